"""The invariants that hold under all faults; each check returns sentences about its violations."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from chaos.agents import CompleteReply, Crowd, Observed
from chaos.world import World
from support.proxies import RunningProxy
from turnwise_fake_engine import RunningFakeEngine
from turnwise_fake_engine.ledger import SeenCall

from turnwise.features.page.updates import list_updates
from turnwise.store import schema, turns
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import list_sessions
from turnwise.store.turns import TurnView
from turnwise.types import Outcome

ALL = 1_000_000
TRAINABLE = {Outcome.EXACT, Outcome.RETOKENISED}
GROWTH_BYTES = 64 * 2**20
"""Limit of the growth of a proxy's memory after the first third of a run."""
NUM_SHOWN = 10


def stored_turns(database: Database) -> list[tuple[str, TurnView]]:
    with database.read() as connection:
        listed, _ = list_sessions(connection, SessionFilter(), limit=ALL)
        return [
            (session.tenant, view)
            for session in listed
            for view in turns.read_turns(connection, session.tenant, session.session_id, limit=ALL)[0]
        ]


def times_trained(database: Database) -> Counter[str]:
    counts: Counter[str] = Counter()
    with database.read() as connection:
        for record in list_updates(connection, limit=ALL)[0]:
            counts.update(record.metrics)
    return counts


def trained_more_than_once(database: Database) -> list[str]:
    return [f"turn {turn_id} was trained {n} times" for turn_id, n in times_trained(database).items() if n > 1]


def violations(world: World, observed: Observed) -> list[str]:
    """Check everything once all faults are healed, all agents have finished and all groups are trained."""
    stored = stored_turns(world.database)
    return [
        *lost_or_doubled(observed, stored, world.engines),
        *_wrong_rewards(world.database, observed),
        *trained_more_than_once(world.database),
        *_not_trained(observed.replies, stored, times_trained(world.database)),
    ]


def lost_or_doubled(
    observed: Observed, stored: Sequence[tuple[str, TurnView]], engines: Iterable[RunningFakeEngine]
) -> list[str]:
    """Compare the replies that agents received, the turns of their sessions, and what the engines sampled."""
    return [
        *not_whole(observed, stored),
        *_crossed(stored),
        *_not_what_was_sampled(engines, stored),
    ]


