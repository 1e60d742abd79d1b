"""One engine, a vLLM over HTTP: its health and state, and the routes that sample, pause, and load weights or adapters.

Of another kind of engine, the routes from `sample` on and the forms of `vllm_forms` would differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
import orjson

from proxy.dialects.base import Call, Captured
from proxy.engines.http_client import Access, Answer, Disconnected, HttpClient, NotConnected
from proxy.engines.vllm_forms import read_parts, reject_prompt_logprobs, request, without_thinking
from proxy.sessions.place import CallPlace
from turnwise.engine_routes import read_models
from turnwise.errors import EngineRefused, EngineUnavailable, ReloadFailed
from turnwise.json_text import dumps
from turnwise.telemetry.requests import current_request
from turnwise.types import Json, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""An engine on loopback or a private network accepts a connection within this time, or it is absent."""
HEALTH_TIMEOUT_SECONDS = 2.0
MAX_FAILED_CHECKS = 3
"""Health checks in a row that a serving engine may fail before it is taken out."""
GONE_SECONDS = 30.0
"""An engine that has answered no health check for this long is gone: the calls on it are ended."""
UNLABELLED = -1
"""`loaded_version` of weights without a label: the model that the engine was started with."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this."""
NOT_A_COMPLETION = (msgspec.DecodeError, LookupError, TypeError, AttributeError)
"""What decoding a reply raises that is not a completion."""
LOADING = "loading"
"""Label of weights that are being exchanged: a process that finds it after a crash must load a version again."""


class EngineState(enum.StrEnum):
    """What the proxy may do with an engine."""

    ABSENT = "absent"
    """It does not answer, or does not serve the version that it should; it gets no calls and is expected back."""
    UNSUITABLE = "unsuitable"
    """It answers but lacks what exact capture needs; it gets no calls until it is restarted with other flags."""
    READY = "ready"
    """It serves the right version and gets calls."""
    DRAINING = "draining"
    """It serves, but new calls go to another engine where there is one."""
    RELOADING = "reloading"
    """Its weights are being exchanged; new calls wait inside the proxy."""


TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.ABSENT: frozenset({EngineState.UNSUITABLE, EngineState.READY}),
    EngineState.UNSUITABLE: frozenset({EngineState.ABSENT, EngineState.READY}),
    EngineState.READY: frozenset({EngineState.ABSENT, EngineState.DRAINING, EngineState.RELOADING}),
    EngineState.DRAINING: frozenset({EngineState.ABSENT, EngineState.READY, EngineState.RELOADING}),
    EngineState.RELOADING: frozenset({EngineState.ABSENT, EngineState.READY, EngineState.DRAINING}),
}
"""The legal transitions; from a state to itself nothing happens."""
SERVING = frozenset({EngineState.READY, EngineState.DRAINING, EngineState.RELOADING})
"""States in which calls are routed to the engine, at once or after a wait."""


@dataclasses.dataclass(slots=True, eq=False)
class Lane:
    """What a call samples with on an engine: the engine's base weights, which a reload changes, or an adapter."""

    engine: Engine
    version: int = 0
    """Policy version of the base weights now, or of the adapter."""
    adapter: str | None = None
    """Name the adapter is served under, empty while it is not loaded; None for the base weights."""
    num_calls: int = 0

    @property
    def model(self) -> str:
        return self.adapter or self.engine.model

    @property
    def sampled_version(self) -> int:
        """Policy version that is sampled now. Whole weights that are loaded during a call of an adapter replace it."""
        return self.engine.base_lane.version or self.version

    def read_reply(self, parts: list[bytes], captured: Captured, call: Call, place: CallPlace) -> list[bytes]:
        """Capture a whole reply, or chunks of a stream; return them without the fields the client did not ask for.

        Raises:
            EngineUnavailable: one is not of a completion.
        """
        engine, inside, requested = self.engine, self.model, call.model or self.engine.model
        try:
            shown = read_parts(parts, captured, call, place.prompt)
            engine.gives |= captured.gives
            if call.hides_thinking:
                shown = list(map(without_thinking, shown))
        except NOT_A_COMPLETION as error:
            raise EngineUnavailable(
                f"the engine at {engine.url} answered something that is no completion ({error}); retry"
            ) from error
        if inside != requested:
            old, new = (b'"model":' + orjson.dumps(name) for name in (inside, requested))
            shown = [part.replace(old, new, 1) for part in shown]
        return shown


