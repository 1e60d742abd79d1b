"""Calls of every function of `turnwise.store` that sends statements, on a store that `support.store_fill` fills.

Each call runs in a transaction that is rolled back, so that all of them share one store.
"""

import contextlib
import dataclasses
import datetime
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import sqlalchemy as sa
from support.ledger_samples import make_turn
from support.store_fill import acknowledge, claim, inferred_turn, opened

from turnwise.errors import Conflict
from turnwise.features import (
    arms,
    consent,
    estimates,
    evaluation,
    examples,
    feedback,
    forks,
    gate,
    group_parts,
    images,
    inferred,
    labels,
    limits,
    pace,
    policies,
    records,
    remote_claims,
    resumed,
    retention,
    rewinds,
    roles,
    sentinels,
    stalled,
    summaries,
    training_note,
    transfers,
    untrained,
)
from turnwise.features.advantages import with_advantages
from turnwise.features.consent import ConsentMark, ConsentOf
from turnwise.features.earned import earned_by_version
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.features.images import IMAGES, pack_images
from turnwise.features.imported import imported_groups
from turnwise.features.labels import Label
from turnwise.features.lineage import shaped
from turnwise.features.lineage import versions as lineage
from turnwise.features.page import activity, overview, search
from turnwise.features.page import updates as page_updates
from turnwise.features.page.activity import Activity
from turnwise.features.page.search import Contents
from turnwise.features.page.turns import session_credit
from turnwise.features.policies import publish_next
from turnwise.features.prices import read_costs
from turnwise.features.ratings import draws, predictions, rated
from turnwise.features.remote_claims import Held, Work
from turnwise.store import (
    claims,
    conversations,
    experiences,
    extensions,
    groups,
    keys,
    leases,
    rewards,
    rows,
    schema,
    selection,
    serving,
    sessions,
    trainer_reports,
    turns,
    updates,
    versions,
)
from turnwise.store.policies import names_of_policies
from turnwise.store.selection import SessionFilter
from turnwise.types import (
    DEFAULT_POLICY,
    Outcome,
    PolicyKind,
    PolicyVersion,
    Reward,
    Role,
    Session,
    SessionStatus,
    Split,
    Turn,
    name_digest,
    utc_now,
    values_of,
)

NOW = utc_now()
DIGEST = "0" * 64
LONG_AGO = datetime.datetime.fromtimestamp(0, datetime.UTC)
WEEK = datetime.timedelta(days=7)
CONTENTS = Contents(min_reward=0.0, outcome=Outcome.EXACT, reason="r", policy_version=0, text="question")
Ask = Callable[[sa.Connection], Any]


def _rewards(conn: sa.Connection) -> None:
    """Post rewards for a session, a step and a turn twice with the same key; the repetition gets the first answer."""
    lines = [
        Reward(session_id="s", tenant="t", value=1.0),
        Reward(session_id="s", tenant="t", step=0, value=1.0),
        Reward(session_id="", turn_id="t-s-t1", tenant="t", value=1.0),
        Reward(session_id="done", tenant="t", value=1.0),
        Reward(session_id="unrewarded", tenant="t", value=1.0),
    ]
    for _ in range(2):
        rewards.add_rewards(conn, lines, idempotency_key="k", retrain=True)
        inferred.claim_target(conn, "t", "key", "k", "s")


def _release_deleted(conn: sa.Connection) -> None:
    held = claim(conn)
    deleted = [dataclasses.replace(group, group_id="deleted") for group in held.groups]
    claims.release(opened(conn), dataclasses.replace(held, groups=tuple(deleted)))


def _parts(conn: sa.Connection) -> None:
    """Let another policy have sampled all turns; delete its parts of the groups."""
    conn.execute(sa.update(schema.turns).where(schema.turns.c.session_pk.in_(range(1, 100))).values(policy_id=1))
    group_parts.add_parts(conn, range(1, 100))
    assert retention.prune(conn, NOW + WEEK).sessions


