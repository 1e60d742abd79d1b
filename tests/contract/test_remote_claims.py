"""Trainers that claim over HTTP: each experience is trained once, whichever trainer dies, repeats or is late."""

import contextlib
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, sampled_by
from support.waiting import WAIT_SECONDS

from turnwise import errors
from turnwise.client import Client, wire
from turnwise.features.policies import publish_next
from turnwise.store import schema, trainer_reports
from turnwise.store.database import Database
from turnwise.types import Credit, PolicyKind


@pytest.fixture
def database(empty_proxy):
    opened = Database(empty_proxy.database_url)
    yield opened
    opened.close()


@pytest.fixture
def client(empty_proxy, monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_BASE_SECONDS", 0.001)
    with Client(empty_proxy.url) as made:
        yield made


@pytest.fixture
def version(database):
    with database.write() as connection:
        return publish_next(connection, f"/{uuid.uuid4()}", PolicyKind.FULL, metrics={}).version


def group_rows(database, tenant="default"):
    with database.read() as connection:
        of_tenant = sa.select(schema.groups).where(schema.groups.c.tenant == tenant)
        return {row.group_id: row for row in connection.execute(of_tenant)}


def updates_of(database):
    with database.read() as connection:
        return connection.execute(sa.select(schema.updates)).all()


def expire(database):
    with database.write() as connection:
        connection.execute(sa.update(schema.groups).values(leased_until=1))


def turns_of(held):
    return {turn: 0.5 for chain in held["chains"] for turn in chain["turn_ids"]}


def test_a_claim_has_tokens_masks_logprobs_versions_rewards_and_the_advantages_of_its_group(client, database):
    for number, value in enumerate((1.0, 0.0)):
        add_finished(database, f"s{number}", turns=2, group_id="g", group_size=2, value=value, of_turns=sampled_by(3))
    add_finished(database, "alone")
    held = client.claim("t", max_groups=2)
    assert [(each["group_id"], each["fencing_token"], each["is_single"]) for each in held["groups"]] == [
        ("g", 1, False),
        ("alone", 1, True),
    ]
    first, second, alone = held["chains"]
    assert first["tokens"] == [10, 11, 12, 13, 20, 21, 22, 23]
    assert (first["prompt_length"], first["loss_mask"]) == (2, [1, 1, 0, 0, 1, 1])
    assert first["logprobs"] == [-1.0, -1.25, 0.0, 0.0, -2.0, -2.25]
    assert (first["session_reward"], first["policy_version_first"], first["policy"]) == (1.0, 3, "default")
    assert first["advantage"] == [-each for each in second["advantage"]]
    assert first["advantage"][0] > 0
    assert alone["advantage"] is None
    assert client.claim("t") == {"object": "claim", "policy": "default", "groups": [], "chains": []}


def test_turns_of_a_step_wise_group_are_compared_by_step(client, database):
    for number, value in enumerate((1.0, 0.0)):
        name = f"s{number}"
        add_finished(database, name, turns=2, group_id="g", group_size=2, value=value, credit=Credit.STEP_WISE)
    (one, other) = client.claim("t")["chains"]
    (as_listed,) = {tuple(row["advantage"]) for row in client.experiences(session_id="s0", merge="chain")}
    assert (one["advantage"], other["advantage"]) == ([*as_listed], [-each for each in as_listed])


def test_an_acknowledgement_whose_answer_was_lost_is_recorded_once(client, database, version, gateway):
    for name in ("a", "b"):
        add_finished(database, name, turns=2)
    gateway.num_lost = 1
    held = client.claim("t")
    assert {each["group_id"] for each in held["groups"]} == {"a", "b"}, "a retry returns what the first one claimed"
    gateway.num_lost = 1
    trained = {turn: 0.5 for turn in turns_of(held) if turn.startswith("a")}
    update = client.acknowledge_claim(held, "t", version, trained, refused={"b": "too long"}, metrics={"loss": 0.25})
    assert update == client.acknowledge_claim(held, "t", version, trained, refused={"b": "too long"})
    counts = ("num_groups", "num_sessions", "num_tokens", "policy_version", "metrics")
    assert [update[name] for name in counts] == [1, 1, 4, version, {"loss": 0.25}]
    assert len(updates_of(database)) == 1
    rows = group_rows(database)
    assert [(rows[name].status, rows[name].reason) for name in "ab"] == [("trained", None), ("dropped", "too long")]
    of_update = {"update_id": update["update_id"], "policy_version": version, "advantage": 0.5}
    assert client.turn("a-t1")["trained_in"] == [of_update]


def test_a_trainer_that_is_late_records_nothing(client, database, version):
    add_finished(database, "a")
    late = client.claim("slow")
    expire(database)  # or the clock jumped
    taken = client.claim("quick")
    for act in (
        lambda: client.renew_claim(late),
        lambda: client.release_claim(late),
        lambda: client.acknowledge_claim(late, "slow", version, turns_of(late)),
    ):
        with pytest.raises(errors.Conflict, match="no longer held under fencing token 1"):
            act()
    assert client.acknowledge_claim(taken, "quick", version, turns_of(taken))["trainer_id"] == "quick"


def test_the_groups_of_a_claim_are_sent_back_as_they_came(client, database, version):
    add_finished(database, "a")
    held = client.claim("t")

    def post(how, **fields):
        reply = httpx2.post(f"{client.base_url}/v1/claims/{how}", json={"groups": held["groups"], **fields})
        return reply.raise_for_status().json()

    assert post("renew")["deleted"] == []
    assert post("release") == {"num_groups": 1}
    held = client.claim("t")
    assert post("ack", trainer_id="t", policy_version=version, trained=turns_of(held))["num_groups"] == 1
    with pytest.raises(errors.Conflict, match="under fencing token 2: it was acknowledged or given back"):
        client.renew_claim(held)


def test_a_renewal_names_what_may_not_be_trained_any_more(client, database):
    for name in ("a", "b", "c"):
        add_finished(database, name)
    held = client.claim("t")
    client.do_not_train("a")
    httpx2.delete(f"{client.base_url}/v1/sessions/b").raise_for_status()
    renewed = client.renew_claim(held, 600)
    assert (renewed["denied"], renewed["deleted"]) == (["a"], ["b"])
    client.release_claim(held, "tired")
    assert [(row.status, row.reason) for row in group_rows(database).values()] == [("ready", "tired")] * 2
    again = client.claim("t")
    assert [each["fencing_token"] for each in again["groups"]] == [2, 2]
    assert [each["session_id"] for each in again["chains"]] == ["c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy_version": 10**6}, "there is no policy version"),
        ({"trained": {"other-t1": 1.0}}, "of no group that was trained"),
        ({"refused": {"other": "why"}}, "refused, but not held"),
        ({"refused": {"a": "why"}}, "of no group that was trained"),
    ],
)
def test_an_acknowledgement_names_only_what_is_held(client, database, version, change, message):
    add_finished(database, "a")
    held = client.claim("t", max_groups=1)
    add_finished(database, "other")
    done = {"trainer_id": "t", "policy_version": version, "trained": turns_of(held)} | change
    with pytest.raises(errors.TurnwiseError, match=message):
        client.acknowledge_claim(held, **done)
    assert [row.status for row in group_rows(database).values()] == ["claimed", "ready"]


