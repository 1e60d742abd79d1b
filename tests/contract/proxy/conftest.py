"""Proxies of these tests run in the test's own process."""

from support.warm_writers import fork_writers

fork_writers()
