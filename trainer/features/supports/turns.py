"""Whether the trainer can redo what an engine did to a turn's logits, or stored ids replace it; if not, no loss.

The stored logprobs are those of the distribution that sampled, so a loss with ratios needs that distribution from the
trainer's logits too. What a call asked for stands in the turn's sampling parameters; the history is the chain's own
tokens; which ids top-k, top-p and min-p left is the turn's stored support. What cannot be applied again is a reason for
which the turn carries no loss. The parameters have vLLM's names, meanings and bounds (vllm/sampling_params.py, 0.32).
Legend: L tokens and K turns of a chain, R sampled tokens of a turn, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.batch.batch import Batch, Row
from trainer.batch.chain import Chain, samplings_of
from trainer.features.supports.grammars import GrammarMasks, Grammars, NotReplayed
from trainer.features.supports.processors import Indices, RowProcessors, SampledTurn, TurnProcessors
from trainer.model.terms import Term
from trainer.settings import TrainerSettings
from turnwise.chains import Experience
from turnwise.features.supports import Support, support_of
from turnwise.sampling import GRAMMARS, GREEDY, TRUNCATING, first_of, not_replayed, temperature_of, unreadable
from turnwise.tokenizer import load_tokenizer
from turnwise.types import Json, TokenIds

log = logging.getLogger(__name__)

LARGEST_BIAS = 100.0
MAX_PAIRS = 4_000_000
"""Most pairs of a sampled token with a bad word, or with an end that `min_tokens` rules out; more take seconds."""
MAX_WORDS, MAX_WORD_CHARACTERS = 10_000, 2**18
"""Bad words of one turn, and their characters."""
NEEDS_TOKENIZER: Mapping[str, Callable[[Any], bool]] = {"bad_words": bool, "min_tokens": lambda value: value > 0}


Found = TurnProcessors | str | None
"""Of a turn: what to apply, or why that cannot be done; None where its logits were only scaled."""


class Vocabulary:
    """The tokenizer of the model that sampled, loaded when a turn first needs it."""

    def __init__(self, model: str) -> None:
        self._model = model

    @functools.cached_property
    def tokenizer(self) -> Any:
        return self._loaded[0]

    @functools.cached_property
    def end_tokens(self) -> list[int]:
        return self._loaded[1]

    @functools.cached_property
    def grammars(self) -> Grammars:
        return Grammars(self._model)

    @functools.cached_property
    def _loaded(self) -> tuple[Any, list[int]]:
        return load_tokenizer(self._model)


class Supports(Term):
    """The processors of a chain's turns, turn by turn, None where logits were only scaled."""

    name = "supports"

    def __init__(self, settings: TrainerSettings) -> None:
        self._vocabulary = Vocabulary(settings.model)
        self._forms_ratios = settings.algorithm.needs_behaviour

    def of_chain(self, chain: Chain) -> Chain:
        """Without ratios the model's own distribution is trained: one id that is left has the logprob 0 whatever it is.

        The chain then has the core's reasons, so that these tokens are not compared with the engine's.
        """
        return with_processors(chain, self._vocabulary) if self._forms_ratios else chain

    def on_logits(self, batch: Batch, row: Row) -> RowProcessors | None:
        members, places = batch.table.experience[row.token], batch.table.place[row.token]
        turns: list[SampledTurn] = []
        turn, place = np.full(len(places), -1, np.int64), np.zeros(len(places), np.int64)
        for member in np.unique(members):
            chain = batch.experiences[member]
            for number, found in enumerate(chain.terms.get(self.name, ())):
                if found is not None:
                    own, sampled = np.flatnonzero(members == member), np.flatnonzero(chain.turn_index == number)
                    inside = own[chain.turn_index[places[own]] == number]
                    turn[inside], place[inside] = len(turns), places[inside] - sampled[0]
                    prompt, reply = chain.tokens[: sampled[0]], chain.tokens[sampled]
                    turns.append(SampledTurn(processors=found, prompt=prompt, sampled=reply))
        return RowProcessors(turns=turns, turn=turn, place=place) if turns else None


