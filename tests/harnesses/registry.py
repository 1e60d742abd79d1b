"""All entries of the two tables, in the order of the page."""

from harnesses.entries.command_line import COMMAND_LINE
from harnesses.entries.frameworks import FRAMEWORKS
from harnesses.entries.sdks import SDKS
from harnesses.entries.shortening import COMPACTING, TRIMMING
from harnesses.entry import Harness
from harnesses.shortening import ShorteningHarness

HARNESSES: tuple[Harness, ...] = (*COMMAND_LINE, *FRAMEWORKS, *SDKS)
SHORTENING: tuple[ShorteningHarness, ...] = (*COMPACTING, *TRIMMING)
"""The agents of the second table."""
