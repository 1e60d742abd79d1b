"""`python -m examples.demos.policies`: eight keys teach four policies contradictory preferences, on one engine.

The agent, the questions and the model are the same for all keys. What differs is which of four replies a key rewards. A
policy belongs to two keys, and learns from their sessions alone. At the end each policy is graded on its own held-out
tasks, and by the preferences of the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from examples.demos.driver import Demo, DemoSettings, demo_command
from examples.demos.report import RunReport, mean_reward, picture
from examples.policies import tasks as preferences
from examples.policies.tasks import PREFERENCES
from turnwise.client import AsyncClient
from turnwise.features.policies import create_policy
from turnwise.processes.supervisor import Supervisor
from turnwise.processes.terminal import Say
from turnwise.rollouts.results import RunResult
from turnwise.rollouts.runner import POLL_SECONDS, active_policy
from turnwise.store import keys
from turnwise.store.database import Database

KEYS_OF_POLICY = 2
TENANT = "default"
VERSION_SECONDS = 60.0
"""How long a round waits for the version that its sessions make; without one, more sessions are played."""


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

    def missed(self, report: PoliciesReport) -> str | None:
        """Return the target if the run missed it."""
        if report.has_learnt(self.enough_reward):
            return None
        return f"{self.enough_reward} on each policy's own tasks, and no gain on the others'"


@dataclasses.dataclass(kw_only=True)
class PoliciesReport(RunReport):
    """The whole run. A matrix has a row for each policy, with its reward under each policy's preference."""

    policies: list[str]
    before: list[list[float]] = dataclasses.field(default_factory=list)
    after: list[list[float]] = dataclasses.field(default_factory=list)
    curves: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Mean training reward of each round, by key."""
    num_versions: list[int] = dataclasses.field(default_factory=list)
    sessions_of_round: int = 0
    """Of each key."""

    def draw(self, directory: Path) -> None:
        """Write `policies.png`."""
        title = f"{len(self.curves)} keys, {len(self.policies)} policies, one engine (seed {self.seed})"
        with picture(directory / "policies.png", "sessions of the key", title, fontsize="small") as axes:
            for number, (key, rewards) in enumerate(self.curves.items()):
                sessions = [self.sessions_of_round * (played + 1) for played in range(len(rewards))]
                line = "-" if number % KEYS_OF_POLICY == 0 else "--"
                axes.plot(sessions, rewards, line, color=f"C{number // KEYS_OF_POLICY}", label=key)

    def lines(self, out: Path) -> list[str]:
        """Return the result in words, and where the picture is."""
        own = [(row[number], self.after[number][number]) for number, row in enumerate(self.before)]
        return [
            *(
                f"{policy}: held-out {before:.2f} → {after:.2f} on its own tasks"
                for policy, (before, after) in zip(self.policies, own, strict=True)
            ),
            f"{self.seconds:.0f} s from the start of the engine on; {out / 'policies.png'}",
        ]

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


class PoliciesDemo(Demo):
    """One run of the demo."""

    tasks = preferences.__name__
    num_parallel = 16

    def __init__(self, settings: PoliciesDemoSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._policies = PREFERENCES[: settings.num_policies]
        self._report = PoliciesReport(seed=settings.seed, policies=list(self._policies))
        self._keys: dict[str, list[str]] = {}
        """The keys of each policy."""
        self._next_task = 0

    def _prepare(self) -> str:
        """Create policies, their keys, and a key for the demo itself, which is returned.

        Before the proxy starts: sessions that it creates while it has no keys can be used without one only.
        """
        database = Database(f"sqlite:///{self._settings.out / 'turnwise.db'}")
        database.upgrade()
        with database.write() as conn:
            for policy in self._policies:
                create_policy(conn, TENANT, _name_of(policy))
                made = [
                    keys.create_key(
                        conn, TENANT, keys.KeyRole.AGENT, f"{_name_of(policy)}-{number}", policy=_name_of(policy)
                    )
                    for number in range(KEYS_OF_POLICY)
                ]
                self._keys[policy] = [key for _, key in made]
            _, admin = keys.create_key(conn, TENANT, keys.KeyRole.ADMIN, "demo")
        database.close()
        return admin

    async def _learn(self, client: AsyncClient, up: Supervisor) -> PoliciesReport:
        """Grade the policies, teach all of them at once, and grade them again."""
        report = self._report
        report.before = await self._graded(client, "before")
        async with asyncio.TaskGroup() as training:
            for policy in self._policies:
                training.create_task(self._teach(client, policy))
        up.check()
        report.after = await self._graded(client, "after")
        return report

    async def _teach(self, client: AsyncClient, policy: str) -> None:
        """Play rounds until the policy has learnt its preference; report what each key's sessions earned."""
        settings, versions, rewards = self._settings, set[int](), list[float]()
        curves = [self._report.curves.setdefault(f"{policy}, key {n + 1}", []) for n in range(KEYS_OF_POLICY)]
        for number in range(settings.max_versions):
            before = await _served(client, policy)
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
            await self._wait_for_version(client, policy, before)
        self._report.num_versions.append(len(versions - {0}))

    async def _wait_for_version(self, client: AsyncClient, policy: str, before: int) -> None:
        """Wait until a policy's sessions sample with another version than before, `VERSION_SECONDS` at most."""
        deadline = time.monotonic() + VERSION_SECONDS
        while time.monotonic() < deadline:
            if await _served(client, policy) != before:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _round(self, policy: str, key: str, name: str) -> list[RunResult]:
        """Play one key's part of a batch."""
        count = self._settings.groups_per_batch // KEYS_OF_POLICY
        first, self._next_task = self._next_task, self._next_task + count
        name = f"{_name_of(policy)}-{name}"
        self._write_tasks_file(name, "train", range(first, first + count), {"preference": policy})
        flags = ["--api-key", key, "--group-size", str(self._settings.group_size)]
        return await self._play(name, "train", *flags, tasks=name)

    async def _graded(self, client: AsyncClient, name: str) -> list[list[float]]:
        """Play the same held-out tasks with each policy; return the rewards under each preference."""
        rows = []
        for policy in self._policies:
            place = f"{name}-{_name_of(policy)}"
            self._write_tasks_file(place, "eval", range(self._settings.num_eval_tasks), {"preference": policy})
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


def _name_of(policy: str) -> str:
    return policy.replace(" ", "-")


async def _served(client: AsyncClient, policy: str) -> int:
    active = await active_policy(client, _name_of(policy))
    return 0 if active is None else int(active["version"])


command = demo_command(
    "demo-policies",
    PoliciesDemoSettings,
    PoliciesDemo,
    "Let eight keys teach four policies contradictory preferences, on one engine.",
)

if __name__ == "__main__":
    command()
