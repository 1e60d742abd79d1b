"""A stored session as the conversations that an agent had: one for each leaf of its forest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from turnwise.store.lineage import TurnView
from turnwise.store.session_records import SessionRecord
from turnwise.types import Json, Session


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A path from a root to a leaf: the messages of its last prompt and the last reply."""

    session: Session
    path: list[TurnView]
    """Turns from the root on, each the parent of the next."""

    @property
    def messages(self) -> list[Json]:
        """All messages in order, the last reply included."""
        return [*self.path[-1].messages, self.path[-1].turn.response]

    @property
    def tools(self) -> list[Json] | None:
        """Tool schemas that the model saw; None without any."""
        return self.path[-1].tools


def conversations(record: SessionRecord) -> Iterator[Conversation]:
    """Yield the conversations of a session in the order of their last turns; turns without a reply are left out."""
    answered = [view for view in record.views() if view.turn.response]
    by_id = {view.turn.turn_id: view for view in answered}
    parents = {view.turn.parent_turn_id for view in answered}
    for view in answered:
        if view.turn.turn_id not in parents:
            yield Conversation(record.session, _path_to(view, by_id))


def _path_to(leaf: TurnView, by_id: dict[str, TurnView]) -> list[TurnView]:
    path: list[TurnView] = [leaf]
    while (parent := by_id.get(path[-1].turn.parent_turn_id or "")) is not None:
        path.append(parent)
    return path[::-1]


def reply_positions(path: Sequence[TurnView]) -> list[int]:
    """Return where the reply of each turn of a path stands among the path's messages."""
    return [len(view.messages) for view in path]
