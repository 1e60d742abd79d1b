"""`/v1/completions`: text or token ids in, text out.

There is no conversation, so every choice is the root of a chain of its own.
"""

from __future__ import annotations

from typing import Any

import orjson

from proxy.dialects import engine_reply
from proxy.dialects.base import Call, Captured, Choice
from proxy.dialects.chat import check_kinds, number_of_choices
from turnwise.errors import InvalidRequest
from turnwise.types import Json, TokenIds


class TextCompletions:
    """OpenAI's legacy completions, as vLLM speaks them."""

    name = "completions"
    route = "/v1/completions"
    engine_route = "/v1/completions"
    id_prefix = "cmpl-"

    def parse(self, body: Json, *, max_choices: int, max_messages: int) -> Call:
        """Check what the proxy itself relies on; the engine judges the rest.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """
        prompts = number_of_prompts(body.get("prompt"))
        if prompts > max_messages:
            raise InvalidRequest(f"`prompt` has {prompts} entries; at most {max_messages} are served.", param="prompt")
        check_kinds(body, {"metadata": dict, "model": str})
        if body.get("echo"):
            raise InvalidRequest("`echo` mixes the prompt with what was sampled; ask without it.", param="echo")
        return Call(
            dialect=self,
            body=body,
            messages=[],
            stream=bool(body.get("stream")),
            num_choices=prompts * number_of_choices(body, max_choices),
            wants_logprobs=body.get("logprobs") is not None,
            wants_token_ids=bool(body.get("return_token_ids")),
        )

    def engine_body(self, call: Call, prompt_token_ids: TokenIds | None, pinned: Json) -> Json:  # noqa: ARG002  never extended
        """Return what the engine is asked, so that it tells everything that capture needs."""
        logprobs = call.body.get("logprobs")
        return {**call.body, **pinned, "return_token_ids": True, "logprobs": 0 if logprobs is None else logprobs}

    def take_reply(self, raw: bytes, call: Call) -> tuple[Captured, bytes]:
        """Capture a whole reply, and return it without what the client did not ask for.

        Raises:
            msgspec.DecodeError: it is no completion.
        """
        captured = Captured()
        return captured, self._take(raw, captured, call)

    def take_chunks(self, events: list[bytes], captured: Captured, call: Call) -> list[bytes]:
        """Capture chunks of a stream, and return those that the client would have got, stripped.

        Raises:
            msgspec.DecodeError: one is no chunk of a completion.
        """
        return [shown for raw in events if (shown := self._take(raw, captured, call))]

    def encode_reply(self, reply: bytes, call: Call) -> bytes:  # noqa: ARG002  the engine's words are the client's
        """Return the reply as it is."""
        return reply

    def encode_error(self, status: int, body: bytes) -> bytes:  # noqa: ARG002  as above
        """Return the error as it is."""
        return body

    def _take(self, raw: bytes, captured: Captured, call: Call) -> bytes:
        reply = engine_reply.decoded(raw)
        captured.model = reply.get("model") or captured.model
        shown = not reply["choices"]
        for said in reply["choices"]:
            shown = shown or bool(said.get("text") or said.get("token_ids")) or said.get("finish_reason") is not None
            self._take_choice(said, captured, call)
        return orjson.dumps(reply) if shown else b""

    def _take_choice(self, raw: Json, captured: Captured, call: Call) -> None:
        choice = captured.choice(raw["index"])
        take_text(raw, choice)
        if not captured.prompt_token_ids:
            captured.prompt_token_ids = choice.prompt_token_ids
        for field, wanted in (
            ("token_ids", call.wants_token_ids),
            ("prompt_token_ids", call.wants_token_ids),
            ("logprobs", call.wants_logprobs),
        ):
            if not wanted and field in raw:
                raw[field] = None


def take_text(raw: Json, choice: Choice) -> None:
    """Add what one choice of a reply or chunk says to what is known of it."""
    choice.message["content"] = (choice.message["content"] or "") + (raw.get("text") or "")
    choice.prompt_token_ids = raw.get("prompt_token_ids") or choice.prompt_token_ids
    choice.token_ids += raw.get("token_ids") or []
    choice.logprobs.append(orjson.dumps(raw.get("logprobs")))
    choice.finish_reason = raw.get("finish_reason") or choice.finish_reason


def number_of_prompts(prompt: Any) -> int:
    """Return how many prompts a request holds: a text, texts, token ids, or lists of token ids.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(prompt, str) and prompt:
        return 1
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return 1
        if all(isinstance(one, str) for one in prompt) or all(isinstance(one, list) and one for one in prompt):
            return len(prompt)
    raise InvalidRequest(
        "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists.", param="prompt"
    )
