"""Images of a tenant: stored once, linked by every session that has them, deleted with the last one."""

import base64
import dataclasses
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish, make_turn
from support.waiting import WAIT_SECONDS, assert_stays

from turnwise import chains
from turnwise.commands.export import _sessions
from turnwise.exchange import training_formats
from turnwise.features import forks, images, retention
from turnwise.features.exports import experience_json
from turnwise.features.images import IMAGES, PlacedImage, images_of, pack_images
from turnwise.features.verify.records import verify
from turnwise.store import experiences, rows, schema, turns
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import Json, Session, Turn

FILE = b"\x89PNG the colour of a marker " * 40
DIGEST = hashlib.sha256(FILE).hexdigest()
PLACED: Json = {"digest": DIGEST, "offset": 0, "length": 2, "runs": [[0, 2]], "processor": "p", "pixels": "x"}


def shown(digest: str = DIGEST) -> Json:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"image:{digest}"}}]}


def append(database: Database, turn: Turn, **files: images.Media) -> None:
    with database.write() as connection:
        turns.append_rows(connection, [rows.TURNS.row(turn, media=files)])


def with_image(turn_id: str, session_id: str, parent: Turn | None = None, **fields: Any) -> Turn:
    turn = make_turn("t1", parent, session_id=session_id, messages=[shown()], **fields)
    turn.parts = {IMAGES: pack_images([PLACED])}
    return dataclasses.replace(turn, turn_id=turn_id, chain_id=turn_id)


def stored_files(database: Database) -> list[tuple[str, str]]:
    with database.read() as connection:
        return [tuple(row) for row in connection.execute(sa.select(images.media.c.tenant, images.media.c.digest))]


@pytest.fixture
def filled(database: Database) -> Database:
    """Return a store in which two sessions of a tenant and one of another show the same image."""
    for session_id, tenant in (("a", "default"), ("b", "default"), ("c", "other")):
        add_session(database, session_id, tenant=tenant, turns=0)
        turn = with_image(f"{session_id}-t1", session_id, tenant=tenant)
        append(database, turn, **{DIGEST: images.Media("image/png", FILE)})
    return database


def test_a_tenant_stores_an_image_once_and_reads_only_its_own(filled):
    assert sorted(stored_files(filled)) == [("default", DIGEST), ("other", DIGEST)]
    with filled.read() as connection:
        assert images.read_media(connection, "default", [DIGEST, "0" * 64]) == {DIGEST: ("image/png", FILE)}
        assert images.read_media(connection, "default", [DIGEST], session_id="b")
        assert not images.read_media(connection, "default", [DIGEST], session_id="c")
        assert not images.read_media(connection, "nobody", [DIGEST])


def test_a_message_that_only_quotes_an_image_does_not_link_it(filled):
    add_session(filled, "q", turns=0)
    named = {"image_url": {"url": f"image:{DIGEST}"}}
    messages = [{"role": "user", "content": str(named), "note": named}, shown("1" * 64)]
    append(filled, make_turn("t8", session_id="q", messages=messages))
    with filled.read() as connection:
        assert not images.read_media(connection, "default", [DIGEST], session_id="q")


def test_the_bytes_leave_the_file_with_the_last_session_that_has_them(filled, tmp_path):
    with filled.read() as connection:
        path, _ = forks.read_path(connection, Session(session_id="fork"), "a-t1", before=False)
    with filled.write() as connection:
        forks.copy_turns(connection, Session(session_id="fork"), path[0], path)
    for session_id, tenant in (("a", "default"), ("b", "default"), ("c", "other")):
        with filled.write() as connection:
            retention.delete_session(connection, tenant, session_id)
        with filled.read() as connection:
            assert not images.read_media(connection, tenant, [DIGEST], session_id=session_id)
    retention.delete_all(filled, lambda _: retention.Deleted())
    assert stored_files(filled) == [("default", DIGEST)]  # the fork has it
    retention.delete_all(filled, lambda connection: retention.delete_session(connection, "default", "fork"))
    assert stored_files(filled) == []
    with filled.read() as connection:
        is_a_file = connection.dialect.name == "sqlite"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert bool(files) is is_a_file
    assert not any(FILE[:40] in file.read_bytes() for file in files)


def test_a_forgotten_person_leaves_an_image_only_to_another_one_who_showed_it(database):
    for user in ("ann", "bob"):
        add_session(database, user, user_id=user, turns=0)
        append(database, with_image(f"{user}-t1", user), **{DIGEST: images.Media("image/png", FILE)})
    for user, left in (("ann", [("default", DIGEST)]), ("bob", [])):
        of_user = SessionFilter(tenant="default", user_id=user)
        retention.delete_all(database, lambda conn, of_user=of_user: retention.delete_sessions(conn, of_user))
        assert stored_files(database) == left
        with database.read() as connection:
            assert not images.read_media(connection, "default", [DIGEST], session_id=user)


