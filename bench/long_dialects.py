"""Chat messages as every wire format sends them, and its replies as chat messages."""

from __future__ import annotations

from typing import Any

import orjson

Json = dict[str, Any]
DIALECTS = ("chat", "messages", "responses", "gemini")
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/long:generateContent",
}


def encode_message(dialect: str, encoded: bytes) -> bytes:
    """Return the JSON of a chat message in a format: the items of a list, separated by commas."""
    message = orjson.loads(encoded)
    return b",".join(map(orjson.dumps, _items(dialect, message)))


def _items(dialect: str, message: Json) -> list[Json]:
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    role, text = message["role"], message.get("content") or ""
    if dialect == "messages":
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}
            return [{"role": "user", "content": [block]}]
        blocks: list[Json] = [{"type": "text", "text": text}] if text else []
        for call_id, function in calls:
            arguments = orjson.loads(function["arguments"])
            blocks.append({"type": "tool_use", "id": call_id, "name": function["name"], "input": arguments})
        return [{"role": role, "content": blocks if calls else text}]
    if dialect == "responses":
        if role == "tool":
            return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}]
        items = [{"type": "message", "role": role, "content": text}] if text else []
        return [*items, *({"type": "function_call", "call_id": call_id, **function} for call_id, function in calls)]
    if role == "tool":
        answer = {"id": message["tool_call_id"], "name": "shell", "response": {"output": text}}
        return [{"role": "user", "parts": [{"functionResponse": answer}]}]
    parts: list[Json] = [{"text": text}] if text else []
    for call_id, function in calls:
        arguments = orjson.loads(function["arguments"])
        parts.append({"functionCall": {"id": call_id, "name": function["name"], "args": arguments}})
    return [{"role": "model" if role == "assistant" else "user", "parts": parts}]


def encode_body(dialect: str, messages: list[bytes], system: str, tools: list[Json]) -> bytes:
    """Return a request; the messages are `encode_message` of all but the system message."""
    array = b"[" + b",".join(messages) + b"]"
    functions = [tool["function"] for tool in tools]
    if dialect == "messages":
        schemas = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in functions
        ]
        rest: Json = {"model": "long", "max_tokens": 64, "system": system, "tools": schemas}
        return b'{"messages":' + array + b"," + orjson.dumps(rest)[1:]
    if dialect == "responses":
        rest = {"model": "long", "instructions": system, "tools": [{"type": "function", **each} for each in functions]}
        return b'{"input":' + array + b"," + orjson.dumps(rest)[1:]
    rest = {"systemInstruction": {"parts": [{"text": system}]}, "tools": [{"functionDeclarations": functions}]}
    return b'{"contents":' + array + b"," + orjson.dumps(rest)[1:]


def chat_reply(dialect: str, reply: Json) -> Json:
    """Return a whole reply as a chat message."""
    if dialect == "chat":
        message: Json = reply["choices"][0]["message"]
        return message
    texts, calls = [], []
    if dialect == "gemini":
        parts = reply["candidates"][0]["content"]["parts"]
        texts = [part["text"] for part in parts if "text" in part]
        found = [part["functionCall"] for part in parts if "functionCall" in part]
        calls = [(call.get("id"), call["name"], orjson.dumps(call.get("args") or {}).decode()) for call in found]
    elif dialect == "messages":
        texts = [block["text"] for block in reply["content"] if block["type"] == "text"]
        found = [block for block in reply["content"] if block["type"] == "tool_use"]
        calls = [(block["id"], block["name"], orjson.dumps(block["input"]).decode()) for block in found]
    else:
        items = reply["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        found = [item for item in items if item["type"] == "function_call"]
        calls = [(item["call_id"], item["name"], item["arguments"]) for item in found]
    functions = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": functions} if functions else {})}
