"""The name of an adapter on an engine: its version, the database that the version is of, and a digest of its files.

An engine outlives a database, and two databases may share an engine: both have a version 1. Engines also keep what they
computed under a name, so a name stands for the same weights as long as the engine runs. Clients never see these names.
"""

from __future__ import annotations

import re

PREFIX = "policy-v"
DATABASE_DIGITS = 12
FILES_DIGITS = 16
_NAME = re.compile(rf"{PREFIX}([0-9]+)(?:-([0-9a-f]{{{DATABASE_DIGITS}}})-[0-9a-f]{{{FILES_DIGITS}}})?")


def adapter_name(version: int, database_id: str, digest: str) -> str:
    return f"{PREFIX}{version}-{database_id}-{digest[:FILES_DIGITS]}"


def is_adapter_name(name: str) -> bool:
    """Return whether a name has the form of an adapter's, of this database or of any other."""
    return _NAME.fullmatch(name) is not None


def own_version(name: str, database_id: str) -> int | None:
    """Return the policy version in the name of an adapter of a database; None for any other name."""
    form = _NAME.fullmatch(name)
    return int(form[1]) if form is not None and form[2] == database_id else None
