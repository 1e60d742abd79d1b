"""`make screenshots`: pictures of the page's views into docs/images/, of a small run over a fake engine.

`make screenshots ARGS=LINK` takes those of a run of `make demo`, where LINK is the page's with its key: the demo prints
it, and so does `turnwise up` over the demo's database later.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.browser import Visit, running_browser, visit
from support.observed_run import observe_run
from support.proxies import RunningProxy, running_proxy
from turnwise_fake_engine import running_fake_engine

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES = 150_000
SESSION = "#session/refund-17-7-1"


def open_tokens(page: Any) -> None:
    """Show the tokens of the turn, coloured by their logprobs, with one of them chosen."""
    page.locator("summary:text('Tokens')").last.click()
    page.wait_for_selector(".tokens span")
    page.select_option("select[name=colour]", "logprob")
    page.locator(".tokens .sampled").first.click()
    page.locator(".foot").last.evaluate("(element) => element.scrollIntoView({block: 'start'})")


def examine(page: Any) -> None:
    page.click("button:text('Examine')")
    page.wait_for_selector("td:text('reachable, with the tables of this release')")
    page.locator(".chart canvas").nth(2).wait_for()
    page.wait_for_timeout(9000)  # the live curves get a few points
    page.evaluate("scrollTo(0, 0)")


def open_session(page: Any) -> None:
    page.locator("a[href^='#session/']").first.click()
    page.wait_for_selector("text=For the whole session")


DEMO_SHOTS: dict[str, tuple[str, str, Any]] = {
    "overview": ("", "light", None),
    "runs": ("#runs", "dark", None),
    "session": ("#sessions/min_reward=1", "light", open_session),
}
"""Address, colour scheme and preparation of each picture of the demo."""
SHOTS: dict[str, tuple[str, str, Any]] = {
    "search": ("#sessions/text=money+back&min_reward=1", "light", None),
    "group": ("#sessions/group_id=refund-17-4", "light", None),
    "branch": ("#session/edited", "light", None),
    "tokens": (SESSION, "light", open_tokens),
    "health": ("#health", "dark", examine),
}
"""The same of the small run."""


@dataclasses.dataclass(frozen=True)
class Running:
    url: str
    key: str = ""


def main() -> None:
    """Make the pictures of the small run, or those of the proxy whose page's link is given."""
    IMAGES.mkdir(exist_ok=True)
    if len(sys.argv) > 1:
        with running_browser() as browser:
            take_all(browser, running_at(sys.argv[1]), DEMO_SHOTS)
        return
    with tempfile.TemporaryDirectory() as temporary, running_fake_engine() as engine, running_browser() as browser:
        directory = Path(temporary)
        with running_proxy(engine.url, f"sqlite:///{directory}/turnwise.db", directory) as proxy:
            observe_run(proxy, engine)
            take_all(browser, proxy, SHOTS)


def running_at(link: str) -> Running:
    """Return the proxy of a page's link.

    Raises:
        SystemExit: the link has no key, and pictures would show that one is asked for.
    """
    url, _, key = link.partition("/#key=")
    if not key:
        raise SystemExit(f"{link!r} has no key: give the whole link that the demo prints, such as {url}/#key=tw-…")
    return Running(url, key)


def take_all(browser: Any, proxy: RunningProxy | Running, shots: dict[str, tuple[str, str, Any]]) -> None:
    for name, (address, scheme, prepare) in shots.items():
        options = {"viewport": {"width": 1080, "height": 720}, "color_scheme": scheme}
        with visit(browser, proxy, **options) as window:
            take(window, address, prepare, IMAGES / f"{name}.png", getattr(proxy, "key", ""))


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
