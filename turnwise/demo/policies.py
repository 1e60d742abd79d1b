"""`python -m turnwise.demo.policies`: eight keys teach four policies contradictory preferences, on one engine.

The agent, the questions and the model are the same for all keys. What differs is which of four replies a key rewards. A
policy belongs to two keys, and learns from their sessions alone. At the end each policy is graded on its own held-out
tasks, and by the preferences of the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from turnwise.client import AsyncClient
from turnwise.commands.flags import SettingsCommand
from turnwise.demo import preferences
from turnwise.demo.driver import Demo, DemoSettings, fresh, mean_reward, terminal
from turnwise.demo.plain_agent import Split, play_task
from turnwise.demo.preferences import PREFERENCES, PreferenceTask
from turnwise.errors import TurnwiseError
from turnwise.processes.printer import Say
from turnwise.rollouts.results import RunResult
from turnwise.store import keys
from turnwise.store.database import Database
from turnwise.store.policies import create_policy
from turnwise.store.serving import serving_state
from turnwise.types import Json

if TYPE_CHECKING:
    from turnwise.rollouts.worker import Run

KEYS_OF_POLICY = 2
TENANT = "default"
VERSION_SECONDS = 60.0
"""How long a round waits for the version that its sessions make; without one, more sessions are played."""
POLL_SECONDS = 0.25


class PoliciesDemoSettings(DemoSettings):
    """Settings of `make demo-policies`."""

    trainer_config: Path = Path("examples/policies/train.toml")
    out: Path = Path("runs/demo-policies")
    num_policies: int = Field(default=4, ge=2, le=len(PREFERENCES))
    groups_per_batch: int = Field(default=16, ge=KEYS_OF_POLICY)
    target_reward: float = Field(default=0.93, gt=0, le=1)
    enough_reward: float = Field(default=0.85, gt=0, le=1)
    num_eval_tasks: int = Field(default=64, ge=1)
    max_versions: int = Field(default=24, ge=1)
    """Rounds of each policy; a round makes about one version."""


@dataclasses.dataclass(kw_only=True)
class PoliciesReport:
    """The whole run. A matrix has a row for each policy, with its reward under each policy's preference."""

    seed: int
    policies: list[str]
    before: list[list[float]] = dataclasses.field(default_factory=list)
    after: list[list[float]] = dataclasses.field(default_factory=list)
    curves: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Mean training reward of each round, by key."""
    num_versions: list[int] = dataclasses.field(default_factory=list)
    sessions_of_round: int = 0
    """Of each key."""
    seconds: float = 0.0
    warm_up_seconds: float = 0.0
    load_average: float = 0.0

    def write(self, directory: Path) -> None:
        """Write `report.json` and `policies.png`."""
        (directory / "report.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for number, (key, rewards) in enumerate(self.curves.items()):
            sessions = [self.sessions_of_round * (played + 1) for played in range(len(rewards))]
            line = "-" if number % KEYS_OF_POLICY == 0 else "--"
            axes.plot(sessions, rewards, line, color=f"C{number // KEYS_OF_POLICY}", label=key)
        axes.set(xlabel="sessions of the key", ylabel="mean reward", ylim=(0, 1.02))
        axes.set(title=f"{len(self.curves)} keys, {len(self.policies)} policies, one engine (seed {self.seed})")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="lower right")
        figure.savefig(directory / "policies.png", dpi=120)

    def has_learnt(self, enough: float) -> bool:
        """Return whether each policy learnt its own preference, and none of the others'."""
        own = [row[number] for number, row in enumerate(self.after)]
        others = [
            (row[other], self.before[number][other])
            for number, row in enumerate(self.after)
            for other in range(len(row))
            if other != number
        ]
        return min(own) >= enough and all(after <= before + 0.1 for after, before in others)


