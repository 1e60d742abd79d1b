"""The fixtures of tests with third-party clients."""

from support.client_fixtures import async_http, everything_served_is_stored, fake_engine, http, proxy

__all__ = ["async_http", "everything_served_is_stored", "fake_engine", "http", "proxy"]
