"""The fake engine's routes except sampling: models, tokenizer, pausing, weights, adapters, and `/fake/…` for tests.

Control routes change state that a test can read. A bad path is rejected as in vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jinja2
import orjson
import pydantic
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnwise.processes.engine_checks import SERVER_INFO_ROUTE
from turnwise.sampling import ENFORCE_STRICT_TOOLS
from turnwise_fake_engine import tokens
from turnwise_fake_engine.ledger import EngineState
from turnwise_fake_engine.script import Fault, Rule

Json = dict[str, Any]
Endpoint = Callable[[EngineState, Request], Awaitable[Response]]


def reply_json(value: Any, status: int = 200) -> Response:
    """Return a JSON reply; like vLLM, a 5xx closes its connection."""
    headers = {"connection": "close"} if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None
    return Response(orjson.dumps(value), status, headers, "application/json")


def reply_error(message: str, status: int = 400, param: str | None = None, kind: str | None = None) -> Response:
    """Return an error in vLLM's shape."""
    names = {404: "NotFoundError", 429: "TooManyRequestsError", 500: "InternalServerError"}
    kind = kind or names.get(status, "BadRequestError")
    return reply_json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


async def no_route(_request: Request, error: Exception) -> Response:
    """Answer a path or method that does not exist as FastAPI does."""
    status, detail = getattr(error, "status_code", 404), getattr(error, "detail", "Not Found")
    return reply_json({"detail": detail}, status)


def unknown_model(state: EngineState, name: object) -> Response | None:
    """Return the error for a model that is not served; None for a served model."""
    if name is None or name == state.script.model or name in state.adapters:
        return None
    message = f"The model `{name}` does not exist. Valid aliases: {state.script.model}."
    return reply_error(message, 404, "model")


async def body_of(request: Request) -> Json:
    """Return the decoded body.

    Raises:
        ValueError: it is not a JSON object.
    """
    body = json.loads(await request.body() or b"{}")
    if not isinstance(body, dict):
        raise TypeError("the body is not an object")
    return body


async def health(_state: EngineState, _request: Request) -> Response:
    """Answer the health check."""
    return Response(status_code=200)


async def version(_state: EngineState, _request: Request) -> Response:
    """Return the vLLM release whose wire format is implemented."""
    return reply_json({"version": "0.32.0"})


async def server_info(state: EngineState, _request: Request) -> Response:
    """Return the environment that the proxy asks for."""
    return reply_json(
        {
            "vllm_env": {ENFORCE_STRICT_TOOLS: state.script.enforces_strict_tools},
            "vllm_config": {
                "model_config": {"max_logprobs": state.script.max_logprobs},
                "weight_transfer_config": {"backend": "turnwise"} if state.script.weight_transfer else None,
            },
        }
    )


async def models(state: EngineState, _request: Request) -> Response:
    """List the served model and its adapters."""
    served: list[tuple[str, str, str | None]] = [(state.script.model, state.model_path, None)]
    served += [(name, path, state.script.model) for name, path in state.adapters.items()]
    shared = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": state.script.max_model_len}
    data = [
        {"id": name, "root": root, "parent": parent, **shared, "permission": [_permission(name)]}
        for name, root, parent in served
    ]
    return reply_json({"object": "list", "data": data})


def _permission(name: str) -> Json:
    allowed = ("sampling", "logprobs", "view")
    denied = ("create_engine", "search_indices", "fine_tuning")
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": 0,
        **{f"allow_{what}": True for what in allowed},
        **{f"allow_{what}": False for what in denied},
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


async def tokenize(state: EngineState, request: Request) -> Response:
    """Return the ids of a text, or of a conversation under the chat template."""
    body = await body_of(request)
    if refusal := unknown_model(state, body.get("model")):
        return refusal
    if isinstance(body.get("messages"), list):
        try:
            ids = rendered_ids(body)
        except jinja2.TemplateError as error:
            return reply_error(str(error))
    elif isinstance(body.get("prompt"), str):
        ids = tokens.encode(body["prompt"])
    else:
        return reply_error("Field required: prompt or messages", param="body.prompt", kind="Bad Request")
    texts = tokens.piecewise(ids, keep_control=True) if body.get("return_token_strs") else None
    limit = state.script.max_model_len
    return reply_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})


