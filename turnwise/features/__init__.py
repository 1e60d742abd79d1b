"""What features have in the store, one after another; importing this lets the store call them.

The store knows none of them. A process imports this package at its top, before it opens a database.
"""

from turnwise.features import labels, limits, prices
from turnwise.store import extensions

EXTENSIONS: tuple[extensions.Extension, ...] = (labels.EXTENSION, limits.EXTENSION, prices.EXTENSION)

extensions.use(EXTENSIONS)
