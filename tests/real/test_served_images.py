"""Images through a real vLLM: the next turn extends stored tokens and images exactly, in each dialect.

`TURNWISE_IMAGE_SESSIONS=200 TURNWISE_IMAGE_MODEL=Qwen3VL` before pytest plays more sessions, and another model.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from support.engines import RunningEngine, running_engine
from support.proxies import RunningProxy, StartProxy
from support.seeing_agents import FORMATS, Reference, SeeingAgent
from support.served_vision import make_served_model, picture, shown

from turnwise import chains
from turnwise.store import media, rows, schema
from turnwise.store.database import Database
from turnwise.types import Outcome, PlacedImage

NUM_SESSIONS = int(os.environ.get("TURNWISE_IMAGE_SESSIONS", "20"))
KIND = os.environ.get("TURNWISE_IMAGE_MODEL", "Idefics3")
MAX_GAP = 1e-4


@pytest.fixture(scope="module")
def seeing_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    place = tmp_path_factory.mktemp("seeing")
    model = make_served_model(place / "model", KIND)
    with running_engine(model, place / "engine.log", "--limit-mm-per-prompt", '{"image": 12}') as running:
        yield running


@pytest.fixture
def seeing(seeing_engine: RunningEngine, start_proxy: StartProxy) -> RunningProxy:
    return start_proxy(seeing_engine.url)


def ask(proxy: RunningProxy, messages: list[dict[str, Any]], **fields: Any) -> httpx2.Response:
    body = {"model": "small", "messages": messages, "max_tokens": 8, "seed": 1, **fields}
    return httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_turn_with_another_image_extends_the_first_ones_tokens_and_image(
    seeing: RunningProxy, seeing_engine: RunningEngine, stream: bool
) -> None:
    first, second = picture(1, (100, 80)), picture(2, (40, 90))
    messages = [{"role": "user", "content": [shown(first), {"type": "text", "text": "What is it?"}]}]
    for image in (second, None):
        ask(seeing, messages, stream=stream).raise_for_status()
        reply = seeing.turns()[-1].turn.response
        content = [{"type": "text", "text": "And now?"}, *([shown(image)] if image else [])]
        messages += [reply, {"role": "user", "content": content}]
    ask(seeing, messages, stream=stream).raise_for_status()
    views = seeing.turns()
    assert [(view.turn.outcome, view.turn.reason) for view in views] == [(Outcome.EXACT, None)] * 3
    assert [view.turn.parent_turn_id for view in views[1:]] == [view.turn.turn_id for view in views[:-1]]
    placed = [[PlacedImage.of_json(image) for image in view.turn.images or ()] for view in views]
    assert [[image.digest for image in images] for images in placed] == [
        [hashlib.sha256(first).hexdigest()],
        [hashlib.sha256(second).hexdigest()],
        [],
    ]
    image_id = json.loads((seeing_engine.model_dir / "config.json").read_text())["image_token_id"]
    for images in placed[:2]:
        (image,) = images
        ids = views[-1].prompt_token_ids
        inside = range(image.offset, image.offset + image.length)
        runs = [place for offset, length in image.runs for place in range(offset, offset + length)]
        assert runs == [place for place in inside if ids[place] == image_id]
        assert image.pixels.startswith("float32:")
        assert image.processor


def test_another_image_of_the_same_size_extends_nothing(seeing: RunningProxy) -> None:
    """Its tokens are the same, and its digest is not."""
    text = {"type": "text", "text": "What is it?"}
    ask(seeing, [{"role": "user", "content": [shown(picture(1)), text]}]).raise_for_status()
    reply = seeing.turns()[0].turn.response
    later = [reply, {"role": "user", "content": "Sure?"}]
    for seed in (2, 1):
        ask(seeing, [{"role": "user", "content": [shown(picture(seed)), text]}, *later]).raise_for_status()
    first, other, same = (view.turn for view in seeing.turns())
    assert (other.outcome, other.reason, other.parent_turn_id) == (Outcome.RETOKENISED, "edited_history", None)
    assert (same.outcome, same.reason, same.parent_turn_id) == (Outcome.EXACT, None, first.turn_id)


def test_a_placeholder_that_the_processor_would_not_put_there_starts_a_chain_before_sampling(
    seeing: RunningProxy, seeing_engine: RunningEngine, start_proxy: StartProxy
) -> None:
    messages = [{"role": "user", "content": [shown(picture(1)), {"type": "text", "text": "What is it?"}]}]
    ask(seeing, messages).raise_for_status()
    first = seeing.turns()[0].turn
    (placed,) = first.images or ()
    moved = rows.TURNS.values({"images": [{**placed, "offset": placed["offset"] + 1}]})  # as of another processor
    with Database(seeing.database_url).write() as conn:
        conn.execute(sa.update(schema.turns).values(moved))
    other = start_proxy(seeing_engine.url, database_url=seeing.database_url)
    messages += [first.response, {"role": "user", "content": "Sure?"}]
    ask(other, messages).raise_for_status()
    turn = other.turns()[-1].turn
    assert (turn.outcome, turn.reason, turn.parent_turn_id) == (Outcome.RETOKENISED, "media_rerendered", None)
    assert turn.images == [placed]
    assert chains.is_trainable(turn)


def test_sessions_with_images_stay_on_their_chains_and_are_what_transformers_computes(
    seeing: RunningProxy, seeing_engine: RunningEngine
) -> None:
    def play(number: int) -> None:
        rng = random.Random(number)
        agent = SeeingAgent(seeing, f"f{number}", FORMATS[number % len(FORMATS)], rng)
        with httpx2.Client(timeout=300) as http:
            agent.play(rng.randint(3, 6), http)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(play, range(NUM_SESSIONS)))
    reference, gaps, found, num_skipped = Reference(seeing_engine.model_dir), [], Counter(), 0
    with Database(seeing.database_url).read() as conn:
        digests = set()
        for number in range(NUM_SESSIONS):
            turns = [view.turn for view in seeing.turns(f"f{number}")]
            found.update((turn.outcome, turn.reason) for turn in turns)
            images = {image["digest"] for turn in turns for image in turn.images or ()}
            digests |= images
            files = {digest: file.content for digest, file in media.read_media(conn, "default", images).items()}
            for chain in chains.merge_session(turns):
                gap = reference.gap(chain, files)
                num_skipped += gap is None
                gaps += [] if gap is None else [gap]
        stored = conn.exec_driver_sql("SELECT digest FROM media").scalars().all()
    print(
        f"{KIND}: {NUM_SESSIONS} sessions, {found}, {len(gaps)} chains, largest gap {max(gaps):.2g}, {num_skipped} left"
    )
    assert sorted(stored) == sorted(digests)
    broken = {key: count for key, count in found.items() if key[0] not in (Outcome.EXACT, Outcome.ABORTED)}
    assert broken == {}
    assert {reason for outcome, reason in found if outcome is Outcome.EXACT} <= {None, "edited_history"}
    assert max(gaps) <= MAX_GAP
