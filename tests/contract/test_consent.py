"""Calls that may not be trained, or not even be recorded, and texts that are redacted before they are stored."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.commands import run_turnwise
from support.migrated import migrated, writing
from support.proxies import RunningProxy, StartProxy, running_proxy
from support.redactors import FAILS_AT
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, running_fake_engine

from turnwise.client import Client
from turnwise.store import keys
from turnwise.store.database import Database

SECRET = "unspeakable"
MAIL = "kim@example.com"
HIDDEN = {"x-record": "false"}


@pytest.fixture
def proxy(empty_proxy: RunningProxy) -> RunningProxy:
    return empty_proxy


def call(
    proxy: RunningProxy,
    session: str | None,
    text: str = "Hello.",
    before: Any = (),
    key: str = "",
    **headers: str,
) -> list[dict[str, Any]]:
    """Make a call; return the conversation with its reply."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    messages = [*before, {"role": "user", "content": text}]
    url = proxy.v1 if session is None else proxy.session_v1(session)
    body = {"model": "fake", "messages": messages}
    replied = httpx2.post(f"{url}/chat/completions", json=body, headers=headers).raise_for_status()
    return [*messages, replied.json()["choices"][0]["message"]]


def read(proxy: RunningProxy, path: str, key: str = "", **params: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.get(f"{proxy.url}/v1/{path}", params=params, headers=headers).raise_for_status().json()


def mark(proxy: RunningProxy, kind: str, name: str = "", key: str = "", **fields: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.post(f"{proxy.url}/v1/consent", json={"kind": kind, "name": name, **fields}, headers=headers)


def is_stored(proxy: RunningProxy, text: str) -> bool:
    """Return whether a text stands anywhere in the files of the database."""
    path = Path(proxy.database_url.removeprefix("sqlite:///"))
    return any(text.encode() in file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


@pytest.mark.parametrize(
    ("headers", "metadata"), [({"x-train": "false"}, {}), ({}, {"train": "false"}), ({}, {"train": False})]
)
def test_a_call_marks_its_session_which_is_recorded_and_never_trained(proxy, headers, metadata):
    call(proxy, "s")
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}], "metadata": metadata}
    url = f"{proxy.session_v1('s')}/chat/completions"
    httpx2.post(url, json=body, headers=headers).raise_for_status()
    shown = read(proxy, "sessions/s")
    assert (shown["train"], shown["record"], shown["num_turns"]) == (False, True, 2)
    assert {view.turn.outcome for view in proxy.turns("s")} == {"exact"}
    note = httpx2.post(f"{proxy.url}/v1/sessions/s/end", json={"reward": 1.0}).json()["training_note"]
    assert "train = false" in note
    assert httpx2.get(f"{proxy.url}/v1/experiences").content == b""
    assert len(httpx2.get(f"{proxy.url}/v1/experiences", params={"train": "false"}).content.splitlines()) == 2


def test_a_header_that_is_neither_true_nor_false_is_refused_and_such_metadata_is_the_applications(proxy):
    refused = httpx2.post(
        f"{proxy.session_v1('s')}/chat/completions", json={"model": "fake", "messages": []}, headers={"x-train": "no"}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-train")
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi."}], "metadata": {"train": "ICE 123"}}
    httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body).raise_for_status()
    assert read(proxy, "sessions/s")["train"]


def test_a_session_can_be_created_marked_and_marked_later_but_not_unmarked(proxy):
    with Client(proxy.url) as client:
        assert not client.create_session(session_id="a", train=False).data["train"]
        client.create_session(session_id="b")
        assert client.create_session(session_id="b", record=False).data["record"] is False
        assert not client.create_session(session_id="b").data["train"]
    again = httpx2.post(f"{proxy.url}/v1/sessions", json={"session_id": "a", "train": True})
    assert (again.status_code, again.json()["error"]["param"]) == (409, "train")
    assert mark(proxy, "session", "a", train=True).status_code == 422
    assert [each["session_id"] for each in read(proxy, "sessions", train="false")["data"]] == ["b", "a"]


def test_nothing_that_is_said_in_a_session_without_a_record_is_stored_and_its_calls_are_served_and_counted(
    proxy, shared_engine
):
    shared_engine.state.script.rules.append(Rule(reply=Reply(text=f"Very {SECRET}.")))
    first = call(proxy, "s", f"Is it {SECRET}?", **HIDDEN)
    second = call(proxy, "s", f"Say {SECRET} again.", before=first)
    assert second[-1]["content"] == f"Very {SECRET}."
    turns = [view.turn for view in proxy.turns("s")]
    assert [(turn.outcome, turn.reason, turn.messages) for turn in turns] == [("untrainable", "not_recorded", [])] * 2
    assert not any(turn.token_ids.size or turn.prompt_delta.size or turn.response for turn in turns)
    # The second call extended the first one's tokens, which are in memory alone.
    assert "kv_transfer_params" in shared_engine.state.calls[-1].body
    assert not is_stored(proxy, SECRET)
    said = {"kind": "comment", "value": SECRET, "session_id": "s"}
    refused = httpx2.post(f"{proxy.url}/v1/feedback", json=said)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_not_recorded")
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    assert 'turnwise_turns_total{outcome="untrainable",reason="not_recorded"} 2.0' in metrics
    assert run_turnwise("verify", "--database", proxy.database_url).returncode == 0


