"""A month of live traffic in minutes: `python bench/traffic.py [--seed N] [--sessions-per-day N]`.

500 users talk to a real proxy in front of two stand-in engines. The trainer's real claims, baselines and sentinels feed
a policy of four numbers: how often it works, guesses, asks back, or breaks a call. So an update costs nothing, and what
decides about versions is the product's. Users rate late or never, leave, or are rude. Proxy and trainer restart, tools
fail for an hour, and twice a reward is wrong: a survey that likes questions, and a grader that takes a broken call for
work. The operator does what an alarm says. The exit status is 1 if a check at the end fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import random
import sys
import tempfile
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from poisoned import Weights, ask, write_weights
from servers import running
from turnwise_fake_engine import Reply, running_fake_engine
from turnwise_fake_engine.script import ToolCall

sys.path.append(sys.path.pop(0))  # bench/proxy.py would be imported instead of the package

from proxy.features.arms.verdict import lift
from trainer.algorithms.algorithm import select
from trainer.algorithms.loading import load
from trainer.batch.advantages import moved_on
from trainer.batch.selection import SelectionRule
from trainer.claims.claims import Claims
from trainer.claims.holds import Detour
from trainer.claims.ledger import RunProgress
from trainer.features import FEATURES, Settings, sentinels
from turnwise.features.arms import held_out_arms, holdout_of
from turnwise.processes.ports import free_port
from turnwise.processes.stack import command
from turnwise.store import claims, serving
from turnwise.store.database import Database
from turnwise.types import Json, PolicyVersion, UpdateRecord

NUM_USERS, DAYS = 500, 30
KINDS = {"polite": 0.45, "silent": 0.35, "rude": 0.1, "hurried": 0.1}
"""Silent users never rate, rude ones also rate good work badly, hurried ones leave at a question."""
RATING_MINUTES = 20.0  # mean delay of a rating
RESTARTS = {8: "proxy", 20: "trainer"}
BROKEN_DAY, BROKEN_SESSIONS = 11, 60  # of the hour in which every tool fails
HACKS = {13: ("questions", "ask"), 23: ("broken_calls", "break")}
"""By the day from which on a reward is wrong: the sentinel that is to name it, and what is rewarded."""
BEHAVIOURS = ("work", "guess", "ask", "break")
CHANCES = {"v0": np.array([0.3, 0.4, 0.2, 0.1])}
"""How often each version does what, by the name of its directory."""
ANCESTRY: dict[int, tuple[int, ...]] = {0: (0,)}
"""The versions that each version's weights came from, as checkpoints hold them."""
RATE = 3.0  # step of the logits a batch
RULE = Settings(groups_per_batch=8, wait_seconds=None, max_versions_in_flight=None)
MOST_ATTEMPTS, STOP_SECONDS = 6000, 600.0
TOOLS = [{"type": "function", "function": {"name": "refund", "parameters": {"type": "object", "properties": {}}}}]


class Assistant(Weights):
    """Replies by the behaviour of the loaded version."""

    def take_reply(self, last_message: str, **_: object) -> Reply | None:  # type: ignore[override]
        """Return a sampled behaviour's reply; after a tool's result the end."""
        if last_message.startswith(("paid", "error")):
            return Reply(text="That is settled now, have a good day.")
        chances = CHANCES.get(Path(self._state.weights_path).name, CHANCES["v0"])
        behaviour = random.choices(BEHAVIOURS, list(chances))[0]
        order = random.randrange(10_000)
        if behaviour in ("work", "break"):
            arguments = {"order": order} if behaviour == "work" else '{"order": '
            return Reply(tool_calls=[ToolCall(name="refund", arguments=arguments)])
        return Reply(text="It is settled, have a good day." if behaviour == "guess" else f"Is it order {order}?")


