"""Thumbs, comments and edits reach the ledger from a server with the three routes of Open WebUI that are read."""

from __future__ import annotations

import contextlib
import http.server
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from support.proxies import running_proxy
from support.servers import serving
from turnwise_adapters.open_webui import WebUI, pass_on
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.client import Client

CHATS = "/api/v1/chats/all/db"
RATINGS = "/api/v1/evaluations/feedbacks/all/export"


@contextlib.contextmanager
def served(documents: dict[str, Any]) -> Iterator[str]:
    """Serve documents by their paths, to an administrator's key alone, as Open WebUI 0.12.4 answers."""

    class Routes(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_admin = self.headers["authorization"] == "Bearer sk-admin"
            body = json.dumps(documents[self.path] if is_admin else {"detail": "no"}).encode()
            self.send_response(200 if is_admin else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)) as url:
        yield url


def rating(message_id: str, **data: Any) -> dict[str, Any]:
    return {"id": f"f-{message_id}", "type": "rating", "data": data, "meta": {"chat_id": "c", "message_id": message_id}}


def snapshot(messages: dict[str, Any]) -> dict[str, Any]:
    return {"chat": {"chat": {"history": {"messages": json.loads(json.dumps(messages))}}}}


def test_thumbs_comments_and_edits_are_posted_once_and_revised(tmp_path: Path) -> None:
    rules = [{"reply": {"text": "In Rome."}, "contains": "Where"}, {"reply": {"text": "Yes."}}]
    with (
        running_fake_engine(Script.model_validate({"rules": rules})) as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
        Client(proxy.url) as client,
    ):
        turns = []
        for question in ("Where is Kim?", "Sure?", "Really sure?"):
            body = {"model": "fake", "messages": [{"role": "user", "content": question}]}
            answer = httpx2.post(f"{proxy.v1}/chat/completions", json=body, headers={"X-Session-Id": "c"})
            turns.append(answer.raise_for_status().json()["id"])
        messages: dict[str, dict[str, Any]] = {
            "m1": {"role": "assistant", "content": "<details>hm</details>\nIn Rome.", "timestamp": 1},
            "m2": {"role": "assistant", "content": "Yes.", "timestamp": 2},
            "m3": {"role": "assistant", "content": "Yes.", "timestamp": 3},
        }
        ratings = [rating("m1", rating=-1, reason="wrong", comment="It is Oslo."), rating("m3", rating="1")]
        ratings.append(rating("m9", rating=1))  # of a message that is not of this proxy
        documents = {CHATS: [{"id": "c", "chat": {"history": {"messages": messages}}}], RATINGS: ratings}
        with served(documents) as url:
            web_ui = WebUI(url, "sk-admin")
            assert list(pass_on(client, web_ui).values()) == [2, 1, 0, 0, 1]
            in_force = {(each["turn_id"], each["kind"]): each["value"] for each in client.feedback_of("c")}
            assert in_force == {
                (turns[0], "boolean"): False,
                (turns[0], "comment"): "wrong: It is Oslo.",
                (turns[2], "boolean"): True,
            }
            messages["m1"] |= {"originalContent": messages["m1"]["content"], "content": "In Bergen."}
            assert pass_on(client, web_ui)["demonstration"] == 1
            messages["m1"] |= {"originalContent": "In Bergen.", "content": "In Oslo."}  # Open WebUI keeps one original
            ratings[1]["data"]["rating"] = -1
            assert list(pass_on(client, web_ui).values()) == [1, 0, 1, 0, 1]
            assert list(pass_on(client, web_ui).values()) == [0, 0, 0, 0, 1]
            ratings[1]["snapshot"] = snapshot(messages)  # what Open WebUI 0.12 keeps of a reply that is edited later
            messages["m3"]["content"] = "No."
            assert pass_on(client, web_ui)["demonstration"] == 1
            client.feedback("boolean", True, turn_id=turns[1], source="another page")
            ratings[0]["data"] = {
                "rating": None,
                "reason": "wrong",
                "comment": "It is Oslo.",
            }  # the thumb is taken back
            del ratings[1]  # and this rating is deleted
            assert pass_on(client, web_ui)["withdrawn"] == 2
            assert pass_on(client, web_ui)["withdrawn"] == 0
            ratings[0]["data"] = {"rating": 1}
            counts = pass_on(client, web_ui)
            assert (counts["boolean"], counts["withdrawn"]) == (1, 1)  # the comment is gone
        in_force = {(each["turn_id"], each["kind"]): each["value"] for each in client.feedback_of("c")}
        assert {key: value for key, value in in_force.items() if key[1] != "demonstration"} == {
            (turns[0], "boolean"): True,
            (turns[1], "boolean"): True,
        }
        edits = [each for each in client.feedback_of("c") if each["kind"] == "demonstration"]
        assert [(each["turn_id"], each["value"]) for each in edits] == [(turns[0], "In Oslo."), (turns[2], "No.")]
        assert {each["source"] for each in edits} == {"open-webui"}
        messages["m1"]["content"] = messages["m1"]["originalContent"] = "<details>hm</details>\nIn Rome."
        with served(documents) as url:
            assert [pass_on(client, WebUI(url, "sk-admin"))["withdrawn"] for _ in range(2)] == [1, 0]
        edits = [each for each in client.feedback_of("c") if each["kind"] == "demonstration"]
        assert [(each["turn_id"], each["value"]) for each in edits] == [(turns[2], "No.")]  # m3 is edited still
