"""The fake engine: a scripted server with vLLM 0.32's wire format, for tests and for the CI of agents.

It implements what an agent, the proxy or a test can observe of vLLM over HTTP, without a model. The sampled tokens are
known in advance, so a test can state exactly which tokens must be stored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

import jinja2
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from turnwise_fake_engine import chat_wire, text_wire, tokens
from turnwise_fake_engine.control import (
    body_of,
    bound,
    control_routes,
    no_route,
    rendered_ids,
    reply_error,
    unknown_model,
)
from turnwise_fake_engine.delivery import ABORT_KEY, Delivery
from turnwise_fake_engine.ledger import EngineState, SeenCall
from turnwise_fake_engine.sampling import Sample, default_reply, last_text, sample, sample_text
from turnwise_fake_engine.script import Fault, FaultKind, Reply, Script
from turnwise_fake_engine.weights import weight_routes

Json = dict[str, Any]

MAX_LOGPROBS = 20


def create_app(script: Script | None = None, *, model_path: str = "fake", state: EngineState | None = None) -> ASGIApp:
    """Return the fake engine as an ASGI application.

    Args:
        script: Its replies; None repeats the user's message.
        model_path: Directory with its tokenizer, written by `write_tokenizer`; the `root` of `/v1/models`.
        state: Its state, for a test in the same process; it replaces the other two arguments.
    """
    engine = state or EngineState(script or Script(), model_path)
    sampling = [
        Route("/v1/chat/completions", bound(chat_completions, engine), methods=["POST"]),
        Route("/v1/completions", bound(completions, engine), methods=["POST"]),
    ]
    app: ASGIApp = Starlette(
        routes=[*sampling, *control_routes(engine), *weight_routes(engine)],
        exception_handlers={HTTPException: no_route},
    )

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn's cycle holds the transport; no ASGI message can reset a connection.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if transport is not None:
            scope[ABORT_KEY] = transport.abort
        await app(scope, receive, send)

    return outermost


async def chat_completions(state: EngineState, request: Request) -> Response:
    """Sample a reply to a conversation."""
    body = await body_of(request)
    seen = _see(state, request, body, "chatcmpl-")
    fault = _fault_of(state, request, last_text(body.get("messages") or []))
    refusal = _fault_reply(fault, seen) or _refuse_chat(state, body)
    if refusal is not None:
        return _refused(seen, refusal, fault)
    try:
        prompt_ids = _prompt_of(state, body)
    except jinja2.TemplateError as error:
        return _refused(seen, reply_error(str(error)), None)
    room = _room(state, body, len(prompt_ids))
    if isinstance(room, Response):
        return _refused(seen, room, None)
    reply = state.script.take_reply(last_text(body["messages"]), offers_tools=bool(body.get("tools"))) or default_reply(
        body, call_tools=state.script.call_tools
    )
    samples = [sample(_choice_of(reply, index), body, max_tokens=room) for index in range(_number(body, "n", 1))]
    call = _call(state, body, seen, prompt_ids, fault)
    if body.get("stream"):
        parts = _events(chat_wire.chunks(call, samples, state.script.tokens_per_chunk))
    else:
        parts = [orjson.dumps(chat_wire.completion(call, samples))]
    return _deliver(state, seen, samples, parts, fault, reply)


async def completions(state: EngineState, request: Request) -> Response:
    """Continue texts or token ids."""
    body = await body_of(request)
    seen = _see(state, request, body, "cmpl-")
    fault = _fault_of(state, request, str(body.get("prompt")))
    refusal = _fault_reply(fault, seen) or _refuse_sampling(state, body)
    if refusal is not None:
        return _refused(seen, refusal, fault)
    try:
        prompts = text_wire.prompts_of(body.get("prompt"))
    except ValueError as error:
        return _refused(seen, reply_error(str(error), param="prompt"), None)
    if body.get("max_tokens") is None:
        body["max_tokens"] = 16
    room = _room(state, body, max(map(len, prompts)))
    if isinstance(room, Response):
        return _refused(seen, room, None)
    reply = state.script.take_reply(tokens.decode(prompts[-1])) or Reply()
    samples = []
    for prompt in prompts:
        text = reply.text if reply.text is not None else tokens.decode(prompt, keep_control=False)
        for index in range(_number(body, "n", 1)):
            varied = _choice_of(Reply(text=text), index)
            samples.append(sample_text(varied.text or "", body, max_tokens=room))
    call = _call(state, body, seen, [token_id for prompt in prompts for token_id in prompt], fault)
    if body.get("stream"):
        parts = _events(text_wire.chunks(call, prompts, samples, state.script.tokens_per_chunk))
    else:
        parts = [orjson.dumps(text_wire.completion(call, prompts, samples))]
    return _deliver(state, seen, samples, parts, fault, reply)


def _see(state: EngineState, request: Request, body: Json, prefix: str) -> SeenCall:
    request_id = request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
    return state.see(prefix + request_id, request.url.path, dict(request.headers), dict(body))


def _fault_of(state: EngineState, request: Request, last_message: str) -> Fault | None:
    header = request.headers.get("x-fake-fault")
    return Fault.from_header(header) if header else state.script.take_fault(last_message)


def _fault_reply(fault: Fault | None, seen: SeenCall) -> Response | None:
    """Return the reply of a fault that needs no sampling."""
    seen.fault = fault.kind if fault else None
    if fault and fault.kind is FaultKind.STATUS:
        return reply_error("a fault was asked for", fault.status)
    if fault and fault.kind is FaultKind.MALFORMED:
        return Response(b'{"id": "' + seen.reply_id.encode() + b'", "choices": [', media_type="application/json")
    if fault and fault.kind is FaultKind.NO_CHOICES:
        empty = {"id": seen.reply_id, "created": 0, "model": "fake", "choices": []}
        return Response(orjson.dumps(empty), media_type="application/json")
    return None


def _refused(seen: SeenCall, response: Response, fault: Fault | None) -> Response:
    seen.outcome = "faulted" if fault else "refused"
    return response


def _refuse_chat(state: EngineState, body: Json) -> Response | None:
    """Return vLLM's error for an invalid chat request; None for a valid one."""
    if not isinstance(body.get("messages"), list):
        return reply_error("Field required: messages", param="body.messages", kind="Bad Request")
    if not body["messages"]:
        return reply_error("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if body.get("tools") == []:
        return reply_error("`tools` must not be an empty array. Provide a tool or omit the field.", param="tools")
    choice = body.get("tool_choice")
    if (isinstance(choice, dict) or choice == "required") and not body.get("tools"):
        return reply_error("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if body.get("top_logprobs") and not body.get("logprobs"):
        return reply_error("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    if (body.get("top_logprobs") or 0) > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {body['top_logprobs']}, which is greater than max allowed: 20"
        return reply_error(message, param="logprobs")
    return _refuse_sampling(state, body)


def _refuse_sampling(state: EngineState, body: Json) -> Response | None:
    """Return vLLM's error for parameters that are invalid on every route; None for valid ones."""
    if refusal := unknown_model(state, body.get("model")):
        return refusal
    if body.get("stream_options") and not body.get("stream"):
        return reply_error("Stream options can only be defined when `stream=True`.", param="stream_options")
    if _number(body, "n", 1) < 1:
        return reply_error(f"n must be at least 1, got {body['n']}.")
    if _number(body, "n", 1) > 1 and body.get("temperature") == 0:
        return reply_error(f"n must be 1 when using greedy sampling, got {body['n']}.")
    if (body.get("temperature") or 0) < 0:
        return reply_error(f"temperature must be non-negative, got {body['temperature']}.", param="temperature")
    return None


def _prompt_of(state: EngineState, body: Json) -> list[int]:
    """Return the prompt's ids: those in the request, else those of the rendered conversation."""
    sent = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if sent and state.script.honours_prompt_token_ids and not tokens.has_media(body["messages"]):
        return list(sent)
    return rendered_ids(body)


def _room(state: EngineState, body: Json, num_prompt: int) -> int | Response:
    """Return the largest number of tokens to sample, or the error for a prompt that does not fit the context."""
    limit = state.script.max_model_len
    if num_prompt >= limit:
        message = f"This model's maximum context length is {limit} tokens. However, your prompt contains {num_prompt}."
        return reply_error(message, param="input_tokens")
    asked = body.get("max_completion_tokens")
    asked = body.get("max_tokens") if asked is None else asked
    if asked is not None and asked < 1:
        return reply_error(f"max_tokens must be at least 1, got {asked}.", param="max_tokens")
    if asked is not None and asked > limit:
        return reply_error(f"max_tokens={asked} cannot be greater than max_model_len={limit}.", param="max_tokens")
    return min(limit - num_prompt, asked or limit)


def _number(body: Json, name: str, default: int) -> int:
    value = body.get(name)
    return default if value is None else int(value)


def _choice_of(reply: Reply, index: int) -> Reply:
    """Return the reply of the n-th choice: scripted, or the first reply with a number."""
    if index == 0:
        return reply
    if index <= len(reply.choices):
        return reply.choices[index - 1]
    return reply if reply.text is None else reply.model_copy(update={"text": f"{reply.text} ({index})"})


def _call(state: EngineState, body: Json, seen: SeenCall, prompt_ids: list[int], fault: Fault | None) -> chat_wire.Call:
    given = body.get("temperature")
    temperature = state.script.default_temperature if given is None else float(given)
    raw = state.script.logprobs_mode == "raw_logprobs"
    asked = body.get("model") or state.script.model
    seen.prompt_token_ids = prompt_ids
    return chat_wire.Call(
        reply_id=seen.reply_id,
        created=int(time.time()),
        model="another" if fault is not None and fault.kind is FaultKind.ANOTHER_MODEL else asked,
        request=body,
        prompt_ids=prompt_ids,
        temperature=1.0 if raw else temperature,
        biases_count=not raw,
        logprob_shift=state.logprob_shift(body.get("model")),
        routed_layers=state.script.routed_layers,
        returns_supports=state.script.returns_supports,
        cached_tokens=state.script.cached_tokens,
        hide_token_ids=fault is not None and fault.kind is FaultKind.NO_TOKEN_IDS,
    )


def _events(chunks: Iterable[Json]) -> list[bytes]:
    return [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


def _deliver(
    state: EngineState, seen: SeenCall, samples: list[Sample], parts: list[bytes], fault: Fault | None, reply: Reply
) -> Response:
    seen.token_ids = [each.token_ids for each in samples]
    streamed = len(parts) > 1
    pace = state.script.pace_seconds if reply.pace_seconds is None else reply.pace_seconds
    return Delivery(
        parts,
        call=seen,
        state=state,
        fault=fault,
        streamed=streamed,
        pace_seconds=pace if streamed else pace * max(len(each.pieces) for each in samples),
    )
