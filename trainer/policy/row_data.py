"""The inputs of one row's loss that are known before the forward pass: columns of the batch's table, on the device."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.learning.batch import Batch, Reals, Row
from trainer.policy.inputs import RowInputs, on_device
from trainer.policy.model import Policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowData:
    """A row's inputs, and the columns of `TrainedTokens` that do not come from the model."""

    inputs: RowInputs
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    proximal: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    pair: Tensor
    chosen: Tensor
    is_imported: Tensor | None
    """True for tokens of imported sessions that are mixed in; None where the batch has none. [m]"""


def inputs_of(policy: Policy, batch: Batch, row: Row) -> RowInputs:
    """Return what the model gets of a row."""
    temperature = torch.from_numpy(batch.table.temperature[row.token])
    return policy.inputs(row, temperature, torch.from_numpy(batch.table.target[row.token]))


def row_data(policy: Policy, batch: Batch, row: Row, weights: Reals, proximal: Reals | None) -> RowData:
    """Return a row's data; may be called in a thread while another row is computed.

    Args:
        policy: The model that will run.
        batch: What was claimed.
        row: The packed row.
        weights: Of each token of the table. [M]
        proximal: Logprobs of each token of the table, if the loss needs them. [M]
    """
    table = batch.table
    members, sequence = np.unique(table.experience[row.token], return_inverse=True)
    _, pair = np.unique(np.array(batch.unit_of)[members], return_inverse=True)

    def column(values: npt.NDArray[np.generic] | None) -> Tensor | None:
        return None if values is None else on_device(torch.from_numpy(values[row.token]), policy.device)

    def present(values: npt.NDArray[np.generic]) -> Tensor:
        return on_device(torch.from_numpy(values), policy.device)

    return RowData(
        inputs=inputs_of(policy, batch, row),
        behaviour=present(table.behaviour[row.token]),
        advantages=present(table.advantages[row.token]),
        weights=present(weights[row.token]),
        sequence=present(sequence),
        proximal=column(proximal),
        old_values=column(table.values),
        returns=column(table.returns),
        pair=present(pair),
        chosen=present(np.array(batch.chosen)[members]),
        is_imported=column(table.experience >= batch.num_sampled if batch.has_imported else None),
    )
