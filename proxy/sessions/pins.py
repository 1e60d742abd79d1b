"""Sampling that a client did not ask for: pinned parameters, and greedy calls that explore without their seed.

A narrower pin wins: of the proxy, the tenant, the policy, the key, the session. A call at temperature 0 teaches
nothing, because no other token could have been sampled. So a share of the sessions samples such calls at a temperature.
The session is chosen, not the call: an episode is of one kind, and comparisons of versions leave explored ones out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from proxy.dialects.base import Call
from proxy.settings import ProxySettings
from turnwise.sampling import NUMBERS
from turnwise.store.arms import takes
from turnwise.types import Json, Session, Split

ASKED = "asked"
"""Key of a turn's sampling with what the call asked for in the place of pinned parameters, None where it set none."""
EXPLORED = "explored"
"""Key of a turn's sampling that is true where a greedy call was sampled at a temperature."""
_EXPLORATION = -1
"""Stands for a version where the sessions that explore are drawn."""


class Pins:
    """Replaces parameters of calls."""

    def __init__(self, settings: ProxySettings, policy_name: Callable[[int], str | None]) -> None:
        self._pins: Mapping[str, Json] = settings.sampling_pins
        self._share, self._temperature = settings.explore, settings.explore_temperature
        self._policy_name = policy_name

    def opened(self, session: Session) -> Session:
        """Return a new session as it is stored: with the temperature of its greedy calls if it explores."""
        if self._share and session.split is Split.TRAIN and takes(_EXPLORATION, self._share, session):
            return dataclasses.replace(session, explores=self._temperature)
        return session

    def pinned(self, session: Session, key_id: str) -> Json:
        """Return the parameters that replace those of a call in a session."""
        policy = self._policy_name(session.policy_id)
        names = ("*", f"tenant:{session.tenant}", f"policy:{policy}", f"key:{key_id}")
        merged: Json = {}
        for name in names:
            merged |= self._pins.get(name, {})
        return merged | session.sampling

    def apply(self, call: Call, session: Session, key_id: str) -> None:
        """Replace a call's parameters, and texts of numbers; note what it asked for, and whether it explores."""
        used = self.pinned(session, key_id) if self._pins else session.sampling
        asked = call.body = with_numbers(call.body)
        is_greedy = session.explores is not None and with_numbers({**asked, **used}).get("temperature") == 0
        if is_greedy:
            used = {**used, "temperature": session.explores}
            if {**asked, **used}.get("seed") is not None:  # by it all runs of a task would sample the same
                used["seed"] = None
        if used:
            replaced = {name: asked.get(name) for name, value in used.items() if asked.get(name) != value}
            call.notes = call.notes | ({ASKED: replaced} if replaced else {}) | ({EXPLORED: True} if is_greedy else {})
            call.body = with_numbers({**asked, **used})


def with_numbers(fields: Json) -> Json:
    """Return the fields of a request with numbers in the place of their texts; other values stay."""
    found = {name: _number(value, NUMBERS[name]) for name, value in fields.items() if name in NUMBERS}
    return fields | found if any(isinstance(fields[name], str) for name in found) else fields


def _number(value: Any, kind: type[int | float]) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    return int(number) if kind is int and number.is_integer() else number
