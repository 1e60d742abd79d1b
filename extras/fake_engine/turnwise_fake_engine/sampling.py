"""Convert a request to sampled tokens, each with the part of the message that it adds.

The whole reply is known before its first byte is sent. It consists of spans (thinking, text, the parts of a tool call)
whose tokens are cut at stop strings and the length limit. The whole message and the stream are made from the same
pieces, as in a real engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from turnwise_fake_engine import tokens
from turnwise_fake_engine.examples import example_of
from turnwise_fake_engine.script import Reply, ToolCall

Json = dict[str, Any]

FORCING_BIAS = 50.0
"""A token with at least this bias is certain."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One sampled token."""

    token_id: int
    text: str
    """The text that it adds; empty while a character is incomplete."""
    kind: str
    """Kind of its part: reasoning, content, name, arguments, or markup, which is not sent to clients."""
    call: int = -1
    """Index of its tool call."""
    name: str | None = None
    """The tool's name, on the token that completes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One sampled choice."""

    pieces: list[Piece]
    finish_reason: str
    """`stop` or `length`."""
    stop_reason: int | str | None
    """The stop string or stop token that ended it."""

    @property
    def token_ids(self) -> list[int]:
        """All token ids, with the end of turn."""
        return [piece.token_id for piece in self.pieces]

    def text(self, kind: str, call: int = -1) -> str:
        """Return the text of one kind of part."""
        return "".join(piece.text for piece in self.pieces if piece.kind == kind and piece.call == call)

    def raw_text(self) -> str:
        """Return the sampled text with markup, without control tokens."""
        return "".join(piece.text for piece in self.pieces)

    def tool_calls(self) -> list[tuple[str, str]]:
        """Return name and arguments of the tool calls that are complete."""
        closing = tokens.SPECIAL_IDS["</tool_call>"]
        complete = [piece.call for piece in self.pieces if piece.token_id == closing and piece.call >= 0]
        names = {piece.call: piece.name for piece in self.pieces if piece.name is not None}
        return [(str(names[call]), self.text("arguments", call)) for call in complete]


def last_text(messages: list[Json], role: str | None = None) -> str:
    """Return the text of the last message, or of the last one of a role."""
    for message in reversed(messages):
        if role is None or message.get("role") == role:
            return tokens.text_of(message.get("content"))
    return ""


def default_reply(request: Json, *, call_tools: bool) -> Reply:
    """Return the reply without a matching rule."""
    said = last_text(request["messages"], "user")
    choice, tools = request.get("tool_choice"), request.get("tools") or []
    if tools and choice != "none":
        after_user = request["messages"][-1].get("role") == "user"
        if isinstance(choice, dict) or choice == "required" or (call_tools and after_user):
            return Reply(tool_calls=[_call_of(tools, choice, said)])
    schema = requested_schema(request)
    if schema is not None:
        return Reply(text=json.dumps(example_of(schema, said), ensure_ascii=False))
    return Reply(text=said or "Hello.")


def requested_schema(request: Json) -> Json | None:
    """Return the JSON schema that the reply must satisfy; None without one."""
    response_format = request.get("response_format") or {}
    if response_format.get("type") == "json_schema":
        return dict(response_format["json_schema"].get("schema") or {})
    if response_format.get("type") == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    structured = (request.get("structured_outputs") or {}).get("json")
    return json.loads(structured) if isinstance(structured, str) else structured


def _call_of(tools: list[Json], choice: object, said: str) -> ToolCall:
    """Return a call of the tool that the tool choice names, otherwise the user, otherwise of the first tool."""
    wanted = choice["function"]["name"] if isinstance(choice, dict) else None
    functions = [tool["function"] for tool in tools]
    named = [each for each in functions if (each["name"] == wanted if wanted else each["name"] in said)]
    function = (named or functions)[0]
    return ToolCall(name=function["name"], arguments=example_of(function.get("parameters") or {}, said))


def sample(reply: Reply, request: Json, *, max_tokens: int) -> Sample:
    """Return the tokens of a reply, cut at the request's stops and length."""
    forced = _forced_token(request)
    if forced is not None:
        return Sample([Piece(forced, tokens.decode([forced]), "content")] * max_tokens, "length", None)
    pieces = list(_pieces(reply))
    if reply.finish_reason == "stop":
        pieces.append(Piece(tokens.END_OF_TURN, "", "markup"))
    finish_reason, stop_reason = reply.finish_reason, None
    stops = request.get("stop") or []
    found = _first_stop(pieces, [stops] if isinstance(stops, str) else stops, request.get("stop_token_ids") or [])
    if found is not None:
        last, stop_reason = found
        pieces, finish_reason = pieces[: last + 1], "stop"
        if isinstance(stop_reason, str):
            pieces = _without_stop(pieces, stop_reason, keep=bool(request.get("include_stop_str_in_output")))
    if len(pieces) > max_tokens:
        pieces, finish_reason, stop_reason = pieces[:max_tokens], "length", None
    return Sample(pieces, finish_reason, stop_reason)


