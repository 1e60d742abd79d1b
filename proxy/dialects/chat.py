"""`/v1/chat/completions`: the engine's own dialect, and the one that all others but completions become.

The engine is always asked for token ids and logprobs; they are taken out for the ledger here, and left in the reply
only where the client wanted them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy import extract
from proxy.call import Call, Captured, Choice
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
        said = extract.read_reply(raw, has_one_choice=call.num_choices == 1)
        captured = Captured(said.reply.prompt_token_ids or [], model=said.reply.model or "")
        for position, choice in enumerate(said.reply.choices):
            captured.choices[choice.index] = Choice(
                choice.message or {}, choice.token_ids or [], said.logprobs[position:][:1], choice.finish_reason
            )
        return captured, _shown(said, call, "message")

    def take_chunks(self, events: list[bytes], captured: Captured, call: Call) -> list[bytes]:
        """Capture chunks of a stream, and return those that the client would have got, stripped.

        Raises:
            msgspec.DecodeError: one is no chunk of a chat completion.
        """
        shown = []
        for event in events:
            said = extract.read_reply(event, has_one_choice=call.num_choices == 1)
            chunk = said.reply
            if chunk.prompt_token_ids:
                captured.prompt_token_ids, captured.model = chunk.prompt_token_ids, chunk.model or ""
            is_shown = not chunk.choices or call.wants_logprobs or call.wants_token_ids
            for position, choice in enumerate(chunk.choices):
                _take_delta(choice, said.logprobs[position:][:1], captured.choice(choice.index))
                is_shown = is_shown or bool(choice.delta) or choice.finish_reason is not None
            if is_shown:
                shown.append(_shown(said, call, "delta"))
        return shown

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


def _shown(said: extract.Extracted, call: Call, field: str) -> bytes:
    """Return what the client asked for of a reply or chunk; `field` holds what its choices say."""
    shown = said.shown(logprobs=call.wants_logprobs, token_ids=call.wants_token_ids)
    return _without_thinking(shown, field) if _hides_thinking(call.body) else shown


def _without_thinking(raw: bytes, field: str) -> bytes:
    """Take the thinking out, and the token ids that would tell it, as vLLM does for who does not want it."""
    reply = extract.decoded(raw)
    for choice in reply["choices"]:
        said = choice[field]
        if "token_ids" in choice:
            choice["token_ids"] = None
        if field == "message" or (said and "role" not in said):
            said["reasoning"] = None
    return orjson.dumps(reply)


def _take_delta(said: extract.EngineChoice, logprobs: list[bytes], choice: Choice) -> None:
    if said.token_ids:
        choice.token_ids += said.token_ids
    choice.logprobs += logprobs
    if said.finish_reason is not None:
        choice.finish_reason = said.finish_reason
    for field, value in (said.delta or {}).items():
        _join(choice.message, field, value)


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
