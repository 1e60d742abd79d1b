"""What an engine can do, found by asking it: nothing is taken from version numbers.

Exact capture needs four things: token ids in the reply, logprobs of the distribution that was really sampled from, a
prompt that can be given as ids, and a chat template that is known. The first three are shown by two short calls; the
fourth by rendering the same conversations here and there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Literal

from proxy.continuation.chat_template import ChatTemplate, Unsafe, load_chat_template
from proxy.engines.pool import Engine, Lane
from turnwise.errors import EngineRefused, EngineUnsuitable
from turnwise.types import Json

log = logging.getLogger(__name__)

CERTAIN = -0.01
"""A token forced by a bias of 100 has a processed logprob above this, whatever the model; a raw one has its own."""
LORA_METRIC = "vllm:lora_requests_info"
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
CALL: Json = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": '{"x": "é 1"}'}}
CONVERSATIONS: list[tuple[list[Json], list[Json] | None]] = [
    ([{"role": "user", "content": "Hello."}], None),
    ([{"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts."}]}], None),
    (
        [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Dø ït."},
        ],
        None,
    ),
    (
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_0", "content": '{"y": 2}'},
        ],
        [TOOL],
    ),
]
"""Conversations whose rendering tells whether the engine's template is understood here."""


async def check_capture(engine: Engine) -> None:
    """Check that the engine tells what capture needs.

    Raises:
        EngineUnsuitable: naming what is missing and the flag that brings it.
        EngineUnavailable: no answer.
    """
    try:
        rendered = await _forced_call(engine, None, 0)
        prompt = rendered.get("prompt_token_ids")
        choice = rendered["choices"][0]
        if not prompt or not choice.get("token_ids"):
            raise EngineUnsuitable(f"the engine at {engine.url} returns no token ids; serve with vLLM 0.32 or newer")
        forced = [choice, (await _forced_call(engine, prompt[:1] * 3, 1))["choices"][0]]
        echoed = (await _forced_call(engine, prompt[:1] * 3, 1)).get("prompt_token_ids")
    except EngineRefused as refused:
        raise EngineUnsuitable(f"the engine at {engine.url} refuses a plain chat call: {refused}") from refused
    if echoed != prompt[:1] * 3:
        raise EngineUnsuitable(
            f"the engine at {engine.url} ignores kv_transfer_params.prompt_token_ids; serve with vLLM 0.32 or newer"
        )
    logprobs = [entry["logprob"] for one in forced for entry in (one.get("logprobs") or {}).get("content") or []]
    if not logprobs or min(logprobs) < CERTAIN:
        raise EngineUnsuitable(
            f"the engine at {engine.url} gives raw logprobs, which are wrong at any temperature but 1; "
            "start it with --logprobs-mode processed_logprobs"
        )


async def _forced_call(engine: Engine, prompt: list[int] | None, token: int) -> Json:
    """Sample one token whose choice is forced."""
    body: Json = {
        "model": engine.model,
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": True,
        "return_token_ids": True,
        "logit_bias": {str(token): 100.0},
    }
    if prompt is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": prompt}
    reply: Json = await engine.ask("POST", "/v1/chat/completions", body, seconds=60.0)
    return reply


async def has_lora(engine: Engine) -> bool:
    """Say whether an engine was started with LoRA: it counts adapters' calls, or has the route that loads them.

    Either may be missing: an engine can hide its metrics, or have no other adapters than those that it started with.

    Raises:
        EngineUnavailable: no answer.
    """
    try:
        if LORA_METRIC in str(await engine.ask("GET", "/metrics")):
            return True
    except EngineRefused:
        log.debug("the engine at %s shows no metrics", engine.url)
    try:
        await engine.ask("POST", "/v1/load_lora_adapter", {})
    except EngineRefused as refused:
        return refused.status not in (404, 405)  # it wants to be told which adapter
    return False


async def find_template(engine: Engine, tokenizer: str | None) -> ChatTemplate | None:
    """Return a template that renders as the engine does; None, and a warning, where none was found."""
    path = tokenizer or engine.model_path
    formats: tuple[Literal["string", "openai"], ...] = ("string", "openai")
    for content_format in formats:
        try:
            template = await asyncio.to_thread(load_chat_template, path, content_format)
        except (OSError, ValueError) as error:
            log.warning("no tokenizer at %r (%s): every turn will be tokenised afresh; give --tokenizer", path, error)
            return None
        difference = await _difference(engine, template)
        if difference is None:
            return template
    log.warning(
        "the chat template of %r renders differently here: %s; every turn will be tokenised afresh", path, difference
    )
    return None


async def _difference(engine: Engine, template: ChatTemplate) -> str | None:
    """Return the first conversation that is rendered differently, None when there is none."""
    for messages, tools in CONVERSATIONS:
        body: Json = {"model": engine.model, "messages": messages, "add_generation_prompt": True}
        if tools:
            body["tools"] = tools
        try:
            theirs = (await engine.ask("POST", "/tokenize", body))["tokens"]
        except EngineRefused:
            theirs = None
        try:
            ours = template.tokenise(template.render(messages, tools, {}, generate=True))
        except Unsafe:
            ours = None
        if ours != theirs:
            return f"{messages!r:.200}"
    return None


async def token_logprobs(lane: Lane, token_ids: list[int], positions: list[int]) -> list[float]:
    """Return the logprob of some of a text's tokens, each given those before it, as a lane would sample them.

    One token is sampled behind each beginning of the text, and the logprob of the one that stands there is asked for
    along with it. `prompt_logprobs` would be one call for all, but kills a vLLM that has adapters enabled while other
    calls run.

    Raises:
        EngineRefused: the engine does not answer that.
        EngineUnavailable: no answer.
    """
    body: Json = {
        "model": lane.adapter or lane.engine.model,
        "prompt": [token_ids[:position] for position in positions],
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": 1,
        "logprob_token_ids": sorted({token_ids[position] for position in positions}),
        "return_tokens_as_token_ids": True,
    }
    reply = await lane.engine.ask("POST", "/v1/completions", body, seconds=60.0)
    found = {choice["index"]: choice["logprobs"]["top_logprobs"][0] for choice in reply["choices"]}
    return [
        float(found[index].get(f"token_id:{token_ids[position]}", math.nan)) for index, position in enumerate(positions)
    ]
