"""What asks for a summary, how a summary stands in the prompt after it, and what carries it between two requests.

The client gets a summary as an opaque text, or beside one. It is not encrypted: whoever has it could write the same
into a message. It names the session too, so that a client that names none goes on in the session of its summary.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import orjson

from proxy.dialects.base import SYSTEM_ROLES
from proxy.sessions.conversation import canonical_content
from turnwise.json_text import dumps
from turnwise.types import Json

PROMPT = (
    "Summarize the conversation so far. Your summary takes its place: whoever goes on with the work sees nothing else "
    "of it. Keep what is needed for that: what was asked for, what was done and found, with names, paths, numbers and "
    "decisions, and what is to be done next. Write the summary and nothing else."
)
HEAD = "A summary stands here for what was said before. Go on from it.\n\n<summary>\n"
END = "\n</summary>"
SEAL = "turnwise-1-"
KEPT_ROLES = ("user", *SYSTEM_ROLES)
"""Messages that stand beside a summary which their client has asked for; one that the proxy made of its own accord
stands for those of users as well."""


def seal(**fields: object) -> str:
    return SEAL + base64.urlsafe_b64encode(dumps(fields)).decode()


def unseal(text: object) -> Json | None:
    """Return what was sealed; None for a text of another service."""
    if not isinstance(text, str) or not text.startswith(SEAL):
        return None
    try:
        fields = orjson.loads(base64.urlsafe_b64decode(text.removeprefix(SEAL)))
    except (binascii.Error, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def framed(summary: str) -> Json:
    """Return the message that stands for what was summarised."""
    return {"role": "user", "content": f"{HEAD}{summary.strip()}{END}"}


def is_framed(message: Json) -> bool:
    return message.get("role") == "user" and str(canonical_content(message.get("content"))).startswith(HEAD)


def with_prompt(messages: Sequence[Json], prompt: str) -> list[Json]:
    """Return a conversation that ends with a prompt: many chat templates refuse two messages of users in a row."""
    last = messages[-1] if messages else {}
    if last.get("role") != "user":
        return [*messages, {"role": "user", "content": prompt}]
    content = last.get("content")
    parts = [*content, {"type": "text", "text": prompt}] if isinstance(content, list) else f"{content}\n\n{prompt}"
    return [*messages[:-1], {**last, "content": parts}]


def without_prompt(messages: Sequence[Json], prompt: str) -> list[Json]:
    """Return a conversation as it was before `with_prompt`."""
    *others, last = messages
    content = last.get("content")
    if isinstance(content, list):
        return [*others, {**last, "content": content[:-1]}]
    own = str(content).removesuffix(prompt).removesuffix("\n\n")
    return [*others, {**last, "content": own}] if own else others
