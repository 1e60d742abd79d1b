"""A captured session as its agent's conversations: one for each leaf of its forest of turns.

It reads a session's JSON with its `turns`, each with its whole prompt, so it serves formats in and outside of Turnwise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator

from turnwise.image_urls import IMAGE_URL, image_digests
from turnwise.types import Json

_IMAGE = re.compile(rf'"image_url": \{{"url": "{IMAGE_URL}([0-9a-f]{{64}})"\}}')
"""An image in the JSON of messages; a text cannot contain it with these quotes."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentConversation:
    """A path from a root to a leaf: the messages of its last prompt and the last reply."""

    session: Json
    path: list[Json]
    """Turns from the root on, each the parent of the next."""

    @property
    def messages(self) -> list[Json]:
        return [*self.path[-1]["messages"], self.path[-1]["response"]]

    @property
    def tools(self) -> list[Json] | None:
        tools: list[Json] | None = self.path[-1]["tools"]
        return tools

    @property
    def replies(self) -> dict[int, Json]:
        return {len(turn["messages"]): turn for turn in self.path}


def with_images(session: Json, data_url: Callable[[str], str]) -> Json:
    """Return a session whose messages show its images by data URLs, which `data_url` returns by their digests."""
    urls = functools.cache(data_url)

    def shown(found: re.Match[str]) -> str:
        return f'"image_url": {{"url": "{urls(found[1])}"}}'

    def turn_shown(turn: Json) -> Json:
        messages = turn["messages"]
        if image_digests(messages):
            messages = json.loads(_IMAGE.sub(shown, json.dumps(messages)))
        return {**turn, "messages": messages}

    return {**session, "turns": list(map(turn_shown, session["turns"]))}


def conversations(session: Json) -> Iterator[AgentConversation]:
    """Yield the conversations of a session in the order of their last turns; turns without a reply are left out."""
    answered: list[Json] = [turn for turn in session["turns"] if turn["response"]]
    by_id = {turn["turn_id"]: turn for turn in answered}
    parents = {turn["parent_turn_id"] for turn in answered}
    for turn in answered:
        if turn["turn_id"] not in parents:
            yield AgentConversation(session, _path_to(turn, by_id))


def _path_to(leaf: Json, by_id: dict[str, Json]) -> list[Json]:
    path: list[Json] = [leaf]
    while (parent := by_id.get(path[-1]["parent_turn_id"] or "")) is not None:
        path.append(parent)
    return path[::-1]
