"""The chat route's wire format, as vLLM 0.32 writes it: the plain reply, and the chunks of a stream.

Which keys are present and which are null matters to clients and to the proxy, so every reply is written out here as
vLLM writes it. A test compares it with a real vLLM.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from turnwise.engine_plugin.features.supports import FIELD, to_text
from turnwise_fake_engine import tokens
from turnwise_fake_engine.sampling import FORCING_BIAS, Piece, Sample, logprobs_of, truncated

Json = dict[str, Any]

IMPOSSIBLE = -9999.0
FINGERPRINT = "vllm-0.32.0-fake"


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The values that all parts of one reply share."""

    reply_id: str
    created: int
    model: str
    request: Json
    prompt_ids: list[int]
    temperature: float
    """Temperature of the logprobs."""
    biases_count: bool = True
    """Whether logprobs are of the distribution after biases; raw ones are not."""
    logprob_shift: float = 0.0
    """Nats that the weights add to the logprobs of tokens that are asked for by id."""
    hide_token_ids: bool = False
    """A fault: the reply lacks the requested token ids."""

    routed_layers: int = 0
    """As in the script."""
    returns_supports: bool = False
    cached_tokens: int | None = None

    @property
    def cached_details(self) -> Json | None:
        return None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}

    @property
    def shows_metadata(self) -> bool:
        """Whether ids and logprobs are part of the reply; without reasoning they are not."""
        return self.request.get("include_reasoning", True) is not False

    @property
    def shows_ids(self) -> bool:
        """Whether sampled token ids are part of the reply."""
        return bool(self.request.get("return_token_ids")) and self.shows_metadata and not self.hide_token_ids

    @property
    def shows_logprobs(self) -> bool:
        """Whether logprobs are part of the reply."""
        return bool(self.request.get("logprobs")) and self.shows_metadata

    @property
    def shown_prompt_ids(self) -> list[int] | None:
        """The prompt's token ids, if they were requested."""
        return self.prompt_ids if self.request.get("return_token_ids") and not self.hide_token_ids else None


def usage(num_prompt: int, num_sampled: int) -> Json:
    """Return the token counts."""
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_sampled, "completion_tokens": num_sampled}


