"""An engine's masks, bias, penalties, min-p, top-k and top-p, applied to the trainer's logits in the engine's order.

The order is that of vLLM 0.32 (vllm/v1/sample/sampler.py): a grammar's mask, allowed ids, bad words and `min_tokens`,
logit bias, the penalties, the temperature, then min-p, top-k and top-p. The last three are the stored support, so that
the behaviour decides what could be sampled, whatever the present weights are. A mask commutes with the division by the
temperature, which the caller does. Each token knows its own history: the ids of its turn's prompt, and those sampled
before it in the turn. Legend: m trained tokens of a row, U distinct predictors, C predictors of a chunk, c of them in a
run, V vocabulary, D distinct ids of a turn, R sampled tokens of a turn, W words of 32 ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batch.logits import Scale
from trainer.features.supports.grammars import GrammarMasks
from turnwise.types import TokenIds

MASKED = -torch.inf
"""Logit of an id that could not be sampled."""
Indices = npt.NDArray[np.int64]
ToDevice = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnProcessors:
    """What was applied to the logits of one turn's tokens before and after the temperature; None or 1 or 0: nothing."""

    grammar: GrammarMasks | None = None
    allowed: Indices | None = None
    """The only ids that may be sampled."""
    forbidden: tuple[Indices, Indices] | None = None
    """Places among the turn's tokens, in order, and an id that bad words or `min_tokens` rule out there."""
    bias: tuple[Indices, npt.NDArray[np.float32]] | None = None
    """Ids, each once, and what is added to their logits."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    support: tuple[Indices, Indices] | None = None
    """Ids that top-k, top-p and min-p left, token by token, and where each token's begin. [R + 1]"""
    is_known: npt.NDArray[np.bool_] | None = None
    """Whether the token's support is known; None where all are, or nothing was truncated. [R]"""

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A turn whose logits were processed."""

    processors: TurnProcessors
    prompt: TokenIds
    sampled: TokenIds
    """[R]"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowProcessors:
    """The processed tokens of a row."""

    turns: Sequence[SampledTurn]
    turn: Indices
    """Index in `turns` of each trained token's turn; -1 where its logits are only scaled. [m]"""
    place: Indices
    """Place of each trained token among its turn's sampled tokens. [m]"""

    @property
    def key(self) -> Tensor:
        return torch.from_numpy(np.where(self.turn < 0, 0, np.arange(1, len(self.turn) + 1)))

    def placed(self, which: Tensor, to_device: ToDevice) -> Processing:
        tokens = np.flatnonzero(self.turn >= 0)
        predictor = which.numpy()[tokens]
        tokens, predictor = tokens[np.argsort(predictor)], np.sort(predictor)
        breaks = np.flatnonzero((np.diff(predictor) != 1) | (np.diff(self.turn[tokens]) != 0)) + 1
        return Processing(
            [
                _Run(int(predictor[run[0]]), self.turns[self.turn[tokens[run[0]]]], self.place[tokens[run]], to_device)
                for run in np.split(np.arange(len(tokens)), breaks)
                if len(run)
            ]
        )


