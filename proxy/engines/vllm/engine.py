"""A vLLM process: the routes of vLLM, and of Turnwise's plug-in in it, that the proxy calls, and what they take.

vLLM always returns token ids and logprobs. They are captured, and stay in the reply only if the client asked for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from proxy.dialects.base import Call, Captured
from proxy.engines.engine import Engine
from proxy.engines.http_client import Answer
from proxy.engines.vllm import requirements
from proxy.engines.vllm.reply import read_parts, without_thinking
from proxy.sessions.place import Place
from turnwise.errors import EngineRefused, EngineUnavailable, InvalidRequest
from turnwise.json_text import dumps
from turnwise.types import TOOL_GRAMMAR, Json
from turnwise.verify.engine import CHAT_ROUTE, logprobs_request, read_logprobs

FORCED: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "include_reasoning": True}
"""Request fields that capture always sets on the chat route."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this."""
LACKS_TRANSFERS = ("Weight transfer not configured", "Invalid init_info")
"""What vLLM answers without weight transfers, and with another backend than the plug-in's."""


class Vllm(Engine):
    """One vLLM process."""

    own_fields: ClassVar[frozenset[str]] = frozenset(
        {
            *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority", "request_id", "data_parallel_rank"),
            *("mm_payload", "return_mm_kwargs", "routed_experts_prompt_start", "stream_interval", "prompt_embeds"),
        }
    )
    has_lora = False
    """Whether it was started with LoRA, so that requests for prompt logprobs must not reach it."""
    returns_routing = False
    """Whether one of its replies had the experts of its tokens."""
    has_tool_grammar = True
    """Whether it samples strict tool calls, and single ones, under a grammar; True also where that is unknown."""
    defaults: Mapping[str, object] = {}
    """Sampling parameters that it uses where a request sets none, as far as they are not neutral."""

    @property
    def may_have_lora(self) -> bool:
        return self.has_lora or bool(self.adapters)

    async def check_features(self) -> None:
        """Find out what it was started with, and check that it meets the requirements of exact capture.

        Raises:
            EngineUnsuitable: naming what is missing and how to get it.
            EngineUnavailable: no answer.
        """
        self.has_lora = await requirements.has_lora(self)
        await requirements.check_capture(self)
        self.defaults = await requirements.find_sampling_defaults(self)
        self.dtype, self.has_tool_grammar = await requirements.read_server_info(self)

    async def sample(self, call: Call, place: Place, model: str, headers: dict[str, str]) -> Answer:
        """Send a call."""
        body = request(call, place, returns_routing=self.returns_routing)
        body["model"] = model
        if self.may_have_lora:
            reject_prompt_logprobs(body)
        return await self.post(call.dialect.engine_route, dumps(body), headers)

    def effective_sampling(self, call: Call) -> Json:
        """Return how it samples a call: the call's parameters, its own defaults, and what it makes of both."""
        sampling = call.sampling
        unset = {name: value for name, value in self.defaults.items() if sampling.get(name) is None}
        temperature = sampling.get("temperature", unset.get("temperature"))
        if isinstance(temperature, int | float) and 0 < temperature < LOWEST_TEMPERATURE:
            unset["temperature"] = LOWEST_TEMPERATURE
        if self.has_tool_grammar and wants_tool_grammar(call):
            unset[TOOL_GRAMMAR] = True
        return {**sampling, **unset} if unset else sampling

    def read_reply(self, parts: list[bytes], captured: Captured, call: Call, place: Place) -> list[bytes]:
        """Capture a whole reply, or chunks of a stream."""
        shown = read_parts(
            parts,
            captured,
            place.prompt,
            shows_logprobs=call.wants_logprobs,
            shows_token_ids=call.wants_token_ids,
            shows_empty=call.wants_logprobs or call.wants_token_ids or not call.stream,
        )
        self.returns_routing |= captured.has_routing
        return list(map(without_thinking, shown)) if call.hides_thinking else shown

    async def tokenise(self, request: Json) -> list[int]:
        """Return the prompt of a chat request."""
        answer = await self.ask("POST", "/tokenize", request)
        if not isinstance(answer, dict) or "tokens" not in answer:
            raise EngineUnavailable(f"the engine at {self.url} answered no tokens: {str(answer)[:80]!r}; retry")
        return list(answer["tokens"])

    async def token_logprobs(
        self, model: str, token_ids: list[int], positions: list[int], parameters: Json | None = None
    ) -> list[float]:
        """Return the logprobs of some of a text's tokens, each given the tokens before it, under a served model."""
        body = logprobs_request(model, token_ids, positions, parameters or {})
        reply = await self.ask("POST", "/v1/completions", body, seconds=60.0)
        return read_logprobs(reply, token_ids, positions)

    async def pause(self) -> None:
        """Stop sampling; running calls are kept, new ones queue."""
        await self.ask("POST", "/pause", mode="keep", clear_cache="true")

    async def is_paused(self) -> bool:
        """Return whether sampling is stopped; False from an engine without that route."""
        return await self._is("paused")

    async def resume(self) -> None:
        """Continue sampling."""
        await self.ask("POST", "/resume")

    async def is_sleeping(self) -> bool:
        """Return whether it gave up its memory; False from an engine without sleep mode."""
        return await self._is("sleeping")

    async def _is(self, state: str) -> bool:
        try:
            answer = await self.ask("GET", f"/is_{state}")
        except EngineRefused:
            return False
        return isinstance(answer, dict) and bool(answer.get(f"is_{state}"))

    async def sleep(self, level: int, *, seconds: float) -> None:
        """Stop sampling and give up memory; running calls are kept, new ones queue."""
        await self.ask("POST", "/sleep", seconds=seconds, level=str(level), mode="keep")

    async def wake(self, part: str, *, seconds: float) -> None:
        """Take back memory: `weights`, or `kv_cache`; sampling resumes once the engine has both."""
        await self.ask("POST", "/wake_up", seconds=seconds, tags=part)

    async def load_weights(self, path: str, *, seconds: float) -> None:
        """Replace the base weights with those of a checkpoint directory."""
        body: Json = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        with self.loading(repr(path)):
            await self.ask("POST", "/collective_rpc", body, seconds=seconds)

    async def num_workers(self) -> int:
        """Return how many processes hold a part of its model."""
        return int((await self.ask("GET", "/get_world_size"))["world_size"])

    async def receive_weights(self, init_info: Json, *, seconds: float) -> None:
        """Start to receive a version from a trainer, beside the running calls."""
        await self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info}, seconds=seconds)

    async def load_received(self, version: int, *, seconds: float) -> None:
        """Replace the base weights with a version that it received."""
        with self.loading(f"version {version}, which it had received"):
            try:
                await self.ask("POST", "/start_weight_update", seconds=seconds)
            except EngineRefused:  # a process that died had started an update
                await self.ask("POST", "/finish_weight_update", {}, seconds=seconds)
                await self.ask("POST", "/start_weight_update", seconds=seconds)
            await self.ask("POST", "/update_weights", {"update_info": {"version": version}}, seconds=seconds)
            await self.ask("POST", "/finish_weight_update", {}, seconds=seconds)

    @staticmethod
    def says_it_takes_no_weights(refused: EngineRefused) -> bool:
        """Return whether the refusal means that it was started without weight transfers."""
        return refused.status in (404, 405) or any(words in str(refused) for words in LACKS_TRANSFERS)

    async def write_label(self, label: str) -> None:
        await self.ask("POST", "/update_weight_version", {"new_version": label})

    async def weights_label(self) -> str | None:
        """Return the label of the base weights, None from an engine that keeps none."""
        try:
            answer = await self.ask("GET", "/weight_info")
        except EngineRefused:
            return None
        label = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if label is None else str(label)

    async def add_adapter(self, name: str, path: str, *, seconds: float) -> None:
        body: Json = {"lora_name": name, "lora_path": path}
        await self.ask("POST", "/v1/load_lora_adapter", body, seconds=seconds)

    async def remove_adapter(self, name: str) -> None:
        with contextlib.suppress(EngineRefused):
            await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})


