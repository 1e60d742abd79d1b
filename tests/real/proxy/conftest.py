"""The two engines of these tests; their proxies run in the test's own process."""

from support.reload_stage import stage
from support.warm_writers import fork_writers

__all__ = ["stage"]

fork_writers()
