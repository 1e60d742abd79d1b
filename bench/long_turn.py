"""Measure turns of long conversations: `python bench/long_turn.py [--tokens 100000 300000 1000000] [--json]`.

Conversations of code, in many messages with tool calls or in a few long ones, grow turn by turn through a proxy that
commits every turn, in every wire format. Printed for each: CPU milliseconds a turn of the serving process and of its
writing process, the longest hold of the event loop, the resident memory a million tokens of live context, and the same
for the first turn, whose whole prompt is new. The engine is a stand-in that echoes the prompt ids as bytes
(bench/long_engine.py).

With `--live 200` so many conversations of the first length are played, turn by turn in turns, by a proxy whose memory
settings are a share of the defaults: 200 of 10,000. Printed: its growth at each round, against the sum of the settings,
and the outcomes of the turns, of which most read back what the proxy has dropped. The client keeps only the replies, so
`--live 10000 --rounds 2` fits on a machine with 16 GB of free disk; it takes about a quarter of an hour of two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from long_dialects import DIALECTS, PATHS, chat_reply
from long_text import FEW, MANY, Conversation, Shape, tokenizer_directory
from memory import CACHE_BYTES as DEFAULT_CACHE_BYTES
from memory import FULL_SESSIONS, resident_bytes
from prometheus_client.parser import text_string_to_metric_families
from servers import START_SECONDS, running

from turnwise.processes.ports import free_port
from turnwise.store.database import Database

HERE = Path(__file__).parent
CHARACTERS_PER_TOKEN = 4.0
LIVE_TOKENS = 4_000_000
"""Live context of each case, more than what freed requests leave: several conversations are played."""
CHAT_MODES = ("whole", "stream")
MODES = [*CHAT_MODES, *DIALECTS[1:]]
"""Whole and streamed replies of chat, and whole replies of the other formats."""
WARM_UP_TURNS = 2
SETTLE_SECONDS = 7.0
"""Until the proxy has returned freed memory to the system."""
TRIM_BYTES = 8 * 2**20
"""Of long requests, after which the proxy returns freed memory; see `proxy.features.freed_memory`."""
LIVE_SAMPLES = 5
"""Samples of the memory in each round."""
WARM_UP_LIVE_TURNS = 20
CACHE_BYTES = 10**10
"""All conversations stay in memory."""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def process_tree(pid: int) -> list[int]:
    """Return the process ids of a process and all its descendants."""
    found = [pid]
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += process_tree(int(child))
    return found


def is_writer(pid: int) -> bool:
    """Return whether a process is a proxy's writing process."""
    return b"proxy.writer.process" in Path(f"/proc/{pid}/cmdline").read_bytes()


class Server:
    """A proxy under measurement, of one worker or several."""

    def __init__(
        self,
        url: str,
        pid: int,
        num_workers: int = 1,
        *,
        engine_pid: int = 0,
        engine_url: str = "",
        directory: Path = HERE,
    ) -> None:
        self.url = url
        self.directory = directory
        self.engine_pid = engine_pid
        self.engine_url = engine_url
        self._address = urlsplit(url).netloc
        self.pid = pid
        deadline = time.monotonic() + START_SECONDS
        while len(writers := [each for each in process_tree(pid) if is_writer(each)]) < num_workers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the proxy at {url} has {len(writers)} writing processes, not {num_workers}")
            time.sleep(0.05)
        self.writers = writers
        self.serving = [each for each in process_tree(pid) if each not in writers]
        self._http = http.client.HTTPConnection(self._address, timeout=300)

    def get(self, path: str) -> Any:
        """Return the decoded answer to a request without a body."""
        return orjson.loads(self.text(path))

    def text(self, path: str) -> str:
        """Return the answer to a request without a body."""
        self._http.request("GET", path)
        return self._http.getresponse().read().decode()

    def turn(self, session_id: str, conversation: Conversation, mode: str) -> int:
        """Play one turn, in `whole` or `stream` replies of chat or in another format; return the request's length."""
        is_chat = mode in CHAT_MODES
        body = conversation.request(stream=mode == "stream") if is_chat else conversation.request_in(mode)
        conversation.extend(self.reply(session_id, body, mode))
        return len(body)

    def reply(self, session_id: str, body: bytes, mode: str) -> dict[str, Any]:
        """Send a request; return the reply's message."""
        dialect = "chat" if mode in CHAT_MODES else mode
        headers = {"content-type": "application/json", "x-session-id": session_id}
        self._http.request("POST", PATHS[dialect], body, headers)
        response = self._http.getresponse()
        raw = response.read()
        if response.status != 200:
            raise RuntimeError(f"the proxy answered {response.status}: {raw[:500]!r}")
        return joined(raw) if mode == "stream" else chat_reply(dialect, orjson.loads(raw))

    def database_bytes(self) -> int:
        """Return the size of the database's files."""
        return sum(path.stat().st_size for path in self.directory.glob("bench.db*"))

    def cpu(self) -> tuple[float, float]:
        """Return the CPU time of the serving processes and of the writing processes."""
        return sum(map(cpu_seconds, self.serving)), sum(map(cpu_seconds, self.writers))