def with_processors(chain: Chain, vocabulary: Vocabulary | None) -> Chain:
    """Return a chain with what is applied to its logits; without `vocabulary` what needs none."""
    found = processors_of(chain, vocabulary)
    is_known = np.ones(len(chain.tokens), np.bool_)
    for turn, each in enumerate(found):
        if isinstance(each, TurnProcessors) and each.is_known is not None:
            is_known[chain.turn_index == turn] = each.is_known
    applied = [each if isinstance(each, TurnProcessors) else None for each in found]
    return dataclasses.replace(
        chain,
        without_ratio=[each if isinstance(each, str) else None for each in found],
        is_known=is_known,
        terms={**chain.terms, Supports.name: applied} if any(applied) else chain.terms,
    )


def processors_of(experience: Experience, vocabulary: Vocabulary | None) -> list[Found]:
    """Return what was applied to the logits of each turn of a chain, or why it cannot be applied again. [K]."""
    if experience.policy_version_first < 0:  # imported: nobody sampled it
        return [None] * len(experience.turn_ids)
    found: list[Found] = []
    for turn, sampling in enumerate(samplings_of(experience)):
        places = np.flatnonzero(experience.turn_index == turn)
        joined = support_of(experience)
        support = None if joined is None else [joined[place] for place in places]
        is_greedy = temperature_of(sampling) <= 0
        start = places[0] if places.size else len(experience.tokens)  # a correction's chain may lack a turn's tokens
        prompt, sampled = experience.tokens[:start], experience.tokens[places]
        found.append(GREEDY if is_greedy else processors(sampling, prompt, sampled, support, vocabulary))
    return found


def processors(
    sampling: Json,
    prompt: TokenIds,
    sampled: TokenIds,
    support: Support | None,
    vocabulary: Vocabulary | None,
) -> Found:
    """Return what the engine applied to the logits of a turn's tokens, which are `sampled`.

    `support` has the ids that could be sampled for each of them, [R]; None where they are not known. Without
    `vocabulary` what needs one cannot be applied.
    """
    if name := unreadable(sampling):
        return name
    support = _of_vocabulary(support, vocabulary)
    truncated = first_of(TRUNCATING, sampling) if temperature_of(sampling) > 0 else None
    if truncated is None:
        support = None
    elif support is None or all(ids is None for ids in support):
        return truncated
    # What a support leaves, all other masks have left: it makes up for one that cannot be computed.
    unknown = not_replayed(sampling)
    if unknown is not None and support is None:
        return unknown
    forbidden = grammar = None
    if unknown is None and (asked := first_of({**GRAMMARS, **NEEDS_TOKENIZER}, sampling)):
        try:
            grammar, forbidden = _masks(sampling, prompt, sampled, vocabulary)
        except NotReplayed as error:
            log.info("%s cannot be applied again: %s", asked, error)
            if support is None:
                return asked
    allowed, bias = sampling.get("allowed_token_ids"), _bias(sampling.get("logit_bias") or {})
    found = TurnProcessors(
        grammar=grammar,
        allowed=np.unique(np.array(allowed, np.int64)) if allowed else None,
        forbidden=forbidden,
        bias=bias,
        repetition=_number(sampling, "repetition_penalty", 1.0),
        frequency=_number(sampling, "frequency_penalty", 0.0),
        presence=_number(sampling, "presence_penalty", 0.0),
        support=None if support is None else _rows(support),
        is_known=None if support is None else np.array([ids is not None for ids in support]),
    )
    is_plain = not any(each is not None for each in (grammar, found.allowed, forbidden, bias, support))
    return None if is_plain and (found.repetition, found.frequency, found.presence) == (1, 0, 0) else found


def _number(sampling: Json, name: str, neutral: float) -> float:
    value = sampling.get(name)
    return neutral if value is None else float(value)


