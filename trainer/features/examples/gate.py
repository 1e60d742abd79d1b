"""What a version answers to pinned examples, before engines get it, and whether it may be published with that.

Every example is answered some times by each version; the answers are kept with the example. A version fails if it
answers examples worse than the served version did, by an exact test of the answers, item by item, of which each served
version may be tested many times (α / (k (k + 1)) for the k-th version beside it). It also fails while it still fails
an example: if no answer of it is right, nor was any of the served version's. So a failure that a version has mended
stays mended, and one that nobody mended is not served again under a new number.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor

from trainer.claims.holds import Beside, OfFirst
from trainer.claims.ledger import Ledger, RunProgress
from trainer.features.examples.checks import Checks, ExampleRules, right_of
from trainer.features.examples.playing import Asked, Player, of_policy, token_by_token
from trainer.features.supports.turns import Vocabulary
from trainer.model.agent import PolicyAgent
from trainer.world import World
from turnwise.errors import GraderFailed, StoreUnavailable
from turnwise.features import examples
from turnwise.features.examples import Example
from turnwise.features.statistics.confidence import ALPHA, spent
from turnwise.features.statistics.pairs import Right, losses_test
from turnwise.settings import FromJson, Settings
from turnwise.store import serving
from turnwise.store.database import Connection
from turnwise.types import Json

log = logging.getLogger(__name__)

NUM_NAMED = 5


class ExampleSettings(Settings):
    """What versions answer to pinned examples."""

    examples: Annotated[dict[str, Any], FromJson] = Field(default={})
    """Table: each version gives so many `answers` (5) to each pinned example before it is published, 0 for none, of at
    most so many `tokens` (512); it `must_mend` (true) what it still fails. Checks have their programs in the directory
    `commands`, which may run so many `seconds` (60)."""

    @field_validator("examples")
    @classmethod
    def _are_known(cls, given: dict[str, Any]) -> dict[str, Any]:
        ExampleRules(**given)
        return given


class Compared(NamedTuple):
    """A version's answers to an example beside those of the version that it is compared with."""

    example_id: str
    now: Right
    before: Right | None
    """None where that version has not answered it."""

    @property
    def is_still_failed(self) -> bool:
        return not self.now.right and (self.before is None or not self.before.right)

    def __str__(self) -> str:
        before = "" if self.before is None else f"{self.before.right} of {self.before.num}, now "
        return f"{self.example_id} ({before}{self.now.right} of {self.now.num})"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the answers to all examples say."""

    chance: float
    """Of losses as large, if nothing had become worse."""
    least_chance: float
    """A smaller one fails the version."""
    reason: str | None
    """Why it is not published."""


def judge(compared: Sequence[Compared], beside: int, *, look: int, must_mend: bool) -> Verdict:
    """Compare a version's answers with those of version `beside`; it is the `look`-th version that is (first: 1)."""
    pairs = [(each.now, each.before) for each in compared if each.before is not None]
    chance, least = losses_test([new for new, _ in pairs], [old for _, old in pairs]), spent(ALPHA, look)
    failed = [each for each in compared if each.is_still_failed]
    reason = None
    if chance <= least:
        lost = [each for each in compared if each.before is not None and each.now.share < each.before.share]
        lost.sort(key=lambda each: each.now.share - (each.before or each.now).share)
        reason = (
            f"it answers {len(lost)} of {len(compared)} pinned examples worse than version {beside} did "
            f"(p = {chance:.2g}): {_named(lost)}"
        )
    elif failed and must_mend:
        reason = f"it still fails {len(failed)} of {len(compared)} pinned examples: {_named(failed)}"
    return Verdict(chance, least, reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Playing:
    """How examples are answered and judged."""

    vocabulary: Vocabulary
    checks: Checks
    num: int
    most_tokens: int
    world: World

    def right(self, player: Player, example: Example, seed: str) -> Right | str:
        """Return how many of a model's answers are right, or why they cannot be told; in every process alike.

        A greedy call has one answer, however often it is asked.
        """
        asked = Asked(prompt=example.prompt, sampling=example.sampling, most_tokens=self.most_tokens)
        if why := player.why_not(asked) or self.world.from_first(lambda: self.checks.why_not_judged(example)):
            return why
        num = 1 if asked.is_greedy else self.num
        try:
            replies = player.answers(asked, num, f"{example.tenant}\0{example.example_id}\0{seed}")
        except torch.OutOfMemoryError:
            if self.world.size > 1:
                raise
            return f"{num} answers behind {len(example.prompt)} tokens do not fit into memory"
        return self.world.from_first(lambda: self._judged(example, replies))

    def _judged(self, example: Example, replies: Sequence[Sequence[int]]) -> Right | str:
        decode: Callable[..., str] = self.vocabulary.tokenizer.decode
        texts = [decode(reply, skip_special_tokens=True) for reply in replies]
        pinned = decode(example.reply.tolist(), skip_special_tokens=True)
        try:
            found = right_of(self.checks, example, texts, pinned)
        except GraderFailed as error:
            return str(error)
        return Right(sum(found), len(found))


class ExampleGate(Beside[ExampleSettings]):
    """Answers the policy's examples with the updated weights; every process calls it in step."""

    @classmethod
    def is_on(cls, settings: ExampleSettings) -> bool:
        return ExampleRules(**settings.examples).answers > 0

    def __init__(self, ledger: Ledger, learner: PolicyAgent, first: OfFirst) -> None:
        super().__init__(ledger, learner, first)
        settings, rules = learner.settings, ExampleRules(**self._settings.examples)
        self._playing = Playing(
            vocabulary=Vocabulary(settings.model),
            checks=Checks(rules, settings.policies_dir / "example-commands.log"),
            num=rules.answers,
            most_tokens=rules.tokens,
            world=learner.world,
        )
        self._answered: list[tuple[Example, Right]] = []
        """The answers of the version that is about to get its number."""

    def opened(self, version: int, probe: Json | None) -> None:  # noqa: ARG002  the hook's
        first = None if version else self._learner.world.from_first(self._ledger.first_version)
        self._catch_up(version if first is None else first.version)

    def trained(self, at: RunProgress, *, is_last: bool) -> Json:
        """Answer with the version that now is what was pinned since, so that the next one has something beside it."""
        if not is_last:
            self._catch_up(at.policy_version)
        return {}

    def why_unpublished(self, policy_version: int) -> tuple[Json, str | None]:
        """Return gauges, and why weights that come from this version must not be published; None where they may."""
        started = time.monotonic()
        found, served = self._learner.world.from_first(lambda: self._ledger.read(self._pinned))
        if not found:
            return {}, None
        self._answered = self._answers(found, f"behind {policy_version}")
        beside = served if any(str(served) in example.answers for example in found) else policy_version
        compared = [
            Compared(example.example_id, right, _right_in(example.answers, beside)) for example, right in self._answered
        ]
        if not compared:
            return {"examples_left_out": len(found)}, None
        later = {version for example in found for version in map(int, example.answers) if version > beside}
        look, must_mend = 1 + len(later), ExampleRules(**self._settings.examples).must_mend
        verdict = judge(compared, beside, look=look, must_mend=must_mend)
        if verdict.reason is not None:
            log.error("the version is kept and not served: %s", verdict.reason)
        gauges: Json = {
            "examples_num": len(compared),
            "examples_left_out": len(found) - len(compared),
            "examples_right": sum(each.now.share for each in compared) / len(compared),
            "examples_chance": verdict.chance,
            "examples_seconds": time.monotonic() - started,
        }
        return gauges, verdict.reason

    def takes(self, version: int, weights: dict[str, Tensor], probe: Json) -> bool:  # noqa: ARG002  the hook's
        """Keep the answers under the number of the version that gave them."""
        self._keep(version, self._answered)
        self._answered = []
        return False

    def _pinned(self, conn: Connection) -> tuple[list[Example], int]:
        served = serving.serving_state(conn, self._ledger.policy_id).served
        return examples.of_policy(conn, self._ledger.policy_id), 0 if served is None else served.version

    def _catch_up(self, version: int) -> None:
        found, _ = self._learner.world.from_first(lambda: self._ledger.read(self._pinned))
        lacking = [example for example in found if str(version) not in example.answers]
        self._keep(version, self._answers(lacking, f"of {version}"))

    def _answers(self, found: Sequence[Example], seed: str) -> list[tuple[Example, Right]]:
        """Return how many answers are right, without the examples that cannot be answered or judged."""
        policy = self._learner.policy
        playing, player = self._playing, Player(of_policy(policy), self._playing.vocabulary, self._learner.world)
        with token_by_token(policy):
            right = [(example, playing.right(player, example, seed)) for example in found]
        for example, why in right:
            if isinstance(why, str):
                log.warning("the gate leaves out example %s: %s", example.example_id, why)
        return [(example, each) for example, each in right if isinstance(each, Right)]

    def _keep(self, version: int, answered: Sequence[tuple[Example, Right]]) -> None:
        if not self._learner.world.is_first or not answered:
            return
        try:
            with self._ledger.db.write() as conn:
                for example, right in answered:
                    examples.add_answers(conn, example, version, right.right, right.num)
        except StoreUnavailable as error:
            log.warning("the answers of version %d to %d examples are not kept: %s", version, len(answered), error)


def _right_in(answers: Mapping[str, Sequence[int]], version: int) -> Right | None:
    return Right(*answers[str(version)]) if str(version) in answers else None


def _named(compared: Sequence[Compared]) -> str:
    more = f" and {len(compared) - NUM_NAMED} more" if len(compared) > NUM_NAMED else ""
    return ", ".join(map(str, compared[:NUM_NAMED])) + more
