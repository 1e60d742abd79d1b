"""What becomes of a conversation: the same through the memory and through the store, whatever the client does.

The engine is the stand-in, so the promises are those of rows and replies: a turn's outcome and reason, what it extends,
its prompt, its tokens, and its role.
"""

import contextlib
import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp
from support.in_process import in_process_proxy
from support.waiting import wait_until

from proxy.engines.vllm_forms import read_parts
from proxy.services import Services
from proxy.sessions.template import Continued, Unsafe, restored
from turnwise.store.database import Database
from turnwise.store.turns import read_turns
from turnwise.types import Json, Outcome, TokenIds, Turn

SYSTEM = {"role": "system", "content": "You write code."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
OF_CALL = ("turn_id", "session_id", "chain_id", "parent_turn_id", "created_at", "ttft_seconds", "duration_seconds")
"""Fields of a turn that differ between two sessions of the same calls, as its digest does."""
IDS = itertools.count()


class Proxy:
    """A proxy in this process, whose memory a test can empty."""

    def __init__(self, http: TestClient, database: Database, services: Services) -> None:
        self.http = http
        self._database = database
        self.sessions = services.sessions
        (self.engine,) = services.pool.engines

    def forget(self, session: str) -> None:
        """Leave nothing of a session in memory, as after a restart."""
        self.sessions.cache.drop(("default", session))
        self.sessions.conversations.pop(("default", "session", session, b""), None)

    def call(self, session: str, messages: list[Json], **fields: Any) -> tuple[Json, list[Json]]:
        """Return a reply without its ids and times, and its messages."""
        body = {"model": "fake", "messages": messages, "max_tokens": 8, **fields}
        raw = self.http.post(f"/sessions/{session}/v1/chat/completions", json=body).raise_for_status()
        if not fields.get("stream"):
            reply = raw.json()
            return reply | {"id": "", "created": 0}, [choice["message"] for choice in reply["choices"]]
        chunks = [orjson.loads(line[6:]) for line in raw.text.splitlines() if line.startswith("data: {")]
        told = [
            (choice["index"], choice["delta"].get("content") or "") for each in chunks for choice in each["choices"]
        ]
        texts = ["".join(text for own, text in told if own == index) for index in sorted({own for own, _ in told})]
        return {"chunks": [each["choices"] for each in chunks]}, [said(text) for text in texts]

    @contextlib.contextmanager
    def replying(self, **reply: Any) -> Iterator[None]:
        """Let the stand-in give one reply in the block."""
        httpx2.post(f"{self.engine.url}/fake/replies", json={"reply": reply, "count": 1}).raise_for_status()
        yield

    def turns(self, session: str) -> list[Turn]:
        with self._database.read() as connection:
            return [view.turn for view in read_turns(connection, "default", session)[0]]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    found: list[Any] = []

    def note(app: ASGIApp) -> ASGIApp:
        found.append(app)
        return app

    directory = tmp_path_factory.mktemp("conversations")
    with in_process_proxy(directory, engine_check="strict", wrap=note) as (http, database):
        wait_until(lambda: http.get("/readyz").status_code == 200, "the proxy is ready")
        yield Proxy(http, database, found[0]._app.state.services)


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def comparable(turns: list[Turn]) -> list[Json]:
    """Return turns with places in the place of ids, so that two sessions of the same calls are alike."""
    names: dict[str | None, int | None] = {None: None} | {turn.turn_id: place for place, turn in enumerate(turns)}
    shown = []
    for turn in turns:
        own = {each.name: getattr(turn, each.name) for each in dataclasses.fields(turn)}
        own |= {name: value.tolist() for name, value in own.items() if isinstance(value, np.ndarray)}
        own |= dict.fromkeys((*OF_CALL, "digest"))
        shown.append(own | {"parent": names[turn.parent_turn_id], "chain": names[turn.chain_id]})
    return shown


Edit = Callable[[list[Json]], list[Json]]
EDITS: dict[str, Edit] = {
    "goes on": lambda told: told,
    "asks again": lambda told: told[:-2] or told,
    "goes back": lambda told: told[: 1 + len(told) // 2] if len(told) > 2 else told,
    "edits a reply": lambda told: [*told[:-1], said("edited")] if told[-1]["role"] == "assistant" else told,
    "edits the begin": lambda told: [user("Something else."), *told[1:]],
    "leaves a reply out": lambda told: told[:-1] if told[-1]["role"] == "assistant" else told,
    "says it in another form": lambda told: [
        {**each, "name": "kim", "content": [{"type": "text", "text": each["content"]}]} if each["content"] else each
        for each in told
    ],
    "adds a system message": lambda told: [SYSTEM, *told],
    "summarises": lambda told: [*told, user("Summarize our conversation so far.")],
}
FIELDS: list[Json] = [
    *[{}] * 4,
    {"tools": TOOLS, "tool_choice": "none"},
    {"n": 2},
    {"logprobs": True},
    {"return_token_ids": True},
    {"temperature": 0},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"truncate_prompt_tokens": 100},
    {"max_tokens": None},
    {"continue_final_message": True, "add_generation_prompt": False},
]
STEPS = st.tuples(
    st.sampled_from([*["goes on"] * 6, *EDITS]), st.sampled_from(["Hello.", "Go on.", "Why?"]), st.sampled_from(FIELDS)
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=1, max_size=6), streams=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_conversation_is_the_same_through_the_memory_and_through_the_store(
    proxy: Proxy, steps: list[tuple[str, str, Json]], streams: list[bool]
) -> None:
    """One session stays in memory; of the other nothing is left in memory before each of its calls."""
    number = next(IDS)
    kept, read = f"kept-{number}", f"read-{number}"
    told: list[Json] = []
    for (edit, text, fields), stream in zip(steps, streams, strict=False):
        messages = [*(EDITS[edit](told) if told else told), user(text)]
        expected, replies = proxy.call(kept, messages, stream=stream, **fields)
        proxy.forget(read)
        found, _ = proxy.call(read, messages, stream=stream, **fields)
        assert found == expected
        told = [*messages, {"role": "assistant", "content": replies[-1]["content"]}]
    turns = proxy.turns(kept)
    assert comparable(proxy.turns(read)) == comparable(turns)
    check_extensions(turns)


def check_extensions(turns: list[Turn]) -> None:
    """Check that each turn's prompt is its parent's tokens and what it adds."""
    lengths: dict[str | None, int] = {None: 0}
    for turn in turns:
        assert lengths[turn.parent_turn_id] + len(turn.prompt_delta) == turn.prompt_length > 0
        assert len(turn.logprobs) == len(turn.token_ids) > 0
        lengths[turn.turn_id] = turn.prompt_length + len(turn.token_ids)


S2 = {"role": "system", "content": "Now hurry."}
RETOKENISED = Outcome.RETOKENISED


def two_turns(proxy: Proxy) -> tuple[str, list[Json]]:
    """Play two turns; return the session, and what the client has then, with the second reply."""
    session = f"played-{next(IDS)}"
    _, (first,) = proxy.call(session, told := [user("Hello.")])
    told += [said(first["content"]), S2, user("Go on.")]
    _, (second,) = proxy.call(session, told)
    return session, [*told, said(second["content"])]


@pytest.mark.parametrize(
    ("edit", "fields", "outcome", "reason", "parent"),
    [
        (lambda told: told, {}, Outcome.EXACT, None, 1),
        (lambda told: [*told[:4], said("edited")], {}, Outcome.EXACT, "edited_history", 0),
        (lambda told: [*told[:2], SYSTEM, *told[3:]], {}, Outcome.EXACT, "system_changed", 0),
        (lambda told: told[:4], {}, Outcome.EXACT, "edited_history", 0),
        (lambda told: told[:3], {}, Outcome.EXACT, None, 0),
        (lambda told: told[:2], {}, Outcome.EXACT, None, 0),
        (lambda told: [told[0], said("edited"), *told[2:]], {}, RETOKENISED, "edited_history", None),
        (lambda told: [SYSTEM, *told], {}, RETOKENISED, "system_changed", None),
        (lambda told: told, {"tools": TOOLS, "tool_choice": "none"}, RETOKENISED, "tools_changed", None),
        (lambda told: told, {"chat_template_kwargs": {"enable_thinking": False}}, RETOKENISED, "tools_changed", None),
        (lambda told: told, {"add_generation_prompt": False}, RETOKENISED, "prefill", None),
        (lambda told: told, {"truncate_prompt_tokens": 100}, RETOKENISED, "truncated_prompt", None),
        (lambda _: [], {}, Outcome.EXACT, None, None),
        (lambda told: told[:1], {}, Outcome.EXACT, "edited_history", None),
    ],
)
def test_a_call_extends_the_deepest_turn_that_it_repeats_and_has_a_reason_where_it_breaks(
    proxy, edit, fields, outcome, reason, parent
):
    """A branch extends stored tokens, so it is exact; a new sample or a branch of the same prompt drops nothing."""
    session, told = two_turns(proxy)
    messages = [*edit(told), user("Why?")]
    proxy.call(session, messages, **fields)
    *stored, turn = turns = proxy.turns(session)
    assert (turn.outcome, turn.reason) == (outcome, reason)
    assert turn.parent_turn_id == (None if parent is None else stored[parent].turn_id)
    if parent is not None:
        assert (turn.messages, turn.tools) == (messages[2 if parent == 0 else 5 :], None)
    check_extensions(turns)


def test_a_first_call_with_a_foreign_history_is_exact_and_stores_all_that_was_asked_and_answered(proxy):
    """A session may start with a longer conversation: nothing of it was sampled here."""
    session = f"played-{next(IDS)}"
    told = [SYSTEM, user("Hello."), said("Hi."), user("Go on.")]
    _, (reply,) = proxy.call(session, told, tools=TOOLS, tool_choice="none", temperature=0.5, stream=True)
    (turn,) = proxy.turns(session)
    assert (turn.outcome, turn.reason, turn.parent_turn_id, turn.chain_id) == (Outcome.EXACT, None, None, turn.turn_id)
    assert (turn.messages, turn.tools, turn.model, turn.dialect) == (told, TOOLS, "fake", "chat")
    assert turn.sampling == {"max_tokens": 8, "temperature": 0.5, "tool_choice": "none"}
    assert turn.response == {"role": "assistant", "content": reply["content"]}
    assert 0 < turn.ttft_seconds <= turn.duration_seconds
    check_extensions([turn])


@pytest.mark.parametrize(
    ("text", "other", "outcome", "reason"),
    [
        (rb'"prompt_token_ids": ?\[[^]]*\]', b'"prompt_token_ids":null', Outcome.UNTRAINABLE, "no_prompt_ids"),
        (rb'"prompt_token_ids": ?\[', b'"prompt_token_ids":[9,', RETOKENISED, "echo_differs"),
        (rb'"token_ids": ?\[[^]]*\]', b'"token_ids":[]', Outcome.UNTRAINABLE, "no_token_ids"),
        (rb'"index": ?0,', b'"index":1,', Outcome.UNTRAINABLE, "unplanned_choice"),
        (rb'"logprob": ?-?[0-9.e-]+', b'"logprob":null', Outcome.UNTRAINABLE, "no_logprobs"),
        (rb'"logprob": ?-?[0-9.e-]+', b'"logprob":-9999.0', Outcome.UNTRAINABLE, "impossible_logprobs"),
    ],
)
def test_a_reply_of_which_something_is_missing_or_wrong_is_stored_with_its_reason(
    proxy, monkeypatch, text, other, outcome, reason
):
    """A missing logprob would be NaN, and so would the loss."""
    session, told = two_turns(proxy)

    def read(parts: list[bytes], *others: Any) -> list[bytes]:
        return read_parts([re.sub(text, other, part) for part in parts], *others)

    monkeypatch.setattr("proxy.engines.engine.read_parts", read)
    proxy.call(session, [*told, user("Why?")])
    turn = proxy.turns(session)[2]
    assert (turn.outcome, turn.reason) == (outcome, reason)
    assert (turn.parent_turn_id is None) == (reason in ("no_prompt_ids", "echo_differs"))


def test_a_template_that_refuses_starts_a_chain_with_its_reason(proxy, monkeypatch):
    def refuse(*_: Any) -> None:
        raise Unsafe("thinking_stripped")

    session, told = two_turns(proxy)
    monkeypatch.setattr(proxy.sessions.template.short, "next_ids", refuse)
    proxy.call(session, [*told, user("Why?")])
    turn = proxy.turns(session)[2]
    assert (turn.outcome, turn.reason, turn.parent_turn_id) == (RETOKENISED, "thinking_stripped", None)


def test_a_long_message_is_rendered_in_a_thread_and_thinking_is_put_back_into_the_replies_that_had_some(
    proxy, monkeypatch
):
    """The event loop goes on meanwhile: a text of 20,000 characters takes 8 ms."""
    seen: list[tuple[bool, list[str | None]]] = []

    def next_ids(continued: Continued, kinds: list[int], thinking: Mapping[int, str]) -> TokenIds:
        shown = [message.get("reasoning") for message in restored(continued.messages, thinking)]
        seen.append((threading.current_thread().name.startswith("render"), shown))
        return render(continued, kinds, thinking)

    render = proxy.sessions.template.short.next_ids
    monkeypatch.setattr(proxy.sessions.template.short, "next_ids", next_ids)
    session = f"played-{next(IDS)}"
    told = [user("Hello.")]
    for reasoning, text in (("one", "Go on."), (None, "Why?"), ("three", "long " * 2_000), (None, "")):
        with proxy.replying(text="A.", reasoning=reasoning):
            proxy.call(session, told, max_tokens=None)
        told += [said("A."), user(text)]
    thinking = [None, "one", None, None, None, "three", None]
    assert seen == [(False, thinking[:3]), (False, thinking[:5]), (True, thinking)]


def test_of_equal_turns_a_call_extends_that_of_its_tool_calls_and_else_the_newest(proxy):
    session, asked = f"played-{next(IDS)}", [user("Hello.")]
    replies = []
    for _ in range(2):
        with proxy.replying(tool_calls=[{"name": "f"}]):
            _, (reply,) = proxy.call(session, asked, tools=TOOLS, max_tokens=None)
        replies.append(reply)
    other = {**replies[0], "tool_calls": [{**replies[0]["tool_calls"][0], "id": "of another run"}]}
    for called in (*replies, other):
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "R"}
        proxy.call(session, [*asked, called, result], tools=TOOLS, tool_choice="none")
    first, second, *extending = proxy.turns(session)
    assert first.history_digest == second.history_digest
    assert [turn.parent_turn_id for turn in extending] == [first.turn_id, second.turn_id, second.turn_id]