def _images(conn: sa.Connection) -> None:
    """Store an image of a session that is over, read it, and delete it."""
    part = {"type": "image_url", "image_url": {"url": f"image:{DIGEST}"}}
    turn = make_turn("t9", session_id="over", tenant="t", messages=[{"role": "user", "content": [part]}])
    turns.append_rows(conn, [rows.TURNS.row(turn, media={DIGEST: images.Media("image/png", b"")})])
    images.read_media(conn, "t", [DIGEST])
    assert images.read_media(conn, "t", [DIGEST], session_id="over")
    placed = {"digest": DIGEST, "offset": 0, "length": 1, "runs": [[0, 1]]}
    seen = sa.update(schema.turns).where(schema.turns.c.turn_id == "t9")
    conn.execute(seen.values(rows.TURNS.values({"parts": {IMAGES: pack_images([placed])}})))
    with_files = experiences.Shape(merge="chain", with_unrewarded=True, with_files=True)
    list(experiences.experiences(conn, SessionFilter(tenant="t", session_id="over"), with_files))
    retention.delete_session(conn, "t", "over")
    while retention.sweep(conn):
        pass


def _base(conn: sa.Connection) -> None:
    """Publish a first version by hand; bind an empty store to a model, and one that another release has bound."""
    conn.execute(sa.delete(schema.policy_versions).where(schema.policy_versions.c.version >= 0))
    publish_next(conn, "a-model", PolicyKind.FULL, metrics={})
    conn.execute(sa.delete(schema.policy_versions).where(schema.policy_versions.c.version >= 0))
    base = PolicyVersion(version=0, path="/no/model")
    versions.adopt_base(conn, base)
    versions.adopt_base(conn, dataclasses.replace(base, model_digest="d"))


def _named_policies(conn: sa.Connection) -> None:
    """Create a policy, again, and one that starts from its adapter; publish a version, and bind a key."""
    conn.execute(sa.update(schema.policy_versions).values(kind=PolicyKind.LORA.value))
    support, _ = policies.create_policy(conn, "t", "support")
    policies.create_policy(conn, "t", "support")
    adapter = publish_next(conn, "adapter", PolicyKind.LORA, metrics={}, policy_id=support.policy_id)
    for base in ("default", f"support@{adapter.version}"):
        policies.create_policy(conn, "t", f"of-{base[:3]}", base)
    policies.find_version(conn, "t", f"support@{adapter.version}")
    serving.activate_version(conn, adapter.version)
    sentinels.alarmed_versions(conn, serving.serving_state(conn, support.policy_id).active)
    policies.find_version(conn, "t", "support")
    policies.policy_of_tenant(conn, "t", adapter)
    versions.list_versions(conn, policy_ids=[support.policy_id])
    keys.create_key(conn, "t", keys.KeyRole.AGENT, "a key", policy="support")
    policies.find_policy(conn, "t", "support")
    policies.list_policies(conn, "t")
    names_of_policies(conn)
    for is_archived in (True, False):
        policies.archive_policy(conn, "t", "support", is_archived=is_archived, max_policies=9)
    policies.trained_tokens_since(conn, "t", NOW)
    with contextlib.suppress(Conflict):
        policies.create_policy(conn, "t", "too-many", max_policies=1)
    policies.create_policy(conn, "t", "brought", adapter="/adapter")
    policies.create_policy(conn, "t", "brought", adapter="/adapter")
    with contextlib.suppress(Conflict):
        rewinds.check_files_exist(opened(conn), PolicyVersion(version=1, path="/no/model"))
    retention.finish(opened(conn), retention.Deleted(policy_versions=(0,)))
    policies.delete_policies(conn, "t")


def _lease(conn: sa.Connection) -> None:
    token = leases.acquire_lease(conn, "reload", "one", 60)
    assert leases.acquire_lease(conn, "reload", "two", 60) is None
    assert token is not None
    leases.under_lease(conn, "reload", token, 60, serving.activate_version, 1)
    leases.renew_lease(conn, "reload", token, 0)


def _pins(conn: sa.Connection) -> None:
    publish_next(conn, "a-model", PolicyKind.FULL, metrics={})
    rewinds.choose_version(conn, 1, pin=False)
    serving.serving_state(conn)
    versions.change_version(conn, 1, alarm="an alarm")
    rewinds.choose_version(conn, 1, pin=True)
    rewinds.choose_version(conn, 2, pin=False)
    versions.publish_version(conn, PolicyVersion(version=3, path="/no/model", update_id=3))
    versions.publish_version(conn, PolicyVersion(version=3, path="/no/model", update_id=3, weights_digest="d"))
    transfers.fail_unwritten(conn, after=2)
    rewinds.choose_version(conn, 3, pin=True)


def _versions(conn: sa.Connection) -> None:
    arms.try_version(conn, 1, None)
    arms.try_version(conn, 1, 0.5)
    arms.record_arms(conn, 1, {})
    serving.reconsider_version(conn, 1)
    serving.fail_version(conn, 1, "an error", {"engine_answer": {}})
    versions.add_metrics(conn, 1, {"eval": {"reward_mean": 1.0}})


