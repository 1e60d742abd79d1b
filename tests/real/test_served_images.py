"""Images through a real vLLM: the next turn extends stored tokens and images exactly, in each dialect and store.

`TURNWISE_IMAGE_SESSIONS=200 TURNWISE_IMAGE_MODEL=Qwen3VL` before pytest plays more sessions, and another model.
"""

import dataclasses
import hashlib
import io
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
import sqlalchemy as sa
import torch
from PIL import Image
from support import control_plane
from support.engines import RunningEngine, running_engine
from support.proxies import RunningProxy, StartProxy
from support.seeing_agents import FORMATS, Reference, SeeingAgent
from support.served_vision import make_served_model, picture, shown

from trainer.batch.batch import build, pack
from trainer.batch.chain import chain_of
from trainer.features import FEATURES, Settings
from trainer.features.images import Vision
from trainer.model.model import Policy
from turnwise import chains
from turnwise.features.images import IMAGES, PlacedImage, pack_images, placed_images, read_media
from turnwise.store import rows, schema
from turnwise.store.database import Database
from turnwise.store.experiences import PER_CHAIN, PER_TURN, experiences
from turnwise.store.selection import SessionFilter
from turnwise.types import Outcome

NUM_SESSIONS = int(os.environ.get("TURNWISE_IMAGE_SESSIONS", "20"))
KIND = os.environ.get("TURNWISE_IMAGE_MODEL", "Idefics3")
NUM_CALLS = 300
MAX_GAP = 1e-4
MAX_GRADIENT_GAP = 1e-6
"""Of merged rows from a row a turn, relative, in float64."""


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
    return httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_turn_with_another_image_extends_the_first_ones_tokens_and_image(seeing, seeing_engine, stream):
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
    placed = [[PlacedImage.of_json(image) for image in placed_images(view.turn)] for view in views]
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


def test_another_image_of_the_same_size_extends_nothing(seeing):
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
    seeing, seeing_engine, start_proxy
):
    messages = [{"role": "user", "content": [shown(picture(1)), {"type": "text", "text": "What is it?"}]}]
    ask(seeing, messages).raise_for_status()
    first = seeing.turns()[0].turn
    (placed,) = placed_images(first)
    elsewhere = {**placed, "offset": placed["offset"] + 1}  # as of another processor
    moved = rows.TURNS.values({"parts": {IMAGES: pack_images([elsewhere])}})
    with Database(seeing.database_url).write() as conn:
        conn.execute(sa.update(schema.turns).values(moved))
    other = start_proxy(seeing_engine.url, database_url=seeing.database_url)
    messages += [first.response, {"role": "user", "content": "Sure?"}]
    ask(other, messages).raise_for_status()
    turn = other.turns()[-1].turn
    assert (turn.outcome, turn.reason, turn.parent_turn_id) == (Outcome.RETOKENISED, "media_rerendered", None)
    assert placed_images(turn) == [placed]
    assert chains.is_trainable(turn)


def gradient(policy: Policy, trained: Sequence[chains.Experience], row_tokens: int | None) -> torch.Tensor:
    """Return the gradient of the sum of all trained tokens' logprobs, each weighed by its captured one."""
    batch = build(list(map(chain_of, trained)), [np.ones(len(each.turn_ids)) for each in trained], policy_version=0)
    policy.model.zero_grad()
    for packed in pack(batch, range(len(trained)), row_tokens):
        row = policy.with_parts(batch, packed)
        targets = torch.from_numpy(batch.table.target[row.token])
        logprobs, _ = policy.logprobs(policy.inputs(row, torch.ones(len(targets)), targets))
        (logprobs * torch.from_numpy(batch.table.behaviour[row.token])).sum().backward()
    return torch.cat([each.grad.flatten() for each in policy.model.parameters() if each.grad is not None])


def loaded(model_dir: Any) -> Policy:
    policy = Policy(Settings(model=str(model_dir), device="cpu", vision="all"), FEATURES.terms)
    policy.load(0)
    return policy


