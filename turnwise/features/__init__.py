"""What features have in the store, one after another; importing this lets the store call them.

The store knows none of them. A process imports this package at its top, before it opens a database.
"""

from turnwise import parts
from turnwise.features import (  # noqa: F401
    arms,
    consent,
    examples,
    experts,
    feedback,
    group_parts,
    images,
    inferred,
    labels,
    limits,
    policies,
    prices,
    summaries,
    supports,
    transfers,
)
from turnwise.features.lineage import versions as lineage
from turnwise.features.page import activity  # noqa: F401  its table is declared there
from turnwise.features.ratings import shown as ratings
from turnwise.store import extensions

EXTENSIONS: tuple[extensions.Extension, ...] = (
    consent.EXTENSION,
    arms.EXTENSION,
    examples.EXTENSION,
    feedback.EXTENSION,
    group_parts.EXTENSION,
    images.EXTENSION,
    inferred.EXTENSION,
    labels.EXTENSION,
    limits.EXTENSION,
    lineage.EXTENSION,
    policies.EXTENSION,
    prices.EXTENSION,
    ratings.EXTENSION,
    summaries.EXTENSION,
)
PARTS: tuple[parts.Part, ...] = (
    supports.Supports(),
    images.Images(),
    experts.Experts(),
    feedback.Hints(),
    summaries.Summaries(),
)
"""What turns have beside their tokens, in the order in which it is stored and shown."""

extensions.use(EXTENSIONS)
parts.use(PARTS)
