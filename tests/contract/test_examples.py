"""Failures that are pinned over REST and on the command line, listed, exported, imported and unpinned."""

import json

import httpx2
import pytest
from support.commands import run_turnwise
from support.proxies import RunningProxy

MUST = "v1/sessions/s/labels/must"


@pytest.fixture
def proxy(empty_proxy: RunningProxy) -> RunningProxy:
    return empty_proxy


def play(proxy: RunningProxy, **sampling) -> str:
    """Make a call of session `s`; return the id of its turn."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}], **sampling}
    return httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body).raise_for_status().json()["id"]


def ask(proxy: RunningProxy, method: str, path: str, **body) -> httpx2.Response:
    return httpx2.request(method, f"{proxy.url}/{path}", **({"json": body} if body else {}))


def listed(proxy: RunningProxy) -> list[dict]:
    return ask(proxy, "GET", "v1/examples").raise_for_status().json()["data"]


def test_the_label_must_pins_the_last_reply_as_one_that_must_not_come_again(proxy):
    play(proxy)
    turn_id = play(proxy, temperature=0.5)
    labelled = ask(proxy, "PUT", MUST, note="It is four.").raise_for_status().json()
    assert [(label["label"], label["note"]) for label in labelled["labels"]] == [("must", "It is four.")]
    (example,) = listed(proxy)
    assert (example["example_id"], example["session_id"]) == (turn_id, "s")
    assert (example["check"], example["note"]) == ({"kind": "not_again"}, "It is four.")
    (view,) = [view for view in proxy.turns("s") if view.turn.turn_id == turn_id]
    assert example["prompt_token_ids"] == view.prompt_token_ids.tolist()
    assert example["reply_token_ids"] == view.turn.token_ids.tolist()
    assert example["sampling"] == view.turn.sampling
    assert ask(proxy, "DELETE", MUST).raise_for_status().json()["labels"] == []
    assert listed(proxy) == []


def test_a_turn_is_pinned_with_a_check_which_another_one_replaces(proxy):
    turn_id = play(proxy)
    check = {"kind": "tool_call", "name": "look", "arguments": {"a": 1}}
    pinned = ask(proxy, "PUT", f"v1/examples/{turn_id}", check=check).raise_for_status().json()
    assert pinned == listed(proxy)[0]
    assert pinned["check"] == check
    ask(proxy, "PUT", f"v1/examples/{turn_id}", check={"kind": "text", "contains": "four"}).raise_for_status()
    assert [each["check"]["kind"] for each in listed(proxy)] == ["text"]
    assert ask(proxy, "DELETE", f"v1/examples/{turn_id}").raise_for_status().json()["example_id"] == turn_id
    assert ask(proxy, "DELETE", f"v1/examples/{turn_id}").status_code == 404
    shown = httpx2.get(f"{proxy.url}/v1/sessions/s").json()
    assert shown["labels"] == []


def test_commands_pin_list_export_import_and_unpin_over_http_and_in_the_database(proxy, tmp_path):
    turn_id, file = play(proxy), tmp_path / "examples.jsonl"

    def run(*arguments: str, where=("--url", proxy.url)) -> str:
        done = run_turnwise(*arguments, *where)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("sessions", "pin", "s", "--tool-call", "look", "--arguments", '{"a": 1}', "--note", "It looks.")
    assert turn_id in run("examples")
    run("examples", "export", str(file))
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["check"] == {"kind": "tool_call", "name": "look", "arguments": {"a": 1}}
    run("sessions", "unpin", "s")
    assert listed(proxy) == []
    assert "1 examples are new" in run("examples", "import", str(file))
    assert "0 examples are new" in run("examples", "import", str(file))
    own = ("--database", proxy.database_url)
    assert turn_id in run("examples", where=own)
    run("sessions", "unpin", turn_id, where=own)
    run("sessions", "pin", "s", "--turn", turn_id, "--contains", "four", where=own)
    (pinned,) = listed(proxy)
    assert (pinned["check"], pinned["session_id"]) == ({"kind": "text", "contains": "four"}, "s")
    run("sessions", "unpin", turn_id)
    assert listed(proxy) == []