def joined(raw: bytes) -> dict[str, Any]:
    """Return the message of a streamed reply."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in raw.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in orjson.loads(line[6:])["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                call.pop("index", None)
                message.setdefault("tool_calls", []).append(call)
    return message


@contextlib.contextmanager
def served(*flags: str, engine_flags: Sequence[str] = (), num_workers: int = 1) -> Iterator[Server]:
    """Run a proxy over a fresh SQLite file, in front of the stand-in engine, with more flags of both."""
    engine, proxy = free_port(), free_port()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        url = f"sqlite:///{directory}/bench.db"
        database = Database(url)
        database.upgrade()
        database.close()
        argv = [sys.executable, str(HERE / "long_engine.py"), "--port", str(engine), *engine_flags]
        engine_url = f"http://127.0.0.1:{engine}"
        stand_in = servers.enter_context(
            running([*argv, "--tokenizer", str(tokenizer_directory())], f"{engine_url}/health")
        )
        argv = [sys.executable, "-P", str(HERE / "watched_proxy.py"), "--engine", engine_url]
        argv += ["--engine-check", "warn", "--database", url, "--port", str(proxy), "--log-level", "warning"]
        argv += ["--cache-bytes", str(CACHE_BYTES), *flags]
        argv += ["--workers", str(num_workers)]
        process = servers.enter_context(running(argv, f"http://127.0.0.1:{proxy}/readyz"))
        yield Server(
            f"http://127.0.0.1:{proxy}",
            process.pid,
            num_workers,
            engine_pid=stand_in.pid,
            engine_url=engine_url,
            directory=Path(directory),
        )


def measure(server: Server, shape: Shape, num_tokens: int, num_turns: int, mode: str) -> dict[str, Any]:
    """Play conversations of one length."""
    num_conversations = max(1, LIVE_TOKENS // num_tokens)
    name = f"{shape.num_messages}-{num_tokens}-{mode}"
    conversations = [
        Conversation(shape, int(num_tokens * CHARACTERS_PER_TOKEN), seed) for seed in range(num_conversations)
    ]
    other = Conversation(shape, int(num_tokens * CHARACTERS_PER_TOKEN), 98)
    for _ in range(WARM_UP_TURNS + 1):
        server.turn(f"{name}-other", other, mode)
    resident = settled_bytes(server, f"{name}-other", other, mode)
    before = server.cpu()
    for number, conversation in enumerate(conversations):
        server.turn(f"{name}-{number}", conversation, mode)
    first = [(after - start) * 1e3 / num_conversations for start, after in zip(before, server.cpu(), strict=True)]
    for _ in range(WARM_UP_TURNS):
        for number, conversation in enumerate(conversations):
            server.turn(f"{name}-{number}", conversation, mode)
    grown = settled_bytes(server, f"{name}-other", other, mode) - resident
    before, played = server.cpu(), 0
    while played < num_turns:
        for number, conversation in enumerate(conversations[: num_turns - played]):
            num_characters = server.turn(f"{name}-{number}", conversation, mode)
            played += 1
    serving, writer = [(after - start) * 1e3 / played for start, after in zip(before, server.cpu(), strict=True)]
    return {
        "shape": shape.name,
        "mode": mode,
        "tokens": num_tokens,
        "characters": num_characters,
        "serving_ms": serving,
        "writer_ms": writer,
        "hold_ms": longest_hold(server, name, conversations, mode),
        "memory_mb_per_million": grown / 1e6 / (num_tokens * num_conversations / 1e6),
        "first_serving_ms": first[0],
        "first_writer_ms": first[1],
        "first_hold_ms": first_hold(server, shape, num_tokens, name, mode),
    }


def settled_bytes(server: Server, name: str, conversation: Conversation, mode: str) -> int:
    """Return the resident memory once the proxy has returned what it freed, which it does after so many bytes."""
    time.sleep(SETTLE_SECONDS)
    num_sent = 0
    while num_sent < TRIM_BYTES:
        num_sent += server.turn(name, conversation, mode)
    time.sleep(SETTLE_SECONDS)
    return resident_bytes(server.pid)


def longest_hold(server: Server, name: str, conversations: list[Conversation], mode: str) -> float:
    """Return the longest hold of the event loop in three more turns, milliseconds."""
    server.get("/bench/watch")
    for _ in range(3):
        server.turn(f"{name}-0", conversations[0], mode)
    return float(server.get("/bench/hold")["seconds"]) * 1e3


def first_hold(server: Server, shape: Shape, num_tokens: int, name: str, mode: str) -> float:
    """Return the longest hold in the first turn of another conversation, milliseconds."""
    conversation = Conversation(shape, int(num_tokens * CHARACTERS_PER_TOKEN), 99)
    server.get("/bench/watch")
    server.turn(f"{name}-first", conversation, mode)
    return float(server.get("/bench/hold")["seconds"]) * 1e3


class LiveConversation:
    """A conversation of which only the seed and the replies are kept: its messages are made again for each turn."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._num_characters = int(num_tokens * CHARACTERS_PER_TOKEN)
        self._seed = seed
        self._replies: list[bytes] = []

    def turn(self, server: Server) -> None:
        """Play its next turn."""
        conversation = Conversation(MANY, self._num_characters, self._seed)
        for reply in self._replies:
            conversation.extend(orjson.loads(reply))
        message = server.reply(f"live-{self._seed}", conversation.request(stream=False), "whole")
        self._replies.append(orjson.dumps(message))


