"""The roles that turns are stored with, and those of earlier turns that a new one corrects."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from proxy.calls.steps import CallStep
from proxy.features.roles.chains import corrections, find_role, read_root
from turnwise.errors import StoreError
from turnwise.store.turns import set_roles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.metrics import Counted
    from proxy.services import Services
    from proxy.sessions.forest import KnownTurn
    from proxy.writer.process import NewTurn

log = logging.getLogger(__name__)


class Roles(CallStep):
    """Finds the roles of all turns."""

    takes_all = True
    counters: ClassVar[Mapping[str, Counted]] = {
        "turns_by_role": ("turnwise_turns_by_role", "Stored completions by the role of their chain", ["role"])
    }
    turns_by_role: Counter

    def __init__(self, services: Services) -> None:
        self._writer = services.writer

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        call, place, root = running.call, running.place, None
        if place.parent is None:
            root = read_root(call.messages, call.tools, turns[0].sampling)
        is_named = place.inferred_by is None
        found = find_role(call, place.parent, place.reason, place.forest, root, is_named=is_named)
        for turn in turns:
            turn.role, turn.role_reason = found

    async def stored(self, running: Running, turns: list[NewTurn], known: list[KnownTurn]) -> None:
        for turn in turns:
            self.turns_by_role.labels(turn.role).inc()
        forest = running.place.forest
        for turn_ids, (role, reason) in corrections(known[0], forest, running.place.conversation) if known else ():
            try:
                await self._writer.do(set_roles, turn_ids, role, reason)
            except StoreError as error:  # the call's own turn is stored
                log.warning("the turns %s keep their roles: %s", ", ".join(turn_ids), error)
                continue
            for turn_id in turn_ids:
                forest.by_id[turn_id].about.role = role
