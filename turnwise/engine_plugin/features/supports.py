"""The ids that top-k, top-p and min-p left to sample from come with each token's logprob, in two bytes an id.

vLLM can return them as the most likely alternatives of each token, which takes it a hundred bytes of JSON and a decoded
text for each: at top-p 0.95 that multiplies the time of a call. Its own sampling masks exist for whole replies of one
route on a GPU. Here a request names `FIELD` in `vllm_xargs` with the most ids that it wants. The engine then returns
the processed logprobs of as many alternatives as arrays, of which the ids of those that are possible are kept, as one
text a token. What a client has asked for, alternatives included, is as it is without the field.

A batch has as many alternatives as the call that wants most. So those of each other call are cut back to its own here,
which vLLM does only after it has decoded all of them.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

FIELD = "turnwise_support"
"""The argument by which a request asks for supports, and the field of a token that has one."""
SUM_TOLERANCE = 1e-5
"""By how much the probabilities of a support may differ from 1, where more ids might be possible than were returned."""
WHOLE_TOLERANCE = 1e-4
"""The same where an impossible id came back. A call in the batch that names ids (`logprob_token_ids`) makes vLLM return
impossible ones in the place of all others' alternatives."""
_SIZES = (1, 2, 4)
_NO_ID = 2**31
"""This and larger numbers are no ids."""
_SHOWN = "turnwise_shown"
"""The argument of a request that keeps how many alternatives its client gets."""
_WANTED, _COLUMNS = "turnwise_wanted", "turnwise_columns"
"""Attributes of a request's processor: whether it collects supports, and how many logprobs of a token it shows."""


def register() -> None:
    from vllm.v1.engine import logprobs

    return_supports(logprobs)


class Alternatives(dict[int, Any]):
    """vLLM's logprobs of one token, by id, with the token's support."""

    support = ""


def return_supports(logprobs: ModuleType) -> None:
    """Let vLLM collect the supports of the requests that want them, and show them in its replies.

    The argument is `vllm.v1.engine.logprobs`, whose processors live where replies are made.
    """
    processor = logprobs.LogprobsProcessor
    create, update = processor.from_new_request.__func__, processor._update_sample_logprobs  # noqa: SLF001  vLLM has no hook

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        made, sampling = create(cls, tokenizer, request), request.sampling_params
        arguments = sampling.extra_args or {}
        is_plain = made.num_logprobs is not None and made.num_logprobs >= 0 and not sampling.logprob_token_ids
        is_wanted = is_plain and tokenizer is not None and type(made.logprobs) is list and FIELD in arguments
        if is_wanted:
            _show_in_replies()
            # The choices of a request share these parameters, so a later choice finds them changed.
            made.num_logprobs = arguments.setdefault(_SHOWN, sampling.logprobs)
            # The engine gets the request after this; more ids than the model has would end it.
            sampling.logprobs = max(made.num_logprobs, min(int(arguments[FIELD]), tokenizer.vocab_size))
        setattr(made, _WANTED, is_wanted)
        setattr(made, _COLUMNS, made.num_logprobs + 1 if is_plain else None)
        return made

    def update_and_keep(self: Any, lists: Any) -> None:
        columns = getattr(self, _COLUMNS)
        if columns is None:
            update(self, lists)
            return
        ids, values, *others = lists
        update(self, type(lists)(ids[:, :columns], values[:, :columns], *others))
        if getattr(self, _WANTED):
            for place, (own_ids, own) in enumerate(zip(ids, values, strict=True), len(self.logprobs) - len(ids)):
                self.logprobs[place] = known = Alternatives(self.logprobs[place])
                known.support = support_text(own_ids, own)

    processor.from_new_request = classmethod(from_new_request)
    processor._update_sample_logprobs = update_and_keep  # noqa: SLF001


def support_text(ids: Any, logprobs: Any) -> str:
    """Return a token's support as text, empty if more ids might be possible.

    The arguments are those of the sampled token, and then of the most likely ones, in one order.
    """
    is_possible = logprobs > -np.inf
    apart = int(ids[0] in ids[1:])  # the sampled token stands twice if it is one of the most likely
    total = np.exp(logprobs[apart:], dtype=np.float64).sum()
    return to_text(np.unique(ids[is_possible])) if abs(total - 1) <= tolerance(is_whole=not is_possible.all()) else ""


def tolerance(*, is_whole: bool) -> float:
    """Return by how much the probabilities may differ from 1; `is_whole` where an impossible id was returned."""
    return WHOLE_TOLERANCE if is_whole else SUM_TOLERANCE


@functools.cache
def _show_in_replies() -> None:
    """Add the supports to the logprobs of both routes; the modules are loaded where requests arrive."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.completion import serving as completion

    show_in_chat = chat.OpenAIServingChat._create_chat_logprobs  # noqa: SLF001  vLLM has no hook
    show_in_text = completion.OpenAIServingCompletion._create_completion_logprobs  # noqa: SLF001

    def chat_logprobs(self: Any, *, top_logprobs: Sequence[Any], **others: Any) -> Any:
        shown = show_in_chat(self, top_logprobs=top_logprobs, **others)
        for entry, known in zip(shown.content, top_logprobs, strict=False):
            if isinstance(known, Alternatives):
                setattr(entry, FIELD, known.support)
        return shown

    def text_logprobs(self: Any, *, top_logprobs: Sequence[Any], **others: Any) -> Any:
        shown = show_in_text(self, top_logprobs=top_logprobs, **others)
        if top_logprobs and isinstance(top_logprobs[0], Alternatives):
            setattr(shown, FIELD, [known.support for known in top_logprobs])
        return shown

    chat.OpenAIServingChat._create_chat_logprobs = chat_logprobs  # noqa: SLF001
    completion.OpenAIServingCompletion._create_completion_logprobs = text_logprobs  # noqa: SLF001


def to_text(ids: npt.NDArray[np.int32]) -> str:
    """Return sorted ids as an engine's reply has them: the bytes of a difference, and the differences in base64."""
    differences = np.diff(ids, prepend=0)
    size = next(size for size in _SIZES if differences.max(initial=0) < 1 << 8 * size)
    return f"{size}{base64.b64encode(differences.astype(f'<u{size}').tobytes()).decode()}"


def from_text(text: str) -> npt.NDArray[np.int32] | None:
    """Return the ids of `to_text`; None for a text that is empty, or that `to_text` has not written."""
    if text[:1] not in ("1", "2", "4"):
        return None
    try:
        differences = np.frombuffer(base64.b64decode(text[1:], validate=True), f"<u{text[0]}")
    except ValueError:
        return None
    ids = differences.cumsum(dtype=np.int64)
    return ids.astype(np.int32) if ids.max(initial=0) < _NO_ID else None
