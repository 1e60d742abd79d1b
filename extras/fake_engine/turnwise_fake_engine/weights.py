"""vLLM's routes of the weight transfer, with the receiver that the plugin runs inside vLLM.

The bytes that arrive are real and are checked as in vLLM; only the model that they would be loaded into is missing. A
test can supply an object of vLLM's own transfer classes instead, which then gets the bodies as a worker of vLLM does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnwise_fake_engine.control import Endpoint, Json, body_of, bound, reply_error, reply_json
from turnwise_fake_engine.ledger import EngineState

LOAD_SECONDS = 10.0
"""How long an update waits for a version that has not arrived."""


async def get_world_size(_state: EngineState, _request: Request) -> Response:
    """Return the number of workers."""
    return reply_json({"world_size": 1})


async def init_weight_transfer_engine(state: EngineState, request: Request) -> Response:
    """Start to receive a version."""
    if not state.script.weight_transfer:
        return _failed("init_weight_transfer_engine", "Weight transfer not configured.")
    from turnwise.engine_plugin.channel import TransferFailed
    from turnwise.engine_plugin.receiver import Receiver, TransferInfo

    found = (await body_of(request))["init_info"]
    if state.weight_engine is not None:
        return await _by_vllm("init_weight_transfer_engine", _initialise, state.weight_engine, found)
    try:
        info = TransferInfo(**found)
    except TypeError as error:
        return _failed("init_weight_transfer_engine", f"Invalid init_info for TurnwiseWeights: {error}")
    state.receiver = state.receiver or Receiver()
    try:
        state.receiver.begin(info, 1)
    except TransferFailed as error:
        return _failed("init_weight_transfer_engine", str(error))
    return reply_json({"message": "Weight transfer initialized"})


async def start_weight_update(state: EngineState, _request: Request) -> Response:
    """Start an update; as in vLLM, only one can be active."""
    if state.is_updating:
        return _failed("start_weight_update", "a weight update is already active. Call finish_weight_update first.")
    state.is_updating = True
    if state.weight_engine is not None:
        return await _by_vllm("start_weight_update", state.weight_engine.start_weight_update)
    return reply_json({"message": "Weight update started"})


async def update_weights(state: EngineState, request: Request) -> Response:
    """Load a version that arrived."""
    from turnwise.engine_plugin.channel import TransferFailed

    found = (await body_of(request))["update_info"]
    if not state.is_updating or (state.receiver is None and state.weight_engine is None):
        return _failed("update_weights", "start_weight_update must be called before update_weights.")
    if state.weight_engine is not None:
        answer = await _by_vllm("update_weights", state.weight_engine.update_weights, found)
        state.is_updating = answer.status_code == HTTPStatus.OK
        return answer
    version = int(found["version"])
    try:
        tensors = await asyncio.to_thread(state.receiver.take, version, LOAD_SECONDS)
    except TransferFailed as error:
        state.is_updating = False
        return _failed("update_weights", str(error))
    state.received = {name: tensor.clone() for name, tensor in tensors}
    state.weights_path = f"memory:{version}"
    state.reloads.append(state.weights_path)
    return reply_json({"message": "Weights updated"})


async def finish_weight_update(state: EngineState, _request: Request) -> Response:
    """End an update."""
    if not state.is_updating:
        return _failed("finish_weight_update", "called without a matching start_weight_update.")
    state.is_updating = False
    if state.weight_engine is not None:
        return await _by_vllm("finish_weight_update", state.weight_engine.finish_weight_update)
    return reply_json({"message": "Weight update finished"})


async def shutdown_weight_transfer_engine(state: EngineState, _request: Request) -> Response:
    """Disconnect from the trainer."""
    if state.weight_engine is not None:
        return await _by_vllm("shutdown_weight_transfer_engine", state.weight_engine.shutdown)
    return reply_json({"message": "Weight transfer shut down"})


def weight_routes(state: EngineState) -> list[Route]:
    """Return the routes of the weight transfer."""
    posts: dict[str, Endpoint] = {
        "/init_weight_transfer_engine": init_weight_transfer_engine,
        "/start_weight_update": start_weight_update,
        "/update_weights": update_weights,
        "/finish_weight_update": finish_weight_update,
        "/shutdown_weight_transfer_engine": shutdown_weight_transfer_engine,
    }
    routes = [Route(path, bound(endpoint, state), methods=["POST"]) for path, endpoint in posts.items()]
    return [Route("/get_world_size", bound(get_world_size, state)), *routes]


def _initialise(weight_engine: Any, init_info: Json) -> None:
    weight_engine.init_transfer_engine(weight_engine.parse_init_info(init_info))


async def _by_vllm(method: str, call: Callable[..., None], *arguments: object) -> Response:
    """Call an object of vLLM's in a thread, and answer its errors as vLLM's server does."""
    try:
        await asyncio.to_thread(call, *arguments)
    except Exception as error:  # noqa: BLE001  vLLM answers every exception of a worker in this way
        return _failed(method, str(error))
    return reply_json({"message": "done"})


def _failed(method: str, message: str) -> Response:
    return reply_error(f"Call to {method} method failed: {message}", 500)