def _holdout(conn: sa.Connection) -> None:
    versions.publish_version(conn, PolicyVersion(version=9, path="newer"))
    for version in (1, 9, 1):
        arms.activate_version(conn, version, None, 0.5)


def _keys(conn: sa.Connection) -> None:
    key_id, key = keys.create_key(conn, "t", keys.KeyRole.AGENT, "another key")
    keys.verify_key(conn, key)
    keys.get_key(conn, key_id)
    keys.valid_key(conn, key_id)
    keys.record_use(conn, key_id)
    keys.list_keys(conn, "t")
    limits.set_budget(conn, key_id, 9)
    keys.revoke_key(conn, key_id, tenant="t")
    limits.add_usage(conn, {("t", key_id, 1): 5})
    limits.used_by_key(conn, "t", key_id, since_day=1)
    limits.used_by_key(conn, "t", since_day=1)
    limits.TOKENS_USED.read(conn, "key", "t", None)
    limits.settle(conn, "proxy", 10.0, [limits.Need("t", key_id, limits.Rule(9, 9, 9), num_needed=1)])
    keys.local_key(conn, keys.local_key(conn, key))
    keys.has_local_key(conn)


def _consent(conn: sa.Connection) -> None:
    """Mark a user with a session that continues another, and its copies; lift the mark."""
    mark = ConsentMark(tenant="t", kind=ConsentOf.USER, name="kim")
    consent.put_mark(conn, mark)
    consent.put_mark(conn, dataclasses.replace(mark, record=False))
    consent.restrict_marked(conn, mark)
    consent.restrict_session(conn, "t", "s", "s~", False)
    consent.restrict_changed(conn, _session("s", user_id="kim"))
    sessions.create_session(conn, dataclasses.replace(_session("s~2"), continues="s"))
    consent.inherit(conn, ("t", "s~2"), ["s"])
    consent.list_marks(conn, "t", limit=1, after=("user", "a"))
    consent.count_marks(conn, "t")
    consent.denied_since(conn, [("t", "s")])
    consent.lift_mark(conn, mark)


def _regroup(conn: sa.Connection) -> None:
    """Move a session from its own group to another, and set its size, and that of one that is complete then."""
    changed = Session(session_id="s", tenant="t", group_id="g", group_size=3)
    sessions.change_session(conn, changed, {"group_id"})
    sessions.change_session(conn, changed, {"group_size"})
    sessions.change_session(conn, changed, {"group_size"})
    training_note.progress_of(conn, changed)
    for session_id in ("first", "last"):
        sessions.create_session(conn, _session(session_id, group_id="h"))
    sessions.end_session(conn, "t", "first", reward=Reward(session_id="first", tenant="t", value=1.0))
    sessions.change_session(conn, _session("last", group_id="h", group_size=1), {"group_size"})


def _example(conn: sa.Connection) -> None:
    for note in ("wrong", "still wrong"):
        examples.pin_session(conn, "t", "s", note=note, written_by=None)
    line = values_of(examples.read_line(conn, "t", examples.last_reply(conn, "t", "s")))
    (example,) = examples.of_policy(conn, DEFAULT_POLICY)
    examples.add_answers(conn, example, 1, 2, 5)
    examples.unpin(conn, "t", example.example_id)
    examples.import_line(conn, "t", line)
    examples.unpin_session(conn, "t", "s")


def _ratings(conn: sa.Connection) -> None:
    """Predict a session's reward, ask about it, put it back, ask another rater and have it rated."""
    predicted = {"policy_version": 1, "mean": 0.8, "deviation": 0.1}
    predictions.keep(
        conn, [predictions.Prediction(tenant="t", session_id="unrewarded", policy_id=DEFAULT_POLICY, **predicted)]
    )
    draws.next_draw(conn, "t", DEFAULT_POLICY, "ann")
    draws.put_back(conn, "t", "unrewarded")
    draws.next_draw(conn, "t", DEFAULT_POLICY, "ben")
    thumb = Feedback(session_id="unrewarded", tenant="t", kind=FeedbackKind.BOOLEAN, content={"value": True})
    draws.rate(conn, "t", "unrewarded", 1.0, thumb)


def _rated(conn: sa.Connection) -> None:
    """Read what is known of all sessions of a policy."""
    _ratings(conn)
    rated.is_asked(conn, DEFAULT_POLICY)
    rated.sessions_of(conn, DEFAULT_POLICY, "t")
    for findings in extensions.findings:
        list(findings(conn, "t"))


