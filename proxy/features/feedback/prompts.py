"""The tokens of what a person wrote: a better reply, and a prompt with a correction in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.sessions.template import ChatTemplate, Unsafe
from turnwise.types import Json


def reply_ids(template: ChatTemplate, messages: Sequence[Json], reply: str, tools: Any, arguments: Json) -> list[int]:
    """Return the tokens of a reply that a person wrote, its end of turn included, as they would be sampled.

    Raises:
        Unsafe: when the template does not render the reply after its own generation prompt.
    """
    prompt = template.render(messages, tools, arguments, generate=True)
    whole = template.render([*messages, {"role": "assistant", "content": reply}], tools, arguments, generate=False)
    sampled = whole[len(prompt) :]
    if not whole.startswith(prompt) or reply.strip() not in sampled:
        raise Unsafe("template_unsafe")
    ends = [sampled.rfind(end) + len(end) for end in template.ends.values() if end in sampled]
    sampled = sampled[: max(ends, default=len(sampled))]
    before, ids = template.tokenise(prompt), template.tokenise(prompt + sampled)
    return ids[len(before) :] if ids[: len(before)] == before else template.tokenise(sampled)


def hinted_ids(template: ChatTemplate, messages: Sequence[Json], hint: str, tools: Any, arguments: Json) -> list[int]:
    """Return the prompt of these messages with a hint of the user after the last one.

    Raises:
        Unsafe: when the template refuses the conversation.
    """
    last = messages[-1]
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        hinted = [*messages[:-1], {**last, "content": f"{last['content']}\n\n{hint}"}]
    else:
        hinted = [*messages, {"role": "user", "content": hint}]
    return template.tokenise(template.render(hinted, tools, arguments, generate=True))
