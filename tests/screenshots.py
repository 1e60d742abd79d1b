"""`make screenshots ARGS=LINK`: pictures of the page's views into docs/images/, of a run of `make demo`.

LINK is the page's with its key: `make demo ARGS=--stay` prints it, and so does `turnwise up` over the demo's database
later. The run gets one more session, with a branch, from the model that it serves.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI
from support.browser import Visit, running_browser, visit

from examples.bosses.agent import OPENING
from turnwise.client import Client

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES = 150_000
EDITED = "edited"
"""The session with a branch: it is held out, so nothing is trained on it."""


def open_tokens(page: Any) -> None:
    """Show the tokens of a session's last turn, coloured by their logprobs, with one of them chosen."""
    open_session(page)
    page.locator("summary:text('Tokens')").last.click()
    page.wait_for_selector(".tokens span")
    page.select_option("select[name=colour]", "logprob")
    page.locator(".tokens .sampled").last.click()
    page.locator(".foot").last.evaluate("(element) => element.scrollIntoView({block: 'start'})")


def examine(page: Any) -> None:
    page.click("button:text('Examine')")
    page.wait_for_selector("td:text('reachable, with the tables of this release')")
    page.locator(".chart canvas").nth(2).wait_for()
    page.wait_for_timeout(9000)  # the live curves get a few points
    page.evaluate("scrollTo(0, 0)")


def show_whole(page: Any) -> None:
    page.set_viewport_size({"width": 1080, "height": page.evaluate("document.documentElement.scrollHeight")})


def show_branch(page: Any) -> None:
    page.locator("text=Why this is a branch").evaluate("(element) => element.scrollIntoView({block: 'center'})")


def open_session(page: Any) -> None:
    page.locator("a[href^='#session/']").first.click()
    page.wait_for_selector("text=For the whole session")


SHOTS: dict[str, tuple[str, str, Any]] = {
    "overview": ("", "light", None),
    "runs": ("#runs", "dark", None),
    "session": ("#sessions/min_reward=1", "light", open_session),
    "search": ("#sessions/text=Rome&min_reward=1", "light", None),
    "group": ("#sessions/group_id={group_id}", "light", show_whole),
    "branch": (f"#session/{EDITED}", "light", show_branch),
    "tokens": ("#sessions/min_reward=1", "light", open_tokens),
    "health": ("#health", "dark", examine),
}
"""Address, colour scheme and preparation of each picture."""


@dataclasses.dataclass(frozen=True)
class Running:
    url: str
    key: str = ""


def main() -> None:
    """Make the pictures of the proxy whose page's link is given."""
    IMAGES.mkdir(exist_ok=True)
    proxy = running_at(*sys.argv[1:])
    with Client(proxy.url, proxy.key) as client:
        group_id = mixed_group(client)
        play_branch(client)
    with running_browser() as browser:
        for name, (address, scheme, prepare) in SHOTS.items():
            options = {"viewport": {"width": 1080, "height": 720}, "color_scheme": scheme}
            with visit(browser, proxy, **options) as window:
                take(window, address.format(group_id=group_id), prepare, IMAGES / f"{name}.png", proxy.key)


def running_at(link: str = "") -> Running:
    """Return the proxy of a page's link.

    Raises:
        SystemExit: the link has no key, and pictures would show that one is asked for.
    """
    url, _, key = link.partition("/#key=")
    if not key:
        raise SystemExit(f"{link!r} has no key: give the whole link that the demo prints, such as {url}/#key=tw-…")
    return Running(url, key)


def mixed_group(client: Client) -> str:
    """Return the newest whole group in which some sessions have a reward of 1 and some of 0.

    Raises:
        SystemExit: the run has none.
    """
    earned: dict[str, list[float]] = {}
    for session in client.sessions(split="train", status="ended"):
        rewards = earned.setdefault(session["group_id"], [])
        rewards.append(session["reward"])
        if len(rewards) == session["group_size"] and {*rewards} == {0, 1}:
            return str(session["group_id"])
    raise SystemExit("no group of this run has rewards of 0 and 1: give the link of a run of `make demo`")


def play_branch(client: Client) -> None:
    """Play a session whose client replaces a stored reply, so that its history starts a new chain."""
    if any(each["session_id"] == EDITED for each in client.sessions(split="eval")):
        return
    session = client.create_session(session_id=EDITED, split="eval", task_id="edited")
    agent = OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [*OPENING, {"role": "user", "content": 'Where is the boss of "Wendy"?'}]
    for edited, result in ((None, 'boss="Karl"'), ('I look up "Karl".', 'city="Zurich"'), (None, None)):
        answer = agent.chat.completions.create(
            model=client.served_model(), messages=messages, max_completion_tokens=12, temperature=0.8
        )
        reply = edited or answer.choices[0].message.content
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": result}]


def take(window: Visit, address: str, prepare: Any, target: Path, key: str) -> None:
    """Make one picture, as whoever has the key.

    Raises:
        SystemExit: it is larger than `MAX_BYTES`.
    """
    page = window.open(address, key=key)
    if address in ("", "#runs"):
        page.locator(".chart canvas").first.wait_for()
    if address == "":
        page.wait_for_selector("text=sampled tokens a minute")
    if prepare is not None:
        prepare(page)
    page.screenshot(path=target)
    size = target.stat().st_size
    print(f"{target.name}: {size} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"{target} has {size} bytes, more than {MAX_BYTES}; show less")


if __name__ == "__main__":
    main()