def _pair(conn: sa.Connection) -> None:
    """Fork a session before its last turn, and offer the fork's reply beside it."""
    fork = _session("pair", metadata={"forked_from": {"session_id": "s", "turn_id": "t-s-t2"}})
    path, _ = forks.read_path(conn, fork, "t-s-t2", before=True)
    forks.copy_turns(conn, fork, path[0], path)
    draws.pair_of(conn, "t", "s")


def _feedback(conn: sa.Connection, text: str) -> None:
    """Store a thumb and an edited reply to a turn that has a parent; a second edit replaces the first."""
    thumb = Feedback(session_id="s", tenant="t", kind=FeedbackKind.BOOLEAN, content={"value": True})
    feedback.add(conn, thumb, reward=1.0, idempotency_key="f", body_digest=b"f")
    edit = Feedback(
        session_id="s", tenant="t", turn_id="t-s-t2", kind=FeedbackKind.DEMONSTRATION, content={"value": text}
    )
    edit = dataclasses.replace(edit, group_id=feedback.new_group_id())
    _, path = turns.turns_to(conn, "t-s-t2", "t")
    member = feedback.sampled(path, edit, _session("s"), 0, 1)
    feedback.add(conn, edit, group=[feedback.written(member, text, np.array([1], np.int32))])


def _withdrawn_feedback(conn: sa.Connection) -> None:
    """Take back an edited reply, and the thumb that was the one reward of a session that is over."""
    _feedback(conn, "Rome")
    edit = Feedback(session_id="s", tenant="t", turn_id="t-s-t2", kind=FeedbackKind.DEMONSTRATION, content={})
    feedback.withdraw(conn, edit)
    thumb = Feedback(session_id="unrewarded", tenant="t", kind=FeedbackKind.BOOLEAN, content={"value": True})
    feedback.add(conn, thumb, reward=1.0)
    feedback.withdraw(conn, thumb, retrain=True)


def _remote_claims(conn: sa.Connection) -> None:
    """Claim over HTTP, twice with one key, renew, give back, claim again, and acknowledge twice."""
    how = {"max_groups": 4, "singles_per_group": 1, "lease_seconds": 60.0}
    for request in ("one", "one", "two"):
        taken = remote_claims.take(conn, "t", "theirs", request, DEFAULT_POLICY, **how)
        assert taken is not None
        held = [
            Held(group=each.group_pk, group_id=each.group_id, fencing_token=each.fencing_token) for each in taken.groups
        ]
        remote_claims.renew(conn, "t", held, 60.0)
        if request == "one":
            again = remote_claims.take(conn, "t", "theirs", request, DEFAULT_POLICY, **how)
            assert again == taken
            remote_claims.release(conn, "t", held, "tired")
    versions.publish_version(conn, PolicyVersion(version=7, path="theirs"))
    trained = {f"t-{each.group_id}-t1": 0.5 for each in held if each.group_id == "over"}
    work = Work(trainer_id="theirs", policy_version=7, trained=trained, refused={}, metrics={})
    assert remote_claims.ack(conn, "t", held, work) == remote_claims.ack(conn, "t", held, work)


def _estimates(conn: sa.Connection) -> None:
    """Keep single sessions from training, and read those that a version is estimated from."""
    estimates.keeping(conn, DEFAULT_POLICY, 1.0, 0)
    estimates.num_trained(conn, DEFAULT_POLICY)
    sessions.create_session(conn, _session("fresh", split=Split.EVAL))
    turns.append_turns(conn, [make_turn("t77", session_id="fresh", tenant="t")])
    sessions.end_session(conn, "t", "fresh", reward=Reward(session_id="fresh", tenant="t", value=1.0))
    estimates.candidates(conn, 9)


def changed(conn: sa.Connection, change: groups.GroupChange) -> list[str]:
    return change.make(conn) if change.is_due(conn) else []


def _session(session_id: str, **fields: Any) -> Session:
    return Session(session_id=session_id, tenant="t", **fields)


