"""The page's views in a real Chromium: they show what is stored, follow live turns, and are accessible."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from openai import OpenAI
from support.browser import Visit, running_browser, visit
from support.migrated import migrated, writing
from support.observed_run import observe_run
from support.proxies import ProxyAndEngine, RunningProxy, running_proxy
from support.waiting import wait_until
from turnwise_fake_engine import running_fake_engine

from turnwise.store import keys

ODD = "<img src=x onerror=alert(1)> שלום 🙂"
VIEWS = {
    "overview": "",
    "runs": "#runs/1/8",
    "sessions": "#sessions",
    "search": "#sessions/text=refund&min_reward=0.5",
    "group": "#sessions/group_id=refund-17-8",
    "session": "#session/edited",
    "health": "#health",
}


FETCHED = """
performance.getEntriesByType("resource")
    .filter((each) => /session|turn/.test(each.name) && each.name.includes("/v1/"))
    .map((each) => [each.name, each.encodedBodySize])
"""
"""Script that returns the address and the size of each answer with a session's content."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def world(shared_proxy: ProxyAndEngine) -> RunningProxy:
    shared_proxy.engine.state.script.max_model_len = 300_000
    observe_run(shared_proxy.proxy, shared_proxy.engine)
    return shared_proxy.proxy


@pytest.fixture
def window(browser: Any, world: RunningProxy) -> Iterator[Visit]:
    with visit(browser, world) as visiting:
        yield visiting


def main_text(page: Any) -> str:
    return page.inner_text("main")


def call(proxy: RunningProxy, session_id: str, text: str = "Hello.") -> None:
    client = OpenAI(base_url=f"{proxy.url}/sessions/{session_id}/v1", api_key="none")
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], max_completion_tokens=8)


def test_the_overview_shows_the_served_version_the_rewards_and_the_stored_sessions(window):
    text = main_text(page := window.open())
    for expected in (
        "version 0",
        "refund-17",
        "No trainer has reported.",
        "0 calls failed",
        "Last minute",
    ):
        assert expected in text, text
    assert page.locator(".chart canvas").count() == 4
    described = page.get_attribute(".chart .u-wrap", "aria-label")
    assert described == "Reward: train 0.9583 at update 8, held out 0.8 at update 8"
    page.wait_for_selector("text=sampled tokens a minute")


def test_the_runs_view_has_every_curve_and_compares_two_versions(window):
    page = window.open("#runs/1/8")
    titles = page.locator(".charts h2").all_inner_texts()
    assert re.fullmatch(r"Reward of \d+ sessions", titles.pop(1))
    expected = ["Reward", "Staleness", "Entropy", "KL and clipped share", "Gradient norm"]
    expected += ["Trained share of the sampled tokens", "Loss"]
    expected += ["Trained tokens per second", "Idle share of trainer and engines", "Groups"]
    expected += [
        "Gap between trainer and engine logprobs",
        "Reward by task",
        "Reward by name",
        "Dropped groups by reason",
    ]
    expected += ["Canary arms: mean reward", "Canary arms: share of broken turns"]
    assert titles == [*expected, "Pause of the engines, seconds"]
    # In the minute of update 8 the engine ran calls for 20 + 4 * 8 of 60 seconds: 8 / 60 are idle.
    idle = page.locator("section:has(h2:text-is('Idle share of trainer and engines')) .u-wrap")
    assert "engines 0.1333 at update 8" in idle.get_attribute("aria-label")
    by_name = page.locator("section:has(h2:text-is('Reward by name')) .u-wrap").get_attribute("aria-label")
    assert by_name == "Reward by name: polite 0.125 at update 8, solved 0.8333 at update 8"
    page.click("summary:text('Metrics of both versions')")
    assert "eval/reward_mean 0.1875 0.8 0.6125" in " ".join(main_text(page).split())
    assert "rolled back: the canary's mean reward" in main_text(page)
    page.select_option("select[name=x]", "time")
    # One of the sessions' rewards, and one for each title but the trained share, of which this run says nothing.
    wait_until(lambda: page.locator(".chart canvas").count() == len(titles), "all curves are drawn again")
    assert "No update has this value: the algorithm does not compute it." in main_text(page)


