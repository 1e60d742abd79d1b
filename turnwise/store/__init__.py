"""The database: the only truth that proxy and trainer share.

Everything here is synchronous SQLAlchemy Core, the same for SQLite and PostgreSQL; the proxy calls it from threads.
"""