def _bias(asked: Mapping[str, float]) -> tuple[Indices, npt.NDArray[np.float32]] | None:
    values = {int(token): min(LARGEST_BIAS, max(-LARGEST_BIAS, float(bias))) for token, bias in asked.items()}
    return (np.array([*values], np.int64), np.array([*values.values()], np.float32)) if values else None


def _of_vocabulary(support: Support | None, vocabulary: Vocabulary | None) -> Support | None:
    """Return a support without those of tokens that have ids which the model has not; all where its size is unknown."""
    if support is None or vocabulary is None:
        return support
    try:
        end = vocabulary.grammars.num_ids
    except (OSError, ValueError, AttributeError):
        return support
    return [None if ids is None or ids[-1:].max(initial=0) >= end else ids for ids in support]


def _rows(support: Support) -> tuple[Indices, Indices]:
    """Return the ids of all tokens, and where each token's begin and end."""
    lengths = [0 if ids is None else len(ids) for ids in support]
    parts = [np.asarray(ids, np.int64) for ids in support if ids is not None]
    return np.concatenate([*parts, np.empty(0, np.int64)]), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _masks(
    sampling: Json, prompt: TokenIds, sampled: TokenIds, vocabulary: Vocabulary | None
) -> tuple[GrammarMasks | None, tuple[Indices, Indices] | None]:
    """Return what a grammar allowed, and what bad words and `min_tokens` ruled out."""
    try:
        if vocabulary is None:
            raise NotReplayed("there is no tokenizer")
        ends = {*vocabulary.end_tokens, *(sampling.get("stop_token_ids") or ())}
        grammar = None
        if first_of(GRAMMARS, sampling):
            grammar = vocabulary.grammars.masks(sampling, prompt.tolist(), sampled.tolist(), ends)
        return grammar, _forbidden(sampling, sampled, ends, grammar, vocabulary)
    except (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NotReplayed(str(error)) from error


def _forbidden(
    sampling: Json, sampled: TokenIds, ends: set[int], grammar: GrammarMasks | None, vocabulary: Vocabulary
) -> tuple[Indices, Indices] | None:
    """Return where bad words and `min_tokens` rule out which ids.

    A grammar that allows nothing but an end is stronger than `min_tokens`.
    """
    num_kept = min(int(sampling.get("min_tokens") or 0), len(sampled))
    words = sampling.get("bad_words") or ()
    if max(num_kept * len(ends), len(words) * len(sampled)) > MAX_PAIRS or len(words) > MAX_WORDS:
        raise NotReplayed(
            f"{len(words)} bad words, {len(ends)} ends and {num_kept} of `min_tokens` are too many for {len(sampled)} "
            "sampled tokens"
        )
    if sum(map(len, words)) > MAX_WORD_CHARACTERS:
        raise NotReplayed(f"its bad words have more than {MAX_WORD_CHARACTERS} characters")
    is_over = np.zeros(num_kept, np.bool_)
    if grammar is not None and num_kept:
        is_over = grammar.allows_nothing_but(ends)[:num_kept]
    found = {(place, end) for place in np.flatnonzero(~is_over).tolist() for end in ends}
    tokens = sampled.tolist()
    for *before, last in bad_words(words, vocabulary.tokenizer.encode) if words else ():
        size = len(before)
        found.update((place, last) for place in range(size, len(tokens)) if tokens[place - size : place] == before)
    if not found:
        return None
    places, ids = zip(*sorted(found), strict=True)
    return np.array(places, np.int64), np.array(ids, np.int64)


def bad_words(words: Iterable[str], encode: Callable[..., list[int]]) -> list[list[int]]:
    """Return the token sequences of bad words: at the start of a text, and after a space if that is as many tokens."""
    found: list[list[int]] = []
    for word in words:
        plain = encode(word.lstrip(), add_special_tokens=False)
        if not plain:
            continue
        found.append(plain)
        spaced = encode(" " + word.lstrip(), add_special_tokens=False)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
