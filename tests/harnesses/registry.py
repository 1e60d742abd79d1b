"""All entries of the table, in the order of the page."""

from __future__ import annotations

from harnesses.entries.command_line import COMMAND_LINE
from harnesses.entries.frameworks import FRAMEWORKS
from harnesses.entries.sdks import SDKS
from harnesses.entry import Harness

HARNESSES: tuple[Harness, ...] = (*COMMAND_LINE, *FRAMEWORKS, *SDKS)