def test_sessions_with_images_stay_on_their_chains_and_are_what_transformers_computes(
    seeing_engine, start_proxy, database_url
):
    """On PostgreSQL each call goes to one of two serving processes."""
    is_postgres = database_url.startswith("postgresql")
    flags = ("--workers", "2", "--no-session-affinity") if is_postgres else ()
    seeing = start_proxy(seeing_engine.url, *flags, database_url=database_url)

    def play(number: int) -> None:
        rng = random.Random(number)
        agent = SeeingAgent(seeing, f"f{number}", FORMATS[number % len(FORMATS)], rng)
        with httpx2.Client(limits=httpx2.Limits(max_keepalive_connections=0)) as http:
            agent.play(rng.randint(3, 6), http)
            http.post(f"{seeing.v1}/rewards", json={"session_id": f"f{number}", "value": 1}).raise_for_status()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(play, range(NUM_SESSIONS)))
    reference, gaps, found, num_skipped = Reference(seeing_engine.model_dir), [], Counter(), 0
    policy, gradient_gaps = loaded(seeing_engine.model_dir), []
    policy.model.double()
    with Database(seeing.database_url).read() as conn:
        digests = set()
        for number in range(NUM_SESSIONS):
            turns = [view.turn for view in seeing.turns(f"f{number}")]
            found.update((turn.outcome, turn.reason) for turn in turns)
            images = {image["digest"] for turn in turns for image in placed_images(turn)}
            digests |= images
            files = {digest: file.content for digest, file in read_media(conn, "default", images).items()}
            for chain in chains.merge_session(turns):
                gap = reference.gap(chain, files)
                num_skipped += gap is None
                gaps += [] if gap is None else [gap]
            if number % 4 == number // 4 % 4:  # a quarter of each format's
                merged, alone = (
                    list(
                        experiences(
                            conn, SessionFilter(session_id=f"f{number}"), dataclasses.replace(shape, with_files=True)
                        )
                    )
                    for shape in (PER_CHAIN, PER_TURN)
                )
                expected = gradient(policy, alone, None)
                assert len(merged) < len(alone)
                gradient_gaps.append(float((gradient(policy, merged, 4096) - expected).norm() / expected.norm()))
        stored = conn.exec_driver_sql("SELECT digest FROM media").scalars().all()
    print(
        f"{KIND}: {NUM_SESSIONS} sessions, {found}, {len(gaps)} chains, largest gap {max(gaps):.2g}, "
        f"{num_skipped} left, {len(stored)} images, "
        f"gradients of {len(gradient_gaps)} sessions differ by {max(gradient_gaps):.2g}"
    )
    assert sorted(stored) == sorted(digests)
    broken = {key: count for key, count in found.items() if key[0] not in (Outcome.EXACT, Outcome.ABORTED)}
    assert broken == {}
    assert {reason for outcome, reason in found if outcome is Outcome.EXACT} <= {None, "edited_history"}
    assert max(gaps) <= MAX_GAP
    assert max(gradient_gaps) <= MAX_GRADIENT_GAP


def written(image: Image.Image, name: str, **options: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, name, **options)
        return file.getvalue()


def kinds_of_files() -> dict[str, bytes]:
    colour, other = (Image.open(io.BytesIO(picture(seed, (90, 70)))) for seed in (1, 2))
    grey = other.convert("L")
    alpha = colour.convert("RGBA")
    alpha.putalpha(grey)
    turned = Image.Exif()
    turned[0x0112] = 6
    deep = Image.fromarray(np.arange(0, 63000, 10, dtype=np.uint16).reshape(70, 90))
    palette = colour.quantize(16)
    return {
        "plain": written(colour, "PNG"),
        "alpha": written(alpha, "PNG"),
        "grey and alpha": written(alpha.convert("LA"), "PNG"),
        "grey": written(grey, "PNG"),
        "one bit": written(grey.convert("1"), "PNG"),
        "16 bits": written(deep, "PNG"),
        "palette": written(palette, "PNG"),
        "transparent palette": written(palette, "PNG", transparency=3),
        "animated PNG": written(colour, "PNG", save_all=True, append_images=[other]),
        "turned": written(colour, "JPEG", exif=turned),
        "CMYK": written(colour.convert("CMYK"), "JPEG"),
        "animated GIF": written(palette, "GIF", save_all=True, append_images=[other.quantize(16)], transparency=2),
        "animated WebP": written(alpha, "WEBP", save_all=True, append_images=[other], lossless=True),
        "BMP": written(colour, "BMP"),
    }


