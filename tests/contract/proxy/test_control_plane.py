"""The control plane's errors for common mistakes, and its representations of sessions and turns."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from support import stalled_files
from support.in_process import in_process_proxy
from support.ledger_samples import update_record
from support.waiting import WAIT_SECONDS, wait_until

from proxy.features import rewinds
from proxy.features.page.beside import MAX_SEARCHES
from proxy.features.policies import routes as policies
from proxy.routes.rewards import read_lines
from turnwise.client import wire
from turnwise.features.page import search
from turnwise.store import claims, keys, versions
from turnwise.store.database import Database
from turnwise.types import PolicyVersion

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Database]]:
    with in_process_proxy(tmp_path_factory.mktemp("control")) as running:
        yield running


@pytest.fixture
def http(world) -> TestClient:
    return world[0]


def refusal(reply) -> str:
    assert reply.status_code in (409, 422), reply.text
    return reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1/experiences?sesion=s", "did you mean `session_id`?"),
        ("/v1/sessions?group=g", "did you mean `group_id`?"),
        ("/v1/sessions/s/turns?promt=whole", "did you mean `prompt`?"),
        ("/v1/counts?tenant=t", "no such query parameter; there are: none"),
        ("/v1/updates?before=1", "no such query parameter; there are: after, limit"),
    ],
)
def test_a_misspelt_filter_is_refused_and_not_ignored(http, path, sentence):
    assert sentence in refusal(http.get(path))


def test_a_list_of_large_sessions_is_answered_in_pages_of_some_megabytes(http):
    for number in range(12):
        body = {"session_id": f"large-{number}", "task_id": "large", "metadata": {"text": "x" * 1_000_000}}
        http.post("/v1/sessions", json=body).raise_for_status()
    query, found = {"task_id": "large", "limit": 1000}, []
    while True:
        reply = http.get("/v1/sessions", params=query)
        assert len(reply.content) < 9 * 2**20
        page = reply.json()
        found += [session["session_id"] for session in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["next_after"]
    assert found == [f"large-{number}" for number in reversed(range(12))]


def test_a_discount_that_has_no_effect_is_refused(http):
    assert "give credit `step_wise`" in refusal(http.post("/v1/sessions", json={"gamma": 0.5}))
    found = http.get("/v1/experiences?credit=propagate&gamma=0.5")
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith("`gamma` discounts step rewards and has no effect")
    assert http.post("/v1/sessions", json={"gamma": 0.5, "credit": "step_wise"}).status_code == 200


def send(http: TestClient, call: wire.ApiCall):
    return http.request(call.method, call.path, params=call.params, json=call.body)


def test_labels_are_set_filtered_by_and_removed_as_the_client_does(http):
    for session_id in ("marked", "plain"):
        http.post("/v1/sessions", json={"session_id": session_id})
    label = "read this: 50%?"
    labelled = send(http, wire.set_label("marked", label, "a <b>note</b>")).json()["labels"]
    assert [(each["label"], each["note"]) for each in labelled] == [(label, "a <b>note</b>")]
    found = http.get("/v1/sessions", params={"label": label}).json()
    assert [each["session_id"] for each in found["data"]] == ["marked"]
    assert found["data"][0]["labels"] == labelled
    assert http.get("/v1/sessions/marked").json()["labels"] == labelled
    assert send(http, wire.set_label("nobody", label, None)).status_code == 404
    assert refusal(send(http, wire.set_label("marked", "x" * 65, None))).startswith("`label`")
    for _ in range(2):
        assert send(http, wire.remove_label("marked", label)).json()["labels"] == []
    assert http.put("/v1/sessions/marked/labels/a", json={"note": "x", "colour": "red"}).status_code == 422


def test_a_search_continues_past_pages_without_a_match(http, monkeypatch):
    monkeypatch.setattr(search, "WINDOW", 2)
    monkeypatch.setattr(search, "MAX_SEARCHED", 2)
    for number in range(5):
        http.post("/v1/sessions", json={"session_id": f"n{number}", "group_id": "searched"})
    http.post("/v1/sessions/n0/end", json={"reward": 0.25, "termination_reason": "solved"})
    call: wire.ApiCall | None = wire.page_of("/v1/sessions", {"group_id": "searched", "max_reward": 0.25})
    pages = []
    while call is not None:
        page = send(http, call).json()
        pages.append(([each["session_id"] for each in page["data"]], page["next_after"], page["num_searched"]))
        call = wire.next_page(call, page, "session_id")
    assert pages == [([], "n3", 2), ([], "n1", 2), (["n0"], None, 1)]
    assert "did you mean `min_reward`?" in refusal(http.get("/v1/sessions?min_rewards=1"))
    assert http.get("/v1/sessions?min_reward=nan").status_code == 422


def test_a_second_creation_changes_the_fields_that_calls_and_credit_use(http):
    http.post("/sessions/opened/v1/chat/completions", json=CHAT).raise_for_status()
    body = {"session_id": "opened", "group_id": "g", "group_size": 2, "credit": "step_wise", "sampling": {"top_p": 0.5}}
    changed = http.post("/v1/sessions", json=body).raise_for_status().json()
    assert (changed["group_id"], changed["credit"], changed["num_turns"]) == ("g", "step_wise", 1)
    http.post("/sessions/opened/v1/chat/completions", json=CHAT).raise_for_status()
    conflict = http.post("/v1/sessions", json={"session_id": "opened", "group_id": "h"})
    assert (conflict.status_code, conflict.json()["error"]["param"]) == (409, "group_id")
    assert http.get("/v1/sessions/opened").json()["sampling"] == {"top_p": 0.5}


def test_a_turn_is_returned_with_its_new_tokens_and_on_request_with_its_whole_prompt(http):
    answer = http.post("/sessions/long/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]
    messages = [*CHAT["messages"], answer, {"role": "user", "content": "Go on."}]
    second = http.post("/sessions/long/v1/chat/completions", json={**CHAT, "messages": messages}).json()
    path = "/v1/sessions/long/turns?after=" + http.get("/v1/sessions/long/turns").json()["data"][0]["turn_id"]
    (added,) = http.get(path).json()["data"]
    (whole,) = http.get(f"{path}&prompt=whole").json()["data"]
    assert http.get(f"/v1/turns/{second['id']}").json() == added
    assert http.get(f"/v1/turns/{second['id']}?prompt=whole").json() == whole
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant", "user"]
    if added["parent_turn_id"] is not None:
        assert added["messages"] == messages[2:]
    assert len(whole["prompt_token_ids"]) == added["prompt_length"] >= len(added["prompt_token_ids"])


def test_a_reward_after_training_is_marked_and_is_in_updates_and_metrics(world):
    http, database = world
    http.post("/sessions/kim/v1/chat/completions", json=CHAT).raise_for_status()
    first = http.post("/v1/rewards", json={"session_id": "kim", "value": 1.0}).json()["data"]
    assert first == [{"turns": 1, "trained_in": None}]
    ended = http.post("/v1/sessions/kim/end", json={}).json()
    assert ended["num_turns"] == 1
    (turn,) = http.get("/v1/sessions/kim/turns").json()["data"]
    claimed = claims.claim(database, "t", max_groups=1, lease_seconds=60)
    update = update_record(7, policy_version=3, metrics={"reward_mean": 1.0})
    with database.write() as connection:
        claims.ack(connection, claims.Finished(claimed, update, trained={("default", "kim"): {turn["turn_id"]: 0.25}}))
    for line in ({"session_id": "kim"}, {"turn_id": turn["turn_id"]}):
        late = http.post("/v1/rewards", json={**line, "value": 2.0}).json()["data"]
        assert late == [{"turns": 1, "trained_in": 7}]
    assert http.get("/v1/sessions/kim").json()["trained_in"] == [{"update_id": 7, "policy_version": 3}]
    trained = http.get(f"/v1/turns/{turn['turn_id']}").json()["trained_in"]
    assert trained == [{"update_id": 7, "policy_version": 3, "advantage": 0.25}]
    (listed,) = http.get("/v1/updates").json()["data"]
    assert listed["groups"] == [{"group_id": "kim", "status": "trained", "reason": None}]
    assert listed["sessions"] == [{"session_id": "kim", "group_id": "kim", "advantages": {turn["turn_id"]: 0.25}}]
    gauges = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }
    assert gauges["turnwise_last_update",] == 7
    assert gauges["turnwise_last_update_reward_mean",] == 1.0
    assert gauges["turnwise_groups", "ready"] == 0
    assert gauges["turnwise_groups", "open"] >= 1


def test_a_directory_that_does_not_answer_delays_nothing_but_the_versions_in_it(world, tmp_path, monkeypatch):
    """As on a network file system that stalls: only the process that reads files asks for it."""
    http, database = world
    stalled, answered, is_dir, asked = tmp_path / "stalled", tmp_path / "answered", Path.is_dir, []
    with database.write() as connection:
        for version, path in ((6, tmp_path), (7, stalled), (8, stalled)):
            versions.publish_version(connection, PolicyVersion(version=version, path=str(path)))

    def noting(self: Path, **kwargs: bool) -> bool:
        asked.append(self)
        return is_dir(self, **kwargs)

    monkeypatch.setattr(Path, "is_dir", noting)
    for module, name in ((policies, "exist_on_disk"), (rewinds, "on_disk"), (policies, "check_published")):
        stalling = functools.partial(stalled_files.stalling, str(stalled), answered, getattr(module, name))
        monkeypatch.setattr(module, name, stalling)
    monkeypatch.setattr("proxy.features.policies.routes.PATIENCE_SECONDS", 0.05)
    for module in (policies, rewinds):
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.05)

    def on_disk() -> list[bool | None]:
        return [each["on_disk"] for each in http.get("/v1/policies").json()["data"] if each["version"] in (6, 7, 8)]

    try:
        for _ in range(2):
            wait_until(lambda: on_disk() == [None, None, True], "only the stalled versions have no answer")
            refused = [
                http.post("/v1/policies/7/activate"),
                http.post("/v1/policies/8/activate"),
                http.post("/v1/policies", json={"path": str(stalled)}),
            ]
            assert {(each.status_code, each.json()["error"]["code"]) for each in refused} == {(503, "files_not_read")}
        assert stalled not in asked
    finally:
        answered.touch()
    for version in (8, 7):
        answers = []

        def is_refused(version=version, answers=answers) -> bool:
            answers.append(http.post(f"/v1/policies/{version}/activate"))
            return answers[-1].status_code == 409

        wait_until(is_refused, "the files are known not to exist")
        assert f"Version {version}'s files no longer exist" in refusal(answers[-1])


def test_the_last_use_of_a_key_is_recorded_at_the_next_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr("proxy.sweeper.SWEEP_SECONDS", 0.05)
    with in_process_proxy(tmp_path) as (http, database):
        with database.write() as connection:
            _, secret = keys.create_key(connection, "default", keys.KeyRole.ADMIN, "mine")
        admin = {"authorization": f"Bearer {secret}"}

        def is_recorded() -> bool:
            (key,) = http.get("/v1/keys", headers=admin).raise_for_status().json()["data"]
            return key["last_used_at"] is not None

        wait_until(is_recorded, "the use is recorded")


def test_few_searches_run_at_once_and_lists_do_not_wait_for_them(http, monkeypatch):
    """Each reads for two seconds: as many searches as there are threads would stop the calls that read the store."""
    going, longest, lock = 0, 0, threading.Lock()
    are_enough = threading.Event()
    plain = search.search_sessions

    def slow(connection, wanted, contents, **page):
        nonlocal going, longest
        if not contents.is_empty:
            with lock:
                going, longest = going + 1, max(longest, going + 1)
            assert are_enough.wait(WAIT_SECONDS)
            with lock:
                going -= 1
        return plain(connection, wanted, contents, **page)

    monkeypatch.setattr(search, "search_sessions", slow)
    with ThreadPoolExecutor(12) as clients:
        searches = [clients.submit(http.get, "/v1/sessions?text=x") for _ in range(12)]
        wait_until(lambda: longest == MAX_SEARCHES, "the searches that have a place run")
        assert http.get("/v1/sessions").status_code == 200
        are_enough.set()
        assert {each.result(WAIT_SECONDS).status_code for each in searches} == {200}
    assert longest == MAX_SEARCHES


@pytest.fixture(scope="module")
def open_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with in_process_proxy(tmp_path_factory.mktemp("rewards")) as (client, _):
        client.post("/sessions/s/v1/chat/completions", json=CHAT).raise_for_status()
        yield client


@pytest.mark.parametrize(("index", "bad"), [(0, {}), (834, {"session_id": "s", "value": "1"})])
def test_an_error_names_the_line_among_all_lines(open_http, index, bad):
    lines = [{"session_id": "s", "value": 1}] * 900
    lines[index] = bad
    with pytest.raises(RequestValidationError) as error:
        read_lines(orjson.dumps(lines))
    assert {each["loc"][:2] for each in error.value.errors()} == {("body", index)}
    refused = open_http.post("/v1/rewards", json=lines)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(f"`{index}.value`")


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"[{]", b'[{"session_id": "s", "value": NaN}]', b'{"value": 1}'])
def test_a_body_that_is_no_list_of_lines_is_refused(open_http, body):
    assert open_http.post("/v1/rewards", content=body).status_code == 422


def test_a_control_plane_body_that_would_hold_the_loop_is_refused(open_http):
    """Such a body is decoded on the loop: 51,000 keys take 16 ms, 16 MiB of text 17 ms."""
    many = open_http.post("/v1/sessions", json={"metadata": {f"k{number}": "v" for number in range(4_100)}})
    long = open_http.post("/v1/sessions", json={"metadata": {"text": "x" * 2**20}})
    assert [(each.status_code, each.json()["error"]["code"]) for each in (many, long)] == [(413, "too_large")] * 2
    assert open_http.post("/v1/sessions", json={"metadata": {"text": "x" * 1_000_000}}).status_code == 200
