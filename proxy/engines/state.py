"""The state of one engine: the values, the legal transitions, and the one object that changes it."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


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


class EngineStatus:
    """Holds an engine's state; every change goes through `change`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.current = EngineState.ABSENT
        """The state now; only `change` sets it."""
        self.on_change: Callable[[EngineState], None] | None = None
        """Called after each change with the new state."""

    def change(self, new: EngineState) -> None:
        """Change the state; to the present state this does nothing."""
        if new is self.current:
            return
        assert new in TRANSITIONS[self.current], f"an engine cannot change from {self.current} to {new}"
        log.debug("the engine at %s changes from %s to %s", self._url, self.current, new)
        self.current = new
        if self.on_change is not None:
            self.on_change(new)

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Keep the engine in RELOADING for the block; then restore its state, unless the block took it out."""
        before = self.current
        self.change(EngineState.RELOADING)
        try:
            yield
        finally:
            if self.current is EngineState.RELOADING:
                self.change(before)
