"""Fixtures of the tests of imports."""

from support.exchanged import database, model

__all__ = ["database", "model"]