def _lineage(conn: sa.Connection) -> None:
    """Note versions, name what shaped one, and let the policies that serve it go back, and end."""
    conn.execute(sa.update(schema.policy_versions).values(kind=PolicyKind.LORA.value))
    support, _ = policies.create_policy(conn, "t", "support")
    for number, policy_id in ((8, DEFAULT_POLICY), (9, support.policy_id)):
        version = PolicyVersion(
            version=number, policy_id=policy_id, path=f"v{number}", kind=PolicyKind.LORA, weights_digest="d"
        )
        versions.publish_version(conn, version)
        lineage.note_version(conn, version, number - 1, {("t", "s"): {"t-s-t1": 0.5}}, {})
        assert lineage.lineage(conn, "t", f"{('default', 'support')[number - 8]}@{number}").is_signed
    lineage.lineage_sessions(conn, "t", "support@9", after="s")
    for then, each in zip(shaped.Then, shaped.shaped_policies(opened(conn), [8]) * 2, strict=False):
        shaped.follow(conn, each, then)
    for each in shaped.shaped_policies(opened(conn), [8]):
        shaped.follow(conn, each, shaped.Then.DROP)


def _deleted_with_a_fork(conn: sa.Connection) -> None:
    """Delete a session between a fork and what it was forked from; a version was trained on it."""
    forks.copy_turns(conn, _session("f"), "t-s-t1", ["t-s-t1"])
    copy = forks.copy_id(_session("f"), "t-s-t1")
    forks.copy_turns(conn, _session("again"), copy, [copy])
    lineage.note_version(conn, PolicyVersion(version=9, path="v9"), 1, {("t", "f"): {copy: 0.5}}, {})
    retention.delete_session(conn, "t", "f")


TENANT = SessionFilter(tenant="t")


def _costs(conn: sa.Connection) -> None:
    charge = "k", 0, "EUR", decimal.Decimal("0.5")
    turns.append_rows(conn, [rows.TURNS.row(_turn(), charge=charge)])
    for by, among in (("session", ["s"]), ("key", ["k"]), ("policy", [0]), ("update", [9])):
        read_costs(conn, by, "t", among)