def test_sessions_are_found_by_their_content_and_a_group_is_shown_side_by_side(window):
    page = window.open("#sessions")
    first = page.locator(".sessions > li").nth(1)
    assert "I want my money back" in main_text(page)
    assert "Goodbye!" in first.inner_text()
    page.fill("input[name=text]", "money back")
    page.click("summary:text('More filters')")
    page.fill("input[name=min_reward]", "1")
    page.click("button:text('Find')")
    page.wait_for_selector("text=found among 97 sessions")
    rows = page.locator(".sessions > li").count()
    assert rows == page.locator(".sessions a:text-is('refund-17')").count() > 0
    assert page.input_value("input[name=min_reward]") == "1"
    group = main_text(window.open("#sessions/group_id=refund-17-8"))
    assert "Group refund-17-8: mean reward 1.125 of 4 sessions" in group
    assert "Run 3" in group
    assert "mean advantage" in group


def test_labels_and_rewards_are_given_by_hand(window, world):
    call(world, "by-hand")
    page = window.open("#session/by-hand")
    page.click("summary:text-is('Label')")
    page.fill("input[name=label]", "odd 🙂")
    page.fill("input[name=note]", ODD)
    page.click("button:text('Mark')")
    page.wait_for_selector(".labelled .chip:text('odd 🙂')")
    page.click("summary:text-is('Details')")
    form = page.locator(".turn form")
    form.locator("input[name=value]").fill("0.75")
    form.locator("select[name=target]").select_option("turn")
    form.locator("button").click()
    page.wait_for_selector(".given:text('reward 0.75')")
    stored = httpx2.get(f"{world.url}/v1/sessions/by-hand").json()
    assert (stored["reward"], [each["note"] for each in stored["labels"]]) == (0.75, [ODD])
    page.click("button[aria-label='Remove label odd 🙂']")
    page.wait_for_selector(".chip", state="detached")
    page.click("summary:text-is('Reward')")
    for value in ("0.25", "0.5"):
        page.fill(".forms input[name=value]", value)
        page.click(".forms button:text('Give or revise')")
        page.wait_for_selector(f".ending .given:text('reward {value}')")
    assert page.locator(".ending s").all_inner_texts() == ["reward 0.25"]
    stored = httpx2.get(f"{world.url}/v1/sessions/by-hand").json()
    assert (stored["labels"], [line["value"] for line in stored["rewards"]]) == ([], [0.25, 0.5])


def test_a_session_is_exported_ended_and_deleted_after_a_question(window, world):
    call(world, "finished")
    page = window.open("#session/finished")
    with page.expect_download() as turns:
        page.click("button:text('Export turns')")
    (turn,) = json.loads(Path(turns.value.path()).read_text())
    assert turn["session_id"] == "finished"
    page.click("button:text('Export experiences')")
    page.wait_for_selector("#problem:text('There are no experiences yet')")
    questions: list[str] = []
    page.once("dialog", lambda dialog: questions.append(dialog.message) or dialog.dismiss())
    page.click("button:text('End')")
    page.once("dialog", lambda dialog: questions.append(dialog.message) or dialog.accept())
    page.click("button:text('End')")
    page.wait_for_selector("text=The session ended")
    httpx2.post(f"{world.url}/v1/rewards", json={"session_id": "finished", "value": 1}).raise_for_status()
    with page.expect_download() as experiences:
        page.click("button:text('Export experiences')")
    assert experiences.value.suggested_filename == "finished.jsonl"
    assert json.loads(Path(experiences.value.path()).read_text())["session_id"] == "finished"
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("button:text('Delete')")
    page.wait_for_url("**/#sessions")
    assert len(questions) == 2
    assert httpx2.get(f"{world.url}/v1/sessions/finished").status_code == 404


def test_a_person_says_what_a_reply_should_have_been(window, world):
    call(world, "judged")
    page = window.open("#session/judged")
    page.click("summary:text-is('Feedback')")
    page.fill("label:text('Comment') textarea", f"Too long. {ODD}")
    page.click("button:text-is('Comment')")
    page.wait_for_selector(".feedback pre:text('Too long.')")
    page.click("summary:text-is('Feedback')")
    page.click("button[aria-label='Bad reply']")
    page.wait_for_selector(".given:text('reward feedback 0')")
    page.click("summary:text-is('Feedback')")
    page.fill("label:text('A better reply') textarea", "Short.")
    page.click("button:text('Store the better reply')")
    page.wait_for_selector(".feedback pre:text-is('Short.')")
    found = httpx2.get(f"{world.url}/v1/feedback?session_id=judged").json()["data"]
    assert [(each["kind"], each["value"]) for each in found] == [
        ("comment", f"Too long. {ODD}"),
        ("boolean", False),
        ("demonstration", "Short."),
    ]


