"""Thumbs, comments and edits of Open WebUI as feedback: on which turn each falls, though it names none.

Open WebUI keeps what people say in its own database and calls nobody, so this command reads its API as an administrator
and posts what is new. A chat is a session: Open WebUI names it in each call if it runs with these variables.

    ENABLE_FORWARD_USER_INFO_HEADERS=true FORWARD_SESSION_INFO_HEADER_CHAT_ID=X-Session-Id open-webui serve
    python -m turnwise_adapters.open_webui --open-webui http://127.0.0.1:8080 --every 30

A message has no completion id, so its turn is found by the text of the reply. What was posted is read from the proxy:
the command has no state, and a second pass posts nothing twice.
"""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import click
import httpx2

from turnwise.client import Client
from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.client.passes import run_passes
from turnwise.client.wire import FeedbackKind
from turnwise.errors import NotFound
from turnwise.types import Json

log = logging.getLogger(__name__)
SOURCE = "open-webui"
TIMEOUT_SECONDS = 60.0
THINKING = re.compile(r"<details\b.*?</details>\s*", re.DOTALL)
"""How Open WebUI stores thinking and tool calls within a message's text."""


class Said(NamedTuple):
    """What a person said about a message."""

    chat_id: str
    message_id: str
    kind: FeedbackKind
    value: bool | str


class WebUI:
    """The administrator's view of an Open WebUI server."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self._http = httpx2.Client(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_SECONDS)

    def feedback(self) -> list[Json]:
        """Return all ratings of messages."""
        return self._get("/api/v1/evaluations/feedbacks/all/export")

    def chats(self) -> list[Json]:
        """Return all chats; the server must allow exports (`ENABLE_ADMIN_EXPORT`, its default)."""
        return self._get("/api/v1/chats/all/db")

    def _get(self, path: str) -> list[Json]:
        found: list[Json] = self._http.get(path).raise_for_status().json()
        return found


def note_originals(feedback: Iterable[Json], messages_of: dict[str, dict[str, Json]]) -> None:
    """Add to replies that were edited after a rating of their chat what they were: the rating has a copy of the chat.

    Open WebUI 0.12 itself does not keep it. A longer reply that begins with the original was continued, not edited.
    """
    for each in feedback:
        chat = ((each.get("snapshot") or {}).get("chat") or {}).get("chat") or {}
        messages = messages_of.get((each.get("meta") or {}).get("chat_id") or "", {})
        for message_id, before in ((chat.get("history") or {}).get("messages") or {}).items():
            original, message = before.get("content"), messages.get(message_id, {})
            is_edited = bool(original) and not str(message.get("content") or original).startswith(original)
            if is_edited and before.get("role") == "assistant" and not message.get("originalContent"):
                message["originalContent"] = original


def said_in(feedback: Iterable[Json], messages_of: dict[str, dict[str, Json]]) -> Iterator[Said]:
    """Yield the thumbs and comments, and the edits of messages.

    Args:
        feedback: Ratings, as Open WebUI exports them.
        messages_of: The messages of each chat by their ids.
    """
    for each in feedback:
        data, meta = each.get("data") or {}, each.get("meta") or {}
        chat_id, message_id = meta.get("chat_id"), meta.get("message_id")
        if not chat_id or not message_id:
            continue
        if data.get("rating") in (1, -1, "1", "-1"):
            yield Said(chat_id, message_id, "boolean", int(data["rating"]) > 0)
        words = [data[name] for name in ("reason", "comment") if data.get(name)]
        if words:
            yield Said(chat_id, message_id, "comment", ": ".join(words))
    for chat_id, messages in messages_of.items():
        for message_id, message in messages.items():
            is_edited = message.get("originalContent") not in (None, "", message.get("content"))
            if message.get("role") == "assistant" and is_edited and text_of(message.get("content")):
                yield Said(chat_id, message_id, "demonstration", text_of(message["content"]))


def text_of(content: object) -> str:
    """Return a message's text without thinking."""
    return THINKING.sub("", content).strip() if isinstance(content, str) else ""