class Month:
    """The users, what they said, and what went wrong."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.users = self.random.choices(list(KINDS), list(KINDS.values()), k=NUM_USERS)
        self.hack: str | None = None
        self.are_tools_broken = False
        self.behaviours: dict[str, list[str]] = {}
        self.due: list[tuple[float, str, bool]] = []
        """Thumbs that are still to come: the minute, the session, whether it is up."""
        self.wrong: dict[str, bool] = {}
        """The thumbs that should have been given where the reward was wrong."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def ask(self, path: str, body: Json) -> Json:
        """POST, again while nobody listens, as clients do."""
        for attempt in itertools.count():
            try:
                return ask(self.url, path, body)
            except OSError as error:
                if attempt == MOST_ATTEMPTS or isinstance(error, urllib.error.HTTPError | TimeoutError):
                    self.failures.append(f"{path}: {error}")
                    raise
                self.counts["repeated calls"] += 1
                time.sleep(0.1)
        raise AssertionError

    def play(self, number: int, minute: float) -> None:
        """Play a session; the next message depends on the reply."""
        with self._lock:
            kind, session_id = self.users[self.random.randrange(NUM_USERS)], f"s{number}"
        messages: list[Json] = [{"role": "system", "content": "You refund orders."}]
        messages.append({"role": "user", "content": f"Please refund order {number % 97}."})
        done: list[str] = []
        self.behaviours[session_id] = done
        for _ in range(4):
            body = {"model": "fake", "messages": messages, "tools": TOOLS}
            reply = self.ask(f"/sessions/{session_id}/v1/chat/completions", body)["choices"][0]["message"]
            self.counts["calls"] += 1
            messages.append(reply)
            for call in reply.get("tool_calls") or ():
                is_good = call["function"]["arguments"].endswith("}")
                done.append("work" if is_good else "break")
                result = "paid" if is_good and not self.are_tools_broken else "error: the call failed"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if messages[-1]["role"] == "tool":
                continue
            if not reply["content"].endswith("?"):
                done += [] if done and done[-1] != "ask" else ["guess"]
                break
            done.append("ask")
            if kind == "hurried":  # the session expires
                self.counts["sessions given up"] += 1
                return
            messages.append({"role": "user", "content": "Yes, that one. Please go on."})
        self.ask(f"/v1/sessions/{session_id}/end", {})
        if kind in ("polite", "rude"):
            is_right = done[-1] == "work" and not self.are_tools_broken
            with self._lock:
                is_fair = kind == "polite" or self.random.random() < 0.5
                given = is_fair and (is_right if self.hack is None else self.hack in done)
                self.due.append((minute + self.random.expovariate(1 / RATING_MINUTES), session_id, given))
                if self.hack is not None:
                    self.wrong[session_id] = is_fair and is_right

    def rate(self, minute: float) -> None:
        """Post the thumbs that are due."""
        due = [each for each in self.due if each[0] <= minute]
        self.due = [each for each in self.due if each[0] > minute]
        for _, session_id, is_up in due:
            self._thumb(session_id, is_up)

    def mend(self, good: int) -> None:
        """Mend the reward, revise what it said, and serve the version before it."""
        self.hack = None
        self.due = [each for each in self.due if each[1] not in self.wrong]
        for session_id, is_up in self.wrong.items():
            self._thumb(session_id, is_up)
        self.wrong.clear()
        self.ask(f"/v1/policies/{good}/activate", {"pin": False})

    def _thumb(self, session_id: str, is_up: bool) -> None:
        self.ask("/v1/feedback", {"session_id": session_id, "kind": "boolean", "value": is_up})
        self.counts["ratings"] += 1


class Learner(threading.Thread):
    """A trainer of four numbers: the real source, baselines and acknowledgements around one step of REINFORCE."""

    def __init__(self, month: Month, url: str, directory: Path) -> None:
        super().__init__(daemon=True)
        self._month, self._directory = month, directory
        self._source = Claims(Database(url), RULE, holds=FEATURES.holds)
        last = self._source.last_update()
        self.version, self._updates = (0, 0) if last is None else (last.policy_version, last.update_id)
        self._source.open(PolicyVersion(version=0, path=str(directory / "v0")), self.version)

    def run(self) -> None:
        """Train until it is stopped."""
        algorithm, window = load("grpo"), ()
        while batch := self._source.next(RunProgress(num_batches=1, recent_versions=ANCESTRY[self.version])):
            if isinstance(batch, Detour):
                self.version = batch.version
                continue
            keys = [group.key for group in batch.claim.groups]
            chosen = select(batch.experiences, keys, algorithm, SelectionRule(), window)
            window = moved_on(window, chosen.single_values)
            chances, step = CHANCES[f"v{self.version}"], np.zeros(len(BEHAVIOURS))
            for one, advantages in zip(chosen.experiences, chosen.advantages, strict=True):
                for behaviour in self._month.behaviours[one.session_id]:
                    gradient = np.array([each == behaviour for each in BEHAVIOURS]) - chances
                    step += np.mean(advantages) * gradient / len(chosen.experiences)
            version, self._updates = self._source.newest_version() + 1, self._updates + 1
            place = write_weights(self._directory / f"v{version}", float(version))
            weights = chances.clip(0.03) * np.exp(RATE * step)
            CHANCES[place.name] = weights / weights.sum()
            counts = {"num_groups": len(keys), "num_sessions": len(chosen.experiences), "num_tokens": 1}
            update = UpdateRecord(update_id=self._updates, trainer_id="trainer", policy_version=version, **counts)
            ANCESTRY[version] = (*ANCESTRY[self.version], version)
            self._source.publish(PolicyVersion(version=version, path=str(place)), ANCESTRY[version])
            self._source.ack([claims.Finished(batch.claim, update, refused=chosen.refused)])
            self.version = version

    def stop(self) -> None:
        """End it after the batch in progress."""
        self._source.stop()
        self.join(STOP_SECONDS)
        self._source.close()