def test_a_claim_of_another_tenants_groups_is_empty_and_its_numbers_open_nothing(client, database, version):
    add_finished(database, "theirs", tenant="acme")
    assert client.claim("t")["groups"] == []
    (row,) = group_rows(database, "acme").values()
    invented = {"groups": [{"group": row.group_pk, "group_id": "theirs", "fencing_token": row.fencing_token}]}
    assert client.renew_claim(invented)["deleted"] == ["theirs"]
    with pytest.raises(errors.NotFound):
        client.acknowledge_claim(invented, "t", version, {})
    assert group_rows(database, "acme")["theirs"].status == "ready"


def test_no_other_trainer_claims_while_one_of_ours_runs(client, database):
    add_finished(database, "a")
    with database.write() as connection:
        trainer_reports.report_status(connection, "ours", "4 of 32")
    with pytest.raises(errors.Conflict, match="'ours' trains this database"):
        client.claim("t")
    with database.write() as connection:
        trainer_reports.delete_report(connection, "ours")
    assert client.claim("t")["groups"]


@pytest.mark.parametrize("num_sessions", [120, pytest.param(10_000, marks=pytest.mark.slow)])
def test_eight_trainers_that_die_and_return_train_each_experience_once(client, database, version, num_sessions):
    """Every third claim is abandoned, and every fifth acknowledged only after its lease has run out."""
    names = [f"of-{num_sessions}-{number}" for number in range(num_sessions)]  # the other case's turns go later
    for name in names:
        add_finished(database, name)
    lock, trained, deadline = threading.Lock(), [], time.monotonic() + WAIT_SECONDS * (1 + num_sessions / 500)

    def train(worker):
        with Client(client.base_url) as own:
            for turn in range(10**6):
                with lock:
                    if len(trained) >= num_sessions:
                        return
                assert time.monotonic() < deadline, f"{len(trained)} of {num_sessions} were trained"
                dies = turn % 3 == 1
                held = own.claim(f"t{worker}", max_groups=16, lease_seconds=0.2 if dies or turn % 5 == 4 else 600)
                if not held["groups"] or dies:
                    continue
                if turn % 5 == 4:
                    threading.Event().wait(0.3)
                with contextlib.suppress(errors.Conflict):
                    own.acknowledge_claim(held, f"t{worker}", version, turns_of(held))
                    with lock:
                        trained.extend(chain["session_id"] for chain in held["chains"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(train, range(8)))
    assert sorted(trained) == sorted(names)
    assert {row.status for row in group_rows(database).values()} == {"trained"}
    ids = [row.update_id for row in updates_of(database)]
    assert len(ids) == len(set(ids))
    with database.read() as connection:
        pks = connection.execute(sa.select(schema.trained_sessions.c.session_pk)).scalars().all()
    assert len(pks) == len(set(pks)) == num_sessions


def test_an_open_session_is_not_claimed(client, database):
    add_session(database, "open")
    assert client.claim("t")["groups"] == []
