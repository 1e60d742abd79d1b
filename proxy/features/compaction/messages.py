"""Context management in Anthropic's Messages: edits, compaction on demand, and the block of a summary.

What stands before the last block with a summary is left out, save messages of the system. A block without one says that
a compaction has failed, and stands for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from proxy.dialects.base import SYSTEM_ROLES, Call
from proxy.dialects.chat import check_kinds
from proxy.features.compaction.calls import Form, Managed, ManagedCall, Summary, ask, know_task, resumed, said
from proxy.features.compaction.edits import FIELD, prompt_of, read_edits
from proxy.features.compaction.texts import framed, seal, unseal
from proxy.features.formats.blocks import Block
from proxy.features.formats.messages import MessageEncoder, Messages, is_cut_off, usage_of
from proxy.routes.calls import SESSION
from turnwise.errors import InvalidRequest, TurnwiseError
from turnwise.store.turns import TurnView
from turnwise.types import Json

ON_DEMAND = "compaction"
"""The field that asks for a summary, and the type of its block."""


class ManagedMessages(Managed, Messages):
    """Anthropic's Messages with context management."""

    call_type = ManagedCall

    def parse(self, body: Json, *, failed_tool_text: str = "") -> ManagedCall:
        edits, wanted = read_edits(body.get(FIELD)), read_on_demand(body)
        messages, continued = read_messages(body.get("messages"))
        own = {name: value for name, value in body.items() if name != ON_DEMAND}
        call = super().parse(own | {"messages": messages}, failed_tool_text=failed_tool_text)
        assert isinstance(call, ManagedCall)
        know_task(call)
        call.continued, call.edits = continued, edits
        call.applied = None if body.get(FIELD) is None else []
        if wanted is not None:
            ask(call, Form.REPLY, prompt_of(wanted))
        return call

    def count_request(self, body: Json, *, failed_tool_text: str = "") -> Json:
        read_on_demand(body)
        own = {name: value for name, value in body.items() if name != ON_DEMAND}
        messages, _ = read_messages(body.get("messages"))
        return super().count_request(own | {"messages": messages}, failed_tool_text=failed_tool_text)

    def resume(self, call: Call, earlier: TurnView) -> None:
        super().resume(call, resumed(earlier, SYSTEM_ROLES))

    def encode_with(self, call: ManagedCall) -> None:
        if call.form is not None or call.summary is not None or call.applied is not None:
            kind = ManagedEncoder if call.form is None else SummaryEncoder
            call.encode_with(partial(kind, Changes.of(call), call.headers))

    def encode_reply(self, reply: bytes, call: Call) -> bytes:
        assert isinstance(call, ManagedCall)
        return reply if call.form is Form.ENGINES else super().encode_reply(reply, call)

    def finished(self, message: Json, reply: Json, call: Call) -> Json:
        assert isinstance(call, ManagedCall)
        if call.form is not None:
            text = said(reply["choices"][0].get("message"))
            block = summary_block(text, call.headers.get(SESSION))
            message |= {"content": [block], "stop_reason": "compaction", "stop_sequence": None}
        elif call.summary is not None:
            message["content"].insert(0, summary_block(call.summary.text, call.summary.session_id))
        return message | Changes.of(call).fields(message["usage"])


