"""The steps of a call beside its capture: what features do with it, where the call's story says so.

A step overrides the methods of the places that it has a part in. At the start one list a place is made of the steps
that are on, so what is off costs a call nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.calls.capture import Running
    from proxy.settings import ProxySettings
    from proxy.writer.process import NewTurn
    from turnwise.store.extensions import Column


class CallStep:
    """One feature's part in every call. What it keeps of one is `running.kept` under its class."""

    columns: tuple[Column, ...] = ()
    """What lists show besides while it is on."""

    def __init__(self, services: Any) -> None:
        """Take what is needed of `proxy.services.Services`, which has its store, writer, engines and sessions."""

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:  # noqa: ARG003
        return True

    def sent(self, running: Running) -> None:
        """Take a call whose lane is chosen, just before the engine gets it."""

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        """Take a call's turns before they are stored, also those of a call that was cut off after its first token."""

    def ended(self, running: Running) -> None:
        """Take a call that is over, however it ended, while it still has its lane."""


class Steps:
    """The steps that are on, in their order, by the places that they have a part in."""

    def __init__(self, kinds: Iterable[type[CallStep]], services: Any, settings: ProxySettings) -> None:
        on = [kind(services) for kind in kinds if kind.is_on(settings)]
        self.columns = [column for step in on for column in step.columns]
        self.sent = [step.sent for step in on if type(step).sent is not CallStep.sent]
        self.built = [step.built for step in on if type(step).built is not CallStep.built]
        self.ended = [step.ended for step in on if type(step).ended is not CallStep.ended]
