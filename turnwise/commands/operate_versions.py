"""What the commands about the served model do with the store, as plain JSON values."""

from __future__ import annotations

from turnwise.commands.operate import as_json, opened
from turnwise.store import policies, queries
from turnwise.store.database import Database
from turnwise.types import Json, PolicyVersion


def list_versions(url: str, *, limit: int) -> list[Json]:
    """Return the versions, newest first, each with whether it is pinned and whether its files still exist."""
    with opened(url) as database, database.read() as conn:
        pinned = policies.pinned_version(conn)
        found, _ = policies.list_policies(conn, limit=limit)
    return [
        {
            **as_json(policy),
            "pinned": policy.version == pinned,
            "on_disk": policies.on_disk(policy),
            "reward_mean": policy.metrics.get("reward_mean"),
        }
        for policy in found
    ]


def pin_version(url: str, version: int) -> Json:
    """Serve a version whatever is published later.

    Raises:
        NotFound: no such version.
        Conflict: its files no longer exist.
    """
    with opened(url) as database:
        with database.read() as conn:
            policy = policies.get_policy(conn, version)
        policies.check_files_exist(policy, lambda: _newest_versions(database))
        with database.write() as conn:
            pinned: Json = as_json(policies.choose_policy(conn, version, pin=True))
    return pinned


def _newest_versions(database: Database) -> list[PolicyVersion]:
    with database.read() as conn:
        return policies.list_policies(conn, limit=1000)[0]


def follow_newest(url: str) -> Json:
    """Serve the newest version again; return its number, None before the first."""
    with opened(url) as database, database.write() as conn:
        policies.pin_policy(conn, None)
        newest = policies.newest_policy(conn)
    return {"version": None if newest is None else newest.version}


def list_updates(url: str, *, limit: int) -> list[Json]:
    """Return the updates, newest first."""
    with opened(url) as database, database.read() as conn:
        return [
            {
                **as_json(update),
                "reward_mean": update.metrics.get("reward_mean"),
                "seconds": update.metrics.get("seconds"),
            }
            for update in queries.updates(conn, limit=limit)[0]
        ]