def test_a_turn_that_shows_an_image_while_it_is_deleted_waits_and_has_it(filled):
    with filled.write() as connection:
        for session_id in ("a", "b"):
            retention.delete_session(connection, "default", session_id)
    add_session(filled, "late", turns=0)
    turn = with_image("late-t1", "late")
    appended: list[Future[None]] = []

    def show(*statement: Any) -> None:
        """Append the turn when the image is locked, but not deleted yet."""
        if str(statement[2]).startswith("DELETE FROM media"):
            appended.append(pool.submit(append, filled, turn, **{DIGEST: images.Media("image/png", FILE)}))
            assert_stays(lambda: not appended[-1].done(), "the turn waits for the deletion", seconds=0.5)

    with ThreadPoolExecutor(1) as pool:
        with filled.write() as connection:
            links = sa.select(images.session_media.c.session_pk).where(images.session_media.c.tenant == "default")
            first, last = connection.execute(links).scalars().all()
            assert images.sweep_media(connection, first)
            sa.event.listen(connection, "before_cursor_execute", show)
            assert images.sweep_media(connection, last)
        appended[0].result(WAIT_SECONDS)
    with filled.read() as connection:
        assert images.read_media(connection, "default", [DIGEST], session_id="late")


def test_a_claimed_experience_has_its_images_with_their_files(filled):
    second = make_turn("t2", with_image("a-t1", "a"), session_id="a", messages=[shown()])
    placed = {**PLACED, "offset": second.prompt_length - 1, "length": 1, "runs": [[second.prompt_length - 1, 1]]}
    second.parts = {IMAGES: pack_images([placed])}
    append(filled, second)
    finish(filled, "a")
    with filled.read() as connection:
        pk = connection.execute(sa.select(schema.sessions.c.group_pk).where(schema.sessions.c.session_id == "a"))
        (claimed,) = experiences.experiences_of_groups(connection, [pk.scalar_one()])
        (listed,) = experiences.experiences(connection, SessionFilter(session_id="a"), experiences.PER_CHAIN)
    assert [(image.offset, image.runs, image.content) for image in images_of(claimed)] == [
        (0, ((0, 2),), FILE),
        (placed["offset"], ((placed["offset"], 1),), FILE),
    ]
    assert [image.content for image in images_of(listed)] == [b"", b""]
    assert experience_json(listed)["images"][0] == {**PLACED, "runs": ((0, 2),)}


def test_placeholders_of_different_images_have_different_keys_and_equal_ones_equal_keys():
    tokens = np.array([9, 9, 9, 8], np.int32)
    image = PlacedImage.of_json(PLACED)
    other = PlacedImage.of_json({**PLACED, "digest": "1" * 64})
    assert chains.token_keys(tokens, {}) is tokens
    keys = chains.token_keys(tokens, {IMAGES: [image]})
    assert keys[2:].tolist() == [9, 8]  # an id outside of the placeholder is text
    assert (keys[:2] < 0).all()
    assert keys[0] != keys[1]
    assert chains.token_keys(tokens, {IMAGES: [image]}).tolist() == keys.tolist()
    assert not np.isin(chains.token_keys(tokens, {IMAGES: [other]})[:2], keys).any()


def test_a_changed_place_of_an_image_changes_the_turns_digest(filled):
    with filled.read() as connection:
        view = turns.read_turn(connection, "default", "a-t1")
    moved = [{**PLACED, "offset": 2}]
    assert rows.turn_row(view.turn, 0)["digest"] == view.turn.digest
    view.turn.parts = {IMAGES: pack_images(moved)}
    assert rows.turn_row(view.turn, 0)["digest"] != view.turn.digest


def test_an_exported_conversation_shows_its_images_and_formats_of_text_leave_it_out(filled):
    with filled.read() as connection:
        (document,) = _sessions(connection, SessionFilter(session_id="a"))
    (line,) = training_formats.openai_lines(document)
    url = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    assert line["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": url}}]
    assert list(training_formats.trl_lines(document)) == []


def test_verify_finds_an_image_that_was_changed_or_lies_outside_of_its_turn(filled):
    reports = []
    changed = sa.update(images.media).where(images.media.c.tenant == "default").values(content=b"other")
    moved = rows.TURNS.values({"parts": {IMAGES: pack_images([{**PLACED, "offset": 1}])}})
    for change in (None, changed, sa.update(schema.turns).where(schema.turns.c.turn_id == "b-t1").values(moved)):
        with filled.write() as connection:
            if change is not None:
                connection.execute(change)
        reports.append(verify(filled, SessionFilter(session_id="b"), checker=None, share=1, seed=0, progress=print))
    assert [report.checked["images"] for report in reports] == [1, 1, 1]
    found = [[(each.check, each.problem) for each in report.mismatches] for report in reports]
    assert found[:2] == [[], [("digest", "has another content")]]
    assert ("structure", "lies at 1 to 3, with features at [(0, 2)]") in found[2]
