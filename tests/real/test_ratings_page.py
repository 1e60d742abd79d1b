"""Forty sessions are rated on the page in a real Chromium by keys alone."""

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from support.browser import Visit, running_browser, visit
from support.proxies import RunningProxy
from support.waiting import wait_until

from turnwise.client import Client

NUM = 40
HELLO = [{"role": "user", "content": "Where is Kim?"}]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as running:
        yield running


@pytest.fixture
def window(browser: Any, empty_proxy: RunningProxy) -> Iterator[Visit]:
    with visit(browser, empty_proxy) as visiting:
        yield visiting


def ask(base_url: str, messages: list[dict[str, Any]] = HELLO) -> dict[str, Any]:
    body = {"model": "fake", "messages": messages}
    return httpx2.post(f"{base_url}/chat/completions", json=body).raise_for_status().json()


def play(client: Client, *names: str) -> None:
    for name in names:
        ask(client.create_session(session_id=name).base_url)
        client.end_session(name)


def shown(page: Any) -> str:
    return page.locator("main dl.inline a").first.inner_text()


def _rated(page: Any) -> str:
    return page.inner_text("main p[role=status]").rpartition(": ")[2]


def _shown_or_none(page: Any) -> str | None:
    # In one step: the last session goes while it is looked at.
    text: str | None = page.evaluate("document.querySelector('main dl.inline a')?.innerText ?? null")
    return text


def press(page: Any, keys: str) -> str:
    """Press keys one after another, and wait for the next session; return the one that was shown."""
    before = shown(page)
    for key in keys:
        page.keyboard.press(key)
    # The next key counts when the next session is shown.
    wait_until(lambda: _rated(page) == before and _shown_or_none(page) != before, "the next session is shown")
    return before


def test_forty_sessions_are_rated_by_keys_alone(window, empty_proxy):
    """The time is only printed, because it depends on the machine; each rating is one key."""
    with Client(empty_proxy.url) as client:
        play(client, *(f"s{number}" for number in range(NUM)))
        page = window.open("#sessions")
        link = page.locator("a:text-is('Rate these')")
        wait_until(
            lambda: page.keyboard.press("Tab") or link.evaluate("each => each === document.activeElement"), "Tab"
        )
        page.keyboard.press("Enter")
        page.wait_for_selector("text=probability 1 / 40")
        assert "Where is Kim?" in page.inner_text("main")
        started, expected = time.perf_counter(), {}
        for number in range(NUM):
            expected[press(page, "yn"[number % 2])] = 1.0 - number % 2
        page.wait_for_selector("text=No session is left to rate")
        print(f"{NUM} ratings took {time.perf_counter() - started:.1f} s")
        assert {name: client.session(name)["reward"] for name in expected} == expected
        assert (len(expected), client.ratings()["num_rated"]) == (NUM, NUM)
        page = window.open("#sessions")
        assert page.inner_text("main").count("rated") >= NUM


def test_a_comment_a_skip_and_a_second_thought_need_no_pointer(window, empty_proxy):
    with Client(empty_proxy.url) as client:
        play(client, "a", "b", "c")
        page = window.open("#sessions/rate")
        page.wait_for_selector("text=probability 1 / 3")
        commented = shown(page)
        page.keyboard.press("c")
        page.keyboard.type("yes, but the other Kim")
        press(page, ["Control+Enter"])
        assert client.session(commented)["reward"] == 0.0
        first = press(page, "n")
        page.keyboard.press("z")
        wait_until(lambda: shown(page) == first, "the last one is shown again")
        page.keyboard.press("y")
        wait_until(lambda: client.session(first)["reward"] == 1.0, "the later rating is in force")
        page.wait_for_selector("text=probability 1 / 1")
        page.keyboard.press("s")
        page.wait_for_selector("text=No session is left to rate")
        violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert violations == []


def test_the_better_of_two_replies_is_chosen_by_a_key(window, empty_proxy):
    with Client(empty_proxy.url) as client:
        session = client.create_session(session_id="a")
        reply = ask(session.base_url)["choices"][0]["message"]
        more = [*HELLO, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "And Jo?"}]
        second = ask(session.base_url, more)["id"]
        client.end_session("a")
        fork = client.fork(second, at="before", session_id="f")
        other = ask(fork.base_url, more)["id"]
        page = window.open("#sessions/rate")
        page.wait_for_selector("text=which is better?")
        assert Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"] == []
        page.keyboard.press("b")
        page.wait_for_selector("text=Reply b is better")
        press(page, "y")
        (chosen,) = client.feedback_of("f")
        assert (chosen["turn_id"], chosen["over"]) == (other, [second])
