"""vLLM over HTTP: one `Engine` per process, the lanes that calls sample in, and the pool that routes sessions to them.

A session always goes to the same healthy engine, by rendezvous hashing of its id, so that its prefix cache is warm
and the loss of an engine moves only that engine's sessions. Each engine has a gate of its own: while its weights are
exchanged, new calls wait here, and one whose engine does not come back goes to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Protocol
from urllib.parse import urlencode

import orjson

from proxy.engines.http_client import Answer, Disconnected, HttpClient
from proxy.metrics import Metrics
from turnwise.errors import EngineRefused, EngineUnavailable, InvalidRequest, Overloaded, ReloadFailed
from turnwise.types import Json, Session

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""An engine on loopback or a private network that takes longer to accept is not there."""
HEALTH_SECONDS = 1.0
"""How often a present engine is checked; a missing one is looked for as often as policy versions are."""

ADAPTER_PREFIX = "policy-v"
"""What stands before the version in the name that an adapter is served under."""
UNLABELLED = -1
"""What weights without a label are: those of the model that the engine was started with."""
LOADING = "loading"
"""Label of weights that are being exchanged: whoever finds it without a driver knows that they are of no version."""


@dataclasses.dataclass(slots=True, eq=False)
class Lane:
    """What a call samples with on an engine: the engine's own weights, which a reload changes, or an adapter."""

    engine: Engine
    version: int = 0
    """Policy version that is sampled now; of an adapter always the same."""
    adapter: str | None = None
    """Name the adapter is served under; None for the engine's own weights."""
    num_calls: int = 0
    """Calls of this process on their way."""


