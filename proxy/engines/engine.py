"""One engine process over HTTP: its state, its health, and the lanes that calls sample in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import orjson

from proxy.engines.http_client import Access, Answer, Disconnected, HttpClient, NotConnected
from proxy.engines.kind import EngineKind
from proxy.engines.state import SERVING, TRANSITIONS, EngineState
from turnwise.errors import EngineRefused, EngineUnavailable, ReloadFailed
from turnwise.json_text import dumps
from turnwise.telemetry.tracing import current_request
from turnwise.types import Json, PolicyKind, PolicyVersion
from turnwise.verify.engine import read_models

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""An engine on loopback or a private network accepts a connection within this time, or it is absent."""
HEALTH_TIMEOUT_SECONDS = 2.0
"""How long a health check may take."""
MAX_FAILED_CHECKS = 3
"""Health checks in a row that a serving engine may fail before it is taken out."""
ADAPTER_PREFIX = "policy-v"
"""Prefix of the name that a version's adapter is served under."""
UNLABELLED = -1
"""`loaded_version` of weights without a label: the model that the engine was started with."""
LOADING = "loading"
"""Label of weights that are being exchanged: a process that finds it after a crash must load a version again."""


@dataclasses.dataclass(slots=True, eq=False)
class Lane:
    """What a call samples with on an engine: the engine's base weights, which a reload changes, or an adapter."""

    engine: Engine
    version: int = 0
    """Policy version of the base weights now, or of the adapter."""
    adapter: str | None = None
    """Name the adapter is served under; None for the base weights."""
    num_calls: int = 0
    """Running calls of this process."""

    @property
    def model(self) -> str:
        """The name that its engine serves it under."""
        return self.adapter or self.engine.model

    @property
    def sampled_version(self) -> int:
        """Policy version that is sampled now. Whole weights that are loaded during a call of an adapter replace it."""
        return self.engine.base_lane.version or self.version