class Preferred:
    """The tasks as one preference grades them."""

    def __init__(self, preference: str) -> None:
        self._preference = preference

    def make_task(self, split: Split, index: int, seed: int, /) -> PreferenceTask:
        """Return a task."""
        return preferences.make_task(split, index, seed)

    def reward(self, task: PreferenceTask, final_text: str, /) -> float:
        """Return the reward of the agent's last reply."""
        return preferences.reward(task, final_text, self._preference)


async def play(line: Json, run: Run) -> float:
    """Play the task that a line names; return its reward."""
    return await play_task(Preferred(line["preference"]), line, run)


class PoliciesDemo(Demo):
    """One run of the demo."""

    tasks = preferences  # type: ignore[assignment]  # graded by `Preferred`
    call = "turnwise.demo.policies:play"
    num_parallel = 16

    def __init__(self, settings: PoliciesDemoSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._policies = PREFERENCES[: settings.num_policies]
        self._report = PoliciesReport(seed=settings.seed, policies=list(self._policies))
        self._database = Database(f"sqlite:///{settings.out / 'turnwise.db'}")
        self._keys: dict[str, list[str]] = {}
        """The keys of each policy."""
        self._numbers: dict[str, int] = {}
        self._next_task = 0

    async def learn(self) -> PoliciesReport:
        """Run the demo, write the report and return it."""
        started = time.monotonic()
        fresh(self._settings.out, ("turnwise.db", "turnwise.db-wal", "turnwise.db-shm", "policies", "rollouts"))
        model = await asyncio.to_thread(self._build_model)
        report = self._report
        report.warm_up_seconds = round(time.monotonic() - started, 1)
        started = time.monotonic()
        # Before the proxy starts: sessions that it creates while it has no keys can be used without one only.
        admin = await asyncio.to_thread(self._create_policies)
        up = self._stack(model)
        await asyncio.to_thread(up.__enter__)
        try:
            async with AsyncClient(self._proxy, api_key=admin) as client:
                report.before = await self._graded(client, "before")
                async with asyncio.TaskGroup() as training:
                    for policy in self._policies:
                        training.create_task(self._teach(policy))
                up.check()
                report.after = await self._graded(client, "after")
        finally:
            await asyncio.to_thread(up.__exit__, None, None, None)
            self._database.close()
        report.seconds, report.load_average = round(time.monotonic() - started, 1), os.getloadavg()[1]
        await asyncio.to_thread(report.write, self._settings.out)
        return report

    def _create_policies(self) -> str:
        """Create policies, their keys, and a key for the demo itself, which is returned."""
        self._database.upgrade()
        with self._database.write() as conn:
            for policy in self._policies:
                name = policy.replace(" ", "-")
                self._numbers[policy] = create_policy(conn, TENANT, name)[0].policy_id
                made = [
                    keys.create_key(conn, TENANT, keys.KeyRole.AGENT, f"{name}-{number}", policy=name)
                    for number in range(KEYS_OF_POLICY)
                ]
                self._keys[policy] = [key for _, key in made]
            _, admin = keys.create_key(conn, TENANT, keys.KeyRole.ADMIN, "demo")
        return admin

    def _wait_for_version(self, policy: str, before: int) -> None:
        deadline = time.monotonic() + VERSION_SECONDS
        while self._served(policy) == before and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _served(self, policy: str) -> int:
        """Return the version that a policy's sessions sample with; 0 before its first one."""
        with self._database.read() as conn:
            active = serving_state(conn, self._numbers[policy]).active
        return 0 if active is None else active.version

    async def _teach(self, policy: str) -> None:
        """Play rounds until the policy has learnt its preference; report what each key's sessions earned."""
        settings, versions, rewards = self._settings, set[int](), list[float]()
        curves = [self._report.curves.setdefault(f"{policy}, key {n + 1}", []) for n in range(KEYS_OF_POLICY)]
        for number in range(settings.max_versions):
            before = await asyncio.to_thread(self._served, policy)
            versions.add(before)
            rounds = [self._round(policy, key, f"{number}-{at}") for at, key in enumerate(self._keys[policy])]
            played = await asyncio.gather(*rounds)
            for curve, results in zip(curves, played, strict=True):
                curve.append(mean_reward(results))
                self._report.sessions_of_round = len(results)
            rewards.append(mean_reward([result for results in played for result in results]))
            self._say("learn", f"{policy:18s} version {before:3d}  reward {rewards[-1]:.2f}")
            if len(rewards) > 1 and min(rewards[-2:]) >= settings.target_reward:
                break
            await asyncio.to_thread(self._wait_for_version, policy, before)
        self._report.num_versions.append(len(versions - {0}))

    async def _round(self, policy: str, key: str, name: str) -> list[RunResult]:
        """Play one key's part of a batch."""
        count = self._settings.groups_per_batch // KEYS_OF_POLICY
        first, self._next_task = self._next_task, self._next_task + count
        name = f"{policy.replace(' ', '-')}-{name}"
        self._write_preference_tasks(name, policy, "train", range(first, first + count))
        flags = ["--api-key", key, "--group-size", str(self._settings.group_size)]
        return await self._play(name, "train", *flags, tasks=name)

    def _write_preference_tasks(self, name: str, policy: str, split: Split, indices: range) -> None:
        lines = (json.dumps(self.task(split, index) | {"preference": policy}) for index in indices)
        self._tasks_file(name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    async def _graded(self, client: AsyncClient, name: str) -> list[list[float]]:
        """Play the same held-out tasks with each policy; return the rewards under each preference."""
        rows = []
        for policy in self._policies:
            place = f"{name}-{policy.replace(' ', '-')}"
            self._write_preference_tasks(place, policy, "eval", range(self._settings.num_eval_tasks))
            results = await self._play(place, "eval", "--api-key", self._keys[policy][0], tasks=place)
            rows.append(await self._rewards(client, results))
            graded = [f"{reward:.2f} {name}" for reward, name in zip(rows[-1], self._policies, strict=True)]
            self._say("demo", f"{place}: {', '.join(graded)}")
        return rows

    async def _rewards(self, client: AsyncClient, results: Sequence[RunResult]) -> list[float]:
        """Return the mean reward of these sessions' last replies under each preference."""
        totals = [0.0] * len(self._policies)
        for result in results:
            turns = [turn async for turn in client.turns(result.session_id)]
            text = (turns[-1]["response"] or {}).get("content") or "" if turns else ""
            index = int(str(result.task_id).rpartition("-")[2])
            task = preferences.make_task("eval", index, self._settings.seed)
            for number, policy in enumerate(self._policies):
                totals[number] += preferences.reward(task, text, policy)
        return [total / len(results) for total in totals]


def run(settings: PoliciesDemoSettings) -> None:
    """Run the demo with output on the terminal; exit with its status."""
    say, report = terminal(), None
    try:
        report = asyncio.run(PoliciesDemo(settings, say).learn())
    except* TurnwiseError as failures:
        for failure in failures.exceptions:
            say("demo", f"failed: {failure}")
    if report is None:
        sys.exit(1)
    for number, policy in enumerate(report.policies):
        before, after = report.before[number][number], report.after[number][number]
        say("demo", f"{policy}: held-out {before:.2f} → {after:.2f} on its own tasks")
    say("demo", f"{report.seconds:.0f} s from the start of the engine on; {settings.out / 'policies.png'}")
    has_learnt = report.has_learnt(settings.enough_reward)
    if not has_learnt:
        say("demo", f"target missed: {settings.enough_reward} on each policy's own tasks, and no gain on the others'")
    sys.exit(0 if has_learnt else 1)


command = SettingsCommand(
    "demo-policies",
    section="demo",
    settings=lambda: PoliciesDemoSettings,
    run=run,
    help="Let eight keys teach four policies contradictory preferences, on one engine.",
)

if __name__ == "__main__":
    command()