class Growth:
    """How much memory a proxy and its writing process use more than when the measurement started."""

    def __init__(self, server: Server) -> None:
        self._pids = (server.pid, *server.writers)
        self._before = [resident_bytes(pid) for pid in self._pids]

    def __str__(self) -> str:
        proxy, writer = (
            (resident_bytes(pid) - before) / 1e6 for pid, before in zip(self._pids, self._before, strict=True)
        )
        return f"proxy {proxy:.0f} MB more, writer {writer:.0f} MB more"


def play_live(num_conversations: int, num_tokens: int, num_rounds: int) -> None:
    """Play many conversations, each one turn after the other conversations' turns; print the growth of the memory."""
    limit = DEFAULT_CACHE_BYTES * num_conversations // FULL_SESSIONS
    conversations = [LiveConversation(num_tokens, seed) for seed in range(num_conversations)]
    each = num_conversations // LIVE_SAMPLES or 1
    with served("--cache-bytes", str(limit), engine_flags=["--any-ids"]) as server:
        warm = LiveConversation(num_tokens, num_conversations)
        for _ in range(WARM_UP_LIVE_TURNS):
            warm.turn(server)
        time.sleep(SETTLE_SECONDS)
        growth, started = Growth(server), time.monotonic()
        print(f"{num_conversations} conversations of {num_tokens} tokens, memory settings of {limit / 1e6:.0f} MB")
        for round_number in range(1, num_rounds + 1):
            before = server.cpu()
            for number, conversation in enumerate(conversations, 1):
                conversation.turn(server)
                if number % each == 0:
                    print(f"  {number} after {time.monotonic() - started:.0f} s: {growth}", flush=True)
            spent = [
                (after - start) / num_conversations * 1e3 for start, after in zip(before, server.cpu(), strict=True)
            ]
            time.sleep(SETTLE_SECONDS)
            print(
                f"turn {round_number}: {growth}; a turn takes {spent[0]:.1f} ms of CPU of the serving process and "
                f"{spent[1]:.1f} ms of the writing process; {server.database_bytes() / 1e9:.1f} GB are stored",
                flush=True,
            )
        for family in text_string_to_metric_families(server.text("/metrics")):
            for sample in family.samples:
                if sample.name == "turnwise_turns_total":
                    print(f"{sample.value:.0f} turns {sample.labels}")


def main() -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--turns", type=int, default=12, help="measured turns of each case")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--live", type=int, default=0, help="conversations of the first length, instead of the cases")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each conversation with --live")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.live:
        play_live(given.live, given.tokens[0], given.rounds)
        return 0
    rows = []
    print(
        f"{'tokens':>9} {'shape':31}{'mode':10}{'serving':>10}{'writer':>10}{'hold':>10}{'MB/M tok':>10}"
        f"{'first':>10}{'its writer':>12}{'its hold':>10}"
    )
    for num_tokens in given.tokens:
        for shape in (MANY, FEW):
            for mode in given.modes:
                with served() as server:
                    row = measure(server, shape, num_tokens, given.turns, mode)
                rows.append(row)
                print(
                    f"{num_tokens:9} {shape.name:31}{mode:10}{row['serving_ms']:7.1f} ms{row['writer_ms']:7.1f} ms"
                    f"{row['hold_ms']:7.1f} ms{row['memory_mb_per_million']:10.1f}{row['first_serving_ms']:7.0f} ms"
                    f"{row['first_writer_ms']:9.0f} ms{row['first_hold_ms']:7.0f} ms",
                    flush=True,
                )
    if given.json:
        print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