class _Run:
    """Successive predictors of tokens of one turn, with what is applied to them on the device."""

    def __init__(self, start: int, turn: SampledTurn, places: Indices, to_device: ToDevice) -> None:
        def moved(values: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(values)))

        of = self._processors = turn.processors
        self.start, self.stop = start, start + len(places)
        self._moved = moved
        self._places = moved(places)
        self._grammar = None if of.grammar is None else (moved(of.grammar.words), moved(of.grammar.index[places]))
        self._allowed = None if of.allowed is None else moved(of.allowed)
        self._forbidden = None if of.forbidden is None else _of_places(*of.forbidden, places)
        self._bias = None if of.bias is None else (moved(of.bias[0]), moved(of.bias[1]))
        self._support = None
        if of.support is not None:
            ids, starts = of.support
            self._support = _of_places(np.repeat(np.arange(len(starts) - 1), np.diff(starts)), ids, places)
        prompt = turn.prompt if of.repetition != 1 else turn.prompt[:0]
        before = turn.sampled[:-1] if of.has_penalties else turn.sampled[:0]
        distinct, index = np.unique(np.concatenate([prompt, before]), return_inverse=True)
        self._ids = moved(distinct.astype(np.int64))
        """The distinct ids of prompt and sampled tokens. [D]"""
        self._in_prompt = moved(np.isin(np.arange(len(distinct)), index[: len(prompt)]))
        self._sampled = moved(index[len(prompt) :].astype(np.int64))
        """Index in these ids of each sampled token but the last. [R - 1]"""

    def apply(self, logits_cV: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
        """Change the logits of the run's predictors from `first` on in place; return ids and derivative of a scale."""
        inside, found = slice(first, first + len(logits_cV)), None
        if self._grammar is not None:
            words, masks = self._grammar
            constrain(logits_cV, words[masks[inside]])
        if self._allowed is not None:
            allow(logits_cV, self._allowed)
        if self._forbidden is not None:
            forbid(logits_cV, *self._flat(self._forbidden, inside))
        if self._bias is not None:
            add_bias(logits_cV, *self._bias)
        if self._processors.has_penalties:
            found = self._penalise(logits_cV, self._places[inside])
        if self._support is not None:
            truncate(logits_cV, *self._flat(self._support, inside))
        return found

    def _penalise(self, logits_cV: Tensor, places: Tensor) -> tuple[Tensor, Tensor] | None:
        """Apply the penalties of what stands before each token; return ids and derivative, where it is not 1.

        Repetition divides a positive logit, and multiplies another, of any id in prompt or reply; frequency and
        presence are subtracted for the reply's own (vllm/model_executor/layers/utils.py: apply_penalties).
        """
        of, (size, length) = self._processors, (len(places), len(self._sampled))
        is_before = torch.arange(length, device=places.device) < places[:, None]
        counts_cD = logits_cV.new_zeros(size, len(self._ids))
        counts_cD.scatter_add_(1, self._sampled.expand(size, length), is_before.to(counts_cD.dtype))
        logits_cD, scale_cD = logits_cV[:, self._ids], None
        if of.repetition != 1:
            is_seen = (counts_cD > 0) | self._in_prompt
            scale_cD = torch.where(is_seen, torch.where(logits_cD > 0, 1 / of.repetition, of.repetition), 1.0)
            logits_cD = logits_cD * scale_cD
        logits_cD = logits_cD - of.frequency * counts_cD - of.presence * (counts_cD > 0)
        logits_cV[:, self._ids] = logits_cD
        return None if scale_cD is None else (self._ids, scale_cD)

    def _flat(self, pairs: tuple[Indices, Indices], inside: slice) -> tuple[Tensor, Tensor]:
        rows, ids = pairs
        start, stop = np.searchsorted(rows, [inside.start, inside.stop])
        return self._moved(rows[start:stop] - inside.start), self._moved(ids[start:stop])


def _of_places(place: Indices, ids: Indices, places: Indices) -> tuple[Indices, Indices]:
    """Return the pairs of place and id whose place is in the run, with its number there."""
    number = np.searchsorted(places, place).clip(max=len(places) - 1)
    inside = places[number] == place
    return number[inside], ids[inside]


class Processing:
    """What is applied to the logits of a row's distinct predictors, as runs of them in order."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = runs

    def apply(self, logits_CV: Tensor, chunk: slice) -> list[Scale]:
        """Change the float32 logits of a chunk in place; return where their derivative is not 1 or 0."""
        scales: list[Scale] = []
        for run in self._runs:
            start, stop = max(run.start, chunk.start), min(run.stop, chunk.stop)
            if start >= stop:
                continue
            rows = slice(start - chunk.start, stop - chunk.start)
            scaled = run.apply(logits_CV[rows], start - run.start)
            if scaled is not None:
                scales.append((rows, *scaled))
        return scales


def apply_to_turn(logits_RV: Tensor, turn: SampledTurn) -> None:
    """Apply to the float32 logits of all of a turn's tokens, in place."""
    places = np.arange(len(turn.sampled))
    row = RowProcessors(turns=[turn], turn=np.zeros_like(places), place=places)
    row.placed(torch.from_numpy(places), lambda tensor: tensor).apply(logits_RV, slice(0, len(places)))


def constrain(logits_cV: Tensor, words_cW: Tensor) -> None:
    """Leave what a grammar allows, a bit for each id (vllm/v1/structured_output/utils.py: apply_grammar_bitmask)."""
    bits = torch.arange(32, dtype=torch.int32, device=words_cW.device)
    is_allowed = ((words_cW[:, :, None] >> bits) & 1).flatten(1)[:, : logits_cV.shape[1]] != 0
    logits_cV[:, : is_allowed.shape[1]].masked_fill_(~is_allowed, MASKED)


def allow(logits_cV: Tensor, ids: Tensor) -> None:
    """Leave these ids alone (`allowed_token_ids`)."""
    kept = logits_cV[:, ids]
    logits_cV.fill_(MASKED)
    logits_cV[:, ids] = kept


def forbid(logits_cV: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Rule out an id in a row (vllm/v1/sample/ops/bad_words.py, and MinTokensLogitsProcessor)."""
    logits_cV[rows, ids] = MASKED


def add_bias(logits_cV: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add to the logits of some ids (LogitBiasLogitsProcessor)."""
    logits_cV[:, ids] += values


def truncate(logits_cV: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Leave in each row the ids that top-k, top-p and min-p left to the behaviour; all in a row that has none here."""
    kept = logits_cV[rows, ids]
    is_cut = torch.zeros(len(logits_cV), dtype=torch.bool, device=logits_cV.device)
    is_cut[rows] = True
    logits_cV.masked_fill_(is_cut[:, None], MASKED)
    logits_cV[rows, ids] = kept