def test_a_reply_that_must_not_come_again_is_pinned_by_a_button(window, world):
    call(world, "pinned")
    page = window.open("#session/pinned")
    page.click("summary:text-is('Feedback')")
    page.click("button:text-is('Must not come again')")
    page.wait_for_selector(".chip:text('must')")
    (turn_id,) = [view.turn.turn_id for view in world.turns("pinned")]
    (example,) = httpx2.get(f"{world.url}/v1/examples").json()["data"]
    assert (example["example_id"], example["check"]["kind"]) == (turn_id, "not_again")
    assert [each["label"] for each in httpx2.get(f"{world.url}/v1/sessions/pinned").json()["labels"]] == ["must"]
    httpx2.delete(f"{world.url}/v1/examples/{turn_id}").raise_for_status()


def test_the_served_version_is_chosen_after_a_question(window, world):
    """The engines of other tests keep their version, because the route that chooses one is answered here."""
    page = window.page
    questions: list[str] = []
    chosen: list[Any] = []

    def answer(route: Any) -> None:
        chosen.append((route.request.url.rpartition("/v1/")[2], route.request.post_data_json))
        route.fulfill(json={})

    page.route("**/activate", answer)
    page.route("**/v1/policies?*", lambda route: route.fulfill(json=served))
    version = {"status": "active", "metrics": {}, "created_at": "2026-01-01T00:00:00Z", "on_disk": True, "path": "/p"}
    listed = [version | {"version": 3}, version | {"version": 2, "status": "retired"}]
    served = {"data": listed, "has_more": False, "pinned_version": 2, "policies": [], "trained_shares": []}
    page.on("dialog", lambda dialog: questions.append(dialog.message) or dialog.accept())
    page = window.open("#runs")
    page.click("button:text('Follow the newest')")
    wait_until(lambda: len(chosen) == 1, "the newest is followed")
    served["pinned_version"] = None
    page = window.open("#runs")
    page.click("button:text-is('Pin')")
    wait_until(lambda: len(chosen) == 2, "the active version is pinned")
    page.click("button:text-is('Roll back')")
    wait_until(lambda: len(chosen) == 3, "the older version is chosen")
    assert chosen == [
        ("policies/3/activate", {"pin": False}),
        ("policies/3/activate", {"pin": True}),
        ("policies/2/activate", {"pin": True}),
    ]
    assert len(questions) == 3


def test_the_overview_states_the_lift_over_the_hold_out(window):
    arm = {"version": 5, "num_sessions": 40, "num_turns": 40, "broken_share": 0.0, "mean_reward": 0.5}
    arms = {"canary": arm | {"version": 7}, "control": arm, "lift": {"reward": {"mean": 0.2, "low": 0.1, "high": 0.3}}}
    version = {"status": "active", "metrics": {}, "created_at": "2026-01-01T00:00:00Z", "on_disk": True, "path": "/p"}
    served = {"data": [version | {"version": 7, "arms": arms}], "has_more": False, "pinned_version": None}
    window.page.route("**/v1/policies?*", lambda route: route.fulfill(json=served))
    assert "Reward +0.2 over version 5, which is held out (0.1 to 0.3)" in main_text(window.open())


def test_groups_and_single_sessions_have_counts_and_curves_of_their_own(window):
    """Live traffic came after update 4, with other graders: one curve of both would fall without a reason."""

    def with_singles(route: Any) -> None:
        found = route.fetch().json()
        for each in found["data"][4:]:
            each["by_kind"]["singles"] = {"mean": 0.11, "num_sessions": 16}
        route.fulfill(json=found)

    def waiting(route: Any) -> None:
        found = route.fetch().json()
        route.fulfill(json=found | {"groups": found["groups"] | {"ready": 16}, "num_ready_singles": 15})

    window.page.route("**/v1/updates/summaries*", with_singles)
    window.page.route("**/v1/counts", waiting)
    text = " ".join(main_text(page := window.open()).split())
    assert "1 group is ready 15 single sessions are ready" in text
    described = page.get_attribute(".chart .u-wrap", "aria-label")
    expected = "Reward: groups 0.9583 at update 8, single sessions 0.11 at update 8, held out 0.8 at update 8"
    assert described == expected


def test_a_pinned_version_is_said_without_a_word_on_what_the_trainer_does(window):
    version = {"status": "active", "metrics": {}, "created_at": "2026-01-01T00:00:00Z", "on_disk": True, "path": "/p"}
    served = {"data": [version | {"version": 7}], "has_more": False, "pinned_version": 7}
    window.page.route("**/v1/policies?*", lambda route: route.fulfill(json=served))
    text = main_text(window.open())
    assert "Pinned to version 7: newer versions are not served until you follow the newest" in text
    assert "are trained and not served" not in text