OF_TENANT: dict[str, Ask] = {
    "a page of sessions": lambda c: sessions.list_sessions(c, TENANT),
    "a later page": lambda c: sessions.list_sessions(c, TENANT, after="over", max_bytes=1),
    "sessions of a task": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", task_id="x")),
    "sessions of a group": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", group_id="g")),
    "sessions of a split": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", split=Split.EVAL)),
    "labelled sessions": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", label="golden")),
    "sessions of a policy": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", policy="support")),
    "open sessions": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", status=SessionStatus.OPEN)),
    "a search": lambda c: search.search_sessions(c, TENANT, CONTENTS),
    "a later search": lambda c: search.search_sessions(c, TENANT, CONTENTS, after="over"),
    "a search without contents": lambda c: search.search_sessions(c, TENANT, Contents()),
    "a search by rewards": lambda c: search.search_sessions(c, TENANT, Contents(min_reward=0.0)),
    "a page's summaries": lambda c: search.ends_of(
        c, [sessions.read_session(c, "t", "s"), sessions.read_session(c, "t", "over")]
    ),
    "a session's own rewards": lambda c: sessions.read_session_with_rewards(c, "t", "s"),
    "changes": lambda c: overview.read_state(c, "t"),
    "the credit of a session": lambda c: session_credit(c, _pk(c, "over"), DEFAULT_POLICY),
    "a page of turns": lambda c: turns.read_turns(c, "t", "s", whole_prompt=False, max_bytes=1),
    "a later page of turns": lambda c: turns.read_turns(c, "t", "s", after="t-s-t1", max_bytes=1),
    "whole turns": lambda c: turns.read_turns(c, "t", "s"),
    "a turn": lambda c: turns.read_turn(c, "t", "t-s-t1"),
    "an added turn": lambda c: turns.read_turn(c, "t", "t-s-t1", whole_prompt=False),
    "a turn's tokens": lambda c: conversations.full_tokens(c, "t-s-t1"),
    "a turn's session": lambda c: selection.session_of_turn(c, "t", "t-s-t1"),
    "a turn's path": lambda c: turns.turns_to(c, "t-s-t2", "t"),
    "a session's unknown turns": lambda c: conversations.unknown_turns(c, "t", "s", first=0, known=()),
    "a conversation": lambda c: inferred.sessions_of_conversation(c, "t", "k", [b"d"], limit=4),
    "a dialogue": lambda c: inferred.sessions_of_conversation(c, "t", "k", [b"d"], limit=4, by="dialogue_digest"),
    "later sessions of an id": lambda c: conversations.newest_generation(c, "t", "s~"),
    "a conversation of the Responses API": lambda c: resumed.newest_in_conversation(c, "t", "s", "conv"),
    "a repeated call": lambda c: turns.find_turn(c, "t", "s", request_key="key"),
    "counts of a tenant": lambda c: overview.count_rows(c, "t"),
    "the number of a tenant's sessions": lambda c: records.count_sessions(c, TENANT),
    "an export of a tenant": lambda c: list(records.session_records(c, TENANT)),
    "experiences of a tenant": lambda c: list(experiences.experiences(c, TENANT)),
    "experiences of a group": lambda c: list(with_advantages(c, dataclasses.replace(TENANT, group_id="g"))),
    "experiences of groups": lambda c: list(experiences.experiences_of_groups(c, [1])),
    "last updates of sessions": lambda c: updates.last_updates(c, "t", ["s"]),
    "versions of an evaluation": lambda c: evaluation.versions_sampled(c, [("t", "held-out"), ("t", "none")]),
    "imported sessions": lambda c: records.imported_digests(c, "t", ["s"]),
    "what a session waits for": lambda c: training_note.progress_of(c, _session("member", group_id="g")),
    "how a session's calls are sampled": lambda c: untrained.newest_samplings(c, "t", "s"),
    "how a tenant's calls are sampled": lambda c: untrained.newest_samplings(c, "t"),
    "what a tenant's versions earned": lambda c: earned_by_version(c, "t"),
    "what of a tenant was trained": lambda c: untrained.trained_shares(c, "t"),
    "a new session": lambda c: sessions.create_session(c, _session("n", group_id="g2")),
    "a new session of a group": lambda c: sessions.create_session(c, _session("n", group_id="g")),
    "a session that exists": lambda c: sessions.create_session(c, _session("s")),
    "sessions of calls": lambda c: sessions.create_sessions(c, [_session(name) for name in ("n", "m", "s", "n")]),
    "a changed session": lambda c: sessions.change_session(c, _session("s", metadata={"a": 1}), {"metadata"}),
    "a changed group": _regroup,
    "a turn to append": lambda c: turns.append_turns(c, [_turn()]),
    "a turn that goes on from a summary": lambda c: turns.append_turns(c, _compacted()),
    "a turn that goes on from a summary without a text": lambda c: turns.append_turns(c, _silent()),
    "the session of a context that goes on from a summary": lambda c: (
        turns.append_turns(c, _compacted()[:2]),
        summaries.session_summed_up(c, "t", ["s"], _compacted()[2].messages),
    ),
    "what calls cost": _costs,
    "a turn that is stored": lambda c: (
        turns.append_turns(c, [inferred_turn("t8")]),
        turns.find_turn(c, "t", inferred_turn("t8").session_id, turn_id="t8"),
    ),
    "the path of a fork": lambda c: forks.read_path(c, _session("f"), "t-s-t2", before=True),
    "a fork": lambda c: [forks.copy_turns(c, _session("f"), "t-s-t1", ["t-s-t1", "t-s-t2"]) for _ in range(2)],
    "a chain's role": lambda c: roles.set_chain_role(c, "t", "t-s-t1", Role.SIDE),
    "rewards": _rewards,
    "feedback": lambda c: (_feedback(c, "Rome"), _feedback(c, "Oslo"), feedback.feedback_of(c, "t", "s")),
    "feedback that is taken back": _withdrawn_feedback,
    "a session with feedback that is deleted": lambda c: (_feedback(c, "Rome"), retention.delete_session(c, "t", "s")),
    "a label": lambda c: labels.set_label(c, "t", "s", Label(label="golden")),
    "examples that are pinned, imported and unpinned": _example,
    "a pinned example": lambda c: examples.pin_session(c, "t", "s", note="wrong", written_by=None),
    "examples": lambda c: (examples.list_lines(c, "t", limit=2, after="a"), examples.is_pinned(c, "t", "t-s-t1")),
    "examples of a policy": lambda c: examples.of_policy(c, DEFAULT_POLICY, "t"),
    "ratings that are asked for": _ratings,
    "two replies to compare": _pair,
    "a removed label": lambda c: labels.remove_label(c, "t", "over", "golden"),
    "an end": lambda c: sessions.end_session(c, "t", "s", reward=Reward(session_id="s", tenant="t", value=1.0)),
    "keys and their usage": _keys,
    "images": _images,
    "a deleted session": lambda c: retention.delete_session(c, "t", "s"),
    "a deleted session with a fork": _deleted_with_a_fork,
    "a deleted tenant": lambda c: retention.delete_tenant(c, "t"),
    "the sessions of an end user": lambda c: (
        sessions.change_session(c, _session("over", user_id="kim"), {"user_id"}),
        retention.delete_all(
            opened(c), lambda conn: retention.delete_sessions(conn, SessionFilter(tenant="t", user_id="kim"))
        ),
    ),
    "consent": _consent,
    "sessions that are not trained": lambda c: sessions.list_sessions(c, SessionFilter(tenant="t", train=False)),
    "a tenant without sessions": lambda c: retention.delete_tenant(c, "nobody"),
}
"""Calls of one tenant: their work must not grow with the data of others."""

