"""A small run for tests of the page: groups of sessions over a fake engine, and a few updates without a trainer.

Rewards rise from update to update: in the last of eight, the tasks have 4, 3 and 3 of 4 sessions solved, and half of
all sessions have 0.25 for being polite. The trainer's metrics are made up, everything else comes through the proxy.
"""

import datetime
import math
from typing import Any

import httpx2
import sqlalchemy as sa
from support.proxies import RunningProxy
from turnwise_fake_engine import RunningFakeEngine
from turnwise_fake_engine.script import Reply, Rule

from turnwise.features import rewinds
from turnwise.features.page import activity
from turnwise.store import claims, schema, versions
from turnwise.store.database import Database
from turnwise.store.turns import read_turns
from turnwise.types import PolicyStatus, PolicyVersion, UpdateRecord, utc_now

TASKS = {
    "refund-17": ("I want my money back for order 17.", "Order 17 is 12 days old, so I have started the refund."),
    "address-4": ("Send order 4 to my new address.", "Order 4 has left already; I have told the courier."),
    "invoice-88": ("Where is the invoice of order 88?", "I have sent the invoice of order 88 to you again."),
}
GROUP_SIZE = 4
STARTED_AT = utc_now().replace(second=0, microsecond=0) - datetime.timedelta(hours=1)
"""When the first update began; each took a minute."""
SYSTEM = {"role": "system", "content": "You are the help desk of a shop. Look the order up before you answer."}


def observe_run(proxy: RunningProxy, engine: RunningFakeEngine, *, num_updates: int = 8) -> None:
    for question, answer in TASKS.values():
        engine.state.script.rules.append(Rule(contains=question, reply=Reply(text=f"Let me look that up. {answer}")))
    engine.state.script.rules.append(Rule(contains="Thank you", reply=Reply(text="You are welcome. Goodbye!")))
    database = Database(proxy.database_url)
    with httpx2.Client(base_url=proxy.url) as http:
        for number in range(1, num_updates + 1):
            for task_id in TASKS:
                _play_group(http, task_id, number, num_updates)
            _train(database, number, num_updates)
        labels = {f"refund-17-{num_updates}-0": "golden", f"address-4-{num_updates}-3": "look-at"}
        for session_id, label in labels.items():
            http.put(f"/v1/sessions/{session_id}/labels/{label}", json={"note": "found by hand"}).raise_for_status()
        _play_branch(http)
    database.close()


def _play_group(http: httpx2.Client, task_id: str, number: int, num_updates: int) -> None:
    for run in range(GROUP_SIZE):
        wanted = {"session_id": f"{task_id}-{number}-{run}", "task_id": task_id, "run": run}
        grouped = {"group_id": f"{task_id}-{number}", "group_size": GROUP_SIZE}
        session = http.post("/v1/sessions", json=wanted | grouped).raise_for_status().json()
        messages: list[Any] = [SYSTEM, {"role": "user", "content": TASKS[task_id][0]}]
        reply = {"role": "assistant", "content": _reply(http, session, messages, 120)}
        _reply(http, session, [*messages, reply, {"role": "user", "content": "Thank you."}], 40)
        values = _rewards_of(task_id, run, number, num_updates)
        target = {"session_id": session["session_id"]}
        rewards = [target | {"name": name, "value": value} for name, value in values.items()]
        http.post("/v1/rewards", json=rewards).raise_for_status()
        reason = "solved" if values["solved"] else "gave_up"
        http.post(f"/v1/sessions/{session['session_id']}/end", json={"termination_reason": reason}).raise_for_status()


def _rewards_of(task_id: str, run: int, number: int, num_updates: int) -> dict[str, float]:
    solved = float(run < math.ceil(GROUP_SIZE * number / num_updates - (task_id != "refund-17")))
    return {"solved": solved, "polite": 0.25 * (run % 2)}


def _reply(http: httpx2.Client, session: dict[str, Any], messages: list[Any], max_tokens: int) -> str:
    """Make a call in a session and return the text of its reply; a client for each session would load TLS each time."""
    answer = http.post(
        f"{session['base_url']}/chat/completions",
        json={"model": "fake", "messages": messages, "max_completion_tokens": max_tokens},
        headers={"authorization": f"Bearer {session['api_key']}"},
    )
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


