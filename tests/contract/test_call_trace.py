"""A call passes few functions of the project, so that one engineer can follow it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from support.in_process import in_process_proxy, served
from support.migrated import new_database
from support.waiting import wait_until
from turnwise_fake_engine import running_fake_engine

import proxy
import turnwise
from proxy.settings import ProxySettings
from turnwise.types import Outcome

ROOTS = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (proxy, turnwise))
MOST, MOST_ALONE = (135, 25), (118, 22)
"""The functions and files of a streamed later turn, with all features and with none."""
COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
"""Code that some versions of Python call as functions."""


class Trace:
    """Notes the project's functions that the event loop calls while a request is served, those of timers too."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the app with each request traced; the last one counts."""

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            self.functions.clear()
            sys.setprofile(self._note)
            try:
                await app(scope, receive, send)
            finally:
                sys.setprofile(None)

        return serve

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOTS) and code.co_name not in COMPREHENSIONS:
            self.functions.add(code)


@contextlib.contextmanager
def core_alone(directory: Path, wrap: Callable[[ASGIApp], ASGIApp]) -> Iterator[TestClient]:
    new_database(directory / "turnwise.db")
    with running_fake_engine() as engine:
        settings = ProxySettings(engine=[engine.url], database=f"sqlite:///{directory}/turnwise.db")
        with served(settings, wrap) as http:
            yield http


@contextlib.contextmanager
def with_all_features(directory: Path, wrap: Callable[[ASGIApp], ASGIApp]) -> Iterator[TestClient]:
    with in_process_proxy(directory, engine_check="strict", wrap=wrap) as (http, _):
        yield http


@pytest.mark.parametrize(("proxy_of", "most"), [(with_all_features, MOST), (core_alone, MOST_ALONE)])
def test_a_streamed_second_turn_passes_few_functions_in_few_files(proxy_of, most, tmp_path, monkeypatch):
    """From the route to the end of the reply, in the serving process; each turn extends the one before it exactly.

    What all later turns pass is what a turn needs; what only one of them passes is a timer's.
    """
    trace = Trace()
    # On a busy machine these timers would run in every turn.
    monkeypatch.setattr("proxy.reload.driver.POLL_SECONDS", 600.0)
    monkeypatch.setattr("proxy.writer.client.CHECK_SECONDS", 600.0)
    with proxy_of(tmp_path, trace.wrap) as http:
        wait_until(lambda: http.get("/readyz").status_code == 200, "the proxy is ready")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
        later: list[set[CodeType]] = []
        for _ in range(5):
            body = {"model": "fake", "messages": messages, "stream": True, "max_tokens": 20}
            http.post("/sessions/s/v1/chat/completions", json=body).raise_for_status()
            later.append(set(trace.functions))
            turns = http.get("/v1/sessions/s/turns").raise_for_status().json()["data"]
            messages += [turns[-1]["response"], {"role": "user", "content": "Go on."}]
    assert [turn["outcome"] for turn in turns] == [Outcome.EXACT] * 5
    assert [turn["parent_turn_id"] for turn in turns[1:]] == [turn["turn_id"] for turn in turns[:-1]]
    functions = set.intersection(*later[1:])
    files = {code.co_filename for code in functions}
    listed = sorted(f"{code.co_filename}: {code.co_qualname}" for code in functions)
    print(f"{len(functions)} functions in {len(files)} files", *listed, sep="\n")
    assert len(functions) <= most[0]
    assert len(files) <= most[1]
