"""A term: what a kind of call adds to how its chains are computed, from the claim to the forward pass of a row.

The trainer by itself computes text that was sampled at a temperature. A feature that computes more derives from `Term`
and overrides some of its methods. What it finds in a chain stands under its name in `Chain.terms`, and its part of a
row under its name in `Row.parts`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.batch.batch import Batch, Row
from trainer.batch.chain import Chain
from trainer.batch.logits import RowLogits
from trainer.model.inputs import RowInputs
from trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from trainer.model.model import Policy


class Around:
    """What a term does with one model; its defaults do nothing."""

    def why_unfit(self, chain: Chain) -> str | None:  # noqa: ARG002  for subclasses
        """Return why the model cannot compute a chain; None where it can."""
        return None

    def of_inputs(self, row: Row, inputs: RowInputs) -> RowInputs:  # noqa: ARG002
        """Return a row's inputs with the term's part; may be called in a thread while another row is computed."""
        return inputs

    def forward(self, inputs: RowInputs | None) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of a forward pass of a row; of a plain text where `inputs` is None."""
        return contextlib.nullcontext()


class Term:
    """A term of the rows of one trainer; its defaults do nothing."""

    name: ClassVar[str]

    def __init__(self, settings: TrainerSettings) -> None: ...

    def of_chain(self, chain: Chain) -> Chain:
        """Return a claimed chain with what the term finds in it."""
        return chain

    def of_row(self, batch: Batch, row: Row) -> Any:  # noqa: ARG002  for subclasses
        """Return the term's part of a packed row; None where it has none."""
        return None

    def on_logits(self, batch: Batch, row: Row) -> RowLogits | None:  # noqa: ARG002
        """Return what changes the logits of the row's trained tokens beside a scale; None: nothing."""
        return None

    def around(self, policy: Policy) -> Around | None:  # noqa: ARG002
        """Return what the term does with a model that was just loaded; None where it does nothing."""
        return None
