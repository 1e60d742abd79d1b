"""What a feature adds to the control plane: its routes, the action of each, and models of their answers."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

if TYPE_CHECKING:
    from proxy.dialects.base import Action, WireRoute
    from proxy.routes.calls import Endpoint
    from proxy.routes.models import Answer
    from proxy.services import Services


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of one feature."""

    router: APIRouter
    actions: Mapping[str, str]
    """The action of each route, as `proxy.auth.ACTION_OF_ROUTE` has those of the core."""
    files: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By their path what answers without a key and is in no document: a handler, or an app that is mounted."""
    endpoints: Callable[[Services], Iterable[tuple[WireRoute, Endpoint]]] = lambda _: ()
    """Makes what it serves on the data plane."""
    answers: Callable[[], Iterable[type[Answer]]] = tuple
    """Makes the models of answers, which only the OpenAPI document needs: pydantic takes long for them."""


def endpoints(services: Services, kinds: Mapping[Action, type[Endpoint]]) -> list[tuple[WireRoute, Endpoint]]:
    """Return the routes of all formats whose action is one of these, with what serves each."""
    return [
        (route, kinds[route.action](services, dialect, route))
        for dialect in services.dialects
        for route in dialect.routes
        if route.action in kinds
    ]


def load_routes(modules: Iterable[str]) -> list[Routes]:
    """Return `ROUTES` of each module."""
    return [importlib.import_module(module).ROUTES for module in modules]