class Engine:
    """One vLLM process."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.healthy = False
        """Whether it answered lately and serves a version that it should; others get no calls."""
        self.draining = False
        """Whether its calls are let run out: new ones go elsewhere, if there is an elsewhere."""
        self.model = ""
        """The name it serves its model under."""
        self.model_path = ""
        """Where it loaded that model from."""
        self.own = Lane(self)
        """Its own weights."""
        self.holds: int | None = UNLABELLED
        """Version of its own weights, by their label; None while they are exchanged, or when that was cut off."""
        self.main = self.own
        """What calls sample with here unless a canary takes them."""
        self.adapters: dict[int, Lane] = {}
        """The LoRA adapters it has, by policy version, in the order of loading."""
        self.has_lora = False
        """Whether it was started with LoRA, so that some requests must not reach it."""
        self.gate = asyncio.Event()
        """Open unless weights are being exchanged; new calls wait at it inside the proxy."""
        self.gate.set()
        self._http = HttpClient(self.url, connect_seconds=CONNECT_SECONDS, silence_seconds=timeout_seconds)

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Open a call; the caller reads the answer as it comes, in a `with` block.

        Raises:
            EngineUnavailable: no connection, or one that broke before the answer's head.
            EngineRefused: an error status, with the engine's own body.
        """
        try:
            answer = await self._http.request("POST", path, body, headers)
            if answer.status >= 400:
                with answer:
                    raise EngineRefused(answer.status, await answer.read())
        except Disconnected as error:
            raise self._unavailable(error) from error
        return answer

    def close(self) -> None:
        """Drop the connections that no call is on."""
        self._http.close()

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"the engine at {self.url} cannot be reached ({str(error) or type(error).__name__}); "
            "check that it runs, then retry: nothing was sampled"
        )

    async def ask(
        self, method: str, path: str, body: Json | None = None, *, seconds: float = 10.0, **query: str
    ) -> Any:
        """Make one short call of the control routes and return its decoded answer.

        Raises:
            EngineUnavailable: no answer in time.
            EngineRefused: an error status.
        """
        data = b"" if body is None else orjson.dumps(body)
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

    @property
    def version(self) -> int:
        """Policy version that calls sample with now."""
        return self.main.version

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Make new calls wait inside the proxy for as long as the block lasts."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def reject_prompt_logprobs(self, body: Json) -> None:
        """Reject requests for prompt logprobs on an engine with LoRA: they end the engine and all its calls.

        A vLLM with LoRA crashes on prompt logprobs as soon as another call runs at the same time. `echo` requests them
        too, on the chat route even without `logprobs`.

        Raises:
            InvalidRequest: naming the field.
        """
        deadly = "prompt_logprobs" if body.get("prompt_logprobs") is not None else "echo" if body.get("echo") else None
        if deadly is not None and (self.has_lora or self.adapters):
            raise InvalidRequest(
                f"`{deadly}` would end the engine, because it was started with LoRA; ask without it, or serve from an "
                "engine that was started without --lora",
                param=deadly,
                code="engine_has_lora",
            )

    async def identify(self) -> None:
        """Learn what model and which adapters it serves."""
        models = (await self.ask("GET", "/v1/models"))["data"]
        self.model, self.model_path = str(models[0]["id"]), str(models[0].get("root") or models[0]["id"])
        served = {version for model in models if (version := adapter_version(str(model["id"]))) is not None}
        known = self.adapters
        self.adapters = {version: known[version] for version in known if version in served}
        for version in sorted(served - known.keys()):
            self.adapters[version] = Lane(self, version, adapter_name(version))

    async def pause(self) -> None:
        """Stop sampling; running calls are kept, new ones queue."""
        await self.ask("POST", "/pause", mode="keep", clear_cache="true")

    async def is_paused(self) -> bool:
        """Say whether sampling is stopped; an engine that does not know of pausing never is."""
        try:
            answer = await self.ask("GET", "/is_paused")
        except EngineRefused:
            return False
        return isinstance(answer, dict) and bool(answer.get("is_paused"))

    async def load_weights(self, path: str, *, seconds: float) -> None:
        """Replace all weights by those of a checkpoint directory.

        Raises:
            ReloadFailed: the engine would not take them.
        """
        body: Json = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        try:
            await self.ask("POST", "/collective_rpc", body, seconds=seconds)
        except EngineRefused as refused:
            raise ReloadFailed(f"the engine at {self.url} would not load {path!r}: {refused}") from refused

    async def label_weights(self, label: int | str) -> None:
        """Tell the engine which version its own weights are."""
        await self.ask("POST", "/update_weight_version", {"new_version": str(label)})
        self.take_label(str(label))

    def take_label(self, label: str | None) -> None:
        """Learn from the label of its weights what they are."""
        if label == LOADING:
            self.holds = None
            return
        self.holds = int(label) if label is not None and label.isdigit() else UNLABELLED
        self.own.version = max(self.holds, 0)

    async def weights_label(self) -> str | None:
        """Return the label of its weights, None from an engine that keeps none."""
        try:
            answer = await self.ask("GET", "/weight_info")
        except EngineRefused:
            return None
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if label is None else str(label)

    async def resume(self) -> None:
        """Sample on."""
        await self.ask("POST", "/resume")

    async def load_adapter(self, version: int, path: str, *, seconds: float) -> Lane:
        """Load a LoRA adapter beside what is served, under a name of its own; one that is there already stays.

        Raises:
            ReloadFailed: the engine would not take it.
        """
        await self.identify()
        if version not in self.adapters:
            body: Json = {"lora_name": adapter_name(version), "lora_path": path}
            try:
                await self.ask("POST", "/v1/load_lora_adapter", body, seconds=seconds)
            except EngineRefused as refused:
                raise ReloadFailed(
                    f"the engine at {self.url} would not load the adapter {path!r}: {refused}; "
                    "an engine takes adapters if it was started with `turnwise engine --lora`"
                ) from refused
            self.adapters[version] = Lane(self, version, adapter_name(version))
        return self.adapters[version]

    async def unload_adapter(self, version: int) -> None:
        """Drop a LoRA adapter; one that is gone already is fine."""
        with contextlib.suppress(EngineRefused):
            await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})
        self.adapters.pop(version, None)


def adapter_name(version: int) -> str:
    """Return the name that a policy version's adapter is served under."""
    return f"{ADAPTER_PREFIX}{version}"