GROWING_WITH_THE_TENANT = frozenset(
    {
        "a page of sessions",
        "a later page",
        "sessions of a task",
        "labelled sessions",
        "open sessions",
        "sessions of a policy",
        "a search",
        "a later search",
        "a search without contents",
        "a search by rewards",
        "changes",
        "counts of a tenant",
        "how a tenant's calls are sampled",
        "what a tenant's versions earned",
        "what of a tenant was trained",
        "the number of a tenant's sessions",
        "an export of a tenant",
        "experiences of a tenant",
        "ratings that are asked for",
        "a deleted tenant",
    }
)
"""Of the calls of one tenant, those that read many of its sessions. The others read one session, turn or group."""

OF_ALL: dict[str, Ask] = {
    "what all versions earned": lambda c: earned_by_version(c, None),
    "what of all was trained": untrained.trained_shares,
    "what the doctor says": lambda c: [list(each(c, "t")) for each in extensions.findings],
    "what is known of a policy's sessions": _rated,
    "how all calls are sampled": lambda c: untrained.newest_samplings(c, None),
    "labelled sessions of all tenants": lambda c: sessions.list_sessions(c, SessionFilter(label="golden")),
    "the newest eval sessions": lambda c: sessions.list_sessions(c, SessionFilter(split=Split.EVAL), limit=10),
    "the regression set": lambda c: gate.regression_set(c, 4, ["golden"], roles=set(Role)),
    "summaries of updates": lambda c: (acknowledge(c, 2, "over"), page_updates.judged_sessions(c, "t", 2)),
    "updates": lambda c: page_updates.list_update_views(c, "t"),
    "later updates": lambda c: (
        page_updates.list_update_views(c, "t", after=9),
        page_updates.list_updates(c, after=9, tenant="t"),
        updates.updates_after(c, 9),
    ),
    "the last update": lambda c: (
        updates.last_update(c),
        updates.last_update(c, policy_id=0),
        updates.last_update_id(c),
    ),
    "digests of an update": lambda c: records.trained_digests(c, 1),
    "groups for the metrics": groups.unfinished_groups,
    "imported groups": imported_groups,
    "claimable groups": lambda c: (claims.num_claimable(c), claims.num_claimable(c, with_imported=True)),
    "open sessions with a reward": groups.num_open_with_reward,
    "a claim": lambda c: claim(c, min_policy_version=-1),
    "a claim with imports": lambda c: claim(c, with_imported=True),
    "a drop of undone versions": lambda c: changed(c, rewinds.drop_sampled_by(c, range(1, 2))),
    "a renewed claim": lambda c: claims.renew(opened(c), claim(c), 60),
    "a released claim": lambda c: claims.release(opened(c), claim(c)),
    "a released claim of deleted groups": _release_deleted,
    "a trainer's lineage": lambda c: updates.check_lineage(c, range(10_000)),
    "a dead trainer's claim": lambda c: claims.take_back(opened(c), "trainer"),
    "an update": lambda c: acknowledge(c, 2, "over"),
    "the oldest version in flight": lambda c: pace.oldest_version_in_flight(c, NOW - WEEK),
    "a canary's arms": lambda c: arms.arms_since(c, NOW - WEEK, (0, 1)),
    "a hold-out's arms": lambda c: arms.held_out_arms(c, PolicyVersion(version=0, path="v0")),
    "policies": lambda c: (versions.list_versions(c), versions.list_versions(c, after=1, max_bytes=1)),
    "served policies": serving.serving_states,
    "failed policies": lambda c: (rewinds.failed_versions(c, [1]), rewinds.refused_in_a_row(c, 3)),
    "pins": _pins,
    "named policies": _named_policies,
    "the base model": _base,
    "states of a version": _versions,
    "a hold-out": _holdout,
    "sessions for the sentinels": lambda c: (
        sentinels.live_sessions(c, 4),
        sentinels.live_sessions(c, 4, newest=True),
        sentinels.played(c, [1, 2]),
        sentinels.held_out_sessions(c, 1, 4),
    ),
    "a lease": _lease,
    "engine activity": lambda c: [activity.add_activity(c, {(1, "e"): Activity(1, 1)}) for _ in range(2)],
    "idle shares of engines": lambda c: activity.idle_shares(c, {1: (NOW - WEEK, NOW)}),
    "trainers": lambda c: (
        trainer_reports.report_status(c, "trainer", "waits"),
        trainer_reports.note_sign_of_life(c, "trainer"),
        trainer_reports.trainer_statuses(c, "t"),
        trainer_reports.delete_report(c, "trainer"),
    ),
    "what a trainer keeps": lambda c: (
        trainer_reports.keep_state(c, 0, {"buffer": [{"group": name_digest(("t", "g"))}], "singles": []}),
        trainer_reports.kept_state(c, 0),
        trainer_reports.forget_in_states(c, [("t", "s")], [("t", "g")]),
    ),
    "weights in memory": lambda c: (
        transfers.announce_weights(c, "trainer", "http://trainer", NOW),
        transfers.weight_urls(c),
    ),
    "all keys": lambda c: (
        keys.any_keys(c),
        keys.tenants(c),
        keys.list_keys(c),
        keys.server_secret(c),
        keys.database_id(c),
        keys.known_database_id(c),
    ),
    "idle sessions": lambda c: sessions.expire_idle_sessions(c, NOW + WEEK),
    "idle sessions with a reward": lambda c: sessions.end_rewarded_sessions(c, NOW + WEEK),
    "stalled groups": lambda c: changed(c, stalled.stalled(NOW + WEEK, "train")),
    "stalled groups to drop": lambda c: changed(c, stalled.stalled(NOW + WEEK, "drop")),
    "groups without rewards": lambda c: changed(c, stalled.unrewarded(NOW + WEEK)),
    "old answers": lambda c: rewards.forget_answers(c, NOW - WEEK),
    "old sessions": lambda c: retention.prune(c, NOW + WEEK),
    "no more old sessions": lambda c: retention.prune(c, LONG_AGO),
    "parts of groups": _parts,
}
"""Calls of the trainer and of maintenance, which are of all tenants."""

