"""The database: the only state that proxy and trainer share.

All code here is synchronous SQLAlchemy Core, the same for SQLite and PostgreSQL; the proxy calls it from threads.
"""
