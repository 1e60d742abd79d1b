"""A proxy in the test's own process, over a fake engine: for tests of the control plane."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.types import ASGIApp
from turnwise_fake_engine import running_fake_engine

from proxy.app import create_app
from proxy.http.connections import CLOSING, LEFT
from proxy.routes.data_plane import data_plane
from proxy.services import NO_FEATURES, Features, running_services
from proxy.settings import ProxySettings

if TYPE_CHECKING:
    from turnwise.store.database import Database


@contextlib.contextmanager
def in_process_proxy(
    directory: Path, *, engine_check: str = "off", wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app, **settings: Any
) -> Iterator[tuple[TestClient, "Database"]]:
    """Run a proxy over a new database until the block ends; requests go to what `wrap` makes of its app."""
    from support.migrated import migrated
    from support.warm_writers import fork_writers

    from proxy import features
    from turnwise.store.database import Database

    fork_writers()
    url = f"sqlite:///{directory}/turnwise.db"
    database = Database(migrated(url))
    with running_fake_engine() as engine:
        given = features.Settings(engine=[engine.url], database=url, engine_check=engine_check, **settings)
        with served(given, wrap, routes=features.ROUTES, features=features.served()) as http:
            yield http, database
    database.close()


@contextlib.contextmanager
def served(
    given: ProxySettings,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    *,
    routes: tuple[str, ...] = (),
    features: Features = NO_FEATURES,
) -> Iterator[TestClient]:
    """Serve with features as `create_app` and `running_services` take them; none are imported here."""
    app: ASGIApp

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal app
        async with running_services(given, features) as services:
            app = wrap(data_plane(create_app(services, routes), services))
            yield

    around = Starlette(lifespan=lifespan)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        """Serve a request whose client stays connected; an endless reply ends as it does when the server stops."""
        if scope["type"] == "lifespan":
            await around(scope, receive, send)
            return
        left, closing = (asyncio.get_running_loop().create_future() for _ in range(2))
        closing.set_result(None)
        await app({**scope, "extensions": {LEFT: left, CLOSING: closing}}, receive, send)

    with TestClient(serve) as http:
        yield http
