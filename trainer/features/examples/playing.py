"""Replies of a model of transformers to an exact prompt, sampled as an engine would, without an engine.

The trainer has the weights of a version before anybody else, so it answers the examples itself: token by token with a
cache of keys and values, all answers to one prompt at once. What a call asked for is applied in the engine's order: the
processors that the trainer replays for its losses, then the temperature, min-p, top-k and top-p. Where several
processes hold the model, all compute and the first one draws. Legend: N answers, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.features.supports.processors import RowProcessors, SampledTurn, TurnProcessors
from trainer.features.supports.turns import Vocabulary, processors
from trainer.model.loading import is_capped
from trainer.model.model import Policy
from trainer.world import World
from turnwise.sampling import TRUNCATING, temperature_of
from turnwise.types import Json, TokenIds

LENGTHS = ("max_completion_tokens", "max_tokens")
PROCESSED = frozenset(
    {"allowed_token_ids", "bad_words", "min_tokens", "logit_bias"}
    | {"repetition_penalty", "frequency_penalty", "presence_penalty"}
)
"""Parameters that change logits before the temperature does."""
ANY_ID = 0
"""The id in the place of the token that is not drawn yet: processors of a place depend on those before it alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answering:
    """A model, as what gives the logits behind some tokens."""

    model: Any
    device: torch.device
    computing: Callable[[], contextlib.AbstractContextManager[None]]
    """Stands around each forward pass."""
    num_ids: int
    num_positions: int | None
    """Tokens of the longest text; None for any."""

    def behind(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the float32 logits behind the last of each row's tokens [N, V], and the cache with them."""
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
        if cache is not None:
            given["past_key_values"] = cache
        if "logits_to_keep" in inspect.signature(_base(self.model).forward).parameters:
            given["logits_to_keep"] = 1
        with torch.no_grad(), self.computing():
            output = self.model(**given)
        return output.logits[:, -1, : self.num_ids].float(), getattr(output, "past_key_values", None)


def of_policy(policy: Policy) -> Answering:
    """Return the trained model as it is now."""

    @contextlib.contextmanager
    def computing() -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            entered.enter_context(policy.autocast())
            for around in policy.around:
                entered.enter_context(around.forward(None))
            yield

    return Answering(policy.model, policy.device, computing, policy.num_ids, policy.num_positions)


@contextlib.contextmanager
def token_by_token(policy: Policy) -> Iterator[None]:
    """Let the model attend for one token at a time: flex attention is compiled for whole rows, without a cache."""
    if policy.attention != "flex_attention":
        yield
        return
    policy.base.set_attn_implementation("eager" if is_capped(policy.base.config) else "sdpa")
    try:
        yield
    finally:
        policy.base.set_attn_implementation(policy.attention)


def of_model(model: Any) -> Answering:
    """Return a model that was loaded to be computed alone."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return Answering(model, next(model.parameters()).device, contextlib.nullcontext, int(config.vocab_size), positions)


def device_and_dtype() -> tuple[str, str]:
    """Return where a model that is loaded to be computed alone is computed, and in which number format."""
    return ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is sampled: a prompt, how, and where a reply ends."""

    prompt: TokenIds
    sampling: Json
    most_tokens: int
    """A reply is cut here, or where the call's own limit is."""

    @property
    def is_greedy(self) -> bool:
        return temperature_of(self.sampling) <= 0

    @property
    def length(self) -> int:
        own = (self.sampling.get(name) for name in LENGTHS)
        return min([self.most_tokens, *(int(each) for each in own if each is not None)])


class Player:
    """Answers prompts with one model."""

    def __init__(self, answering: Answering, vocabulary: Vocabulary, world: World | None = None) -> None:
        self._answering = answering
        self._vocabulary = vocabulary
        self._world = World() if world is None else world

    def why_not(self, asked: Asked) -> str | None:
        """Return why the model cannot answer a prompt; None where it can."""
        try:
            self._vocabulary.tokenizer  # noqa: B018  it is loaded once, here
        except (OSError, ValueError, ImportError) as error:
            return f"the model's tokenizer cannot be loaded: {error}"
        highest = int(asked.prompt.max(initial=0))
        if highest >= self._answering.num_ids:
            return f"its prompt has token {highest}, which is not in the vocabulary of {self._answering.num_ids}"
        if self._length(asked) < 1:
            return f"its prompt fills the model's {self._answering.num_positions} positions"
        return None

    def _length(self, asked: Asked) -> int:
        positions = self._answering.num_positions
        return asked.length if positions is None else min(asked.length, positions - len(asked.prompt))

    def answers(self, asked: Asked, num: int, seed: str) -> list[list[int]]:
        """Return the tokens of some replies, each with the token that ended it."""
        draw = torch.Generator().manual_seed(int.from_bytes(blake2b(seed.encode(), digest_size=7).digest(), "big"))
        prompt = torch.tensor(asked.prompt.astype(np.int64), device=self._answering.device)[None]
        logits_NV, cache = self._answering.behind(prompt, None)
        logits_NV, cache = logits_NV.expand(num, -1), _repeated(cache, num)
        replies: list[list[int]] = [[] for _ in range(num)]
        is_over = [False] * num
        most = self._length(asked)
        for length in range(1, most + 1):
            drawn = self._world.from_first(lambda: self._drawn(logits_NV, replies, asked, draw))  # noqa: B023  at once
            for place, token in enumerate(drawn):
                if not is_over[place]:
                    replies[place].append(token)
                    is_over[place] = self._is_over(replies[place], asked.sampling)
            if all(is_over) or length == most:
                break
            logits_NV, cache = self._next(prompt, replies, drawn, cache)
        return replies

    def _next(self, prompt: Tensor, replies: list[list[int]], drawn: list[int], cache: Any) -> tuple[Tensor, Any]:
        last = torch.tensor(drawn, device=prompt.device)[:, None]
        if cache is not None:
            return self._answering.behind(last, cache)
        # An architecture without a cache of its own: the whole text again. Replies that are over repeat their end.
        longest = max(map(len, replies))
        padded = [[*reply, *reply[-1:] * (longest - len(reply))] for reply in replies]
        whole = torch.cat([prompt.expand(len(replies), -1), torch.tensor(padded, device=prompt.device)], 1)
        return self._answering.behind(whole, None)[0], None

    def _drawn(self, logits_NV: Tensor, replies: Sequence[list[int]], asked: Asked, draw: torch.Generator) -> list[int]:
        found = logits_NV.clone()
        untruncated = {name: value for name, value in asked.sampling.items() if name not in TRUNCATING}
        for place, reply in enumerate(replies if PROCESSED & untruncated.keys() else ()):
            sampled = np.array([*reply, ANY_ID], np.int32)
            applied = processors(untruncated, asked.prompt, sampled, None, self._vocabulary)
            if isinstance(applied, TurnProcessors):
                _apply(found[place : place + 1], SampledTurn(processors=applied, prompt=asked.prompt, sampled=sampled))
        if asked.is_greedy:
            return found.argmax(-1).tolist()
        log_p_NV = _truncated((found / temperature_of(asked.sampling)).log_softmax(-1), asked.sampling)
        return torch.multinomial(log_p_NV.exp().cpu(), 1, generator=draw)[:, 0].tolist()

    def _is_over(self, reply: list[int], sampling: Json) -> bool:
        ends = {*(sampling.get("stop_token_ids") or ())}
        if not sampling.get("ignore_eos"):
            ends.update(self._vocabulary.end_tokens)
        if reply[-1] in ends:
            return True
        stops = stops_of(sampling)
        return bool(stops) and any(stop in self._vocabulary.tokenizer.decode(reply) for stop in stops)


def stops_of(sampling: Json) -> list[str]:
    stop = sampling.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


def _apply(logits_1V: Tensor, turn: SampledTurn) -> None:
    """Apply to the logits of the turn's last token, in place."""
    place = np.array([len(turn.sampled) - 1])
    row = RowProcessors(turns=[turn], turn=np.zeros(1, np.int64), place=place)
    row.placed(torch.zeros(1, dtype=torch.long), lambda each: each.to(logits_1V.device)).apply(logits_1V, slice(0, 1))


def _truncated(log_p_NV: Tensor, sampling: Json) -> Tensor:
    """Return the log-probabilities that min-p, top-k and top-p leave, in vLLM's order, not normalised."""
    if (min_p := sampling.get("min_p") or 0) > 0:
        least = log_p_NV.amax(-1, keepdim=True) + float(np.log(min_p))
        log_p_NV = log_p_NV.masked_fill(log_p_NV < least, -torch.inf)
    top_k, top_p = sampling.get("top_k") or 0, sampling.get("top_p")
    if 0 < top_k < log_p_NV.shape[-1]:
        least = log_p_NV.topk(int(top_k)).values[:, -1:]
        log_p_NV = log_p_NV.masked_fill(log_p_NV < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, ids = log_p_NV.log_softmax(-1).sort(-1)
        is_cut = ordered.exp().cumsum(-1) <= 1 - top_p
        is_cut[:, -1] = False
        log_p_NV = log_p_NV.masked_fill(is_cut.scatter(-1, ids, is_cut), -torch.inf)
    return log_p_NV


def _repeated(cache: Any, num: int) -> Any:
    """Return a cache of one prompt for several answers; None where it cannot be repeated."""
    repeat = getattr(cache, "batch_repeat_interleave", None)
    if repeat is None:
        return None
    repeat(num)
    return cache


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