class Engine:
    """One engine process."""

    own_fields: ClassVar[frozenset[str]] = frozenset(
        {
            *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority", "request_id", "data_parallel_rank"),
            *("mm_processor_kwargs", "media_io_kwargs", "mm_payload", "return_mm_kwargs", "prompt_embeds"),
            *("routed_experts_prompt_start", "stream_interval"),
        }
    )
    """Request fields that steer the engine itself; a client's are removed."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        access: Access | None = None,
    ) -> None:
        self.url = without_credentials(url)
        """Its address, without the user and password that the setting may hold."""
        self.state = EngineState.ABSENT
        """What the proxy may do with it now; only `change` sets it."""
        self.on_change: Callable[[], None] | None = None
        self.model = ""
        self.model_path = ""
        """Where it loaded that model from."""
        self.context_tokens: float = math.inf
        """Most tokens of a prompt and its reply; infinity if it does not say."""
        self.dtype: str | None = None
        """Number format of its weights, such as `float32`; None if it does not say."""
        self.has_lora = False
        """Whether it was started with LoRA, so that requests for prompt logprobs must not reach it."""
        self.info: Json = {}
        """How it was started, as it says; empty if it does not say."""
        self.defaults: Mapping[str, object] = {}
        """Sampling parameters that it uses where a request sets none, as far as they are not neutral."""
        self.gives: set[str] = set()
        """The parts of turns that one of its replies had."""
        self.problem: str | None = None
        """Why it gets no calls, as the last check found; None while it serves, and before the first check."""
        self.own_model = PolicyVersion(version=0, path="")
        """That model as a version, with the digest of its files if they are on this machine too."""
        self.base_lane = Lane(self)
        self.loaded_version: int | None = UNLABELLED
        """Version of the base weights, from their label; None during an exchange, or after one that was interrupted."""
        self.adapters: dict[int, Lane] = {}
        """The LoRA adapters that calls sample with, by policy version; this process knows that they are their files."""
        self.adapter_names: list[str] = []
        """The names of all adapters that it serves, in the order of loading, those of other databases too."""
        self.draining_since = 0.0
        """When its last draining began, on the monotonic clock."""
        self.num_started = 0
        """Calls of this process that it was given since the process began."""
        self.observe_head: Callable[[float], None] | None = None
        """Called with the seconds from each call's request to the head of its answer."""
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
        return self.adapters.get(version.version) or Lane(self, version.version, adapter="")

    @property
    def num_calls(self) -> int:
        return self.base_lane.num_calls + sum(lane.num_calls for lane in self.adapters.values())

    @property
    def is_serving(self) -> bool:
        return self.state in SERVING

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
        answered for `GONE_SECONDS`, the calls on it are ended.

        Raises:
            EngineUnavailable: it does not answer.
            EngineRefused: it answers an error.
        """
        began = asyncio.get_running_loop().time()
        try:
            await self.ask("GET", "/health", seconds=HEALTH_TIMEOUT_SECONDS)
        except (EngineUnavailable, EngineRefused) as error:
            if self.is_serving and isinstance(error.__cause__, TimeoutError) and self._http.heard_at >= began:
                self._answered_at = time.monotonic()
                return
            self._failed_checks += 1
            is_closed = isinstance(error.__cause__, NotConnected) and error.__cause__.is_refused
            silent = time.monotonic() - self._answered_at
            if is_closed or silent >= GONE_SECONDS:
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
                with await self._http.request(method, path, data, silence_seconds=seconds) as answer:
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

        Calls get no adapter from here: a name alone does not say whose it is, nor what the engine loaded.

        Raises:
            EngineUnavailable: no answer, or one of another server than an engine.
            EngineRefused: an error status.
        """
        before = set(self.adapter_names)
        answer = await self.ask("GET", "/v1/models")
        models = read_models(self.url, answer)
        self.model, self.model_path = models[0]
        limit = answer["data"][0].get("max_model_len")
        self.context_tokens = limit if isinstance(limit, int) and limit > 0 else math.inf
        served = [name for name, _ in models[1:]]
        meanwhile = [name for name in self.adapter_names if name not in before and name not in served]
        self.adapter_names = served + meanwhile
        self.adapters = {version: lane for version, lane in self.adapters.items() if lane.adapter in self.adapter_names}

    async def label_weights(self, label: int | str) -> None:
        await self.ask("POST", "/update_weight_version", {"new_version": str(label)})
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

    async def load_adapter(self, name: str, path: str, *, seconds: float) -> None:
        """Load a LoRA adapter under a name of its own beside what is served; a loaded one stays.

        Raises:
            ReloadFailed: the engine refused it.
        """
        await self.fetch_models()
        if name not in self.adapter_names:
            advice = "; an engine takes adapters if it was started with `turnwise engine --lora`"
            try:
                with self.loading(f"the adapter {path!r}", advice):
                    body: Json = {"lora_name": name, "lora_path": path}
                    await self.ask("POST", "/v1/load_lora_adapter", body, seconds=seconds)
                self.adapter_names.append(name)
            except ReloadFailed:
                await self.fetch_models()
                if name not in self.adapter_names:  # otherwise another process has loaded it meanwhile
                    raise

    def take_adapter(self, version: int, name: str) -> Lane:
        """Let calls sample with an adapter that it serves; return its lane, which stays where it was taken before."""
        lane = self.adapters.get(version)
        if lane is None or lane.adapter != name:
            lane = self.adapters[version] = Lane(self, version, name)
        return lane

    @contextlib.contextmanager
    def loading(self, what: str, advice: str = "") -> Iterator[None]:
        """Raise `ReloadFailed` where the engine refuses to load something in the block."""
        try:
            yield
        except EngineRefused as refused:
            raise ReloadFailed(
                f"the engine at {self.url} did not load {what}: {refused}{advice}", is_transient=refused.is_transient
            ) from refused

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; one that is not loaded is no error."""
        with contextlib.suppress(EngineRefused):
            await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        self.adapter_names = [each for each in self.adapter_names if each != name]
        self.adapters = {version: lane for version, lane in self.adapters.items() if lane.adapter != name}

    async def sample(self, call: Call, place: CallPlace, model: str, headers: dict[str, str]) -> Answer:
        """Send a call to a served model, so that its reply has all that capture needs.

        The caller reads the answer in a `with` block. An engine that takes no connection is taken out.

        Raises:
            EngineUnavailable: no connection, or one that broke before the answer's head.
            EngineRefused: an error status, with the engine's own body.
            InvalidRequest: the request would crash the engine.
        """
        body = request(call, place) if call.media is None else await asyncio.to_thread(request, call, place)
        body["model"] = model
        if self.has_lora or self.adapters:
            reject_prompt_logprobs(body)
        path, context = call.dialect.engine_route, current_request.get()
        if context is not None:
            trace = context.trace
            traceparent = context.traceparent if trace is None else trace.start_engine(self.url + path)
            headers = {**headers, "traceparent": traceparent}
        raw, started = dumps(body), time.perf_counter()
        try:
            answer = await self._http.request("POST", path, raw, headers)
            if self.observe_head is not None:
                self.observe_head(time.perf_counter() - started)
            if answer.status >= 400:
                with answer:
                    raise EngineRefused(answer.status, await answer.read())
        except Disconnected as error:
            if self.is_serving and isinstance(error, NotConnected) and not error.is_local:
                self.take_out(error)
            raise self._unavailable(error) from error
        return answer

    def effective_sampling(self, call: Call) -> Json:
        """Return how it samples a call: the call's parameters, its own defaults, and what it makes of both."""
        sampling = call.sampling
        unset = {name: value for name, value in self.defaults.items() if sampling.get(name) is None}
        temperature = sampling.get("temperature", unset.get("temperature"))
        if isinstance(temperature, int | float) and 0 < temperature < LOWEST_TEMPERATURE:
            unset["temperature"] = LOWEST_TEMPERATURE
        return {**sampling, **unset} if unset else sampling

    async def tokenise(self, request: Json) -> list[int]:
        """Return the prompt of a chat request.

        Raises:
            EngineUnavailable: no answer in time, or one without the prompt.
            EngineRefused: an error status.
        """
        answer = await self.ask("POST", "/tokenize", request)
        if not isinstance(answer, dict) or "tokens" not in answer:
            raise EngineUnavailable(f"the engine at {self.url} answered no tokens: {str(answer)[:80]!r}; retry")
        return list(answer["tokens"])

    async def pause(self) -> None:
        """Stop sampling; running calls are kept, new ones queue."""
        await self.ask("POST", "/pause", mode="keep", clear_cache="true")

    async def is_paused(self) -> bool:
        """Return whether sampling is stopped; False from an engine without that route."""
        return await self.has_flag("paused")

    async def has_flag(self, name: str) -> bool:
        """Return what it answers to `/is_NAME`; False from an engine without that route."""
        try:
            answer = await self.ask("GET", f"/is_{name}")
        except EngineRefused:
            return False
        return isinstance(answer, dict) and bool(answer.get(f"is_{name}"))

    async def resume(self) -> None:
        await self.ask("POST", "/resume")

    async def load_weights(self, path: str, *, seconds: float) -> None:
        """Replace the base weights with those of a checkpoint directory.

        Raises:
            ReloadFailed: the engine refused them.
        """
        body: Json = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        with self.loading(repr(path)):
            await self.ask("POST", "/collective_rpc", body, seconds=seconds)

    async def weights_label(self) -> str | None:
        """Return the label of the base weights; None from an engine that keeps none."""
        try:
            answer = await self.ask("GET", "/weight_info")
        except EngineRefused:
            return None
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if label is None else str(label)


def without_credentials(url: str) -> str:
    parts = urlsplit(url.rstrip("/"))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
