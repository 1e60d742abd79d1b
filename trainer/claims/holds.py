"""What features have in a training: why no batch is claimed although one is ready, and what stands beside a step.

The trainer by itself waits for groups, and for those that older versions sampled, and publishes what it trained.
Features derive from `Hold` or `Beside`, and are asked in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from torch import Tensor

from trainer.model.agent import PolicyAgent
from turnwise.store.database import Connection
from turnwise.store.groups import GroupChange
from turnwise.store.serving import ServingState
from turnwise.store.updates import Advantages
from turnwise.types import GroupKey, Json, PolicyVersion, SessionKey

if TYPE_CHECKING:
    from trainer.batch.batch import Batch, Reals
    from trainer.batch.selection import Selection
    from trainer.claims.ledger import Ledger, RunProgress

OfFirst: TypeAlias = "Mapping[type[Beside[Any]], Any]"
Given = TypeVar("Given")
"""The feature's own part of the settings, which are the sum of all."""


class Detour:
    """What the training does first, in place of a batch; every process does it."""

    def taken(self, training: Any, state: Any) -> Any:
        """Return the state of the training to go on from."""
        raise NotImplementedError


def own(parts: Sequence[Any], method: Callable[..., Any]) -> list[Any]:
    """Return the parts' own versions of a method of their base class, in their order."""
    name = method.__name__
    return [getattr(each, name) for each in parts if getattr(type(each), name) is not method]


class Comparison:
    """What the optimizer steps of one batch are held against; every process calls it in step."""

    def why_refused(self, members: Sequence[int], logprobs: Reals, *, has_moved: bool) -> Mapping[GroupKey, str]:
        """Take a step's members with the batch's logprobs, [M]; return the groups that it must not train, and why.

        It is called before the step is taken; `has_moved` says that the batch had an earlier one.
        """
        raise NotImplementedError

    def gauges(self, refused: Collection[GroupKey]) -> Json:
        """Return gauges of the batch, whose groups are trained but for these."""
        raise NotImplementedError


class Hold(Generic[Given]):
    """A reason to wait of one policy's training; its defaults have none."""

    needs_person: ClassVar[bool] = False
    """Whether the wait lasts until a person acts."""
    needs_batch: ClassVar[bool] = False
    """Whether it is asked only once there is a batch that it could stop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._settings = cast("Given", ledger.settings)

    @classmethod
    def is_on(cls, settings: Given) -> bool:  # noqa: ARG003  for subclasses
        return True

    def changes(self, conn: Connection, state: ServingState) -> list[GroupChange]:  # noqa: ARG002  for subclasses
        """Return what must change in the store before groups are counted."""
        return []

    def watch(self) -> None:
        """Look at the store beside the reads of a poll, now and then, before a batch is claimed; may write to it."""

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | Detour | None:  # noqa: ARG002
        """Return why no batch may be claimed now, None where one may, or what is to be done first."""
        return None

    def denied(self, conn: Connection, read: Collection[SessionKey]) -> set[SessionKey]:  # noqa: ARG002
        """Return those of the sessions that were read of which nothing may be trained any more."""
        return set()

    def why_failed(self, state: ServingState, came_from: Sequence[int]) -> str | None:  # noqa: ARG002
        """Return why a version whose weights come from these fails at once, in the transaction that publishes it."""
        return None

    def announced(self, version: PolicyVersion, parent: int, trained: Mapping[SessionKey, Advantages]) -> None:
        """Take a version that is about to be published, with what it comes from, and again once its files are written.

        It is not called on an event loop, and may write to the store and to the version's directory.
        """


class Beside(Generic[Given]):
    """One feature's part in one policy's training, called where `Training` says; its defaults do nothing.

    Every process calls it in step.
    """

    def __init__(self, ledger: Ledger, learner: PolicyAgent, first: OfFirst) -> None:
        """`first` has what stands beside the first policy of the process, as far as it is made."""
        self._ledger = ledger
        self._learner = learner
        self._settings = cast("Given", ledger.settings)
        self._first = first

    @classmethod
    def is_on(cls, settings: Given) -> bool:  # noqa: ARG003  for subclasses
        return True

    def opened(self, version: int, probe: Json | None) -> None:
        """Take the version that the training starts from, and what its manifest has as `probe`."""

    def selected(self, selection: Selection, at: RunProgress) -> Json:  # noqa: ARG002
        """Take what is selected of a batch, which it may add to; return gauges."""
        return {}

    def comparison(self, batch: Batch) -> Comparison:
        """Return what the steps of a batch are held against."""
        raise NotImplementedError

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return what stands around the computation of a batch."""
        return contextlib.nullcontext()

    def why_unpublished(self, policy_version: int) -> tuple[Json, str | None]:  # noqa: ARG002
        """Return gauges, and why weights that come from this version must not be published; None where they may.

        A version that is refused is kept on disk and stored as failed.
        """
        return {}, None

    def takes(self, version: int, weights: dict[str, Tensor], probe: Json) -> bool:  # noqa: ARG002
        """Take a new version; return whether engines get it from here, so that its directory may be written later."""
        return False

    def trained(self, at: RunProgress, *, is_last: bool) -> Json:  # noqa: ARG002
        """Take the end of a batch; return gauges to record."""
        return {}

    def kept_versions(self) -> set[int]:
        """Return the versions that stay on disk besides those in use."""
        return set()

    def close(self) -> None:
        """End what it started."""