def _train(database: Database, number: int, num_updates: int) -> None:
    claimed = claims.claim(database, "trainer", max_groups=len(TASKS), lease_seconds=600)
    assert claimed is not None
    progress = number / num_updates
    metrics = {
        "reward_mean": 0.15 + 0.75 * progress,
        "staleness_mean": 0.3 + 0.1 * math.sin(number),
        "staleness_max": 1,
        "entropy": 0.9 - 0.5 * progress,
        "kl": 0.01 + 0.005 * math.cos(2 * number),
        "clip_fraction": 0.02 - 0.01 * progress,
        "grad_norm": 0.6 + 0.2 * math.sin(3 * number),
        "loss": 0.2 * math.cos(number),
        "logprob_gap": 0.002,
        "logprob_gap_max": 0.01 + 0.005 * math.cos(number),
        "tokens": 900 + 40 * number,
        "seconds": 1.5,
        "waited_seconds": 2.0 - progress,
        "held_seconds": 0.1,
        "num_groups": len(TASKS),
        "num_refused_groups": 1,
        "num_uniform_groups": 1,
    }
    refused = {claimed.groups[-1].key: "uniform_rewards"}
    update = UpdateRecord(
        update_id=number,
        trainer_id="trainer",
        policy_version=number,
        num_groups=len(TASKS) - 1,
        num_sessions=GROUP_SIZE * (len(TASKS) - 1),
        num_tokens=metrics["tokens"],
        metrics=metrics,
        created_at=STARTED_AT + datetime.timedelta(minutes=number),
    )
    evaluation = {"eval": {"reward_mean": 0.1 + 0.7 * progress}}
    version = PolicyVersion(
        version=number,
        path=f"policies/v{number:06d}",
        status=PolicyStatus.FAILED if number == 3 else PolicyStatus.RETIRED,
        error="rolled back: the canary's mean reward fell by 0.2" if number == 3 else None,
        update_id=number,
        metrics=metrics | evaluation,
        reload_seconds=0.4 + 0.1 * math.sin(number),
        arms=_arms(number, progress),
    )
    with database.write() as connection:
        minute = int(STARTED_AT.timestamp()) // 60 + number - 1
        busy = (1 << (20 + 4 * number)) - 1
        activity.add_activity(connection, {(minute, "made-up"): activity.Activity((1 << 60) - 1, busy)})
        versions.publish_version(connection, version)
        # Nobody makes the files of these versions, so engines stay on version 0.
        versions.publish_version(connection, PolicyVersion(version=0, path="fake"))
        rewinds.pin_policy(connection, 0)
        connection.execute(
            sa.update(schema.policy_versions)
            .where(schema.policy_versions.c.version == number)
            .values(status=version.status.value, reload_seconds=version.reload_seconds)
        )
        trained = {}
        for _, group_id in (group.key for group in claimed.groups[:-1]):
            task_id = group_id.rsplit("-", 1)[0]
            totals = [sum(_rewards_of(task_id, run, number, num_updates).values()) for run in range(GROUP_SIZE)]
            for run, total in enumerate(totals):
                turns, _ = read_turns(connection, "default", f"{group_id}-{run}")
                advantage = total - sum(totals) / GROUP_SIZE
                trained["default", f"{group_id}-{run}"] = {each.turn.turn_id: advantage for each in turns}
        claims.ack(connection, claims.Finished(claimed, update, refused=refused, trained=trained))


def _arms(number: int, progress: float) -> dict[str, Any]:
    """Return the arms of a version's canary: version 3 is worse than the one before it."""
    before, canary = 0.1 + 0.7 * progress, -0.1 if number == 3 else 0.1 + 0.7 * progress
    of_turns = {"num_sessions": 12, "num_turns": 24, "broken_share": 0.0}
    return {
        "canary": {"version": number, **of_turns, "mean_reward": canary},
        "control": {"version": number - 1, **of_turns, "num_sessions": 36, "mean_reward": before},
    }


def _play_branch(http: httpx2.Client) -> None:
    """Play an open session whose client shortens a stored reply, so that its history starts a new chain."""
    session = http.post("/v1/sessions", json={"session_id": "edited", "task_id": "refund-17"}).raise_for_status().json()
    messages: list[Any] = [SYSTEM, {"role": "user", "content": TASKS["refund-17"][0]}]
    for edited in (None, "I have started the refund."):
        reply = _reply(http, session, messages, 120)
        messages += [{"role": "assistant", "content": edited or reply}, {"role": "user", "content": "Thank you."}]
    _reply(http, session, messages, 40)