def rendered_ids(body: Json) -> list[int]:
    """Return the ids of a request's conversation.

    Raises:
        jinja2.TemplateError: the template cannot render it.
    """
    text = tokens.render(
        body["messages"],
        None if body.get("tool_choice") == "none" and body.get("tools") is None else body.get("tools"),
        add_generation_prompt=body.get("add_generation_prompt", True) and not body.get("continue_final_message"),
        template=body.get("chat_template"),
        template_arguments=body.get("chat_template_kwargs"),
    )
    if body.get("continue_final_message"):
        text = text.removesuffix("\n").removesuffix("<|im_end|>")
    return tokens.encode(text)


async def detokenize(_state: EngineState, request: Request) -> Response:
    """Return the text of ids."""
    try:
        return reply_json({"prompt": tokens.decode((await body_of(request))["tokens"])})
    except KeyError as error:
        return reply_error(f"no such field or token: {error}")


async def pause(state: EngineState, _request: Request) -> Response:
    """Pause sampling; calls wait."""
    state.running.clear()
    return reply_json({"status": "paused"})


async def resume(state: EngineState, _request: Request) -> Response:
    """Resume sampling."""
    state.running.set()
    return reply_json({"status": "resumed"})


async def sleep(state: EngineState, request: Request) -> Response:
    """Give up memory; calls wait."""
    level = int(request.query_params.get("level", "1"))
    state.running.clear()
    state.asleep = {"weights", "kv_cache"}
    state.sleep_levels.append(level)
    return reply_json({"status": "sleeping", "level": level})


async def wake_up(state: EngineState, request: Request) -> Response:
    """Take back memory, all or some of it; sampling continues once all is back."""
    state.asleep -= set(request.query_params.getlist("tags") or state.asleep)
    if not state.asleep:
        state.running.set()
    return reply_json({"status": "sleeping" if state.asleep else "awake"})


async def is_sleeping(state: EngineState, _request: Request) -> Response:
    """Return whether memory was given up."""
    return reply_json({"is_sleeping": bool(state.asleep)})


async def is_paused(state: EngineState, _request: Request) -> Response:
    """Return whether sampling is paused."""
    return reply_json({"is_paused": not state.running.is_set()})


async def collective_rpc(state: EngineState, request: Request) -> Response:
    """Reload weights from a directory, which must look like a checkpoint."""
    body = await body_of(request)
    if "method" not in body:
        return reply_error("Missing 'method' in request body", kind="Bad Request")
    if body["method"] != "reload_weights":
        return _failed_call("collective_rpc", f"Method {body['method']!r} is not implemented.")
    path = (body.get("kwargs") or {}).get("weights_path") or state.weights_path
    if not has_weights(Path(path)) and path != state.model_path:
        return _failed_call("collective_rpc", f"Cannot find any model weights with `{path}`")
    await asyncio.sleep(state.script.load_seconds)
    state.weights_path = path
    state.reloads.append(path)
    return reply_json({"results": [None]})


def has_weights(directory: Path) -> bool:
    """Return whether a directory has weights to load."""
    return directory.is_dir() and any(directory.glob("*.safetensors"))


def _failed_call(method: str, message: str) -> Response:
    return reply_error(f"Call to {method} method failed: {message}", 500)


async def update_weight_version(state: EngineState, request: Request) -> Response:
    """Set the label of the weights."""
    body = await body_of(request)
    if "new_version" not in body:
        return reply_error("Field required: new_version", param="body.new_version", kind="Bad Request")
    state.weight_version = str(body["new_version"])
    return reply_json({"success": True, "new_version": state.weight_version})


async def weight_info(state: EngineState, _request: Request) -> Response:
    """Return the label of the weights."""
    return reply_json({"weight_version": state.weight_version})


async def metrics(state: EngineState, _request: Request) -> Response:
    """Return the metrics that show the start options."""
    names = ["vllm:num_requests_running", *(["vllm:lora_requests_info"] if state.script.lora else [])]
    return Response("".join(f"# TYPE {name} gauge\n" for name in names), media_type="text/plain")


