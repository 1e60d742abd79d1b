"""Answers of judges and of called functions that have another shape than they should."""

import asyncio
import http.server
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import pytest
from support.servers import serving
from support.waiting import WAIT_SECONDS

from turnwise.rewards.judge import Judge
from turnwise.rewards.posting import Poster
from turnwise.rewards.settings import RewardSettings
from turnwise.rollouts import worker
from turnwise.types import Json


class ProxyOfTwoSessions:
    """Has two ended sessions; the judge answers about one of them with rubbish."""

    def __init__(self) -> None:
        self.posted: list[Mapping[str, Any]] = []

    async def sessions(self, **_: Any) -> AsyncIterator[Json]:
        for name in ("bad", "good"):
            yield {
                "session_id": name,
                "num_turns": 1,
                "metadata": {},
                "group_id": None,
                "group_size": None,
                "reward": None,
            }

    async def turns(self, session_id: str) -> AsyncIterator[Json]:
        content = f"{session_id} \ud83d"  # half of a surrogate pair, which UTF-8 does not have
        turn = {"turn_id": session_id, "chain_id": session_id, "parent_turn_id": None, "tools": None}
        yield turn | {"messages": [{"role": "user", "content": content}], "response": {"role": "assistant"}}

    async def rewards(self, lines: Iterable[Mapping[str, Any]], **_: Any) -> list[int]:
        self.posted += lines
        return [1]


@pytest.mark.parametrize(
    "rubbish",
    [
        *("{}", "null", "[]", "[null]", '"text"', '{"choices": null}', '{"choices": [null]}', '{"choices": {"a": 1}}'),
        *('{"choices": [{"message": null}]}', '{"choices": [{"message": {"content": 5}}]}', "[" * 100_000),
        *('{"choices": [{"message": {"content": "{\\"score\\": %s}"}}]}' % ("7" * 400), "\xff"),
    ],
)
async def test_one_rubbish_answer_of_a_judge_fails_its_session_and_the_others_go_on(tmp_path, monkeypatch, rubbish):
    monkeypatch.setattr("turnwise.rewards.posting.POLL_SECONDS", 0.01)
    answered = json.dumps({"choices": [{"message": {"content": [{"type": "text", "text": '{"score": 5}'}]}}]})

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["content-length"]))
            body = (rubbish if rb"user\nbad" in asked else answered).encode("latin-1")
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as url:
        rule = RewardSettings(
            source="judge", judge_url=url, judge_model="m", state=tmp_path / "state.jsonl", attempts=1, watch=True,
            max_sessions=2,
        )  # fmt: skip
        proxy, judge = ProxyOfTwoSessions(), Judge(rule)
        counts = await Poster(rule, proxy, judge, lambda _: None).run()
        await judge.close()
    assert (counts.num_sessions, counts.num_failed, counts.num_rewards) == (2, 1, 1)
    assert [(line["session_id"], line["value"]) for line in proxy.posted] == [("good", 0.5)]
    assert counts.last_error.startswith("session bad")


FUNCTIONS = """
import numpy as np

def number(task, run):
    return np.float32(0.5)

def fields(task, run):
    return [{"value": np.int64(1), "step": np.int64(2)}, np.True_, np.array([0.25])]

def leaves(task, run):
    raise SystemExit("no GPU")

async def leaves_in_a_coroutine(task, run):
    raise SystemExit("no GPU")

def no_number(task, run):
    return {1, 2}

def too_long(task, run):
    return "a" * 2**25
"""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("number", {"value": 0.5}),
        ("fields", {"value": [{"value": 1, "step": 2}, True, [0.25]]}),
        ("leaves", {"error": "SystemExit: no GPU"}),
        ("leaves_in_a_coroutine", {"error": "RuntimeError: SystemExit: no GPU"}),
        ("no_number", {"error": "TypeError: it returned {1, 2}, which is no JSON value"}),
        ("too_long", {"error": "ValueError: it returned 33554434 characters of JSON; at most 16777216 are taken"}),
    ],
)
async def test_a_warm_worker_answers_each_call_whatever_its_function_does(tmp_path, function, expected):
    """A call without an answer would wait for the time limit of its run."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    process = await asyncio.create_subprocess_exec(
        sys.executable, worker.__file__, f"mine:{function}", "1",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=tmp_path, env=dict(os.environ), limit=2**27,
    )  # fmt: skip
    names = ("session_id", "base_url", "api_key", "model", "directory", "split")
    run = dict.fromkeys(names, "x") | {"run": 0, "environment": {}}
    asked = "".join(json.dumps({"id": number, "task": {}, "run": run}) + "\n" for number in (1, 2))
    async with asyncio.timeout(WAIT_SECONDS):
        ready, *answers = (await process.communicate(asked.encode()))[0].splitlines()
    assert json.loads(ready) == {"ready": True}
    assert [json.loads(answer) for answer in answers] == [{"id": 1, **expected}, {"id": 2, **expected}]
