"""Forests that branch at random places."""

import numpy as np

from trainer.batch.forest import Forest
from turnwise.types import TokenIds

VOCABULARY = 64


def grown_forest(seed: int, num_sequences: int = 12, length: int = 60) -> tuple[Forest, list[TokenIds]]:
    """Return a forest of sequences that branch from earlier ones at random places, and the sequences."""
    rng = np.random.default_rng(seed)
    sequences: list[TokenIds] = []
    for _ in range(num_sequences):
        stem = sequences[rng.integers(len(sequences))] if sequences and rng.random() < 0.8 else np.empty(0, np.int32)
        stem = stem[: rng.integers(len(stem) + 1)]
        sequences.append(np.concatenate([stem, rng.integers(1, VOCABULARY, length)]).astype(np.int32))
    forest = Forest()
    for tokens in sequences:
        forest.insert(tokens)
    return forest, sequences