def completion(call: Call, samples: list[Sample]) -> Json:
    """Return the plain reply."""
    details = {"prompt_tokens_details": call.cached_details, "completion_tokens_details": None}
    num_sampled = sum(len(sample.pieces) for sample in samples)
    return {
        "id": call.reply_id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.model,
        "choices": [_choice(call, index, sample) for index, sample in enumerate(samples)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(len(call.prompt_ids), num_sampled) | details,
        "prompt_logprobs": None,
        "prompt_token_ids": call.shown_prompt_ids,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(call: Call, index: int, sample: Sample) -> Json:
    calls = sample.tool_calls() if _parses_tools(call.request) else []
    finish_reason = "tool_calls" if calls and not _names_tool(call.request) else sample.finish_reason
    return {
        "index": index,
        "message": _message(call, index, sample, calls),
        "logprobs": _logprobs(call, sample.pieces) if call.shows_logprobs else None,
        "finish_reason": finish_reason,
        "stop_reason": sample.stop_reason,
        "token_ids": sample.token_ids if call.shows_ids else None,
        "routed_experts": routing(call, call.prompt_ids, sample) if call.routed_layers else None,
    }


def routing(call: Call, prompt_ids: list[int], sample: Sample) -> str:
    """Return experts of all tokens but the last one, as vLLM encodes them. [tokens, layers, 2].

    The first `routed_experts_prompt_start` tokens are left out. A stream's chunks have no experts.
    """
    tokens = np.array([*prompt_ids, *sample.token_ids][call.request.get("routed_experts_prompt_start", 0) : -1])
    layers = tokens[:, None, None] + np.arange(call.routed_layers)[:, None] + np.arange(2)
    with io.BytesIO() as encoded:
        np.save(encoded, (layers % 256).astype(np.uint8), allow_pickle=False)
        return base64.b64encode(encoded.getbuffer()).decode()


def _message(call: Call, choice: int, sample: Sample, calls: list[tuple[str, str]]) -> Json:
    """Return the assistant's message; a truncated tool call stays text."""
    content: str | None = sample.text("content")
    if any(piece.call >= 0 for piece in sample.pieces) and not calls:
        content = sample.raw_text()
    elif calls and not content and call.request.get("tool_choice", "auto") == "auto":
        content = None
    message: Json = {"role": "assistant", "content": content}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    if calls:
        message["tool_calls"] = [
            {
                "id": _tool_call_id(call, index, choice),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message | {"reasoning": sample.text("reasoning") or None if call.shows_metadata else None}


def chunks(call: Call, samples: list[Sample], tokens_per_chunk: int) -> Iterator[Json]:
    """Yield the chunks of a streamed reply; the chunks of several choices alternate, as they are sampled together."""
    options = call.request.get("stream_options") or {}
    continuous = bool(options.get("include_usage") and options.get("continuous_usage_stats"))
    for index in range(len(samples)):
        yield _chunk(call, _opening(index), usage_of=0 if continuous else None) | {
            "prompt_token_ids": call.shown_prompt_ids,
            "prompt_text": None,
        }
    longest = max(len(sample.pieces) for sample in samples)
    for start in range(0, longest, tokens_per_chunk):
        for index, sample in enumerate(samples):
            pieces = sample.pieces[start : start + tokens_per_chunk]
            last = start + len(pieces) == len(sample.pieces)
            choice = _stream_choice(call, index, sample, pieces, last=last) if pieces else None
            if choice is None:
                continue
            chunk = _chunk(call, choice, usage_of=start + len(pieces) if continuous else None)
            if last and not options.get("include_usage"):
                chunk["system_fingerprint"] = FINGERPRINT
            yield chunk
    if options.get("include_usage"):
        totals = usage(len(call.prompt_ids), sum(len(sample.pieces) for sample in samples))
        if call.cached_details is not None:
            totals["prompt_tokens_details"] = call.cached_details
        yield _chunk(call, None, usage_of=None) | {"usage": totals, "system_fingerprint": FINGERPRINT}


def _opening(index: int) -> Json:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _chunk(call: Call, choice: Json | None, *, usage_of: int | None) -> Json:
    chunk: Json = {
        "id": call.reply_id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": call.model,
        "choices": [] if choice is None else [choice],
    }
    if usage_of is not None:
        chunk["usage"] = usage(len(call.prompt_ids), usage_of) | {"completion_tokens_details": None}
    return chunk


def _stream_choice(call: Call, index: int, sample: Sample, pieces: list[Piece], *, last: bool) -> Json | None:
    """Return a chunk's choice; None if it is empty and the token ids were not requested."""
    delta = _delta(call, index, pieces)
    if not delta and not last and not call.shows_ids and not call.shows_logprobs:
        return None
    choice: Json = {
        "index": index,
        "delta": delta,
        "logprobs": _logprobs(call, pieces) if call.shows_logprobs else None,
        "finish_reason": None,
    }
    if last:
        called = any(piece.name for piece in sample.pieces) and _parses_tools(call.request)
        renamed = called and sample.finish_reason == "stop" and not _names_tool(call.request)
        choice["finish_reason"] = "tool_calls" if renamed else sample.finish_reason
        choice["stop_reason"] = sample.stop_reason
    choice["token_ids"] = [piece.token_id for piece in pieces] if call.shows_ids else None
    return choice


def _delta(call: Call, choice: int, pieces: list[Piece]) -> Json:
    """Return the delta that some tokens add to the message."""
    delta: Json = {}
    for piece in pieces:
        kind = piece.kind if _parses_tools(call.request) or piece.call < 0 else "content"
        if piece.name is not None and kind == "name":
            opened = {"id": _tool_call_id(call, piece.call, choice), "type": "function", "index": piece.call}
            delta.setdefault("content", None)
            delta.setdefault("tool_calls", []).append(opened | {"function": {"name": piece.name}})
        elif kind == "arguments" and piece.text:
            delta.setdefault("content", None)
            part = {"index": piece.call, "function": {"arguments": piece.text}}
            delta.setdefault("tool_calls", []).append(part)
        elif kind == "content" and piece.text:
            delta["content"] = (delta.get("content") or "") + piece.text
        elif kind == "reasoning" and piece.text and call.shows_metadata:
            delta["reasoning"] = delta.get("reasoning", "") + piece.text
    if delta and not call.shows_metadata:
        delta["reasoning"] = None
    return delta


def _logprobs(call: Call, pieces: list[Piece]) -> Json:
    return {"content": [_token_logprobs(call, piece) for piece in pieces]}


def _token_logprobs(call: Call, piece: Piece) -> Json:
    count = call.request.get("top_logprobs") or 0
    chosen, ranked = logprobs_of(piece.token_id, call.temperature, count=count)
    support: Json = {}
    if top_k := call.request.get("top_k"):
        values = truncated(piece.token_id, call.temperature, top_k)
        chosen, ranked = values[piece.token_id], list(values.items())[:count]
        support = support_of(call, values)
    if call.biases_count and (call.request.get("logit_bias") or {}).get(str(piece.token_id), 0.0) >= FORCING_BIAS:
        chosen = -1e-6
    text = piece.text or tokens.SPECIAL_TEXTS.get(piece.token_id, "")
    by_id = call.request.get("return_tokens_as_token_ids")
    top = [_named(f"token_id:{each}" if by_id else tokens.decode([each]), logprob) for each, logprob in ranked]
    return _named(text, chosen) | {"top_logprobs": top} | support


def support_of(call: Call, values: dict[int, float]) -> Json:
    """Return the field of a token by which Turnwise's plug-in says which ids could be sampled."""
    if not call.returns_supports or FIELD not in (call.request.get("vllm_xargs") or {}):
        return {}
    return {FIELD: to_text(np.array(sorted(each for each, value in values.items() if value > IMPOSSIBLE), np.int32))}


def _named(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _tool_call_id(call: Call, index: int, choice: int) -> str:
    return f"chatcmpl-tool-{call.reply_id.removeprefix('chatcmpl-')}-{choice}-{index}"


def _parses_tools(request: Json) -> bool:
    return bool(request.get("tools")) and request.get("tool_choice") != "none"


def _names_tool(request: Json) -> bool:
    return isinstance(request.get("tool_choice"), dict)
