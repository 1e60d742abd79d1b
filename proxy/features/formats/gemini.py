"""`/v1beta/models/…:generateContent`: Google's Gemini API, its routes and replies; requests are in `gemini_request`.

A streamed reply is either server-sent events (`alt=sse`) or, as Google's REST API does by default, one JSON array.
Function calls are sent when their arguments are complete: Google's format has no partial ones. The last response of a
stream has the calls and finish reasons of all candidates, and the whole usage.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
import orjson

from proxy.dialects.base import COMMENT, ENDED, EVENT_STREAM, Action, Call, WireRoute, event
from proxy.features.formats.blocks import (
    Assembler,
    Block,
    blocks_of,
    counts_of,
    embedded,
    own_id,
    read_error,
    status_of,
)
from proxy.features.formats.gemini_request import chat_body, dropped_tools, num_signatures, read, read_object
from proxy.features.formats.translated import Translated, TranslatedCall
from turnwise.types import Json

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
FINISH_REASONS = {**dict.fromkeys(ENDED, "STOP"), "length": "MAX_TOKENS", "content_filter": "SAFETY"}
MALFORMED = "MALFORMED_FUNCTION_CALL"
"""Google's finish reason of a candidate without a call whose arguments were not sampled to the end."""
METHODS = ["generateContent", "streamGenerateContent", "countTokens"]
CONTENTS: Json = {"contents": {"type": ["array", "object"], "minItems": 1, "items": {"type": "object"}}}


MODEL_ROUTES = (
    WireRoute(
        method="GET",
        path="/v1beta/models",
        action=Action.LIST_MODELS,
        summary="List the served models, as Google's models.list",
    ),
    WireRoute(
        method="GET",
        path="/v1beta/models/{model:model}",
        action=Action.GET_MODEL,
        summary="Describe a served model, as Google's models.get",
    ),
)


def _call_routes(version: str) -> tuple[WireRoute, ...]:
    """Return the routes of one API version; Google's SDK uses `v1`, its command line and REST examples `v1beta`."""
    model = f"/{version}/models/{{model:path}}"
    return (
        WireRoute(
            path=f"{model}:generateContent",
            summary="Sample a reply, as Google's generateContent",
            required=("contents",),
            properties=CONTENTS,
        ),
        WireRoute(
            path=f"{model}:streamGenerateContent",
            summary="Stream a reply, as Google's streamGenerateContent",
            required=("contents",),
            properties=CONTENTS,
        ),
        WireRoute(
            path=f"{model}:countTokens",
            action=Action.COUNT_TOKENS,
            summary="Count a prompt's tokens, as Google's countTokens",
        ),
    )


class Gemini(Translated):
    """Google's Gemini API."""

    name = "gemini"
    routes: ClassVar[Sequence[WireRoute]] = (*_call_routes("v1beta"), *_call_routes("v1"), *MODEL_ROUTES)
    error_prefixes = ("/v1beta",)
    marker_header = b"x-goog-api-key"
    error_schema: ClassVar[Json] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["code", "message", "status"]}},
    }
    id_prefix = "gemini-"
    conversation_field = "contents"
    reads_url = True

    def normalise_headers(self, headers: dict[bytes, bytes], query: Mapping[str, str]) -> dict[bytes, bytes]:
        key = headers.get(b"x-goog-api-key") or query.get("key", "").encode()
        return {**headers, b"x-api-key": key} if key else headers

    def merge_url(self, body: Json, route: WireRoute, params: Mapping[str, str], query: Mapping[str, str]) -> Json:
        stream = route.path.endswith(":streamGenerateContent")
        return {**body, "model": params["model"], "stream": stream, "alt": query.get("alt")}

    def translate(self, body: Json, failed_tool_text: str) -> Json:  # noqa: ARG002
        return chat_body(body)

    def parse(self, body: Json, *, failed_tool_text: str = "") -> TranslatedCall:
        call = super().parse(body, failed_tool_text=failed_tool_text)
        call.dropped_tools = dropped_tools(body)
        call.dropped_items = ["thoughtSignature"] * num_signatures(body.get("contents"))
        call.encode_with(partial(GeminiEncoder, call.original, "delta"))
        return call

    def count_request(self, body: Json, *, failed_tool_text: str = "") -> Json:
        nested = read_object(body, "generateContentRequest")
        asked = {**(nested or body), "model": body["model"], "stream": False}
        return self.chat_request(asked, failed_tool_text=failed_tool_text)

    def encode_reply(self, reply: bytes, call: Call) -> bytes:
        encoder = GeminiEncoder(call.original, "message")
        return orjson.dumps(encoder.whole(msgspec.json.decode(reply)))

    def encode_error(self, status: int, body: bytes) -> bytes:
        return orjson.dumps(_error(status, read_error(body)))

    def encode_count(self, num_tokens: int) -> Json:
        return {"totalTokens": num_tokens}

    def encode_models(self, models: list[Json]) -> Json:
        return {"models": [self.encode_model(model) for model in models]}

    def encode_model(self, model: Json) -> Json:
        limit = model.get("max_model_len")
        limits = {} if limit is None else {"inputTokenLimit": limit, "outputTokenLimit": limit}
        named = {"name": f"models/{model['id']}", "displayName": model["id"], "version": "001"}
        return named | limits | {"supportedGenerationMethods": METHODS}


