"""The completions route's wire format, as vLLM 0.32 writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise_fake_engine import chat_wire, tokens
from turnwise_fake_engine.chat_wire import FINGERPRINT, Call, usage
from turnwise_fake_engine.sampling import Piece, Sample, logprobs_of, truncated

Json = dict[str, Any]


def prompts_of(prompt: object) -> list[list[int]]:
    """Return the token ids of each prompt: a text, texts, token ids, or lists of them.

    Raises:
        ValueError: there is no prompt, or an id is outside the vocabulary.
    """
    if isinstance(prompt, str) and prompt:
        return [tokens.encode(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        strange = [token_id for token_id in prompt if not 0 <= token_id < tokens.VOCABULARY_SIZE]
        if strange:
            raise ValueError(f"Token id {strange[0]} is out of vocabulary")
        return [list(prompt)]
    if isinstance(prompt, list) and prompt:
        return [ids for item in prompt for ids in prompts_of(item)]
    raise ValueError("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")


def completion(call: Call, prompts: list[list[int]], samples: list[Sample]) -> Json:
    """Return the plain reply; `samples` holds all choices of the first prompt, then of the next."""
    per_prompt = len(samples) // len(prompts)
    num_prompt = sum(map(len, prompts))
    details = {"prompt_tokens_details": call.cached_details, "completion_tokens_details": None}
    return {
        "id": call.reply_id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": [_choice(call, index, prompts[index // per_prompt], each) for index, each in enumerate(samples)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(num_prompt, sum(len(sample.pieces) for sample in samples)) | details,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(call: Call, index: int, prompt: list[int], sample: Sample) -> Json:
    echo = bool(call.request.get("echo"))
    return {
        "index": index,
        "text": (tokens.decode(prompt) if echo else "") + sample.text("content"),
        "logprobs": _logprobs(call, prompt if echo else [], sample.pieces, 0),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "token_ids": sample.token_ids if call.shows_ids else None,
        "prompt_logprobs": _prompt_logprobs(call, prompt),
        "prompt_token_ids": prompt if call.shows_ids else None,
        "routed_experts": chat_wire.routing(call, prompt, sample) if call.routed_layers else None,
    }


def _prompt_logprobs(call: Call, prompt: list[int]) -> list[Json | None] | None:
    """Return the logprob of each prompt token except the first, with the most likely alternatives."""
    count = call.request.get("prompt_logprobs")
    if count is None and call.request.get("echo"):
        count = call.request.get("logprobs")
    if count is None:
        return None
    shown: list[Json | None] = [None]
    for token_id in prompt[1:]:
        chosen, ranked = logprobs_of(token_id, call.temperature, count=count)
        alternatives = {token_id: chosen} | dict(ranked)
        shown.append(
            {
                str(each): {"logprob": logprob, "rank": rank, "decoded_token": tokens.decode([each])}
                for rank, (each, logprob) in enumerate(alternatives.items(), start=1)
            }
        )
    return shown


def chunks(call: Call, prompts: list[list[int]], samples: list[Sample], tokens_per_chunk: int) -> Iterator[Json]:
    """Yield the chunks of a streamed reply; the chunks of several choices alternate."""
    options = call.request.get("stream_options") or {}
    per_prompt = len(samples) // len(prompts)
    longest = max(len(sample.pieces) for sample in samples)
    for start in range(0, longest, tokens_per_chunk):
        for index, sample in enumerate(samples):
            if pieces := sample.pieces[start : start + tokens_per_chunk]:
                yield _chunk(call, index, prompts[index // per_prompt], sample, pieces, start)
    if options.get("include_usage"):
        totals = usage(sum(map(len, prompts)), sum(len(sample.pieces) for sample in samples))
        if call.cached_details is not None:
            totals["prompt_tokens_details"] = call.cached_details
        yield _envelope(call, []) | {"usage": totals, "system_fingerprint": FINGERPRINT}


def _chunk(call: Call, index: int, prompt: list[int], sample: Sample, pieces: list[Piece], start: int) -> Json:
    last = start + len(pieces) == len(sample.pieces)
    echoed = prompt if call.request.get("echo") and not start else []
    # With the ids of the prompt in the reply, vLLM leaves its text out of a stream.
    shown_echo = "" if call.request.get("return_token_ids") else tokens.decode(echoed)
    said_before = "".join(piece.text for piece in sample.pieces[:start])
    choice = {
        "index": index,
        "text": shown_echo + "".join(piece.text for piece in pieces),
        "logprobs": _logprobs(call, echoed, pieces, len(said_before)),
        "finish_reason": sample.finish_reason if last else None,
        "stop_reason": sample.stop_reason if last else None,
        "prompt_token_ids": prompt if not start and (call.shows_ids or echoed) else None,
        "token_ids": [piece.token_id for piece in pieces] if call.shows_ids else None,
    }
    chunk = _envelope(call, [choice])
    if last and not (call.request.get("stream_options") or {}).get("include_usage"):
        chunk["system_fingerprint"] = FINGERPRINT
    return chunk


def _envelope(call: Call, choices: list[Json]) -> Json:
    return {
        "id": call.reply_id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }


def _logprobs(call: Call, prompt: list[int], pieces: list[Piece], offset: int) -> Json | None:
    """Return four lists over the echoed prompt and the sampled tokens; a prompt's first token has no logprob."""
    count = call.request.get("logprobs")
    if count is None:
        return None
    texts = tokens.piecewise(prompt, keep_control=True) + [
        piece.text or tokens.SPECIAL_TEXTS.get(piece.token_id, "") for piece in pieces
    ]
    ids = prompt + [piece.token_id for piece in pieces]
    asked = call.request.get("logprob_token_ids") or []

    def name(token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if call.request.get("return_tokens_as_token_ids") else text

    names = list(map(name, ids, texts))
    answer: Json = {"text_offset": [], "token_logprobs": [], "tokens": names, "top_logprobs": []}
    for position, (token_id, text) in enumerate(zip(ids, texts, strict=True)):
        answer["text_offset"].append(offset)
        offset += len(text)
        chosen, ranked = logprobs_of(token_id, call.temperature, count=count)
        if top_k := call.request.get("top_k"):
            values = truncated(token_id, call.temperature, top_k)
            chosen, ranked = values[token_id], list(values.items())[:count]
            for field, support in chat_wire.support_of(call, values).items():
                answer.setdefault(field, []).append(support)
        unknown = position == 0 and bool(prompt)
        answer["token_logprobs"].append(None if unknown else chosen)
        others = [] if asked else ranked
        others += [(each, logprobs_of(each, call.temperature, count=0)[0] + call.logprob_shift) for each in asked]
        top = {name(token_id, text): chosen} | {name(each, tokens.decode([each])): value for each, value in others}
        answer["top_logprobs"].append(None if unknown else top)
    return answer
