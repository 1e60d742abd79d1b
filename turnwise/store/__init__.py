"""The database: the only state that proxy and trainer share.

All code here is synchronous SQLAlchemy Core, the same for SQLite and PostgreSQL; the proxy calls it from threads. Most
functions take an open transaction, and who opened it commits all changes together. A function that is given the id of a
session, turn, version, key or policy raises `NotFound` if it, or the given tenant, has none.
"""
