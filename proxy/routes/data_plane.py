"""Routes of all wire formats, also under `/sessions/{session_id}`, and their lists of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.types import Receive, Scope

from proxy.dialects.base import Action
from proxy.http.asgi import cancelled_when_client_leaves
from proxy.http.connections import LEFT
from proxy.routes.calls import DataPlane, Endpoint, ReplySender, SampleEndpoint, query_of
from proxy.routes.declared import endpoints

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxy.services import Services


class ModelConvertor(StringConvertor):
    """`{name:model}` in a path: the name of a model, with slashes and colons, but without `:someMethod` at its end."""

    regex = r"(?!.*:[a-z]+[A-Z][A-Za-z]*$).+"


class ModelsEndpoint(Endpoint):
    """An endpoint of one dialect that lists the models, or describes the one in its path.

    Several formats have the same path, so the answer is in that of the client.
    """

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:  # noqa: ARG002  it has no body
        services, headers = self._services, dict(scope["headers"])
        reply.dialect = dialect = services.dialects.of_headers(headers, self._dialect)
        name = scope["path_params"].get("model")
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await self._caller(dialect.normalise_headers(headers, query_of(scope)))
            if name is not None:
                services.models.check(principal.tenant, name)
            answer = await services.pool.ask(principal.key_id, lambda engine: engine.ask("GET", "/v1/models"))
        models = services.models.listed(answer["data"])
        if name is None:
            shown = dialect.encode_models(models)
        else:
            listed = next((model for model in models if model["id"] == name), models[0])
            shown = dialect.encode_model({**listed, "id": name})
        await reply.whole(orjson.dumps(shown))


ENDPOINTS: dict[Action, type[Endpoint]] = {
    Action.SAMPLE: SampleEndpoint,
    Action.LIST_MODELS: ModelsEndpoint,
    Action.GET_MODEL: ModelsEndpoint,
}


def data_plane(app: FastAPI, services: Services) -> DataPlane:
    """Return what serves the routes of the data plane; it passes other requests to the app."""
    register_url_convertor("model", ModelConvertor())
    served = endpoints(services, ENDPOINTS)
    served += [each for make in app.state.endpoints for each in make(services)]
    return DataPlane(app, served)
