"""What a session that is over waits for until it is trained, or why it is not trained, as a sentence."""

from __future__ import annotations

from proxy.services import Beside, Services
from turnwise import sampling
from turnwise.features.training_note import progress_of
from turnwise.features.untrained import newest_samplings
from turnwise.store.database import Connection
from turnwise.types import GroupStatus, Json, Session, Split

SINGLE = {
    GroupStatus.OPEN: "It will be trained as a single session once it has a reward",
    GroupStatus.READY: "It is a single session and waits for the trainer, which takes several at once",
    GroupStatus.CLAIMED: "It is a single session that the trainer works on",
    GroupStatus.TRAINED: "It is a single session and was trained",
    GroupStatus.DROPPED: "It is a single session and was not trained",
}
"""The training note of a session that is its own group, by the state of that group."""
COMPARED = "Its reward is compared with those of other single sessions of the same agent."


class TrainingNote(Beside):
    """Says it in the answer that ends a session."""

    def __init__(self, services: Services) -> None:
        self._database = services.database
        services.ended.append(self._add)

    async def _add(self, session: Session) -> Json:
        return {"training_note": await self._database.fetch(training_note, session)}


def training_note(conn: Connection, session: Session) -> str:
    """Return what a session that is over waits for until it is trained, or why it is not trained, as a sentence."""
    if session.split is Split.EVAL:
        return "A session of split `eval` is not trained."
    if not session.train:
        return "The session is marked `train = false` and is not trained."
    left_out = sampling.count_not_trained(newest_samplings(conn, session.tenant, session.session_id))
    return _waits_for(conn, session) + ("" if left_out is None else f" {left_out} {sampling.ADVICE}")


def _waits_for(conn: Connection, session: Session) -> str:
    missing = "It has no reward yet: post one to `/v1/rewards`. " if session.reward is None else ""
    group = progress_of(conn, session)
    if group is None:
        return "It was deleted."
    if group.group_size == 1:
        reason = f": {group.reason}" if group.reason else ""
        return f"{missing}{SINGLE[group.status]}{reason}. {COMPARED}"
    name = f"Group {session.group_id!r}"
    if group.status != GroupStatus.OPEN:
        return f"{missing}{name} is {group.status}" + (f": {group.reason}." if group.reason else ".")
    if group.group_size is None:
        return (
            f"{missing}{name} has no `group_size`: it closes when nothing has happened in it for the trainer's "
            "`stalled_seconds`."
        )
    awaited = {
        "not created": group.group_size - group.num_sessions,
        "not ended": group.num_open,
        "ended without a reward (`unrewarded_seconds`)": group.num_sessions - group.num_finished - group.num_open,
    }
    named = [f"{count} {what}" for what, count in awaited.items() if count > 0]
    done = f"{missing}{name} has {group.num_finished} of {group.group_size} sessions that are over and have a reward."
    return done + (f" Missing: {', '.join(named)}." if named else "")
