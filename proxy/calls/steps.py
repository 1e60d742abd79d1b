"""The steps of a call beside its capture: what features do with it, where the call's story says so.

A step overrides the methods of the places that it has a part in. At the start one list a place is made of the steps
that are on, so what is off costs a call nothing. The order of the methods is that of the story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

if TYPE_CHECKING:
    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.metrics import Counted
    from proxy.sessions.forest import KnownTurn
    from proxy.sessions.memory import Enter
    from proxy.settings import ProxySettings
    from proxy.writer.process import MakeRowStep, NewTurn
    from turnwise.store.extensions import Column
    from turnwise.types import Session


EVERY_CALL, WITH_KEY = "every call", "with a key"
"""Marks of calls: of all, and of those whose caller has a key."""


class CallStep:
    """One feature's part in calls. What it keeps of one is `running.kept` under its class."""

    columns: tuple[Column, ...] = ()
    """What lists show besides while it is on."""
    dialects: ClassVar[frozenset[str] | None] = None
    """Whose calls it is `asked` of; None for those of all."""
    marks: frozenset[Any] = frozenset({EVERY_CALL})
    """It takes calls that have one of these: `EVERY_CALL`; when they are `admitted` `WITH_KEY`; when they are `asked`
    names of headers and metadata; when they are `sent` names of request fields, notes, the engine's defaults and parts
    that it gives. From `built` on it takes those of which it keeps something."""
    takes_all: ClassVar[bool] = False
    """Whether it takes all calls from `built` on."""
    session_fields: ClassVar[Mapping[str, Callable[[Any], None]]] = {}
    """Fields of a new session that it serves, each with what raises a `ValueError` at a value that it refuses."""
    counters: ClassVar[Mapping[str, Counted]] = {}
    """Its metrics by the names of its attributes that hold them."""
    unpacked: ClassVar[Mapping[str, Counted]] = {}
    """Its metrics of turns that are stored without a part of this name, labelled with the reason."""

    rows: tuple[MakeRowStep, ...] = ()
    """What it does with rows of turns in the writing process."""

    def __init__(self, services: Any) -> None:
        """Take what is needed of `proxy.services.Services`, which has its store, writer, metrics and settings."""

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:  # noqa: ARG003
        return True

    async def admitted(self, running: Running) -> None:
        """Take a call whose caller is known, before its place is counted; what it raises refuses the call."""

    async def asked(self, running: Running) -> None:
        """Take a call whose request was read."""

    def entering(self, session: Session) -> Enter | None:  # noqa: ARG002
        """Return what changes each call of a session before its conversation is read, also one that counts tokens."""
        return None

    async def denied(self, running: Running) -> None:
        """Take a call that denies training, in its session; one without a place repeats the answer of an earlier."""

    def sent(self, running: Running) -> None:
        """Take a call whose lane is chosen, just before the engine gets it; again where it gets it a second time."""

    # Only of a call of which the step keeps something.

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        """Take a call's turns before they are stored, also those of a call that was cut off after its first token."""

    async def stored(self, running: Running, turns: list[NewTurn], known: list[KnownTurn]) -> None:
        """Take the turns of any call that were stored; `known` are those that the next call may extend."""

    def ended(self, running: Running) -> None:
        """Take a call after its last byte, however far it came: also one that was refused or repeated an answer."""


Meant: TypeAlias = "list[tuple[frozenset[Any], Any]]"
"""The steps of one place, each with the marks of the calls that it takes."""
StepT = TypeVar("StepT", bound=CallStep)


class Steps:
    """The steps that are on, in their order, by the places that they have a part in."""

    def __init__(self, kinds: Iterable[type[CallStep]], services: Any) -> None:
        self._on: list[CallStep] = []
        self.unpacked: dict[str, Counter] = {}
        for kind in kinds:
            metrics = {name: services.metrics.counter(*each) for name, each in kind.counters.items()}
            self.unpacked |= {name: services.metrics.counter(*each) for name, each in kind.unpacked.items()}
            if kind.is_on(services.settings):
                step = kind(services)
                vars(step).update(metrics)
                self._on.append(step)
        self.rows = tuple(make for step in self._on for make in step.rows)
        self.session_fields = {name: check for step in self._on for name, check in step.session_fields.items()}
        self.columns = [column for step in self._on for column in step.columns]
        self.admitted = self._marked(self._overridden(lambda kind: kind.admitted))
        self.entering = self._overridden(lambda kind: kind.entering)
        self.denied = self._overridden(lambda kind: kind.denied)
        self.sent = self._marked(self._overridden(lambda kind: kind.sent))
        self.built = self._kept(lambda kind: kind.built)
        self.stored = self._overridden(lambda kind: kind.stored)
        self.ended = self._kept(lambda kind: kind.ended)

    def _overridden(self, method: Callable[[Any], Any]) -> list[Any]:
        """Return the steps' own versions of a method."""
        return [method(step) for step in self._on if method(type(step)) is not method(CallStep)]

    def _marked(self, steps: Iterable[Any]) -> Meant:
        return [(each.__self__.marks, each) for each in steps]

    def _kept(self, method: Callable[[Any], Any]) -> Meant:
        steps = self._overridden(method)
        return [(frozenset({EVERY_CALL if each.__self__.takes_all else type(each.__self__)}), each) for each in steps]

    def asked_in(self, dialect: str) -> Meant:
        """Return the steps of calls of one dialect that were read."""
        steps = self._overridden(lambda kind: kind.asked)
        return self._marked(each for each in steps if dialect in (each.__self__.dialects or {dialect}))

    def of(self, kind: type[StepT]) -> StepT:
        """Return the step of a feature that is on."""
        return next(step for step in self._on if isinstance(step, kind))