def main() -> int:
    """Play the month, print each day, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions-per-day", type=int, default=150)
    options = parser.parse_args()
    sentinels.WATCH_SECONDS, started = 0.2, time.monotonic()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="turnwise-traffic-") as name, contextlib.ExitStack() as stack:
        directory, port = Path(name), free_port()
        engines = [stack.enter_context(running_fake_engine()) for _ in range(2)]
        for engine in engines:
            engine.state.script = Assistant().of(engine.state)
        url, database = f"http://127.0.0.1:{port}", f"sqlite:///{directory / 'ledger.db'}"
        argv = [*(part for engine in engines for part in ("--engine", engine.url)), "--port", str(port)]
        argv += ["--database", database, "--log-level", "error", "--session-idle-seconds", "60"]
        argv = command("proxy", *argv, "--holdout-share", "0.1")
        db = Database(database)
        db.upgrade()
        stack.callback(db.close)
        write_weights(directory / "v0")
        month, proxy = Month(url, options.seed), contextlib.ExitStack()
        learner = Learner(month, database, directory)
        proxy.enter_context(running(argv, f"{url}/readyz"))
        learner.start()
        named, works, good = list[str](), list[float](), 0
        for day in range(1, DAYS + 1):
            if RESTARTS.get(day) == "trainer":
                learner.stop()
                learner = Learner(month, database, directory)
                learner.start()
            month.hack = HACKS[day][1] if day in HACKS else month.hack
            if RESTARTS.get(day) == "proxy":
                proxy.close()
                starting = running(argv, f"{url}/readyz")
                threading.Thread(target=proxy.enter_context, args=(starting,)).start()
            _day(month, day, options.sessions_per_day)
            measured, alarm, served = _measured(db)
            good = served if month.hack is None and alarm is None else good
            chances = CHANCES[f"v{learner.version}"]
            works.append(chances[0])
            shown = ", ".join(f"{name} {chance:.2f}" for name, chance in zip(BEHAVIOURS, chances, strict=True))
            print(f"day {day:2}: version {learner.version:2}: {shown}; {measured} {alarm or ''}", flush=True)
            if alarm is not None and day != BROKEN_DAY:
                named.append(alarm)
                month.mend(good)
        learner.stop()
        proxy.close()
    took = (time.monotonic() - started) / 60
    print(f"{DAYS} days in {took:.1f} minutes, {DAYS * 24 * 60 / took:,.0f} times as fast; {dict(month.counts)}")
    return _judge(month, named, works)


def _day(month: Month, day: int, num_sessions: int) -> None:
    """Play a day's sessions, eight at a time, and post the ratings as their time comes."""
    first = day * num_sessions
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, num_sessions, 30):
            month.are_tools_broken = day == BROKEN_DAY and start < BROKEN_SESSIONS
            minute = (day + start / num_sessions) * 24 * 60
            numbers = range(first + start, first + start + 30)
            list(pool.map(month.play, numbers, [minute] * len(numbers)))
            month.rate(minute)


def _measured(db: Database) -> tuple[str, str | None, int]:
    """Return the lift over the hold-out, what the sentinels say, and the served version."""
    with db.read() as conn:
        state = serving.serving_state(conn)
        active, holdout = state.active, holdout_of(state)
        found = {} if holdout is None else lift(*held_out_arms(conn, holdout))
        alarm = sentinels.check(conn, RULE.sentinels)
    each = found.get("feedback")
    text = each and f"lift over {holdout.version}: {each['mean']:+.2f} [{each['low']:+.2f}, {each['high']:+.2f}]"
    return text or "", alarm, 0 if active is None else active.version


def _judge(month: Month, named: list[str], works: list[float]) -> int:
    found = {sentinel for sentinel, _ in HACKS.values() if any(repr(sentinel) in alarm for alarm in named)}
    checks = {
        "no call failed": not month.failures,
        "both hacks are named": len(found) == len(HACKS),
        "the broken hour taught nothing": works[BROKEN_DAY] >= works[BROKEN_DAY - 2] - 0.05,
        "it learnt to work": works[-1] >= 0.8,
    }
    print("\n".join(f"{'ok ' if is_good else 'NOT'} {name}" for name, is_good in checks.items()))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
