"""Which commands features add to the command line, each with the group that it stands in; None for no group.

A command stands above what it calls, so the feature's commands are here and not with its part of the store.
"""

from __future__ import annotations

import click

from turnwise.commands.features import examples, lineage
from turnwise.commands.features.certify.command import certify
from turnwise.commands.features.doctor import doctor
from turnwise.commands.features.engines import engine, fake_engine
from turnwise.commands.features.reward import reward
from turnwise.commands.features.verify.command import verify

COMMANDS: tuple[tuple[str | None, click.Command], ...] = (
    (None, examples.examples),
    (None, examples.gate),
    ("sessions", examples.pin),
    ("sessions", examples.unpin),
    ("policies", lineage.lineage),
    (None, engine),
    (None, fake_engine),
    (None, reward),
    (None, doctor),
    (None, verify),
    (None, certify),
)