class ManagedEncoder(MessageEncoder):
    """Writes the events of a reply with what was changed of its conversation, and the block of a summary before it."""

    def __init__(self, changes: Changes, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._changes, self._headers = changes, headers

    def starting(self, chunk: Json) -> bytes:
        events, summary = super().starting(chunk), self._changes.summary
        return events if summary is None else events + self.block_events(summary.text, summary.session_id)

    def ended(self, delta: Json, usage: Json) -> Json:
        return super().ended(delta, usage) | self._changes.fields(usage)

    def block_events(self, text: str, session_id: str | None) -> bytes:
        """Return the events of a whole block of a summary."""
        block = summary_block(text, session_id)
        events = self._event("start", content_block=block | {"content": None, "encrypted_content": None})
        events += self._event("delta", delta=block | {"type": "compaction_delta"}) + self._event("stop")
        self._num_closed += 1
        return events


class SummaryEncoder(ManagedEncoder):
    """Writes the events of a reply that is a summary: one block, which is complete when the reply is."""

    def opening(self, block: Block) -> bytes:  # noqa: ARG002  its text is no block of its own
        return b""

    def growing(self, block: Block, text: str, logprobs: list[Json]) -> bytes:  # noqa: ARG002
        return b""

    def closing(self, block: Block) -> bytes:  # noqa: ARG002
        return b""

    def ending(self) -> bytes:
        if is_cut_off(self.finish_reason):
            return super().ending()
        texts = [block.text for block in self.assembler.blocks if block.kind == "text"]
        try:
            text = said({"content": "".join(texts)})
        except TurnwiseError as error:
            return self.failing({"message": str(error)}, 503)
        return self.block_events(text, self._headers.get(SESSION)) + super().ending()

    def ended(self, delta: Json, usage: Json) -> Json:
        return super().ended(delta | {"stop_reason": "compaction", "stop_sequence": None}, usage)


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What was changed of a call's conversation, as its reply says it."""

    applied: list[Json] | None
    summary: Summary | None
    is_summary: bool

    @classmethod
    def of(cls, call: ManagedCall) -> Changes:
        return cls(call.applied, call.summary, call.form is not None)

    def fields(self, usage: Json) -> Json:
        """Return the fields of a reply: the applied edits, and the tokens of each sampling.

        Those of a compaction are counted there alone.
        """
        fields: Json = {} if self.applied is None else {FIELD: {"applied_edits": self.applied}}
        if self.is_summary:
            fields["usage"] = dict.fromkeys(usage, 0) | {"iterations": [{"type": ON_DEMAND, **usage}]}
        elif self.summary is not None:
            compacted = {"type": ON_DEMAND, **usage_of(self.summary.usage)}
            fields["usage"] = usage | {"iterations": [compacted, {"type": "message", **usage}]}
        return fields


def summary_block(text: str, session_id: str | None) -> Json:
    return {"type": ON_DEMAND, "content": text, "encrypted_content": seal(session=session_id)}


def read_on_demand(body: Json) -> Json | None:
    """Return the configuration of a compaction on demand; None where none is asked for.

    Raises:
        InvalidRequest: it is of another type, or stands beside edits.
    """
    wanted = body.get(ON_DEMAND)
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "summarize" or wanted.keys() - {"type", "instructions"}:
        raise InvalidRequest(
            f"`{ON_DEMAND}` is an object of type `summarize` with `instructions`, not {wanted!r:.80}", param=ON_DEMAND
        )
    if body.get(FIELD) is not None:
        raise InvalidRequest(f"send `{ON_DEMAND}` or `{FIELD}`, not both", param=ON_DEMAND)
    return wanted


def read_messages(messages: Any) -> tuple[Any, str | None]:
    """Return the messages of a request with the one that stands for their last summary, and the summary's session."""
    if not isinstance(messages, list):
        return messages, None
    found = [
        (index, place, block)
        for index, message in enumerate(messages)
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for place, block in enumerate(message["content"])
        if isinstance(block, dict) and block.get("type") == ON_DEMAND and block.get("content")
    ]
    if not found:
        return messages, None
    index, place, block = found[-1]
    check_kinds(block, {"content": str})
    kept = [each for each in messages[:index] if isinstance(each, dict) and each.get("role") in SYSTEM_ROLES]
    rest = messages[index]["content"][place + 1 :]
    own = [{**messages[index], "content": rest}] if rest else []
    sealed = unseal(block.get("encrypted_content")) or {}
    return [*kept, framed(block["content"]), *own, *messages[index + 1 :]], sealed.get("session")