def adapter_version(name: str) -> int | None:
    """Return the policy version of an adapter's name, None for any other model."""
    digits = name.removeprefix(ADAPTER_PREFIX)
    return int(digits) if digits != name and digits.isdigit() else None


class Arm(Protocol):
    """A version under trial: it says which sessions are sampled with it."""

    @property
    def version(self) -> int:
        """The version."""

    def takes(self, session: Session) -> bool:
        """Say whether the session is one of the trial's."""


class EnginePool:
    """All engines: which lane each session's calls take, and how many calls there are at once."""

    def __init__(self, urls: list[str], metrics: Metrics, *, timeout_seconds: float, max_concurrent_calls: int) -> None:
        self.engines = [Engine(url, timeout_seconds=timeout_seconds) for url in urls]
        self.trial: Arm | None = None
        """The canary under way: the version that only its share of the sessions samples with."""
        self._metrics = metrics
        self._max_concurrent_calls = max_concurrent_calls
        self._in_flight = 0

    @property
    def healthy(self) -> list[Engine]:
        """Engines that may get calls."""
        return [engine for engine in self.engines if engine.healthy]

    def route(self, key: str) -> Engine:
        """Return the healthy engine of a session or of any other key.

        Raises:
            EngineUnavailable: when none is healthy.
        """
        return self._choose(key, [engine.main for engine in self.healthy]).engine

    def lane(self, session: Session) -> Lane:
        """Return what the session's calls sample with now.

        Raises:
            EngineUnavailable: when no engine is healthy.
        """
        healthy, trial = self.healthy, self.trial
        healthy = [engine for engine in healthy if not engine.draining] or healthy
        lanes = [engine.main for engine in healthy]
        if trial is not None:
            tried = [lane for lane in lanes if lane.version == trial.version]
            tried = tried or [engine.adapters[trial.version] for engine in healthy if trial.version in engine.adapters]
            control = [lane for lane in lanes if lane.version != trial.version]
            # Where one arm has no engine left, its sessions are better served by the other than not at all.
            lanes = (tried if trial.takes(session) else control) or lanes
        return self._choose(session.session_id, lanes)

    def _choose(self, key: str, lanes: list[Lane]) -> Lane:
        if not lanes:
            addresses = ", ".join(engine.url for engine in self.engines)
            raise EngineUnavailable(f"no engine is ready ({addresses}); check /readyz and the engine's log, then retry")
        if len(lanes) == 1:
            return lanes[0]
        return max(lanes, key=lambda lane: blake2b(f"{lane.engine.url} {key}".encode(), digest_size=8).digest())

    def let_all_in(self) -> None:
        """Let new calls go to every engine again."""
        for engine in self.engines:
            engine.draining = False

    async def admit(self, session: Session) -> Lane:
        """Take a place among the concurrent calls, wait out a reload, and return the lane that the call takes.

        Who was admitted gives the lane to `release`, once.

        Raises:
            Overloaded: when there is no place.
            EngineUnavailable: when no engine is healthy.
        """
        if self._in_flight >= self._max_concurrent_calls:
            raise Overloaded(f"{self._in_flight} calls are in flight, which is the limit; retry after a second")
        self._count(1)
        try:
            lane = self.lane(session)
            while not lane.engine.gate.is_set():
                await lane.engine.gate.wait()
                # While it waited, its engine may have gone, or its version have been withdrawn.
                lane = self.lane(session)
        except BaseException:
            self._count(-1)
            raise
        lane.num_calls += 1
        if self.trial is not None:
            arm = "canary" if lane.version == self.trial.version else "control"
            self._metrics.canary_calls.labels(arm).inc()
        return lane

    def release(self, lane: Lane) -> None:
        """Give the place of a call back."""
        lane.num_calls -= 1
        self._count(-1)

    def _count(self, change: int) -> None:
        self._in_flight += change
        self._metrics.in_flight.set(self._in_flight)

    def close(self) -> None:
        """Drop all connections that no call is on."""
        for engine in self.engines:
            engine.close()