def test_versions_are_compared_by_the_rewards_and_replies_of_the_same_task(window):
    """In this run version 0 sampled everything, so a version is compared with itself."""
    text = " ".join(main_text(window.open("#runs/0/0")).split())
    assert "Over 3 tasks that both versions played" in text
    assert "refund-17" in text
    assert "You are welcome. Goodbye!" in text


def test_a_branch_shows_its_reason_and_both_texts(window):
    text = main_text(window.open("#session/edited"))
    assert "Why this is a branch: edited_history" in text
    assert "Stored reply of turn 1" in text or "Stored reply of turn 0" in text
    assert "What the client sent in this turn" in text


def test_a_compaction_shows_both_contexts_their_tokens_and_the_summary_between_them(window, world):
    """The stand-in engine repeats the last message, here as a summary."""
    client = OpenAI(base_url=f"{world.url}/sessions/compacted/v1", api_key="none")
    asked = {"role": "user", "content": "Summarize our conversation so far."}
    said = client.chat.completions.create(
        model="fake",
        messages=(start := [{"role": "user", "content": "Hello."}]),
        max_completion_tokens=8,
    )
    reply = {"role": "assistant", "content": said.choices[0].message.content}
    for messages in ([*start, reply, asked], [{"role": "user", "content": f"So far: {asked['content']}"}]):
        client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=40)
    long, summary, after = world.turns("compacted")
    text = " ".join(main_text(window.open(f"#session/compacted/{after.turn.turn_id}")).split())
    before = long.turn.prompt_length + long.turn.token_ids.size
    assert "This context goes on from a summary" in text
    assert f"Turn 0: {before} tokens" in text
    assert f"Turn 1: {summary.turn.token_ids.size} tokens" in text
    assert f"{after.turn.prompt_length} tokens" in text
    text = " ".join(main_text(window.open(f"#session/compacted/{summary.turn.turn_id}")).split())
    assert "A summary of the conversation up to here; it goes on in Turn 2." in text


def test_tokens_are_compared_with_the_served_version(window):
    page = window.open("#session/edited")
    page.locator("summary:text('Tokens')").last.click()
    page.wait_for_selector(".tokens .scaffold")
    page.click("button:text('Compare with the served version')")
    # The stand-in gives every token the logprob that it was sampled with.
    page.wait_for_selector("text=Under version 0, 0 of 26 tokens are more probable")
    assert page.input_value("select[name=colour]") == "change"
    page.locator(".tokens .sampled").last.click()
    assert "under version 0" in page.inner_text(".token-detail")


def answering(answer: dict[str, Any]) -> Callable[[Any], None]:
    return lambda route: route.fulfill(**answer)


def test_values_of_a_proxy_that_does_not_answer_are_marked_as_old_and_an_answer_of_another_form_is_an_error(window):
    page = window.open("#health")
    page.route("**/readyz", lambda route: route.abort())
    page.wait_for_selector("#problem:text('The proxy does not answer')")
    assert page.inner_text("#state") == "no answer"
    page.unroute("**/readyz")
    page.wait_for_selector("#state .good")
    page.wait_for_selector("#problem:empty", state="attached")
    for view, path, answer, said in (
        ("#health", "**/readyz", {"body": "<html>", "content_type": "text/html"}, "text/html, not application/json"),
        ("#health", "**/v1/budget", {"json": {}}, "not of the form that this page reads"),
        ("#runs", "**/v1/policies?*", {"json": {"data": [], "has_more": True}}, "pages that do not end"),
    ):
        page.route(path, answering(answer))
        page.evaluate("hash => { location.hash = hash; }", view)
        page.wait_for_selector(f"#problem:has-text('{said}')")
        assert page.get_attribute("main", "aria-busy") == "false"
        page.unroute(path)
    assert {line for line in window.console if "ERR_FAILED" not in line} == set()
    window.console.clear()


