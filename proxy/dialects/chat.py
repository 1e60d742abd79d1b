"""`/v1/chat/completions`: the engine's own dialect, and the one that all others but completions become.

The engine is always asked for token ids and logprobs; they are taken out for the ledger here, and left in the reply
only where the client wanted them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.dialects import engine_reply
from proxy.dialects.base import Call, Captured, Choice
from turnwise.errors import InvalidRequest
from turnwise.types import Json, TokenIds

FORCED: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "include_reasoning": True}
"""What the engine is always asked for, whatever the client said."""
JSON_NAME: Mapping[type, str] = {list: "array", dict: "object", str: "string"}


class ChatCompletions:
    """OpenAI's chat completions, as vLLM speaks them."""

    name = "chat"
    route = "/v1/chat/completions"
    engine_route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: Json, *, max_choices: int, max_messages: int) -> Call:
        """Check what the proxy itself relies on; the engine judges the rest.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """
        messages = body.get("messages") or []
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("`messages` must be a list of objects.", param="messages")
        if len(messages) > max_messages:
            raise InvalidRequest(
                f"`messages` has {len(messages)} entries; at most {max_messages} are served.", param="messages"
            )
        check_kinds(body, {"tools": list, "chat_template_kwargs": dict, "metadata": dict, "model": str})
        check_kinds(body, {"kv_transfer_params": dict})
        return Call(
            dialect=self,
            body=body,
            messages=messages,
            stream=bool(body.get("stream")),
            num_choices=number_of_choices(body, max_choices),
            wants_logprobs=bool(body.get("logprobs")) and not _hides_thinking(body),
            wants_token_ids=bool(body.get("return_token_ids")),
        )

    def engine_body(self, call: Call, prompt_token_ids: TokenIds | None, pinned: Json) -> Json:
        """Return what the engine is asked, so that it tells everything that capture needs."""
        body = {**call.body, **pinned}
        if not _is_refused(body):
            body |= FORCED
        if prompt_token_ids is not None:
            body["kv_transfer_params"] = {
                **(body.get("kv_transfer_params") or {}),
                "prompt_token_ids": prompt_token_ids,
            }
        return body

    def take_reply(self, raw: bytes, call: Call) -> tuple[Captured, bytes]:
        """Capture a whole reply, and return it without what the client did not ask for.

        Raises:
            msgspec.DecodeError: it is no chat completion.
        """
        said = engine_reply.read_reply(raw, has_one_choice=call.num_choices == 1)
        captured = Captured(said.reply.prompt_token_ids or [], model=said.reply.model or "")
        for position, choice in enumerate(said.reply.choices):
            captured.choices[choice.index] = Choice(
                choice.message or {}, choice.token_ids or [], said.logprobs[position:][:1], choice.finish_reason
            )
        shown = said.raw if call.wants_logprobs else said.rest
        shown = shown if call.wants_token_ids else engine_reply.without_ids(shown)
        return captured, _without_thinking(shown, "message") if _hides_thinking(call.body) else shown

    def take_chunks(self, events: list[bytes], captured: Captured, call: Call) -> list[bytes]:
        """Capture chunks of a stream, and return those that the client would have got, stripped.

        Raises:
            msgspec.DecodeError: one is no chunk of a chat completion.
        """
        shown = []
        has_one_choice, shows_all = call.num_choices == 1, call.wants_logprobs or call.wants_token_ids
        for event in events:
            said = engine_reply.read_reply(event, has_one_choice=has_one_choice)
            if _take_chunk(said, captured) or shows_all:
                shown.append(event if call.wants_logprobs else said.rest)
        if shown and not call.wants_token_ids:
            shown = engine_reply.without_ids(b"\n".join(shown)).split(b"\n")
        return [_without_thinking(chunk, "delta") for chunk in shown] if _hides_thinking(call.body) else shown

    def encode_reply(self, reply: bytes, call: Call) -> bytes:  # noqa: ARG002  the engine's words are the client's
        """Return the reply as it is."""
        return reply

    def encode_error(self, status: int, body: bytes) -> bytes:  # noqa: ARG002  as above
        """Return the error as it is."""
        return body


def check_kinds(body: Json, kinds: Mapping[str, type]) -> None:
    """Check the JSON types of fields that the proxy itself reads.

    Raises:
        InvalidRequest: naming the first that is wrong.
    """
    for field, kind in kinds.items():
        if body.get(field) is not None and not isinstance(body[field], kind):
            raise InvalidRequest(f"`{field}` must be a JSON {JSON_NAME[kind]}, not {body[field]!r:.80}.", param=field)


def number_of_choices(body: Json, max_choices: int) -> int:
    """Return `n`.

    Raises:
        InvalidRequest: it is no integer, or above `max_choices`; the engine refuses what is below 1.
    """
    count = body.get("n")
    if count is None:
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or count > max_choices:
        raise InvalidRequest(f"`n` must be an integer from 1 to {max_choices}, not {count!r}.", param="n")
    return max(count, 1)


def _hides_thinking(body: Json) -> bool:
    """Say whether the client wants no thinking, for which vLLM keeps ids and logprobs of the reply to itself too."""
    return body.get("include_reasoning") is False


def _is_refused(body: Json) -> bool:
    """Say whether the engine refuses the request, so that what is forced must not change its words, or its mind."""
    return not body.get("messages") or (bool(body.get("top_logprobs")) and not body.get("logprobs"))


def _without_thinking(raw: bytes, field: str) -> bytes:
    """Take the thinking out, and the token ids that would tell it, as vLLM does for who does not want it."""
    reply = engine_reply.decoded(raw)
    for choice in reply["choices"]:
        said = choice[field]
        if "token_ids" in choice:
            choice["token_ids"] = None
        if field == "message" or (said and "role" not in said):
            said["reasoning"] = None
    return orjson.dumps(reply)


def _take_chunk(said: engine_reply.Extracted, captured: Captured) -> bool:
    """Capture a chunk, and say whether it tells something to a client that wants the text alone."""
    chunk = said.reply
    if chunk.prompt_token_ids:
        captured.prompt_token_ids, captured.model = chunk.prompt_token_ids, chunk.model or ""
    tells = not chunk.choices
    for position, told in enumerate(chunk.choices):
        choice = captured.choice(told.index)
        if told.token_ids:
            choice.token_ids += told.token_ids
        if said.logprobs:
            choice.logprobs.append(said.logprobs[position])
        if told.finish_reason is not None:
            choice.finish_reason, tells = told.finish_reason, True
        if told.delta:
            tells = True
            for field, value in told.delta.items():
                _join(choice.message, field, value)
    return tells


def _join(message: Json, field: str, value: Any) -> None:
    """Add a delta's field to the message that it is a part of."""
    if field == "tool_calls":
        for part in value or ():
            _join_call(message.setdefault("tool_calls", []), part)
    elif isinstance(value, str) and field != "role":
        message[field] = (message.get(field) or "") + value
    elif value is not None:
        message[field] = value


def _join_call(calls: list[Json], part: Json) -> None:
    index = part.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