def request(call: Call, place: Place, *, returns_routing: bool) -> Json:
    """Return the request of a call, with the options that capture needs, for `dumps`."""
    body = dict(call.body)
    if call.dialect.engine_route != CHAT_ROUTE:
        logprobs = body.get("logprobs")
        return body | {"return_token_ids": True, "logprobs": 0 if logprobs is None else logprobs}
    if call.messages:
        body["messages"] = orjson.Fragment(call.messages_json)
    # vLLM refuses both of these; capture's options must not change that error.
    is_refused = not body.get("messages") or (body.get("top_logprobs") and not body.get("logprobs"))
    if not is_refused:
        body |= FORCED
    if place.prompt is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": orjson.Fragment(place.prompt.json())}
        if returns_routing and place.parent is not None:
            # Leaves out the experts of earlier turns' tokens. The last token before this turn's own was not routed when
            # it was sampled, so its experts are this turn's.
            body["routed_experts_prompt_start"] = place.prompt.num_ids - len(place.between) - 1
    return body


def reject_prompt_logprobs(body: Json) -> None:
    """Reject a request that would crash an engine with LoRA.

    A vLLM with LoRA crashes on logprobs of the prompt's own tokens while another call runs. `echo` asks for them too,
    in chat even without `logprobs`.

    Raises:
        InvalidRequest: naming the field.
    """
    field = "prompt_logprobs" if body.get("prompt_logprobs") is not None else "echo" if body.get("echo") else None
    if field is not None:
        raise InvalidRequest(
            f"`{field}` would crash the engine, because it was started with LoRA; send the request without it, or "
            "serve from an engine that was started without --lora",
            param=field,
            code="engine_has_lora",
        )


def wants_tool_grammar(call: Call) -> bool:
    """Return whether vLLM, where it enforces strict tools, samples the call under a grammar that it does not name.

    With `tool_choice` "auto", it attaches a structural tag if a tool is strict or only one call is allowed.
    """
    tools = call.tools
    if not tools or call.body.get("tool_choice") not in (None, "auto"):
        return False
    if call.body.get("parallel_tool_calls") is False:
        return True
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return any(isinstance(function, dict) and bool(function.get("strict")) for function in functions)