def not_whole(observed: Observed, stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    """Compare the replies that agents received with the turns of their sessions."""
    return [
        *observed.violations,
        *not_stored_once(observed.replies, stored),
        *_without_outcome(stored),
        *_not_numbered(stored),
    ]


def assert_nothing_is_lost_or_doubled(crowd: Crowd, proxy: RunningProxy, engine: RunningFakeEngine) -> None:
    assert crowd.observed.replies
    found = lost_or_doubled(crowd.observed, [("default", view) for view in proxy.turns()], [engine])
    assert not found, shortened(found)


def not_stored_once(replies: Iterable[CompleteReply], stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    """A completely received reply is stored once, in its tenant and session, as the child of the turn before."""
    found = []
    by_id = {view.turn.turn_id: (tenant, view) for tenant, view in stored}
    finished: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for tenant, view in stored:
        if view.turn.finish_reason is not None and view.turn.outcome in TRAINABLE:
            finished[tenant, view.turn.session_id, _asked(view)].add(view.turn.turn_id.partition("#")[0])
    for seen in replies:
        if seen.turn_id not in by_id:
            found.append(f"lost: {seen}")
            continue
        tenant, view = by_id[seen.turn_id]
        turn = view.turn
        kept = (tenant, turn.session_id, turn.parent_turn_id, turn.response["content"])
        if kept != (seen.tenant, seen.session_id, seen.parent_turn_id, seen.text):
            found.append(f"{seen} is stored as {kept}, outcome {turn.outcome}, reason {turn.reason}")
        same = finished[seen.tenant, seen.session_id, seen.asked]
        if seen.has_key and same != {seen.turn_id}:
            found.append(f"{seen} is stored {len(same)} times: {same}")
    return found


def _asked(view: TurnView) -> str:
    return str(view.messages[-1]["content"])


def _crossed(stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    found = []
    for tenant, view in stored:
        owner = f"{tenant} {view.turn.session_id} call"
        texts = [str(message["content"]) for message in view.messages]
        if any(not text.startswith(owner) for text in texts):
            found.append(f"turn {view.turn.turn_id} of {owner!r} has {texts}")
        text, index = str((view.turn.response or {}).get("content") or ""), view.turn.turn_id.partition("#")[2]
        # The engine numbers the further choices of a call.
        if not (f"{_asked(view)} ({index})" if index else _asked(view)).startswith(text):
            found.append(f"turn {view.turn.turn_id} answers {_asked(view)!r} by {text!r}")
    return found


def _without_outcome(stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    """Each turn has an outcome; a trainable turn is complete; an untrainable one has a reason."""
    found = []
    for _, view in stored:
        turn = view.turn
        is_whole = turn.finish_reason is not None and len(turn.token_ids) == len(turn.logprobs) > 0
        if turn.outcome in TRAINABLE and not is_whole:
            found.append(f"turn {turn.turn_id} is {turn.outcome} and not whole")
        if turn.outcome is Outcome.UNTRAINABLE and not turn.reason:
            found.append(f"turn {turn.turn_id} is untrainable without a reason")
    return found


def _not_numbered(stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tenant, view in stored:
        numbers[tenant, view.turn.session_id].append(view.turn.seq)
    return [f"{of} has turns {found}" for of, found in numbers.items() if sorted(found) != list(range(len(found)))]


def _not_what_was_sampled(engines: Iterable[RunningFakeEngine], stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    """A stored turn holds the tokens that an engine sampled for it, or their beginning."""
    sampled = by_reply(engines)
    found = []
    for _, view in stored:
        kept = view.turn.token_ids.tolist()
        if not kept:
            continue
        name, _, index = view.turn.turn_id.partition("#")
        # The last of the engines that had the call: it was sampled anew where the one before was lost.
        call = sampled[name][-1] if name in sampled else None
        whole = [] if call is None else call.token_ids[int(index or 0)]
        if call is None or kept != whole[: len(kept)]:
            found.append(f"turn {view.turn.turn_id} holds tokens that no engine sampled")
        elif view.turn.finish_reason is not None and len(kept) != len(whole):
            found.append(f"turn {view.turn.turn_id} is finished and lacks tokens")
        elif view.prompt_token_ids.tolist() != call.prompt_token_ids:
            found.append(f"turn {view.turn.turn_id} has another prompt than the engine saw")
    return found


def by_reply(engines: Iterable[RunningFakeEngine]) -> dict[str, list[SeenCall]]:
    """Return the calls whose reply engines had begun to send, by its id, in the order of their arrival."""
    found = defaultdict(list)
    for call in sorted(
        (call for engine in engines for call in engine.calls if call.token_ids), key=lambda call: call.at
    ):
        found[call.reply_id].append(call)
    return found


def wrong_versions(engines: Iterable[RunningFakeEngine], stored: Sequence[tuple[str, TurnView]]) -> list[str]:
    """A stored turn names a span of versions that has those of its first and last token on the engine."""
    sampled, found = by_reply(engines), []
    for _, view in stored:
        turn = view.turn
        if turn.outcome in TRAINABLE:
            labels = sampled[turn.turn_id.partition("#")[0]][-1].versions
            first, last = (int(label) if label.isdigit() else 0 for label in labels)
            if not turn.policy_version_first <= first <= last <= turn.policy_version_last:
                spans = f"{turn.policy_version_first} to {turn.policy_version_last}"
                found.append(f"turn {turn.turn_id} has versions {spans}, its engine sampled with {labels}")
    return found


def _wrong_rewards(database: Database, observed: Observed) -> list[str]:
    rewards, sessions = schema.rewards.c, schema.sessions.c
    with database.read() as connection:
        rows = connection.execute(
            sa.select(sessions.tenant, sessions.session_id, rewards.turn_id)
            .join_from(schema.rewards, schema.sessions)
            .where(rewards.name == "step")
        )
        counts = Counter((row.tenant, row.session_id, row.turn_id) for row in rows)
    wrong = [f"reward {each} is stored {counts[each]} times" for each in observed.step_rewards if counts[each] != 1]
    return wrong + [f"reward {each} was never acknowledged" for each in counts - Counter(observed.step_rewards)]


def _not_trained(
    replies: Iterable[CompleteReply], stored: Sequence[tuple[str, TurnView]], counts: Counter[str]
) -> list[str]:
    trainable = {view.turn.turn_id for _, view in stored if view.turn.outcome in TRAINABLE}
    return [f"never trained: {seen}" for seen in replies if seen.turn_id in trainable and not counts[seen.turn_id]]


def grown(samples: Sequence[int]) -> list[str]:
    """Memory is flat: the last third of the samples is not far above the first third."""
    third = len(samples) // 3
    if not third:
        return []
    first, last = max(samples[:third]), max(samples[-third:])
    if last - first <= GROWTH_BYTES:
        return []
    return [f"a proxy's memory grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB"]


def shortened(found: Sequence[str]) -> str:
    more = [f"and {len(found) - NUM_SHOWN} more"] if len(found) > NUM_SHOWN else []
    return "\n".join([*found[:NUM_SHOWN], *more])
