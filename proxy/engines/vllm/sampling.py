"""Requests for samples as vLLM takes them, and how it samples them.

vLLM always returns token ids and logprobs. They are captured, and stay in the reply only if the client asked for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.continuation.plan import Plan
from proxy.dialects.base import Call
from proxy.dialects.chat import readable_messages
from turnwise.engine_requirements import CHAT_ROUTE
from turnwise.errors import InvalidRequest
from turnwise.types import TOOL_GRAMMAR, Json

OWN_FIELDS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority", "request_id", "data_parallel_rank"),
        *("mm_payload", "return_mm_kwargs", "routed_experts_prompt_start", "stream_interval", "prompt_embeds"),
    }
)
"""Request fields that steer the engine itself."""
FORCED: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "include_reasoning": True}
"""Request fields that capture always sets on the chat route."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this."""


def request(call: Call, plan: Plan, *, returns_routing: bool) -> Json:
    """Return the request of a call, with the options that capture needs, for `orjson.dumps`."""
    body = dict(call.body)
    if call.dialect.engine_route != CHAT_ROUTE:
        logprobs = body.get("logprobs")
        return body | {"return_token_ids": True, "logprobs": 0 if logprobs is None else logprobs}
    if call.messages:
        body["messages"] = readable_messages(call)
    # vLLM refuses both of these; capture's options must not change that error.
    is_refused = not body.get("messages") or (body.get("top_logprobs") and not body.get("logprobs"))
    if not is_refused:
        body |= FORCED
    if plan.prompt is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": orjson.Fragment(plan.prompt.json())}
        if returns_routing and plan.parent is not None:
            # Leaves out the experts of earlier turns' tokens. The last token before this turn's own was not routed when
            # it was sampled, so its experts are this turn's.
            body["routed_experts_prompt_start"] = plan.prompt.num_ids - len(plan.between) - 1
    return body


def reject_prompt_logprobs(body: Json) -> None:
    """Reject a request that would crash an engine with LoRA.

    A vLLM with LoRA crashes on logprobs of the prompt's own tokens while another call runs. `echo` asks for them too,
    in chat even without `logprobs`.

    Raises:
        InvalidRequest: naming the field.
    """
    field = "prompt_logprobs" if body.get("prompt_logprobs") is not None else "echo" if body.get("echo") else None
    if field is not None:
        raise InvalidRequest(
            f"`{field}` would crash the engine, because it was started with LoRA; send the request without it, or "
            "serve from an engine that was started without --lora",
            param=field,
            code="engine_has_lora",
        )


def effective(call: Call, defaults: Mapping[str, object], *, has_tool_grammar: bool) -> Json:
    """Return how a call is sampled: its parameters, the engine's defaults, and what the engine makes of both."""
    sampling = call.sampling
    unset = {name: value for name, value in defaults.items() if sampling.get(name) is None}
    temperature = sampling.get("temperature", unset.get("temperature"))
    if isinstance(temperature, int | float) and 0 < temperature < LOWEST_TEMPERATURE:
        unset["temperature"] = LOWEST_TEMPERATURE
    if has_tool_grammar and wants_tool_grammar(call):
        unset[TOOL_GRAMMAR] = True
    return {**sampling, **unset} if unset else sampling


def wants_tool_grammar(call: Call) -> bool:
    """Return whether vLLM, where it enforces strict tools, samples the call under a grammar that it does not name.

    With `tool_choice` "auto", it attaches a structural tag if a tool is strict or only one call is allowed.
    """
    tools = call.tools
    if not tools or call.body.get("tool_choice") not in (None, "auto"):
        return False
    if call.body.get("parallel_tool_calls") is False:
        return True
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return any(isinstance(function, dict) and bool(function.get("strict")) for function in functions)
