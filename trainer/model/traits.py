"""Whether a row may hold several chains or must hold one, as the model declares or as is measured at the start.

It is decided once, when the model is loaded, for every algorithm. Layers with a window, chunks or a state of their own
read a row as one text, whatever mask they get, so a model that declares such layers shares nothing. Every other model
is measured: a packed row with branches is computed in the attention that is used, and compared with a row a chain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batch.batch import Row
from trainer.batch.forest import Forest, Indices, Layout, side_by_side
from turnwise.errors import SettingsError
from turnwise.types import TokenIds

LENGTHS = (24, 16, 16, 40)
"""Tokens of a trunk, of its two branches, and of another chain in the row that is measured."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Mean |packed − alone| of a token, in nats, up to which both are the same in a precision."""
NOISE = 3.0
"""The tolerance as a multiple of the difference between two rows of equal tokens, which may have other experts."""


def why_alone(config: Any) -> str | None:
    """Return which layers keep a row from holding several chains, as a text model's configuration declares them."""
    kinds = getattr(config, "layer_types", None) or []
    if other := sorted(set(kinds) - {"full_attention"}):
        return f"it has layers of the kind {', '.join(other)}"
    if kinds or getattr(config, "use_sliding_window", True) is False:
        return None
    sizes = {name: size for name, size in config.to_dict().items() if re.search(r"window|chunk_size", name) and size}
    return "it has " + ", ".join(f"{name}={size!r}" for name, size in sizes.items()) if sizes else None


def check_repeatable(logprobs: Callable[[Row, Tensor], Tensor], name: str, vocabulary: int, dtype: torch.dtype) -> None:
    """Check that two passes over the same text are equal, unlike with routers that choose experts at random.

    The arguments are those of `measured_alone`, and the model's name for the error.

    Raises:
        SettingsError: They differ.
    """
    chain = np.random.default_rng(0).integers(vocabulary, size=max(LENGTHS), dtype=np.int32)
    first, second = (_computed(logprobs, *side_by_side([chain]), [chain]) for _ in range(2))
    if (gap := float((first - second).abs().mean())) > TOLERANCE[dtype]:
        raise SettingsError(
            f"transformers computes {name!r} with noise in training, {gap:.2g} nats a token between two passes over "
            "the same text: train another model"
        )


def measured_alone(logprobs: Callable[[Row, Tensor], Tensor], vocabulary: int, dtype: torch.dtype) -> str | None:
    """Return by how much the chains of a packed row differ from a row each; None where they do not.

    `logprobs` returns those of these tokens in a row, [m]; `dtype` is the least precise one of the computation.
    """
    random = np.random.default_rng(0)
    trunk, left, right, other = (random.integers(vocabulary, size=length, dtype=np.int32) for length in LENGTHS)
    chains = [np.concatenate([trunk, left]), np.concatenate([trunk, right]), other]
    alone = [_computed(logprobs, *side_by_side([chain]), [chain]) for chain in chains]
    forest = Forest()
    for chain in chains:
        forest.insert(chain)
    layout = forest.lay_out()
    try:
        packed = _computed(logprobs, layout, [forest.places(chain) for chain in chains], chains)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"it computes no packed row ({str(error)[:200]})"
    gap = float((packed - torch.cat(alone)).abs().mean())
    noise = float((alone[0] - alone[1])[: len(trunk) - 1].abs().mean())
    if gap <= max(TOLERANCE[dtype], NOISE * noise):
        return None
    return f"packed rows differ from a row a chain by {gap:.2g} nats a token"


def _computed(
    logprobs: Callable[[Row, Tensor], Tensor], layout: Layout, places: Sequence[Indices], chains: Sequence[TokenIds]
) -> Tensor:
    predictor = np.concatenate([each[:-1] for each in places])
    targets = np.concatenate([chain[1:] for chain in chains]).astype(np.int64)
    return logprobs(Row(layout=layout, predictor=predictor, token=np.arange(len(targets))), torch.from_numpy(targets))
