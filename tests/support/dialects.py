"""Which databases a test runs on, where not on each of `conftest.DIALECTS`."""

from __future__ import annotations

import pytest

QUICK_ON_SQLITE = pytest.mark.parametrize(
    "dialect", ["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow])]
)
"""For tests that take long and prove the same of both databases: PostgreSQL's turn is in `make test-all`."""
