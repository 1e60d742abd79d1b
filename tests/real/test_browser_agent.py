"""browser-use, unmodified, plays ten tasks by screenshots through the proxy and a vLLM that sees: each turn is exact.

`TURNWISE_BROWSER_USE` names a Python with browser-use 0.13; the browser is Debian's Chromium. Pages are local ones.
"""

import dataclasses
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from support import served_vision
from support.engines import running_engine
from support.forced_browser import SOLVED, TYPED
from support.servers import serving

from trainer.features import FEATURES, Settings
from trainer.features.images import Vision
from trainer.model.model import Policy
from turnwise.features import images
from turnwise.features.images import PlacedImage, placed_images
from turnwise.store.database import Database
from turnwise.types import Outcome

PROGRAM = Path(__file__).parents[1] / "harnesses" / "programs" / "browser_use_tasks.py"
ROOT = Path(__file__).parents[2]
NUM_TASKS = 10
CONTEXT_TOKENS = 16_384
STEPS = (
    '<button aria-label="target" onclick="location=\'{next}\'">Go on</button><button>Do not</button>',
    '<a aria-label="target" href="{next}">Go on</a> <a href="/wrong">Not here</a>',
    '<form action="{next}"><input aria-label="field" name="word"><button aria-label="target">Send</button></form>',
    '<select><option>One<option>Two</select><a aria-label="target" href="{next}">Leave it</a>',
)


class Site(BaseHTTPRequestHandler):
    """Tasks of two or three pages; the last one says that all is done."""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        _, kind, number, *step = [*asked.path.split("/"), "", ""]
        at = int(step[0] or 0) if kind == "task" else -1
        is_last = at == 1 + int(number or 0) % 2
        if is_last:
            self.server.solved.add(number)
        self.server.typed += parse_qs(asked.query).get("word", [])
        going = STEPS[(int(number or 0) + at) % len(STEPS)].format(next=f"/task/{number}/{at + 1}")
        body = f"<body><h1>Task {number}, page {at}</h1>{SOLVED if is_last else going}</body>" if at >= 0 else "Wrong."
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.solved, server.typed = set(), []
    with serving(server):
        yield server


def test_browser_use_plays_ten_tasks_by_screenshots_and_each_turn_is_exact(site, start_proxy, tmp_path, monkeypatch):
    python, chromium = os.environ.get("TURNWISE_BROWSER_USE"), shutil.which("chromium")
    if python is None or chromium is None:
        pytest.skip("needs TURNWISE_BROWSER_USE, a Python with browser-use, and `chromium`")
    monkeypatch.setattr(served_vision, "CONTEXT_TOKENS", CONTEXT_TOKENS)
    model, script = served_vision.make_served_model(tmp_path / "model"), tmp_path / "script.json"
    script.write_text("{}")
    flags = ["--max-model-len", str(CONTEXT_TOKENS), "--logits-processors", "support.forced_browser:ForcedBrowser"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ["PYTHONPATH"]])
    variables = {"FORCED_TOKENS_SCRIPT": str(script), "PYTHONPATH": paths}
    with running_engine(model, tmp_path / "engine.log", *flags, environment=variables) as engine:
        proxy = start_proxy(engine.url)
        address = f"http://127.0.0.1:{site.server_port}"
        command = [python, str(PROGRAM), proxy.url, address, chromium]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        played = subprocess.run(
            command, capture_output=True, text=True, timeout=7200, check=False, env=environment, cwd=tmp_path
        )
        views = proxy.turns()
    print(played.stdout, played.stderr[-3000:], sep="\n")
    assert played.stdout.split() == [word for number in range(NUM_TASKS) for word in (str(number), "True")]
    assert site.solved == {str(number) for number in range(NUM_TASKS)}
    assert set(site.typed) == {TYPED}
    assert {view.turn.outcome for view in views} == {Outcome.EXACT}
    policy = Policy(Settings(model=str(model), device="cpu"), FEATURES.terms)
    policy.load(0)
    (vision,) = (around for around in policy.around if isinstance(around, Vision))
    with Database(proxy.database_url).read() as conn:
        for view in views:  # each shows one screenshot, of which the trainer makes the pixels that the engine saw
            (placed,) = (PlacedImage.of_json(image) for image in placed_images(view.turn))
            (file,) = images.read_media(conn, "default", [placed.digest]).values()
            vision._pixels(dataclasses.replace(placed, content=file.content))
    print(f"{len(views)} turns, reasons {Counter(view.turn.reason for view in views)}, {views[0].turn.sampling}")