@pytest.mark.parametrize("width", [1400, 1024, 390])
def test_a_long_reason_of_an_engine_has_the_width_of_its_card_and_stretches_no_other(window, width):
    page, reason = window.page, "the engine does not answer: [Errno 111] " + "connection refused " * 30
    page.set_viewport_size({"width": width, "height": 900})
    engines = [{"url": "http://10.0.0.7:8000", "ready": False, "model": None, "error": reason}]
    served = {"status": "ready", "store": "ok", "exact_continuation": True, "policy_version": 0, "reload_error": reason}
    page.route("**/readyz", answering({"json": {**served, "engines": engines}}))
    page = window.open()
    card = page.locator(".card", has=page.locator("h2:text('Serving')"))
    said, reload = card.locator("summary").all()
    heights = {"card": card.bounding_box()["height"], "said": said.bounding_box()["height"]}
    assert reload.bounding_box()["height"] < 40
    assert said.bounding_box()["width"] > 0.8 * card.bounding_box()["width"]
    assert (heights["said"] < 40, heights["card"] < 400) == (True, True), heights
    said.click()
    assert reason.strip() in card.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for charts in page.locator(".charts").all():  # none stands alone in a row of several columns
        rows: dict[float, list[dict[str, float]]] = {}
        for box in (each.bounding_box() for each in charts.locator("> .card").all()):
            rows.setdefault(box["y"], []).append(box)
        widths = [sum(box["width"] for box in row) for row in rows.values()]
        assert min(widths) > 0.6 * max(widths), widths


def test_live_turns_appear_without_a_reload(window, world):
    page = window.open("#sessions")
    call(world, "live-session")
    page.wait_for_selector("a[title='live-session']")
    page = window.open("#session/live-session")
    assert page.locator(".turn").count() == 1
    assert page.locator(".tree").count() == 0
    page.click("summary:text-is('Label')")
    page.fill("input[name=note]", "half a no")
    call(world, "live-session", "Another conversation.")
    wait_until(lambda: page.locator(".tree a").count() == 2, "the second turn is in the tree")
    assert page.input_value("input[name=note]") == "half a no"
    page = window.open("")
    httpx2.post(f"{world.url}/v1/sessions/live-session/end", json={"reward": 1.0, "termination_reason": "seen-live"})
    page.wait_for_selector(".sessions li:has(a[title='live-session']):has-text('seen-live')")


def test_the_page_shows_when_it_is_not_live_and_asks_for_a_key(window):
    window.page.route("**/v1/events", lambda route: route.fulfill(status=403, body="{}"))
    window.open("", is_live=False)
    window.page.wait_for_selector("#live span:text-is('not live')")
    assert window.console.pop().startswith("error: Failed to load resource")


def faults_of(page: Any) -> list[tuple[str, Any]]:
    """Return the serious accessibility faults of the view as it is, and by how many pixels it exceeds the window."""
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    found = [each for each in violations if each["impact"] in ("serious", "critical")]
    faults = [(each["id"], each["nodes"][0]["html"]) for each in found]
    excess = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return faults + [("wider than the window", excess)] * (excess > 0)


@pytest.mark.parametrize(("width", "colours"), [(400, "dark"), pytest.param(1100, "light", marks=pytest.mark.slow)])
def test_no_view_has_a_serious_accessibility_fault_or_is_wider_than_the_window(window, width, colours):
    window.page.set_viewport_size({"width": width, "height": 800})
    window.page.emulate_media(color_scheme=colours)
    faults = {}
    for name, address in VIEWS.items():
        page = window.open(address)
        if name == "session":
            page.click("summary:text('Tokens')")
            page.wait_for_selector(".tokens span")
        faults[name] = faults_of(page)
    assert {where: each for where, each in faults.items() if each} == {}


def test_the_link_of_up_opens_the_page_with_its_key_which_leaves_the_address(browser, tmp_path):
    url = migrated(f"sqlite:///{tmp_path}/turnwise.db")
    with writing(url) as connection:
        key = keys.local_key(connection, None)
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, url, tmp_path) as proxy,
        visit(browser, proxy) as visiting,
    ):
        call(proxy, "seen")
        page = visiting.open(f"#key={key}")
        assert (page.evaluate("location.href"), page.is_hidden("#login")) == (f"{proxy.url}/", True)
        page.click("nav a[data-view=sessions]")
        page.wait_for_selector("main >> text=1 turn")


def test_the_page_is_used_by_keyboard(window):
    page = window.open("#session/edited")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#session/edited")
    page.focus("summary:text('Tokens')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tokens span")
    page.focus(".tokens")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text(".token-detail").startswith("Token 1: id ")