def _forced_token(request: Json) -> int | None:
    """Return the token that a logit bias forces; None without one."""
    biases = request.get("logit_bias") or {}
    return next((int(token) for token, bias in biases.items() if bias >= FORCING_BIAS), None)


def sample_text(text: str, request: Json, *, max_tokens: int) -> Sample:
    """Return the tokens of a plain text completion."""
    return sample(Reply(text=text), request, max_tokens=max_tokens)


def _pieces(reply: Reply) -> Iterator[Piece]:
    """Yield the tokens of a whole reply in the Hermes format."""
    if reply.reasoning is not None:
        yield from _span("<think>\n", "markup")
        yield from _span(reply.reasoning, "reasoning")
        yield from _span("\n</think>\n\n", "markup")
    yield from _span(reply.text or "", "content")
    for call, tool_call in enumerate(reply.tool_calls):
        if reply.text or call:
            yield from _span("\n", "markup", call)
        yield from _span('<tool_call>\n{"name": ', "markup", call)
        *most, last = _span(json.dumps(tool_call.name), "name", call)
        yield from most
        yield dataclasses.replace(last, name=tool_call.name)
        yield from _span(', "arguments": ', "markup", call)
        arguments = tool_call.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield from _span(text, "arguments", call)
        yield from _span("}\n</tool_call>", "markup", call)


def _span(text: str, kind: str, call: int = -1) -> Iterator[Piece]:
    ids = tokens.encode(text)
    for token_id, piece in zip(ids, tokens.piecewise(ids), strict=True):
        yield Piece(token_id, piece, kind, call)


def _first_stop(pieces: list[Piece], stops: list[str], stop_ids: list[int]) -> tuple[int, int | str] | None:
    """Return the index of the token that completes the first stop, and that stop."""
    if not stops and not stop_ids:
        return None
    text = ""
    for index, piece in enumerate(pieces):
        if piece.token_id in stop_ids:
            return index, piece.token_id
        text += piece.text
        for stop in stops:
            if piece.text and stop in text[-len(stop) - len(piece.text) :]:
                return index, stop
    return None


def _without_stop(pieces: list[Piece], stop: str, *, keep: bool) -> list[Piece]:
    """Clear the text from the start of the stop string on (from its end, to keep it); the tokens stay."""
    text = "".join(piece.text for piece in pieces)
    room = text.rindex(stop) + (len(stop) if keep else 0)
    kept = []
    for piece in pieces:
        kept.append(dataclasses.replace(piece, text=piece.text[: max(room, 0)]))
        room -= len(piece.text)
    return kept


LOWEST_TEMPERATURE = 0.01
"""As in vLLM, which raises lower ones."""


def logprobs_of(token_id: int, temperature: float, *, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Return a token's logprob and the `count` likeliest tokens with theirs, at a temperature."""
    chosen, ranked = _distribution(token_id, max(temperature, LOWEST_TEMPERATURE) if temperature > 0 else 1.0)
    return chosen, list(ranked[:count])


def truncated(token_id: int, temperature: float, top_k: int) -> dict[int, float]:
    """Return the logprobs of all tokens after top-k, the likeliest first; the sampled token is one of those left."""
    chosen, ranked = logprobs_of(token_id, temperature, count=21)
    left = dict(ranked[:top_k])
    if token_id not in left:
        left.popitem()
        left[token_id] = chosen
    log_total = math.log(math.fsum(map(math.exp, left.values())))
    return {each: value - log_total for each, value in left.items()} | {
        each: -9999.0 for each, _ in ranked if each not in left
    }


@functools.lru_cache(maxsize=4096)
def _distribution(token_id: int, temperature: float) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-softmax of fixed logits over 21 tokens; the sampled one is not always the likeliest."""
    others = [(token_id + 7 * rank) % tokens.VOCABULARY_SIZE for rank in range(1, 21)]
    logits = {token_id: 2.0 + token_id % 5} | {other: 4.0 - 0.25 * rank for rank, other in enumerate(others)}
    scaled = {each: logit / temperature for each, logit in logits.items()}
    log_total = math.log(sum(math.exp(value) for value in scaled.values()))
    ranked = sorted(((each, value - log_total) for each, value in scaled.items()), key=lambda pair: -pair[1])
    return scaled[token_id] - log_total, tuple(ranked)
