"""`turnwise verify` against a real vLLM: captured logprobs are reproduced, and one changed value is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from openai import OpenAI
from support.checkpoints import write_perturbed
from support.commands import verify
from support.control_plane import wait_for_status
from support.engines import RunningEngine
from support.migrated import writing
from support.proxies import running_proxy

from turnwise.store.schema import policy_versions

pytestmark = pytest.mark.engine
SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "extra_body": {"top_k": 20}},
    {
        "temperature": 0.8,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {"300": 2.0},
        "extra_body": {"repetition_penalty": 1.2, "min_tokens": 4, "bad_words": ["the"]},
    },
]


@pytest.fixture(scope="module")
def captured(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a conversation of three turns for each way of sampling."""
    place = tmp_path_factory.mktemp("captured") / "turnwise.db"
    with running_proxy(engine.url, f"sqlite:///{place}", place.parent) as proxy:
        wait_for_status(proxy, 0)
        for number, sampling in enumerate(SAMPLINGS):
            client = OpenAI(base_url=f"{proxy.url}/sessions/s{number}/v1", api_key="none")
            messages: list = [{"role": "user", "content": "Follow each boss from Kim."}]
            for _ in range(3):
                reply = client.chat.completions.create(
                    model="small", messages=messages, max_completion_tokens=8, **sampling
                )
                messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "On."}]
    return place


def test_captured_logprobs_are_reproduced(captured: Path, engine: RunningEngine) -> None:
    status, report = verify(f"sqlite:///{captured}", "--engine", engine.url)
    assert status == 0, report
    assert report["checked"]["turns with logprobs recomputed"] == 9
    assert report["largest_logprob_gap"] < 1e-3


def test_captured_logprobs_are_those_of_the_published_files(captured: Path) -> None:
    """An engine that samples with other weights agrees with itself; the files do not agree with it."""
    status, report = verify(f"sqlite:///{captured}", "--forward")
    assert status == 0, report
    assert report["checked"]["turns with logprobs recomputed"] == 6
    assert report["not_checked"]["sampled with top_p, which cannot be applied again"] == 3
    assert report["largest_logprob_gap"] < 1e-3


def test_files_that_the_engine_did_not_serve_are_named(captured: Path, engine: RunningEngine, tmp_path: Path) -> None:
    changed = tmp_path / "turnwise.db"
    shutil.copy(captured, changed)
    other = write_perturbed(engine.model_dir, tmp_path / "other", 1)
    with writing(f"sqlite:///{changed}") as connection:
        connection.execute(sa.update(policy_versions).values(path=str(other)))
    status, report = verify(f"sqlite:///{changed}", "--forward")
    assert status == 1
    assert any("the files give" in mismatch["problem"] for mismatch in report["mismatches"])