def test_a_response_that_is_not_recorded_cannot_be_continued_by_its_id(proxy):
    body = {"model": "fake", "input": f"Is it {SECRET}?", "metadata": {"record": "false"}}
    first = httpx2.post(f"{proxy.v1}/responses", json=body).raise_for_status().json()
    follow = {"model": "fake", "input": "And now?", "previous_response_id": first["id"]}
    refused = httpx2.post(f"{proxy.v1}/responses", json=follow)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")
    talk = {"model": "fake", "input": "Hi.", "conversation": "conv_1", "metadata": {"record": "false"}}
    httpx2.post(f"{proxy.v1}/responses", json=talk).raise_for_status()
    assert httpx2.post(f"{proxy.v1}/responses", json=talk).status_code == 404
    assert not is_stored(proxy, SECRET)


def test_a_marked_key_of_one_tenant_denies_its_calls_alone(tmp_path):
    """Both tenants have a user and a session of one name; the marked key calls into another key's session too."""
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with writing(migrated(url)) as connection:
        made = {
            name: keys.create_key(connection, tenant, keys.KeyRole(role), name)
            for name, tenant, role in (
                ("denied", "a", "agent"),
                ("free", "a", "agent"),
                ("admin", "a", "admin"),
                ("other", "b", "admin"),
            )
        }
    ids, secret = {name: key[0] for name, key in made.items()}, {name: key[1] for name, key in made.items()}
    with running_fake_engine() as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        for name in ("denied", "other"):
            call(proxy, "s", key=secret[name])
        call(proxy, "shared", key=secret["free"])
        assert mark(proxy, "key", ids["denied"], secret["denied"]).status_code == 403
        assert mark(proxy, "key", ids["denied"], secret["other"]).status_code == 404
        assert mark(proxy, "key", ids["denied"], secret["admin"]).json()["num_sessions"] == 1
        assert [each["train"] for each in read(proxy, "keys", secret["admin"])["data"]] == [False, True, True]
        assert not read(proxy, "sessions/s", secret["admin"])["train"]
        assert read(proxy, "sessions/s", secret["other"])["train"]
        assert read(proxy, "sessions/shared", secret["admin"])["train"]
        call(proxy, "shared", key=secret["denied"])
        assert not read(proxy, "sessions/shared", secret["admin"])["train"]
        made = {"session_id": "own", "user_id": "kim"}
        for name in ("free", "other"):
            headers = {"authorization": f"Bearer {secret[name]}"}
            httpx2.post(f"{proxy.url}/v1/sessions", json=made, headers=headers).raise_for_status()
        assert mark(proxy, "user", "kim", secret["free"]).json()["num_sessions"] == 1
        assert not read(proxy, "sessions/own", secret["admin"])["train"]
        assert read(proxy, "sessions/own", secret["other"])["train"]
        assert read(proxy, "consent", secret["other"])["data"] == []
        listed = read(proxy, "consent", secret["admin"])["data"]
        assert [(each["kind"], each["name"]) for each in listed] == [("key", ids["denied"]), ("user", "kim")]
        assert mark(proxy, "user", "kim", secret["free"], train=True).status_code == 403
        assert mark(proxy, "user", "kim", secret["admin"], train=True).status_code == 200
        doctor = {each["check"]: each["text"] for each in read(proxy, "doctor", secret["admin"])["data"]}
        assert doctor["consent"] == "not trained: 1 key, 3 sessions"
        assert doctor["redaction"].startswith("off")


def test_parallel_first_calls_and_a_retry_of_which_one_denies_leave_one_marked_session(proxy):
    denials: list[dict[str, str]] = [{}, {"x-train": "false"}] * 4
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(call, proxy, "s", f"Part {n}.", **each) for n, each in enumerate(denials)]:
            done.result()
    retried = {"idempotency-key": "k", "x-stainless-retry-count": "1"}
    assert call(proxy, "s", "Once.", **retried) == call(proxy, "s", "Once.", **retried)
    [session] = proxy.sessions()
    assert (session.train, session.num_turns) == (False, 9)


def test_a_retry_that_denies_marks_the_session_of_the_answer_that_it_gets(proxy):
    assert call(proxy, "s", "Once.", idempotency_key="k") == call(
        proxy, "s", "Once.", idempotency_key="k", x_record="false"
    )
    [session] = proxy.sessions()
    assert (session.train, session.record, session.num_turns) == (False, False, 1)


def test_a_demonstration_of_a_marked_session_is_in_a_marked_session(proxy):
    call(proxy, "s", x_train="false")
    turn_id = proxy.turns("s")[0].turn.turn_id
    said = {"kind": "demonstration", "value": "A better reply.", "turn_id": turn_id}
    httpx2.post(f"{proxy.url}/v1/feedback", json=said).raise_for_status()
    assert [session.train for session in proxy.sessions()] == [False] * 3  # with both replies


