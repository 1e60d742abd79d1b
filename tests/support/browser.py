"""A real Chromium, driven by playwright: Debian's, or the one that playwright has downloaded."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.proxies import RunningProxy
from support.waiting import WAIT_SECONDS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

FLAGS = ["--no-sandbox", "--disable-gpu"]


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    """Run a browser until the block ends; skip the test where none is installed."""
    with playwright.sync_playwright() as driver:
        installed = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        path = installed or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("Chromium is not installed: apt-get install chromium, or playwright install chromium")
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A browser's window at a proxy's page, with all that the console has said."""

    def __init__(self, browser: Any, proxy: RunningProxy, **options: Any) -> None:
        self._context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}} | options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(WAIT_SECONDS * 1000)
        self.console: list[str] = []
        self._proxy = proxy
        self.page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))

    def open(self, address: str = "", *, is_live: bool = True, key: str = "") -> Any:
        """Go to a view, with a key where the page asks for one, and wait until it is shown and receives changes."""
        self.page.goto("about:blank")
        self.page.goto(f"{self._proxy.url}/{address}")
        if key:
            self.page.fill("#key", key)
            self.console.clear()  # the page has asked without a key, and was refused
            self.page.press("#key", "Enter")
        self.page.wait_for_selector("main[aria-busy=false] > *")
        if is_live:
            self.page.wait_for_selector("#live .good")
        return self.page

    def num_layouts(self) -> int:
        """Return how often the browser has calculated the layout of the document."""
        session = self._context.new_cdp_session(self.page)
        session.send("Performance.enable")
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        session.detach()
        return int(metrics["LayoutCount"])

    def close(self) -> None:
        self._context.close()


@contextlib.contextmanager
def visit(browser: Any, proxy: RunningProxy, **options: Any) -> Iterator[Visit]:
    """Open a window until the block ends; its console must stay empty."""
    visiting = Visit(browser, proxy, **options)
    try:
        yield visiting
        assert visiting.console == [], visiting.console
    finally:
        visiting.close()