async def load_lora_adapter(state: EngineState, request: Request) -> Response:
    """Load an adapter under its own name."""
    if not state.script.lora:
        return reply_json({"detail": "Not Found"}, 404)
    body = await body_of(request)
    if missing := [field for field in ("lora_name", "lora_path") if field not in body]:
        return reply_error(f"Field required: {missing[0]}", param=f"body.{missing[0]}", kind="Bad Request")
    name, path = body["lora_name"], body["lora_path"]
    if not name or not path:
        return reply_error("Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
    if not (Path(path) / "adapter_config.json").is_file():
        return reply_error(f"Loading lora {name} failed: No adapter found for {path}", 404)
    if name in state.adapters and not body.get("load_inplace"):
        message = f"The lora adapter '{name}' has already been loaded."
        return reply_error(message, kind="InvalidUserInput")
    state.adapters[name] = path
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


async def unload_lora_adapter(state: EngineState, request: Request) -> Response:
    """Unload an adapter."""
    if not state.script.lora:
        return reply_json({"detail": "Not Found"}, 404)
    name = (await body_of(request)).get("lora_name")
    if state.adapters.pop(str(name), None) is None:
        return reply_error(f"The lora adapter '{name}' cannot be found.", 404)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


async def seen_calls(state: EngineState, request: Request) -> Response:
    """List the calls; DELETE clears the list."""
    if request.method == "DELETE":
        state.calls.clear()
    return reply_json(state.summary())


async def plan_fault(state: EngineState, request: Request) -> Response:
    """Add a fault to the script; DELETE removes all remaining faults."""
    if request.method == "DELETE":
        state.script.faults.clear()
        return reply_json({"data": []})
    try:
        state.script.faults.append(Fault.model_validate_json(await request.body()))
    except pydantic.ValidationError as error:
        return reply_error(f"no such fault: {error}")
    return reply_json({"data": [fault.model_dump() for fault in state.script.faults]})


async def plan_reply(state: EngineState, request: Request) -> Response:
    """Add a rule before the script's rules."""
    try:
        state.script.rules.insert(0, Rule.model_validate_json(await request.body()))
    except pydantic.ValidationError as error:
        return reply_error(f"no such rule: {error}")
    return reply_json({"num_rules": len(state.script.rules)})


async def state_of(state: EngineState, _request: Request) -> Response:
    """Return the state that control routes change."""
    shown = ("weights_path", "weight_version", "reloads", "adapters")
    return reply_json({name: getattr(state, name) for name in shown} | {"paused": not state.running.is_set()})


def control_routes(state: EngineState) -> list[Route]:
    """Return all routes of this module."""
    table: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", health),
        ("GET", "/version", version),
        ("GET", SERVER_INFO_ROUTE, server_info),
        ("GET", "/metrics", metrics),
        ("GET", "/v1/models", models),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
        ("POST", "/pause", pause),
        ("POST", "/resume", resume),
        ("GET", "/is_paused", is_paused),
        ("POST", "/sleep", sleep),
        ("POST", "/wake_up", wake_up),
        ("GET", "/is_sleeping", is_sleeping),
        ("POST", "/collective_rpc", collective_rpc),
        ("POST", "/update_weight_version", update_weight_version),
        ("GET", "/weight_info", weight_info),
        ("POST", "/v1/load_lora_adapter", load_lora_adapter),
        ("POST", "/v1/unload_lora_adapter", unload_lora_adapter),
        ("GET DELETE", "/fake/calls", seen_calls),
        ("POST DELETE", "/fake/faults", plan_fault),
        ("POST", "/fake/replies", plan_reply),
        ("GET", "/fake/state", state_of),
    ]
    return [Route(path, bound(endpoint, state), methods=methods.split()) for methods, path, endpoint in table]


def bound(endpoint: Endpoint, state: EngineState) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint with its state; broken bodies get vLLM's error."""

    async def handle(request: Request) -> Response:
        try:
            return await endpoint(state, request)
        except (json.JSONDecodeError, TypeError) as error:
            return reply_error(f"JSON decode error: {error}", param="body", kind="Bad Request")

    return handle
