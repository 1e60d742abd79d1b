"""Compaction in OpenAI's Responses: the trigger, the route `/v1/responses/compact`, and what `context_management` adds.

The item of a summary is opaque to clients. What stands before the last one of a request is left out: replies and calls
always, and messages of users where the proxy has made the summary of its own accord.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from proxy.dialects.base import SYSTEM_ROLES, Call
from proxy.features.compaction.calls import (
    Form,
    Managed,
    ManagedCall,
    Summary,
    ask,
    is_summary,
    know_task,
    resumed,
    said,
)
from proxy.features.compaction.edits import FIELD, read_thresholds
from proxy.features.compaction.texts import (
    KEPT_ROLES,
    PROMPT,
    framed,
    is_framed,
    seal,
    unseal,
    without_prompt,
)
from proxy.features.formats.blocks import Block, own_id
from proxy.features.formats.response_items import ToolMap, is_reference, read_tools
from proxy.features.formats.responses import ResponseEncoder, Responses
from proxy.routes.calls import SESSION
from turnwise.errors import InvalidRequest, TurnwiseError
from turnwise.image_urls import IMAGE_URL
from turnwise.json_text import dumps
from turnwise.store.turns import TurnView
from turnwise.types import Json, Turn

TRIGGER = "compaction_trigger"
ITEMS = ("compaction", "compaction_summary")
"""Types of the item of a summary; the second is Codex's earlier name."""
PREFIX = "cmp"


class ManagedResponses(Managed, Responses):
    """OpenAI's Responses with compaction."""

    call_type = ManagedCall

    def parse(self, body: Json, *, failed_tool_text: str = "") -> ManagedCall:
        edits = read_thresholds(body.get(FIELD))
        items, is_asked, continued = read_items(body.get("input"))
        call = super().parse({**body, "input": items}, failed_tool_text=failed_tool_text)
        assert isinstance(call, ManagedCall)
        know_task(call)
        call.continued = continued
        if is_asked:
            ask(call, Form.REPLY, PROMPT)
        else:
            call.edits = edits
        return call

    def encode_with(self, call: ManagedCall) -> None:
        if call.form is not None:
            call.encode_with(partial(SummaryEncoder, call.original, call.headers))
        elif call.summary is not None:
            tools = read_tools(call.original.get("tools"))
            call.encode_with(partial(AfterSummaryEncoder, call.original, tools, item_before(call.summary)))

    def encode_reply(self, reply: bytes, call: Call) -> bytes:
        assert isinstance(call, ManagedCall)
        if call.form is Form.ENGINES:
            return reply
        if call.form is None and call.summary is None:
            return super().encode_reply(reply, call)
        decoded = msgspec.json.decode(reply)
        choice = decoded["choices"][0]
        if call.summary is not None:
            response = msgspec.json.decode(self._encoded(decoded, call.original))
            response["output"].insert(0, item_before(call.summary))
            return dumps(response)
        text, reply_id = said(choice.get("message")), own_id(decoded["id"], self.id_prefix)
        if choice.get("finish_reason") == "length":
            choice["finish_reason"] = "stop"  # its item has no status
        item = summary_item(text, reply_id, call.headers.get(SESSION))
        response = msgspec.json.decode(self._encoded(decoded, call.original))
        if call.form is Form.REPLY:
            return dumps(response | {"output": [item]})
        window = [*asked_items(call, reply_id), item]
        compacted = {name: response[name] for name in ("id", "created_at", "usage")}
        return dumps({**compacted, "object": "response.compaction", "output": window})

    def encode_stored(self, turn: Turn) -> bytes:
        stored = super().encode_stored(turn)
        if not is_summary(turn):
            return stored
        item = summary_item(said(turn.response), turn.turn_id, turn.session_id)
        return dumps(msgspec.json.decode(stored) | {"output": [item]})

    def resume(self, call: Call, earlier: TurnView) -> None:
        super().resume(call, resumed(earlier, KEPT_ROLES))

    def referenced_turns(self, body: Json) -> list[str]:
        items = body["input"] if isinstance(body.get("input"), list) else []
        own = [turn_id for item in filter(is_reference, items) if (turn_id := _summary_turn(item))]
        return [*super().referenced_turns(body), *own]

    def resolve_references(self, body: Json, stored: Mapping[str, Json]) -> Json:
        body = super().resolve_references(body, stored)
        return {**body, "input": [_resolved(item, stored) for item in body["input"]]}


class CompactRoute(ManagedResponses):
    """The route that answers with the items that the next request begins with."""

    def parse(self, body: Json, *, failed_tool_text: str = "") -> ManagedCall:
        for field in ("stream", FIELD):
            if body.get(field):
                raise InvalidRequest(
                    f"`{field}` is not served here: the answer is one summary, sent whole", param=field
                )
        given = body.get("input")
        call = super().parse({**body, "input": [] if given is None else given}, failed_tool_text=failed_tool_text)
        if call.form is None:
            ask(call, Form.WINDOW, PROMPT)
        call.form = Form.WINDOW
        return call