def test_odd_names_and_long_text_are_shown_as_text(window, world):
    long = "x" * 200_000
    with httpx2.Client(base_url=world.url) as http:
        wanted = {"session_id": "odd", "task_id": ODD, "metadata": {"a": ODD}, "group_id": f"{ODD}#1"}
        session = http.post("/v1/sessions", json=wanted).raise_for_status().json()
        http.post("/v1/sessions/odd/end", json={"termination_reason": ODD}).raise_for_status()
    call(world, "long", f"{ODD} {long}")
    assert session["task_id"] == ODD
    page = window.open("")
    assert page.locator("main img").count() == 0
    assert ODD in main_text(page)
    page.click(f"main a:text-is('{ODD}')")
    page.wait_for_url("**/#sessions/task_id=*")
    page.wait_for_selector("a[title='odd']")
    page = window.open("#session/long")
    assert (
        page.evaluate("document.querySelector('pre').textContent.length")
        == len(f"{ODD} {long}".encode("utf-16-le")) // 2
    )
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_sequence_of_100_000_tokens_keeps_few_of_them_in_the_document(window, world):
    count = 100_000
    answer = {
        "turn_id": "t",
        "token_ids": [number % 1000 for number in range(count)],
        "logprobs": [None] * (count // 2) + [-0.001 * (number % 3000) for number in range(count // 2)],
        "segments": [
            {"kind": kind, "turn_id": "t", "seq": 0, "start": start, "end": start + count // 2, "role": "main"}
            | {"policy_version_first": 0, "policy_version_last": 0, "is_trainable": kind == "sampled"}
            | {"reward": None, "turn_return": None, "advantage": None}
            for kind, start in (("prompt", 0), ("sampled", count // 2))
        ],
        "pieces": {str(number): f" word{number}" for number in range(1000)},
        "special_ids": [7],
        "characters": [],
        "images": [],
    }
    window.page.route("**/tokens", lambda route: route.fulfill(json=answer))
    page = window.open("#session/edited")
    page.click("summary:text('Tokens')")
    page.wait_for_selector(".tokens span")
    page.select_option("select[name=colour]", "logprob")
    last = page.locator(f".tokens [data-at='{count - 1}']")

    def scroll_to_end() -> int:
        page.evaluate("document.querySelector('.tokens').scrollTop = 1e9")
        return last.count()

    wait_until(scroll_to_end, "the last token is in the document")
    wait_until(lambda: page.locator(".tokens [data-at='0']").count() == 0, "the first tokens are removed again")
    assert page.locator(".tokens span").count() < count / 10
    # Logprob -1.999 of -2.999 to 0 is in the second of five shades.
    assert last.get_attribute("class").split() == ["sampled", "s1"]


def test_a_stored_conversation_of_100_000_tokens_opens_with_few_requests_elements_and_layouts(window, world):
    """The time is only printed, because it depends on the machine; what it depends on is checked."""
    messages: list[dict[str, str]] = []
    client = OpenAI(base_url=f"{world.url}/sessions/long-conversation/v1", api_key="none")
    for number in range(3):
        messages.append({"role": "user", "content": f"{number}. " + "one word and the next\n" * 1550})
        reply = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=40)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    started = time.perf_counter()
    page = window.open("#session/long-conversation")
    opened, num_layouts = time.perf_counter(), window.num_layouts()
    page.locator("summary:text('Tokens')").last.click()
    page.wait_for_selector(".tokens span")
    print(f"the view opened in {opened - started:.2f} s, its tokens in {time.perf_counter() - opened:.2f} s")
    assert window.num_layouts() - num_layouts < 100, "each of 200 blocks caused a layout"
    num_tokens = int(page.get_attribute(".tokens", "aria-label").split(" tokens")[0].replace(",", ""))
    assert 100_000 < num_tokens < 110_000
    assert page.evaluate("document.querySelectorAll('*').length") < 3000
    fetched = dict(page.evaluate(FETCHED))
    wanted = ["feedback?session_id=long-conversation", "long-conversation", "tokens", "turns?limit=200"]
    assert sorted(path.split("/")[-1] for path in fetched) == wanted
    assert sum(fetched.values()) < 16 * num_tokens, "bytes: the text, an id, and a logprob or null"


def test_the_health_view_shows_engines_queues_and_the_results_of_the_doctor(window):
    page = window.open("#health")
    text = main_text(page)
    for expected in ("Serving", "Queues", "writes that wait", "Limits", "no budget", "There are no keys"):
        assert expected in text
    page.click("button:text('Examine')")
    page.wait_for_selector("td:text('reachable, with the tables of this release')")
    wait_until(lambda: page.locator(".chart canvas").count() == 3, "there are rates between two samples")