OF_THE_WHOLE_STORE: dict[str, Ask] = {
    "an export of everything": lambda c: list(records.session_records(c, SessionFilter())),
    "the number of all sessions": lambda c: records.count_sessions(c, SessionFilter()),
    "counts of the store": overview.count_rows,
    "all updates": lambda c: updates.updates_after(c, -1, None),
    "what a source said": lambda c: feedback.feedback_from(c, "t", "a program"),
    "what a source said later": lambda c: feedback.feedback_from(c, "t", "a program", after="s"),
    "a claim over HTTP": _remote_claims,
    "what a version is estimated from": _estimates,
    "summaries of policies": policies.summarise_policies,
    "what shaped a version": _lineage,
    "versions on disk": lambda c: policies.measured_versions(c, 0),
}
"""Calls of commands that read everything, by their purpose."""

CALLS = {**OF_TENANT, **OF_ALL, **OF_THE_WHOLE_STORE}


def _pk(conn: sa.Connection, session_id: str) -> int:
    return int(selection.session_row(conn, "t", session_id).session_pk)


def _compacted() -> list[Turn]:
    parent = dataclasses.replace(make_turn("t2"), turn_id="t-s-t2")
    asked, said = [{"role": "user", "content": "Sum it up."}], {"role": "assistant", "content": "What was done so far."}
    of_session = {"session_id": "s", "tenant": "t"}
    attempts = [
        make_turn(name, parent, messages=asked, response=response, role=Role.SUMMARY, **of_session)
        for name, response in (("t10", {"role": "assistant", "content": "Nothing."}), ("t11", said))
    ]
    on = [("t12", Role.MAIN), ("t13", Role.SUB_AGENT)]
    return [
        *attempts,
        *(make_turn(name, messages=[said | {"role": "user"}], role=role, **of_session) for name, role in on),
    ]


def _silent() -> list[Turn]:
    summary, _, on, _ = _compacted()
    nothing, short = {"role": "assistant", "content": ""}, [{"role": "user", "content": "Go."}]
    return [dataclasses.replace(summary, response=nothing), dataclasses.replace(on, messages=short)]


def _turn() -> Turn:
    parent = dataclasses.replace(make_turn("t2"), turn_id="t-s-t2")
    return make_turn("t9", parent, session_id="s", tenant="t", request_key="k")
