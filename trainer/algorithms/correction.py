"""Learning from what people corrected: a teacher that reads the correction teaches the policy, which does not.

The proxy stores a comment or an edited reply as the prompt of its turn with the correction in it. The policy's first
version, or any other model with its tokenizer, replies to that prompt, and the policy learns to give this reply to the
prompt without the correction: forward KL on the contexts that the policy came into itself. No reward is needed.
Self-distillation: Shenfeld et al. 2026 (SDFT, arXiv:2601.19897) with a demonstration, Hübotter et al. 2026 (SDPO,
arXiv:2601.20802) with feedback; that a model's own words forget less is from Yang et al. 2024 (arXiv:2402.13669).
Legend: L tokens and K turns of a chain.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Scorer, Weighed
from trainer.algorithms.teachers import Teacher, Teachers
from trainer.batch.batch import Batch, build
from trainer.batch.chain import Chain
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import NO_TRAINABLE_TURN, Selection
from turnwise.errors import BatchRefused
from turnwise.features.feedback import HINTS, hints_of
from turnwise.settings import FromJson
from turnwise.types import Json, TokenIds

MEDIA = "media: a corrected session has images, and a teacher gets token ids alone"


class Correction(Weighed):
    """Imitation of the replies that a teacher gives with the correction in its prompt."""

    name = "correction"
    credits_tokens = True
    needs_behaviour = False

    class Settings(Weighed.Settings):
        teacher: Annotated[Teacher, FromJson]
        """Table with `url`, `model` and optionally `key`: the engine's base model beside a LoRA policy, or any other
        engine with the policy's first version."""
        max_reply_tokens: int = Field(default=1024, ge=1)
        """Most tokens of a teacher's reply; longer ones are not trained."""

    settings: Settings

    @functools.cached_property
    def _teachers(self) -> Teachers:
        return Teachers((self.settings.teacher,))

    def choose(self, offer: Selection) -> Selection:
        """Choose the corrected sessions, also those whose own replies cannot be trained, such as greedy ones."""
        corrected = [
            experience
            for experience, reason in zip(offer.offered, offer.reasons, strict=True)
            if (reason or NO_TRAINABLE_TURN).startswith(NO_TRAINABLE_TURN) and corrected_turn(experience) is not None
        ]
        seeing = {experience.group_key for experience in corrected if experience.needed_terms}
        corrected = [experience for experience in corrected if experience.group_key not in seeing]
        kept = {experience.group_key for experience in corrected}
        # A session whose own replies cannot be trained is refused by then, and its correction may be trained.
        offer.refused = {key: why for key, why in offer.refused.items() if key not in kept}
        for key in [key for key in offer.keys if key not in kept]:
            offer.refuse(key, MEDIA if key in seeing else "no_correction")
        return offer.choose(corrected, [_of_corrected(experience) for experience in corrected])

    def credit(self, batch: Batch, members: Sequence[int], scorer: Scorer) -> tuple[Batch, Json]:
        """Put the teacher's replies in the place of the corrected ones.

        Raises:
            BatchRefused: The teacher gave no reply at all.
        """
        prompts = [hinted_prompt(batch.experiences[member]) for member in members]
        longest = self.settings.max_reply_tokens
        replies, unscored = scorer.world.from_first(lambda: self._teachers.replies(prompts, longest))
        if not any(map(len, replies)):
            raise BatchRefused(f"the teacher gave no reply ({unscored}); the log says what was wrong")
        experiences = list(batch.experiences)
        for member, reply in zip(members, replies, strict=True):
            experiences[member] = with_reply(experiences[member], reply)
        taught = build(experiences, [_of_corrected(one) for one in experiences], policy_version=-1)
        gauges = {"num_corrected": sum(len(reply) > 0 for reply in replies), "teacher_tokens": sum(map(len, replies))}
        return taught, gauges | {f"num_teacher_{reason}": count for reason, count in sorted(unscored.items())}

    def loss(self, tokens: TrainedTokens) -> Tensor:
        return -tokens.logprobs

    def close(self) -> None:
        if "_teachers" in vars(self):
            self._teachers.close()


def corrected_turn(experience: Chain) -> int | None:
    """Return the first turn of a chain that was corrected and is trained in it; None without one."""
    hints = hints_of(experience)
    turns = (turn for turn, turn_id in enumerate(experience.turn_ids) if turn_id in hints)
    return next((turn for turn in turns if (experience.turn_index == turn).any()), None)


def hinted_prompt(experience: Chain) -> TokenIds:
    turn = corrected_turn(experience)
    assert turn is not None, "only corrected chains are trained"
    hint = hints_of(experience)[experience.turn_ids[turn]]
    return np.concatenate([experience.tokens[: hint["kept"]], np.array(hint["token_ids"], np.int32)])


def with_reply(experience: Chain, reply: TokenIds) -> Chain:
    """Return a chain up to its corrected turn, with another reply there, which is all that it trains.

    The tokens are those of a plain model: what steered the sampling of the old reply does not concern the new one.
    """
    turn = corrected_turn(experience)
    assert turn is not None, "only corrected chains are trained"
    start = int(np.argmax(experience.turn_index == turn))

    def joined(filler: float, value: float, dtype: type[np.generic]) -> Any:
        return np.concatenate([np.full(start, filler, dtype), np.full(len(reply), value, dtype)])

    tokens, num_turns = np.concatenate([experience.tokens[:start], reply]), len(experience.turn_ids)
    return dataclasses.replace(
        experience,
        temperatures=np.ones(num_turns, np.float32),
        without_ratio=(None,) * num_turns,
        is_known=np.ones(len(tokens), np.bool_),
        terms={},
        tokens=tokens,
        prompt_length=start,
        loss_mask=joined(False, True, np.bool_),
        turn_index=joined(-1, turn, experience.turn_index.dtype.type),
        logprobs=joined(0.0, 0.0, np.float32),
        parts={HINTS: hints_of(experience)},
    )


def _of_corrected(experience: Chain) -> np.ndarray:
    return np.array([float(turn == corrected_turn(experience)) for turn in range(len(experience.turn_ids))])
