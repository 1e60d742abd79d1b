"""A settable clock for leases: PostgreSQL's own, or the one of all trainer processes."""

from pathlib import Path

import sqlalchemy as sa

from turnwise.store.database import Database


class DatabaseClock:
    """The clock by which leases are measured; it can jump."""

    def __init__(self, database: Database, directory: Path) -> None:
        self._database = database
        self.file = directory / "clock"
        self.file.write_text("0")
        if database.dialect == "postgresql":
            self._shadow_the_servers()

    def jump(self, seconds: float) -> None:
        if self._database.dialect == "postgresql":
            with self._database.write() as connection:
                connection.execute(sa.text("UPDATE wrong_clock SET off_by = :seconds"), {"seconds": seconds})
            return
        fresh = self.file.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self.file)

    def _shadow_the_servers(self) -> None:
        with self._database.write() as connection:
            connection.exec_driver_sql("CREATE TABLE wrong_clock (off_by double precision)")
            connection.exec_driver_sql("INSERT INTO wrong_clock VALUES (0)")
            connection.exec_driver_sql(
                "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT "
                "pg_catalog.clock_timestamp() + make_interval(secs => (SELECT off_by FROM wrong_clock)) $$"
            )
            name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