class GeminiEncoder:
    """Writes Google's responses: a whole one, or a stream's, as events or as the elements of a JSON array."""

    def __init__(self, request: Json, field: str) -> None:
        thinking = read_object(read_object(request, "generationConfig"), "thinkingConfig")
        self._shows_thoughts = bool(read(thinking, "includeThoughts"))
        self._as_events = request.get("alt") == "sse"
        self.keep_alive = COMMENT if self._as_events else b"\n"
        self.content_type = EVENT_STREAM if self._as_events else "application/json; charset=UTF-8"
        self._field = field
        self._num_written = 0
        self._head: Json = {}
        self._usage: Json = {}
        self._num_sampled: dict[int, int] = {}
        """Tokens so far, by choice: a chunk counts those of its own choice alone."""
        self._calls: dict[int, Assembler] = {}
        self._ended: list[Json] = []
        self._failed = False

    def chunks(self, chunks: list[bytes]) -> bytes:
        return b"".join([self._chunk(msgspec.json.decode(chunk)) for chunk in chunks])

    def _chunk(self, chunk: Json) -> bytes:
        self._read_head(chunk)
        grown = []
        for choice in chunk["choices"]:
            candidate = self._candidate(choice)
            if "finishReason" in candidate:
                self._ended.append(candidate)
            elif candidate["content"]["parts"]:
                grown.append(candidate)
        return self._write(self._response(grown)) if grown else b""

    def done(self) -> bytes:
        """Return the end of the stream, with a candidate: Google's SDK drops a reply whose last response has none.

        An error was the end.
        """
        if self._failed:
            return b""
        self._ended.sort(key=operator.itemgetter("index"))
        last = self._write(self._response(self._ended)) if self._ended else b""
        if self._as_events:
            return last
        return last + (b"]" if self._num_written else b"[]")

    def error(self, body: bytes, status: int | None = None) -> bytes:
        error, self._failed = read_error(body), True
        written = self._write(_error(status or status_of(error), error))
        return written if self._as_events else written + b"]"

    def whole(self, reply: Json) -> Json:
        self._read_head(reply)
        ends = ({**choice, "finish_reason": choice.get("finish_reason") or ""} for choice in reply["choices"])
        return self._response(list(map(self._candidate, ends)))

    def _read_head(self, reply: Json) -> None:
        if usage := reply.get("usage"):
            for choice in reply["choices"] if self._field == "delta" else ():
                self._num_sampled[choice["index"]] = usage.get("completion_tokens") or 0
            total = sum(self._num_sampled.values()) if reply["choices"] and self._num_sampled else None
            self._usage = usage if total is None else {**usage, "completion_tokens": total}
        self._head = {"modelVersion": reply["model"], "responseId": own_id(reply["id"], Gemini.id_prefix)}

    def _response(self, candidates: list[Json]) -> Json:
        for candidate in candidates:
            # Google's SDK drops a reply from its history if any content of it has no part.
            candidate["content"]["parts"] = candidate["content"]["parts"] or [{"text": ""}]
        return {"candidates": candidates, "usageMetadata": _usage(self._usage), **self._head}

    def _candidate(self, choice: Json) -> Json:
        """Return what a choice, or a chunk of one, completes: the calls of a stream are complete at its end."""
        parts: list[Json] = []
        finish_reason, calls = choice.get("finish_reason"), self._calls.setdefault(choice["index"], Assembler())
        for block in blocks_of(choice.get(self._field)):
            if block.kind == "tool":
                calls.block_for(block)
            elif block.kind == "text":
                parts.append({"text": block.text})
            elif self._shows_thoughts:
                parts.append({"text": block.text, "thought": True})
        ended = {}
        if finish_reason is not None:
            made = calls.finish()
            shown = [call.shown() for call in made if not call.is_cut_call(finish_reason)]
            parts += [_function_call(call) if call.kind == "tool" else {"text": call.text} for call in shown]
            is_malformed = [call.kind for call in shown] != ["tool"] * len(made)
            reason = MALFORMED if is_malformed else FINISH_REASONS.get(finish_reason, "OTHER")
            ended = {"finishReason": reason}
        content = {"role": "model", "parts": parts}
        logprobs = _logprobs((choice.get("logprobs") or {}).get("content") or [])
        return {"content": content, "index": choice["index"]} | ended | logprobs

    def _write(self, response: Json) -> bytes:
        self._num_written += 1
        if self._as_events:
            return event(orjson.dumps(response))
        return (b"[" if self._num_written == 1 else b",\r\n") + orjson.dumps(response)


def _function_call(call: Block) -> Json:
    return {"functionCall": {"id": call.tool_call_id or None, "name": call.name, "args": embedded(call.text)}}


def _logprobs(content: list[Json]) -> Json:
    if not content:
        return {}
    chosen = [_token(each) for each in content]
    top = [{"candidates": [_token(each) for each in token.get("top_logprobs") or ()]} for token in content]
    average = sum(each["logProbability"] for each in chosen) / len(chosen)
    return {"avgLogprobs": average, "logprobsResult": {"chosenCandidates": chosen, "topCandidates": top}}


def _token(entry: Json) -> Json:
    return {"token": entry["token"], "logProbability": entry["logprob"]}


def _usage(usage: Json) -> Json:
    prompt, sampled, cached, thoughts = counts_of(usage)
    counts: Json = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled - thoughts,
        "totalTokenCount": prompt + sampled,
    }
    optional = {"thoughtsTokenCount": thoughts, "cachedContentTokenCount": cached}
    return counts | {field: count for field, count in optional.items() if count}


def _error(status: int, error: Json) -> Json:
    reason = error.get("code") or error.get("type")
    details: Any = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": str(reason), "domain": "turnwise"}]
    message = str(error.get("message", "the call failed"))
    shape = {"code": status, "message": message, "status": STATUSES.get(status, "INTERNAL")}
    return {"error": shape | {"details": details} if reason else shape}
