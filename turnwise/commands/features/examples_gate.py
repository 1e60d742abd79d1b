"""`turnwise gate`: two versions answer the same examples, each from its files, and the verdict is that of the gate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.features.examples.checks import Checks, ExampleRules
from trainer.features.examples.gate import Compared, Playing, judge
from trainer.features.examples.playing import Player, device_and_dtype, of_model
from trainer.features.supports.turns import Vocabulary
from trainer.forward import load_version
from trainer.world import World
from turnwise.errors import SettingsError
from turnwise.features import examples, policies
from turnwise.features.examples import Example
from turnwise.features.statistics.pairs import Right
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.store.policies import find_policy
from turnwise.types import Json, PolicyVersion


@dataclasses.dataclass(frozen=True, slots=True)
class Gated:
    """What two versions made of the examples."""

    now: int
    before: int
    rows: list[Json]
    left_out: dict[str, str]
    """Why an example could not be answered or judged, by its id."""
    chance: float
    reason: str | None

    def text(self) -> str:
        left_out = "".join(f"\nleft out: {name}: {why}" for name, why in self.left_out.items())
        said = f"version {self.now} would be published: losses like these come by chance with p = {self.chance:.2g}"
        if self.reason is not None:
            said = f"version {self.now} would fail: {self.reason}"
        return f"{said}{left_out}"


def play(store: Database, rules: ExampleRules, tenant: str, named: str, against: int, *, log: Path) -> Gated:
    """Let a version and another one answer a tenant's examples of its policy.

    Raises:
        NotFound: There is no such policy or version.
        SettingsError: The tenant has no example, or none that can be answered.
    """
    with store.read() as conn:
        now, before = policies.find_version(conn, tenant, named), versions.get_version(conn, against)
        if now.policy_id != before.policy_id and against:
            raise SettingsError(f"version {against} is of another policy than {named!r}: compare two of one policy")
        found = examples.of_policy(conn, find_policy(conn, tenant, named.partition("@")[0]).policy_id, tenant)
        base = versions.get_version(conn, 0)
    if not found:
        raise SettingsError(f"tenant {tenant!r} has no pinned example of {named!r}: `turnwise sessions pin` makes one")
    answered = [_answers(version, base, found, rules, log) for version in (before, now)]
    compared, rows, left_out = list[Compared](), list[Json](), dict[str, str]()
    for example, (old, seconds), (new, more) in zip(found, *answered, strict=True):
        if isinstance(old, str) or isinstance(new, str):
            left_out[example.example_id] = next(each for each in (old, new) if isinstance(each, str))
            continue
        compared.append(Compared(example.example_id, new, old))
        right = {name: f"{each.right}/{each.num}" for name, each in (("before", old), ("now", new))}
        rows.append(
            {"example_id": example.example_id, "check": example.criterion["kind"], **right, "seconds": seconds + more}
        )
    if not compared:
        raise SettingsError("no example can be answered: " + "; ".join(left_out.values()))
    verdict = judge(compared, against, look=1, must_mend=rules.must_mend)
    return Gated(now.version, against, rows, left_out, verdict.chance, verdict.reason)


def _answers(
    version: PolicyVersion, base: PolicyVersion, found: Sequence[Example], rules: ExampleRules, log: Path
) -> list[tuple[Right | str, float]]:
    """Return how many of a version's answers to each example are right, or why not, and the seconds that it took."""
    device, dtype = device_and_dtype()
    model: Any = load_version(version, dtype).to(device)
    vocabulary = Vocabulary(base.path)
    playing = Playing(
        vocabulary=vocabulary,
        checks=Checks(rules, log),
        num=rules.answers,
        most_tokens=rules.tokens,
        world=World(),
    )
    player, answers = Player(of_model(model), vocabulary), list[tuple[Right | str, float]]()
    for example in found:
        started = time.monotonic()
        right = playing.right(player, example, f"gate {version.version}")
        answers.append((right, time.monotonic() - started))
    return answers