class SummaryEncoder(ResponseEncoder):
    """Writes the events of a reply that is a summary: one item, which is complete when the reply is."""

    def __init__(self, request: Json, headers: Mapping[str, str]) -> None:
        super().__init__(request, ToolMap())
        self._headers = headers

    def starting(self, chunk: Json) -> bytes:
        events = super().starting(chunk)
        return events + self._event("response.output_item.added", output_index=0, item=self._item(""))

    def opening(self, block: Block) -> bytes:  # noqa: ARG002  its text is no block of its own
        return b""

    def growing(self, block: Block, text: str, logprobs: list[Json]) -> bytes:  # noqa: ARG002
        item_id = self._item("")["id"]
        return self._event("response.compaction.compacting", item_id=item_id, output_index=0)

    def closing(self, block: Block) -> bytes:  # noqa: ARG002
        return b""

    def ending(self) -> bytes:
        texts = [block.text for block in self.assembler.blocks if block.kind == "text"]
        try:
            item = self._items[0] = self._item(said({"content": "".join(texts)}))
        except TurnwiseError as error:
            return self.failing({"message": str(error)}, 503)
        if self.finish_reason == "length":
            self.finish_reason = "stop"
        return self._event("response.output_item.done", output_index=0, item=item) + super().ending()

    def _item(self, text: str) -> Json:
        item = summary_item(text, self._response["id"], self._headers.get(SESSION))
        return item if text else item | {"encrypted_content": ""}


class AfterSummaryEncoder(ResponseEncoder):
    """Writes the events of a reply behind the item of the summary that it goes on from."""

    def __init__(self, request: Json, tools: ToolMap, item: Json) -> None:
        super().__init__(request, tools)
        self._before = item

    def starting(self, chunk: Json) -> bytes:
        events, item = super().starting(chunk), self._before
        self._items[-1] = item
        added = self._event("response.output_item.added", output_index=-1, item=item | {"encrypted_content": ""})
        return events + added + self._event("response.output_item.done", output_index=-1, item=item)

    def _event(self, name: str, /, **data: Any) -> bytes:
        if "output_index" in data:
            data["output_index"] += 1
        return super()._event(name, **data)


def read_items(given: Any) -> tuple[Any, bool, str | None]:
    """Return the items of a request with the message that stands for its last summary.

    Returns:
        The items, whether they end with a trigger, and the session of the summary.

    Raises:
        InvalidRequest: a trigger is not the last item, or a summary is another service's.
    """
    if not isinstance(given, list):
        return given, False, None
    kinds = [item.get("type", "message") if isinstance(item, dict) else None for item in given]
    if TRIGGER in kinds[:-1]:
        raise InvalidRequest(f"a `{TRIGGER}` must be the last item of `input`", param="input")
    is_asked = kinds[-1:] == [TRIGGER]
    items = given[:-1] if is_asked else given
    last = max((index for index, kind in enumerate(kinds) if kind in ITEMS), default=None)
    if last is None:
        return items, is_asked, None
    sealed = unseal(items[last].get("encrypted_content"))
    if sealed is None or not isinstance(sealed.get("summary"), str):
        raise InvalidRequest(
            "the `encrypted_content` of a compaction item is not this proxy's, so what it stands for cannot be read; "
            "send the messages themselves, or go on where it was made",
            param="input",
            code="compaction_unreadable",
        )
    roles = SYSTEM_ROLES if sealed.get("whole") else KEPT_ROLES
    kept = [
        item
        for item, kind in zip(items[:last], kinds[:last], strict=True)
        if kind == "message" and item.get("role") in roles
    ]
    return [*kept, framed(sealed["summary"]), *items[last + 1 :]], is_asked, sealed.get("session")


def summary_item(text: str, reply_id: str, session_id: str | None, *, whole: bool = False) -> Json:
    """Return the item of a summary; `whole` says that it stands for the messages of users too."""
    sealed = seal(summary=text, whole=whole, session=session_id)
    item_id = f"{PREFIX}_{own_id(reply_id, Responses.id_prefix).partition('_')[2]}_{int(whole)}"
    return {"id": item_id, "type": "compaction", "encrypted_content": sealed}


def item_before(summary: Summary) -> Json:
    return summary_item(summary.text, summary.reply_id, summary.session_id, whole=True)


def asked_items(call: ManagedCall, reply_id: str) -> Iterable[Json]:
    """Return the messages of the user in a call's conversation, as items."""
    for index, message in enumerate(without_prompt(call.messages, call.prompt)):
        if message.get("role") == "user" and not is_framed(message):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            shown = [_input_part(part, call) for part in parts]
            item_id = f"asked_{reply_id.partition('_')[2]}_{index}"
            yield {"id": item_id, "type": "message", "role": "user", "status": "completed", "content": shown}


def _input_part(part: Json, call: ManagedCall) -> Json:
    if part.get("type") != "image_url":
        return {"type": "input_text", "text": part.get("text") or ""}
    url = str(part["image_url"]["url"])
    if (image := call.images.get(url.removeprefix(IMAGE_URL))) is not None:
        url = f"data:{image.media_type};base64,{base64.b64encode(image.content).decode()}"
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _summary_turn(reference: Json) -> str:
    """Return the turn whose summary a reference names; empty for another reference."""
    prefix, _, rest = str(reference.get("id")).partition("_")
    return f"{Responses.id_prefix}{rest.rpartition('_')[0]}" if prefix == PREFIX else ""


def _resolved(item: Any, stored: Mapping[str, Json]) -> Any:
    if not is_reference(item) or (turn_id := _summary_turn(item)) not in stored:
        return item
    return summary_item(said(stored[turn_id]), turn_id, None, whole=str(item["id"]).endswith("_1"))
