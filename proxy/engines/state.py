"""The states of an engine, and the legal transitions between them."""

from __future__ import annotations

import enum


class EngineState(enum.StrEnum):
    """What the proxy may do with an engine."""

    ABSENT = "absent"
    """It does not answer, or does not serve the version that it should; it gets no calls and is expected back."""
    UNSUITABLE = "unsuitable"
    """It answers but lacks what exact capture needs; it gets no calls until it is restarted with other flags."""
    READY = "ready"
    """It serves the right version and gets calls."""
    DRAINING = "draining"
    """It serves, but new calls go to another engine where there is one."""
    RELOADING = "reloading"
    """Its weights are being exchanged; new calls wait inside the proxy."""


TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.ABSENT: frozenset({EngineState.UNSUITABLE, EngineState.READY}),
    EngineState.UNSUITABLE: frozenset({EngineState.ABSENT, EngineState.READY}),
    EngineState.READY: frozenset({EngineState.ABSENT, EngineState.DRAINING, EngineState.RELOADING}),
    EngineState.DRAINING: frozenset({EngineState.ABSENT, EngineState.READY, EngineState.RELOADING}),
    EngineState.RELOADING: frozenset({EngineState.ABSENT, EngineState.READY, EngineState.DRAINING}),
}
"""The legal transitions; from a state to itself nothing happens."""
SERVING = frozenset({EngineState.READY, EngineState.DRAINING, EngineState.RELOADING})
"""States in which calls are routed to the engine, at once or after a wait."""