def test_the_trainer_makes_the_engines_pixels_of_each_kind_of_file(seeing, seeing_engine):
    files, policy = kinds_of_files(), loaded(seeing_engine.model_dir)
    (vision,) = (around for around in policy.around if isinstance(around, Vision))
    for content in files.values():
        ask(seeing, [{"role": "user", "content": [shown(content)]}], max_tokens=1).raise_for_status()
    for (kind, content), view in zip(files.items(), seeing.turns(), strict=True):
        (placed,) = placed_images(view.turn)
        assert (view.turn.outcome, placed["pixels"] != "") == (Outcome.EXACT, True), kind
        vision._pixels(dataclasses.replace(PlacedImage.of_json(placed), content=content))


def test_files_that_are_broken_or_huge_are_refused_and_the_engine_goes_on(seeing):
    """A wrong length of a PNG's data is a syntax error to Pillow, and 400 megapixels are an attack."""
    plain = picture(1, (90, 70))
    huge = written(Image.new("1", (20_000, 20_000)), "PNG")
    wrong_length = plain[:35] + b"\x13" + plain[36:]
    assert len(huge) < 100_000
    for content in (plain[:200], plain[:8], b"\xff\xd8\xff" + plain, b"BM" + plain, wrong_length, huge):
        refused = ask(seeing, [{"role": "user", "content": [shown(content)]}], max_tokens=1)
        assert (refused.status_code, "image" in refused.text) == (400, True), refused.text
    for size in ((1, 1), (1, 900)):
        assert ask(seeing, [{"role": "user", "content": [shown(picture(1, size))]}]).status_code in (200, 400)
    ask(seeing, [{"role": "user", "content": [shown(plain)]}], max_tokens=1).raise_for_status()


def test_a_text_with_the_models_placeholder_never_moves_an_image(seeing):
    """Before the image, behind it, in another message, in a later turn; without an image it is any text."""
    typed = {"type": "text", "text": "A page with <image> in it."}
    plain = {"type": "text", "text": "What is it?"}
    image = shown(picture(1))
    first = [{"role": "user", "content": [image, plain]}]
    for content in ([typed, image], [image, typed]):
        refused = ask(seeing, [{"role": "user", "content": content}])
        assert (refused.status_code, "media_placeholder" in refused.text) == (400, True), refused.text
    ask(seeing, first).raise_for_status()
    reply = seeing.turns()[-1].turn.response
    for later in ([typed], [typed, shown(picture(2))]):
        refused = ask(seeing, [*first, reply, {"role": "user", "content": later}])
        assert (refused.status_code, "media_placeholder" in refused.text) == (400, True), refused.text
    ask(seeing, [{"role": "user", "content": [typed]}]).raise_for_status()
    ask(seeing, [*first, reply, {"role": "user", "content": [plain, shown(picture(2))]}]).raise_for_status()
    assert seeing.turns()[-1].turn.outcome is Outcome.EXACT


def test_calls_with_an_image_are_answered_while_weights_are_loaded(seeing, seeing_engine):
    """Each load empties the caches of images of vLLM's two processes, one after the other."""
    image = shown(picture(1))

    def call(number: int) -> None:
        messages = [{"role": "user", "content": [image, {"type": "text", "text": f"What is {number}?"}]}]
        ask(seeing, messages, stream=number % 2 == 0, max_tokens=4).raise_for_status()

    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(call, number) for number in range(NUM_CALLS)]
        while not all(each.done() for each in calls):
            control_plane.ask(seeing_engine.url, "/pause?mode=keep&clear_cache=true", {})
            control_plane.ask(seeing_engine.url, "/resume", {})
    outcomes = Counter((view.turn.outcome, view.turn.reason) for view in seeing.turns())
    assert outcomes == {(Outcome.EXACT, None): NUM_CALLS}
