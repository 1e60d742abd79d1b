"""Rows in every table, small: what the tests' store has, and by the store's own functions what it lacks."""

import decimal
import hashlib

import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, make_turn
from support.store_calls import CALLS
from support.store_fill import fill

from turnwise.features import consent, examples, images, limits, policies, transfers
from turnwise.features.images import IMAGES, pack_images
from turnwise.features.lineage import versions as lineage
from turnwise.features.ratings import draws, predictions
from turnwise.store import keys, leases, rows, sessions, trainer_reports, turns
from turnwise.store.database import Database
from turnwise.store.schema import metadata, policy_versions
from turnwise.types import PolicyKind, PolicyVersion, utc_now

IMAGE = b"\x89PNG"
DIGEST = hashlib.sha256(IMAGE).hexdigest()
STORED = ("rewards", "feedback", "a fork", "engine activity", "all keys", "a pinned example")
"""The tests' calls of the store that leave rows which no other call of these has left."""


def fill_all(database: Database) -> str:
    """Store rows in each table; return an admin key of their tenant.

    Raises:
        SystemExit: a table has none.
    """
    fill(database)
    with database.write() as conn:
        conn.execute(sa.update(policy_versions).values(kind=PolicyKind.LORA.value))
        support, _ = policies.create_policy(conn, "t", "support")
        consent.put_mark(conn, consent.ConsentMark(tenant="t", kind=consent.ConsentOf.USER, name="kim"))
    add_finished(database, "of-support", tenant="t", policy_id=support.policy_id, user_id="kim")
    add_session(database, "unrated", tenant="t")
    for name in STORED:
        with database.write() as conn:
            CALLS[name](conn)
    with database.write() as conn:
        _add_image(conn)
        made = PolicyVersion(version=1, path="a-model", update_id=1, weights_digest="d")
        lineage.note_version(conn, made, 0, {("t", "over"): {"t-over-t1": 0.5}}, {})
        leases.acquire_lease(conn, "reload", "one", 60)
        transfers.announce_weights(conn, "trainer", "http://trainer", utc_now())
        trainer_reports.report_status(conn, "trainer", "waits")
        trainer_reports.keep_state(conn, 0, {"buffer": [], "singles": []})
        key_id, key = keys.create_key(conn, "t", keys.KeyRole.ADMIN, "reads")
        limits.add_usage(conn, {("t", key_id, 1): 5})
        limits.settle(conn, "proxy", 10.0, [limits.Need("t", key_id, limits.Rule(9, 9, 9), num_needed=1)])
        examples.pin_session(conn, "t", "s", note="wrong", written_by=None)
        predicted = {"policy_version": 1, "mean": 0.8, "deviation": 0.1}
        predictions.keep(conn, [predictions.Prediction(tenant="t", session_id="unrated", policy_id=0, **predicted)])
        sessions.end_session(conn, "t", "unrated")
        draws.next_draw(conn, "t", 0, "ann")
        sessions.end_session(conn, "t", "s")  # it has a reward: a proxy would end it some minutes later
    with database.read() as conn:
        empty = [
            table.name for table in metadata.sorted_tables if conn.execute(sa.select(table).limit(1)).first() is None
        ]
    if empty:
        raise SystemExit(f"no rows in {empty}: let tests/released/rows.py store some")
    return key


def _add_image(conn: sa.Connection) -> None:
    part = {"type": "image_url", "image_url": {"url": f"image:{DIGEST}"}}
    placed = {"digest": DIGEST, "offset": 0, "length": 1, "runs": [[0, 1]]}
    parts = {IMAGES: pack_images([placed]), "experts": b"\x93NUMPY"}
    turn = make_turn("t10", session_id="over", tenant="t", messages=[{"role": "user", "content": [part]}], parts=parts)
    media = {DIGEST: images.Media("image/png", IMAGE)}
    turns.append_rows(conn, [rows.TURNS.row(turn, media=media, charge=("k", 0, "EUR", decimal.Decimal("0.5")))])
