"""What a call was sampled from: the ids that its parameters left at each token, and the grammar of its tools."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from proxy.calls.steps import CallStep
from turnwise.engine_plugin.features.supports import FIELD
from turnwise.engine_routes import CHAT_ROUTE
from turnwise.sampling import (
    STRICT_TOOLS_ADVICE,
    SUPPORT,
    TOOL_GRAMMAR,
    TRUNCATING,
    enforces_strict_tools,
    grammar_settings,
    most_alternatives,
)
from turnwise.settings import Settings
from turnwise.types import Json

if TYPE_CHECKING:
    from proxy.calls.capture import Running
    from proxy.dialects.base import Call
    from proxy.engines.engine import Engine
    from proxy.services import Services
    from proxy.settings import ProxySettings
    from proxy.writer.process import NewTurn

log = logging.getLogger(__name__)

NAME = FIELD.encode()
NO_PARAMETERS: Json = {"type": "object", "properties": {}}
SHOWN = re.compile(rb',\s*"%b":\s*("[^"]*"|\[[^]]*\])' % NAME)
"""Which ids could be sampled, behind a token's logprob or behind those of all tokens; no text can contain this."""
MOST_ALTERNATIVES = 100
"""Ids of a support that are asked for as alternatives: each takes the engine a hundred bytes of JSON, and a token with
100 of them twice the time."""
TIES = 8
"""Ids that top-k may leave beyond its number: all with the last one's logit."""


class SupportSettings(Settings):
    """What calls ask of the ids that could be sampled."""

    support_ids: int = Field(default=4096, ge=0)
    """Most ids that top-k, top-p and min-p may leave to sample from at a token that is trained; a token with more is
    not. 0 asks the engine for none, and such calls are not trained. An engine without Turnwise's plug-in is asked for
    at most its --max-logprobs and 100."""


class Supports(CallStep):
    """Asks for the support of calls that are sampled from a part of the vocabulary, and notes a grammar of tools."""

    marks = frozenset({"tools", *TRUNCATING})

    def __init__(self, services: Services) -> None:
        assert isinstance(services.settings, SupportSettings)
        self._most = services.settings.support_ids
        self._with_plugin: set[str] = set()
        """The URLs of engines one of whose replies had supports, which our plug-in adds."""
        services.engine_checks.append(self._read_grammars)

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:
        return isinstance(settings, SupportSettings)

    async def _read_grammars(self, engine: Engine) -> None:
        engine.defaults = {**engine.defaults, **grammar_settings(engine.info)}
        if engine.info and enforces_strict_tools(engine.info):
            log.warning("the engine at %s: %s", engine.url, STRICT_TOOLS_ADVICE)

    def sent(self, running: Running) -> None:
        call, lane = running.call, running.lane
        assert lane is not None
        engine = lane.engine
        if call.tools and (found := tool_grammar(call, is_strict=enforces_strict_tools(engine.info))):
            call.notes = call.notes | {TOOL_GRAMMAR: found}
        # `logprob_token_ids` take the place of alternatives.
        if self._most and truncates(call.body, engine.defaults) and not call.body.get("logprob_token_ids"):
            alternatives = 0 if engine.url in self._with_plugin else most_alternatives(engine.info)
            call.engine_fields |= support_request(call, engine.defaults, self._most, alternatives)
            call.hides[SUPPORT] = running.kept[Supports] = SHOWN

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        for turn in turns:
            turn.given[SUPPORT] = ()
        assert running.lane is not None
        url = running.lane.engine.url
        if url not in self._with_plugin and any(NAME in piece for turn in turns for piece in turn.encoded_logprobs):
            self._with_plugin.add(url)


def truncates(sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Return whether a call leaves out a part of the vocabulary; a greedy call has no other id to leave out.

    Args:
        sampling: The call's parameters; those of other types are refused by the engine.
        defaults: The engine's, for parameters that are absent or None.
    """
    for name, acts in TRUNCATING.items():
        value = sampling.get(name)
        if value is None:
            value = defaults.get(name)
        if isinstance(value, int | float) and acts(value):
            temperature = sampling.get("temperature")
            return (defaults.get("temperature") if temperature is None else temperature) != 0
    return False


def support_request(call: Call, defaults: Mapping[str, Any], most: int, num_alternatives: int) -> Json:
    """Return the fields by which a reply says which ids could be sampled at each token.

    An engine with our plug-in says it beside the logprobs. Another one can name the most likely alternatives by their
    ids, where the client does not get them by their texts.

    Args:
        call: The call, whose sampling leaves out a part of the vocabulary.
        defaults: The engine's parameters, for those that the call does not set; a top-k bounds the number of ids.
        most: Most ids of a token.
        num_alternatives: Most alternatives that the engine may be asked for; 0 with our plug-in.
    """
    top_k = call.body.get("top_k")
    top_k = defaults.get("top_k") if top_k is None else top_k
    wanted = min(most, top_k + TIES) if isinstance(top_k, int) and top_k > 0 else most
    fields: Json = {"vllm_xargs": {FIELD: wanted}}
    alternatives = min(wanted, num_alternatives, MOST_ALTERNATIVES)
    if alternatives and not call.wants_logprobs:
        name = "top_logprobs" if call.dialect.engine_route == CHAT_ROUTE else "logprobs"
        fields |= {name: alternatives, "return_tokens_as_token_ids": True}
    return fields


def tool_grammar(call: Call, *, is_strict: bool) -> Json | bool:
    """Return the grammar of tools that vLLM samples a call under, which the call does not name.

    A required or named tool is a JSON schema (vllm/tool_parsers/utils.py: get_json_schema_from_tools), unless the
    engine's parser has a form of its own, whose replies no walk of this schema accepts. An engine that enforces strict
    tools makes a structural tag of its parser's in its place, also where a tool is strict or only one call is allowed.

    Args:
        call: The call.
        is_strict: Whether the engine enforces strict tools.

    Returns:
        The schema; True where only the engine knows the grammar; False where there is none, or `tool_choice` says it.
    """
    choice: Any = call.body.get("tool_choice") or "auto"
    tools = call.tools
    if not tools or choice == "none":
        return False
    functions: list[Any] = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    is_single = call.body.get("parallel_tool_calls") is False
    if choice == "auto":
        is_any_strict = any(isinstance(function, dict) and bool(function.get("strict")) for function in functions)
        return is_strict and (is_single or is_any_strict)
    try:
        schemas = {function["name"]: function.get("parameters") or NO_PARAMETERS for function in functions}
        found = _any_call(schemas, is_single=is_single) if choice == "required" else schemas[choice["function"]["name"]]
    except (TypeError, LookupError, AttributeError):
        return False
    return False if is_strict else found


def _any_call(schemas: Mapping[str, Json], *, is_single: bool) -> Json:
    """Return the schema of a list of calls; the tools' definitions become its own."""
    calls: list[Json] = []
    definitions: Json = {}
    for name, schema in schemas.items():
        definitions |= schema.get("$defs", {})
        parameters = {field: value for field, value in schema.items() if field != "$defs"}
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    found: Json = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    return found | ({"maxItems": 1} if is_single else {}) | ({"$defs": definitions} if definitions else {})