@pytest.fixture
def redacting(fake_engine: RunningFakeEngine, start_proxy: StartProxy) -> RunningProxy:
    proxy = start_proxy(fake_engine.url, "--redactor", "support.redactors:redact")
    fake_engine.calls.clear()
    return proxy


def test_from_its_first_redacted_text_on_a_chain_has_no_tokens_in_the_store_and_goes_on_exactly_in_memory(
    redacting, fake_engine
):
    first = call(redacting, "s", "Hello.")
    second = call(redacting, "s", f"Write to {MAIL}.", before=first)
    third = call(redacting, "s", "Did you?", before=second)
    assert second[2]["content"] == f"Write to {MAIL}."
    turns = [view.turn for view in redacting.turns("s")]
    assert [(turn.outcome, turn.reason) for turn in turns] == [("exact", None)] + [("untrainable", "redacted")] * 2
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    assert [turn.token_ids.size > 0 for turn in turns] == [True, False, False]
    assert turns[1].messages[-1]["content"] == "Write to [EMAIL]."
    assert not is_stored(redacting, MAIL)
    sent = [each.body["kv_transfer_params"]["prompt_token_ids"] for each in fake_engine.state.calls[-2:]]
    assert sent[1][: len(sent[0])] == sent[0]  # what the engine got is what was said
    metrics = httpx2.get(f"{redacting.url}/metrics").text
    assert 'turnwise_turns_total{outcome="untrainable",reason="redacted"} 2.0' in metrics
    assert run_turnwise("verify", "--database", redacting.database_url).returncode == 0
    httpx2.post(f"{redacting.url}/v1/sessions/s/end", json={"reward": 1.0}).raise_for_status()
    lines = httpx2.get(f"{redacting.url}/v1/experiences").content.splitlines()
    assert len(lines) == 1  # of the first turn
    better = {"kind": "demonstration", "value": "Yes.", "turn_id": turns[2].turn_id}
    assert httpx2.post(f"{redacting.url}/v1/feedback", json=better).status_code == 400
    assert len(third) == 6


def test_another_proxy_starts_a_redacted_conversation_anew(redacting, fake_engine, start_proxy):
    said = call(redacting, "s", f"I am {MAIL}.")
    redacting.kill()
    again = start_proxy(fake_engine.url, "--redactor", "support.redactors:redact")
    call(again, "s", "Who am I?", before=said)
    turns = [view.turn for view in again.turns("s")]
    assert [(turn.reason, turn.parent_turn_id) for turn in turns] == [("redacted", None)] * 2
    assert not is_stored(again, MAIL)


def test_a_reply_tools_and_what_people_say_are_redacted_and_a_failing_redactor_lets_nothing_pass(
    redacting, fake_engine
):
    fake_engine.state.script.rules.append(Rule(reply=Reply(text=f"Ask {MAIL}.")))
    call(redacting, "reply", "Whom?")
    call(redacting, "fails", f"Is {FAILS_AT} for {MAIL}?")
    with Client(redacting.url) as client:
        client.create_session(session_id="named", metadata={"by": MAIL, "n": 1})
        turn = redacting.turns("reply")[0].turn
        client.feedback("comment", f"It is not {MAIL}.", session_id="named")
        assert client.feedback_of("named")[0]["value"] == "It is not [EMAIL]."
        assert client.session("named")["metadata"] == {"by": "[EMAIL]", "n": 1}
        client.set_label("named", "ask", f"Ask {MAIL}.")
        assert client.session("named")["labels"][0]["note"] == "Ask [EMAIL]."
        assert client.end_session("named", reason=f"{MAIL} left")["termination_reason"] == "[EMAIL] left"
        client.set_label("reply", "ask", FAILS_AT)
        assert client.session("reply")["labels"][0]["note"] == "redactor_failed"
        ended = client.end_session("reply", reason=f"{FAILS_AT} of {MAIL}")
        assert (ended["status"], ended["termination_reason"]) == ("ended", "redactor_failed")
        assert client.end_session("fails", reason="exit_status_0")["termination_reason"] == "exit_status_0"
    assert (turn.reason, turn.response["content"]) == ("redacted", "Ask [EMAIL].")
    assert [(view.turn.reason, view.turn.messages) for view in redacting.turns("fails")] == [("redactor_failed", [])]
    assert not is_stored(redacting, MAIL)
    assert not is_stored(redacting, FAILS_AT)


def test_a_redactor_that_cannot_be_imported_stops_the_start(tmp_path):
    database = Database(migrated(f"sqlite:///{tmp_path}/turnwise.db"))
    database.close()
    done = run_turnwise("proxy", "--redactor", "nowhere:redact", "--database", f"sqlite:///{tmp_path}/turnwise.db")
    assert done.returncode != 0
    assert "redactor='nowhere:redact' cannot be imported" in done.stderr
