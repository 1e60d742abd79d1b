"""The arithmetic by which rewards of a group are compared, for the trainer and for those who look before it trains."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to the standard deviation before a division by it."""
UNIFORM_TOLERANCE = 1e-12
"""Relative spread up to which values count as equal, so that a division does not amplify their rounding."""


def normalised(values: Floats) -> Floats:
    """Return (x_i − mean) / (std + ε), the std with G − 1 as in torch. Shao et al. 2024 (arXiv:2402.03300), 4.1.2."""
    scaled: Floats = (values - values.mean()) / (values.std(ddof=1) + STD_EPSILON)
    return scaled


def is_uniform(values: Floats) -> bool:
    """Return whether all values are equal but for rounding."""
    return bool(np.ptp(values) <= UNIFORM_TOLERANCE * np.abs(values).max())