class Engine(EngineKind):
    """One engine process; a kind of engine is a subclass."""

    def __init__(
        self, url: str, *, timeout_seconds: float, gone_seconds: float = 30.0, access: Access | None = None
    ) -> None:
        self.url = without_credentials(url)
        """Its address, without the user and password that the setting may hold."""
        self.state = EngineState.ABSENT
        """What the proxy may do with it now; only `change` sets it."""
        self.on_change: Callable[[], None] | None = None
        """Called after each change of the state."""
        self.model = ""
        """Name it serves its model under."""
        self.model_path = ""
        """Where it loaded that model from."""
        self.problem: str | None = None
        """Why it gets no calls, as the last check found; None while it serves, and before the first check."""
        self.own_model = PolicyVersion(version=0, path="")
        """That model as a version, with the digest of its files if they are on this machine too."""
        self.base_lane = Lane(self)
        """Samples with its base weights."""
        self.loaded_version: int | None = UNLABELLED
        """Version of the base weights, from their label; None during an exchange, or after one that was interrupted."""
        self.transfers_from = 0.0
        """When weights from a trainer's memory may be sent to it, on the monotonic clock; later if it refused them."""
        self.adapters: dict[int, Lane] = {}
        """Its LoRA adapters by policy version, in the order of loading."""
        self.draining_since = 0.0
        """When its last draining began, on the monotonic clock."""
        self.num_started = 0
        """Calls of this process that it was given since the process began."""
        self.wait_for_any: Callable[[], Awaitable[bool]] | None = None
        """Waits while no engine serves; returns whether one does. A call waits only for its own engine: while others
        serve, it fails at once and can be retried there."""
        self.observe_head: Callable[[float], None] | None = None
        """Called with the seconds from each call's request to the head of its answer."""
        self._gone_seconds = gone_seconds
        self._failed_checks = 0
        self._num_labels = 0
        """How often a label was applied."""
        self._answered_at = time.monotonic()
        self._http = HttpClient(
            url.rstrip("/"), connect_seconds=CONNECT_SECONDS, silence_seconds=timeout_seconds, access=access
        )

    def change(self, new: EngineState) -> None:
        """Change the state; to the present state this does nothing."""
        if new is self.state:
            return
        assert new in TRANSITIONS[self.state], f"an engine cannot change from {self.state} to {new}"
        log.debug("the engine at %s changes from %s to %s", self.url, self.state, new)
        self.state = new
        if self.on_change is not None:
            self.on_change()

    def take_out(self, why: Exception | str) -> None:
        """Route no calls to it until the reloader has admitted it again."""
        self.change(EngineState.ABSENT)
        log.error("the engine at %s is taken out: %s", self.url, why)

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Keep it in RELOADING for the block; then restore its state, unless the block took it out."""
        before = self.state
        self.change(EngineState.RELOADING)
        try:
            yield
        finally:
            if self.state is EngineState.RELOADING:
                self.change(before)

    @property
    def has_own_model(self) -> bool:
        """Whether its base weights are the model that it was started with, which adapters were trained on."""
        return self.loaded_version in (UNLABELLED, 0)

    def lane_of(self, version: PolicyVersion) -> Lane:
        """Return what samples with a version: its adapter, which may not be loaded yet, or else the base weights."""
        if version.kind is PolicyKind.FULL or self.base_lane.version:
            return self.base_lane
        return self.adapters.get(version.version) or Lane(self, version.version, adapter_name(version.version))

    @property
    def num_calls(self) -> int:
        """Running calls of this process."""
        return self.base_lane.num_calls + sum(lane.num_calls for lane in self.adapters.values())

    @property
    def is_serving(self) -> bool:
        """Whether calls are routed to it."""
        return self.state in SERVING

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Send a call; the caller reads the answer in a `with` block.

        Raises:
            EngineUnavailable: no connection, or one that broke before the answer's head.
            EngineRefused: an error status, with the engine's own body.
        """
        context = current_request.get()
        if context is not None:
            trace = context.trace
            traceparent = context.traceparent if trace is None else trace.start_engine(self.url + path)
            headers = {**headers, "traceparent": traceparent}
        started = time.perf_counter()
        try:
            try:
                answer = await self._http.request("POST", path, body, headers)
            except NotConnected as error:
                if error.is_local or not await self._wait_for_return(error):
                    raise
                answer = await self._http.request("POST", path, body, headers)
            if self.observe_head is not None:
                self.observe_head(time.perf_counter() - started)
            if answer.status >= 400:
                with answer:
                    raise EngineRefused(answer.status, await answer.read())
        except Disconnected as error:
            raise self._unavailable(error) from error
        return answer

    async def _wait_for_return(self, error: NotConnected) -> bool:
        """Take the engine out, because it took no connection, and wait; return whether it is back."""
        if self.is_serving:
            self.take_out(error)
        return self.wait_for_any is not None and await self.wait_for_any() and self.is_serving

    async def close(self) -> None:
        await self._http.close()

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"the engine at {self.url} cannot be reached ({str(error) or type(error).__name__}); "
            "check that it runs, then retry: nothing was sampled"
        )

    async def check_health(self) -> None:
        """Check that it answers.

        A serving engine fails after `MAX_FAILED_CHECKS` failed checks in a row, or at once if its port is closed. A
        check without an answer does not count if parts of other answers arrive meanwhile. If the engine has not
        answered for `gone_seconds`, the calls on it are ended.

        Raises:
            EngineUnavailable: it does not answer.
            EngineRefused: it answers an error.
        """
        began = asyncio.get_running_loop().time()
        try:
            await self.ask("GET", "/health", seconds=HEALTH_TIMEOUT_SECONDS)
        except (EngineUnavailable, EngineRefused) as error:
            if self.is_serving and isinstance(error.__cause__, TimeoutError) and self._http.has_heard(began):
                self._answered_at = time.monotonic()
                return
            self._failed_checks += 1
            is_closed = isinstance(error.__cause__, NotConnected) and error.__cause__.is_refused
            silent = time.monotonic() - self._answered_at
            if is_closed or silent >= self._gone_seconds:
                self._http.abort_requests(f"the engine has not answered for {silent:.0f} s")
            if self.is_serving and not is_closed and self._failed_checks < MAX_FAILED_CHECKS:
                log.warning("health check %d of %d failed: %s", self._failed_checks, MAX_FAILED_CHECKS, error)
                return
            raise
        self._failed_checks = 0
        self._answered_at = time.monotonic()

    async def ask(
        self, method: str, path: str, body: Json | None = None, *, seconds: float = 10.0, **query: str
    ) -> Any:
        """Call a control route and return its decoded answer.

        Raises:
            EngineUnavailable: no answer within `seconds`.
            EngineRefused: an error status.
        """
        data = b"" if body is None else dumps(body)
        if query:
            path += "?" + urlencode(query)
        try:
            async with asyncio.timeout(seconds):
                headers = {"content-type": "application/json"}
                with await self._http.request(method, path, data, headers, silence_seconds=seconds) as answer:
                    raw = await answer.read()
        except (Disconnected, TimeoutError) as error:
            raise self._unavailable(error) from error
        if answer.status >= 400:
            raise EngineRefused(answer.status, raw)
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            return raw.decode(errors="replace")

    async def fetch_models(self) -> None:
        """Read which model and which adapters it serves; an adapter that is loaded meanwhile stays.

        Raises:
            EngineUnavailable: no answer, or one of another server than an engine.
            EngineRefused: an error status.
        """
        before = set(self.adapters)
        models = read_models(self.url, await self.ask("GET", "/v1/models"))
        self.model, self.model_path = models[0]
        served = {version for name, _ in models if (version := adapter_version(name)) is not None}
        for version in before - served:
            self.adapters.pop(version, None)
        for version in sorted(served - self.adapters.keys()):
            self.adapters[version] = Lane(self, version, adapter_name(version))

    async def label_weights(self, label: int | str) -> None:
        """Label the base weights."""
        await self.write_label(str(label))
        self.apply_label(str(label))

    def apply_label(self, label: str | None) -> None:
        """Set `loaded_version` from the label of the base weights."""
        self._num_labels += 1
        if label == LOADING:
            self.loaded_version = None
            return
        self.loaded_version = int(label) if label is not None and label.isdigit() else UNLABELLED
        self.base_lane.version = max(self.loaded_version, 0)

    async def read_label(self) -> None:
        """Read the label of the base weights; apply it unless another worker announced a newer one meanwhile."""
        num_applied = self._num_labels
        label = await self.weights_label()
        if num_applied == self._num_labels:
            self.apply_label(label)

    async def load_adapter(self, version: int, path: str, *, seconds: float) -> Lane:
        """Load a LoRA adapter under a name of its own beside what is served; a loaded one stays.

        Raises:
            ReloadFailed: the engine refused it.
        """
        await self.fetch_models()
        if version not in self.adapters:
            advice = "; an engine takes adapters if it was started with `turnwise engine --lora`"
            try:
                with self.loading(f"the adapter {path!r}", advice):
                    await self.add_adapter(adapter_name(version), path, seconds=seconds)
                self.adapters[version] = Lane(self, version, adapter_name(version))
            except ReloadFailed:
                await self.fetch_models()
                if version not in self.adapters:  # otherwise another process has loaded it meanwhile
                    raise
        return self.adapters[version]

    @contextlib.contextmanager
    def loading(self, what: str, advice: str = "") -> Iterator[None]:
        """Raise `ReloadFailed` where the engine refuses to load something in the block."""
        try:
            yield
        except EngineRefused as refused:
            raise ReloadFailed(
                f"the engine at {self.url} did not load {what}: {refused}{advice}", is_transient=refused.is_transient
            ) from refused

    async def unload_adapter(self, version: int) -> None:
        """Unload a LoRA adapter; one that is not loaded is no error."""
        await self.remove_adapter(adapter_name(version))
        self.adapters.pop(version, None)


def without_credentials(url: str) -> str:
    parts = urlsplit(url.rstrip("/"))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def adapter_name(version: int) -> str:
    return f"{ADAPTER_PREFIX}{version}"


def adapter_version(name: str) -> int | None:
    """Return the policy version of an adapter's name, None for any other model."""
    digits = name.removeprefix(ADAPTER_PREFIX)
    return int(digits) if digits != name and digits.isdigit() else None