class Chat:
    """The turns of a chat, and what was said about them before."""

    def __init__(self, client: Client, chat_id: str, messages: dict[str, Json]) -> None:
        self._messages = messages
        self._turns: dict[str, list[str]] = collections.defaultdict(list)
        self.posted: dict[tuple[str | None, str], object] = {}
        """What is in force, by turn and kind."""
        self.said: set[tuple[str | None, str]] = set()
        """What Open WebUI has of it now."""
        self.is_whole = True
        """Whether the turn is known of all that was said about its messages."""
        self.own: set[tuple[str | None, str]] = set()
        """What this command has posted."""
        for session_id in _sessions_of(client, chat_id):
            for turn in client.turns(session_id):
                self._turns[text_of((turn["response"] or {}).get("content"))].append(turn["turn_id"])
            for each in client.feedback_of(session_id):
                self.posted[each["turn_id"], each["kind"]] = each["value"]
                if each["source"] == SOURCE:
                    self.own.add((each["turn_id"], each["kind"]))

    def turn_of(self, message_id: str) -> str | None:
        """Return the turn that sampled a message; None if none of the chat did."""
        message = self._messages.get(message_id) or {}
        for text in (text_of(message.get("originalContent")), text_of(message.get("content"))):
            edits = (turn for (turn, kind), value in self.posted.items() if kind == "demonstration" and value == text)
            alike = self._turns.get(text) if text else None
            if alike:  # equal replies of a chat are told apart by their order
                return alike[min(self._place(message_id, text), len(alike) - 1)]
            if text and (turn := next(edits, None)) is not None:  # it was edited before
                return turn
        return None

    def withdrawn(self) -> set[tuple[str | None, str]]:
        """Return what this command has posted and Open WebUI has no longer.

        An edit is gone only where its message reads as it was sampled: Open WebUI may forget what an edited reply was.
        """
        if not self.is_whole:
            return set()
        replies = (key for key, message in self._messages.items() if message.get("role") == "assistant")
        restored = {self.turn_of(key) for key in replies if text_of(self._messages[key].get("content")) in self._turns}
        return {(turn, kind) for turn, kind in self.own - self.said if kind != "demonstration" or turn in restored}

    def _place(self, message_id: str, text: str) -> int:
        same = [
            (message.get("timestamp") or 0, key)
            for key, message in self._messages.items()
            if text in (text_of(message.get("originalContent")), text_of(message.get("content")))
        ]
        return [key for _, key in sorted(same)].index(message_id)


def _sessions_of(client: Client, chat_id: str) -> Iterator[str]:
    """Yield the chat's session, and those that continue it after it was over."""
    number = 1
    while True:
        session_id = chat_id if number == 1 else f"{chat_id}~{number}"
        try:
            client.session(session_id)
        except NotFound:
            return
        yield session_id
        number += 1


def pass_on(client: Client, web_ui: WebUI) -> Json:
    """Post what people have said since the last pass; return how much, and how much is of no stored turn."""
    chats = web_ui.chats()
    messages_of = {each["id"]: ((each.get("chat") or {}).get("history") or {}).get("messages") or {} for each in chats}
    feedback = web_ui.feedback()
    note_originals(feedback, messages_of)
    known = {chat_id: Chat(client, chat_id, messages) for chat_id, messages in messages_of.items()}
    counts = {"boolean": 0, "comment": 0, "demonstration": 0, "withdrawn": 0, "without_turn": 0}
    for said in said_in(feedback, messages_of):
        if said.chat_id not in known:
            known[said.chat_id] = Chat(client, said.chat_id, {})
        chat = known[said.chat_id]
        turn_id = chat.turn_of(said.message_id)
        chat.said.add((turn_id, said.kind))
        if turn_id is None:
            chat.is_whole &= said.message_id not in messages_of.get(said.chat_id, {})
            counts["without_turn"] += 1
        elif chat.posted.get((turn_id, said.kind)) != said.value:
            client.feedback(said.kind, said.value, turn_id=turn_id, source=SOURCE)
            counts[said.kind] += 1
    for chat in known.values():
        for turn_id, kind in chat.withdrawn():
            client.withdraw_feedback(kind, turn_id=turn_id)
            counts["withdrawn"] += 1
    return counts


@click.command()
@click.option("--open-webui", "url", default="http://127.0.0.1:8080", show_default=True, help="Open WebUI's address.")
@click.option("--open-webui-key", "key", envvar="OPEN_WEBUI_API_KEY", required=True, help="An administrator's key.")
@click.option("--proxy", default=DEFAULT_BASE_URL, show_default=True, help="The proxy that Open WebUI calls.")
@click.option("--api-key", envvar="TURNWISE_API_KEY", help="A key that may read sessions and give rewards.")
@click.option("--every", type=click.FloatRange(min=1), help="Seconds between passes [default: one pass].")
def main(url: str, key: str, proxy: str, api_key: str | None, every: float | None) -> None:
    """Post the thumbs, comments and edits of Open WebUI as feedback."""
    logging.basicConfig(level=logging.INFO)
    web_ui = WebUI(url, key)
    with Client(proxy, api_key) as client:
        run_passes(lambda: pass_on(client, web_ui), every)


if __name__ == "__main__":
    main()
