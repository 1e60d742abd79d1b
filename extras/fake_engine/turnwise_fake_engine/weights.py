"""vLLM's routes of the weight transfer, with the receiver that the plugin runs inside vLLM.

The bytes that arrive are real and are checked as in vLLM; only the model that they would be loaded into is missing.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnwise_fake_engine.control import Endpoint, body_of, bound, reply_error, reply_json
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

    info = TransferInfo(**(await body_of(request))["init_info"])
    state.receiver = state.receiver or Receiver()
    try:
        state.receiver.begin(info, 0)
    except TransferFailed as error:
        return _failed("init_weight_transfer_engine", str(error))
    return reply_json({"message": "Weight transfer initialized"})


async def start_weight_update(state: EngineState, _request: Request) -> Response:
    """Start an update; as in vLLM, only one can be active."""
    if state.is_updating:
        return _failed("start_weight_update", "a weight update is already active. Call finish_weight_update first.")
    state.is_updating = True
    return reply_json({"message": "Weight update started"})


async def update_weights(state: EngineState, request: Request) -> Response:
    """Load a version that arrived."""
    from turnwise.engine_plugin.channel import TransferFailed

    found = (await body_of(request))["update_info"]
    if not state.is_updating or state.receiver is None:
        return _failed("update_weights", "start_weight_update must be called before update_weights.")
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
    return reply_json({"message": "Weight update finished"})


def weight_routes(state: EngineState) -> list[Route]:
    """Return the routes of the weight transfer."""
    posts: dict[str, Endpoint] = {
        "/init_weight_transfer_engine": init_weight_transfer_engine,
        "/start_weight_update": start_weight_update,
        "/update_weights": update_weights,
        "/finish_weight_update": finish_weight_update,
    }
    routes = [Route(path, bound(endpoint, state), methods=["POST"]) for path, endpoint in posts.items()]
    return [Route("/get_world_size", bound(get_world_size, state)), *routes]


def _failed(method: str, message: str) -> Response:
    return reply_error(f"Call to {method} method failed: {message}", 500)
