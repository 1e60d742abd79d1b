"""Size an installation, and check the sizes on its proxies at a twentieth: `python bench/fleet.py [--seconds 90]`.

The model of docs/operations.md: a turn costs the proxy's processes a constant, and a part for each token of its
prompt, of its reply, and of a session's first prompt, which is all new. `calibrate` measures the four by turns of few
sizes, one at a time, on this machine. Then the agents of bench/agents.py play a twentieth of 1,000,000 sessions a day,
in their own sizes and pauses, and what a turn costs is compared with the model for their tokens.

Printed: CPU and stored bytes of a turn, each beside the model's, the CPU of the agents and of the stand-in, and the
sizes for 1, 10 and 100 engines and for 1,000,000 sessions a day. What an engine samples is not measured here but given
by `--engine-tokens`. Returns 1 if a figure is more than 20 % off.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sqlite3
import sys
import time
from collections.abc import Iterator

import numpy as np
import uvloop
from agents import (
    CHARACTERS_PER_TOKEN,
    FIRST_SHARE,
    PAUSE_SECONDS,
    PROMPT_TOKENS,
    QUANTILES,
    REPLY_TOKENS,
    TURNS,
    play_all,
)
from long_text import MANY, Conversation, source_text
from long_turn import Server, served

DAY_SECONDS = 86_400
SESSIONS = 1_000_000
PART = 20
LIMIT = 0.2
CASES = ((10_000, 64), (180_000, 64), (10_000, 2_500), (180_000, 2_500))
"""Tokens of prompt and reply of the turns that calibrate."""
CONVERSATIONS, NUM_TURNS = 4, 5
"""Of each case, and the turns of each conversation after its first."""
SETTLE_SECONDS = 1.0
"""Until what follows a reply is done."""
IDLE_SECONDS = 10.0
ENGINES = (1, 10, 100)


@dataclasses.dataclass(frozen=True)
class Load:
    """What was played, or is expected: sums over turns."""

    turns: float
    prompt: float
    reply: float
    first: float

    def row(self) -> list[float]:
        """Return what each constant of the model is multiplied with."""
        return [self.turns, self.prompt, self.reply, self.first]


def calibrate(server: Server) -> np.ndarray:
    """Return the constants of serving and writing CPU and of stored bytes. [3, 4]."""
    loads, costs = [], []
    print("turns  prompt  reply   serving  writing ms a turn  stored kB")
    for load, cost in _played(server):
        loads.append(load.row())
        costs.append(cost)
        each = [cost[0] / load.turns * 1e3, cost[1] / load.turns * 1e3, cost[2] / load.turns / 1e3]
        print(
            f"{'first' if load.first else 'later'}{load.prompt / load.turns:9.0f}{load.reply / load.turns:7.0f}"
            + "".join(f"{one:10.2f}" for one in each)
        )
    rows = np.array(loads) / np.array(loads).max(axis=0)
    found = [np.linalg.lstsq(rows / wanted[:, None], np.ones(len(rows)), rcond=None)[0] for wanted in np.array(costs).T]
    return np.array(found) / np.array(loads).max(axis=0)


def _played(server: Server) -> Iterator[tuple[Load, list[float]]]:
    for number, (prompt, reply) in enumerate((CASES[0], *CASES)):  # the first one warms up
        shape = dataclasses.replace(MANY, num_messages=prompt // 600)
        named = [
            (f"case-{number}-{each}", Conversation(shape, prompt * CHARACTERS_PER_TOKEN, each))
            for each in range(CONVERSATIONS)
        ]
        for turns, is_first in ((1, True), (NUM_TURNS, False)):
            before, size = (*server.cpu(), stored_bytes(server)), 0
            for _ in range(turns):
                for name, conversation in named:
                    body = conversation.request(stream=False, max_tokens=reply)
                    conversation.extend(server.reply(name, body, "whole"))
                    size += len(body) // CHARACTERS_PER_TOKEN
            time.sleep(SETTLE_SECONDS)
            spent = [after - start for after, start in zip((*server.cpu(), stored_bytes(server)), before, strict=True)]
            count = turns * CONVERSATIONS
            if number:
                yield Load(count, size, count * reply, size if is_first else 0), spent


def stored_bytes(server: Server) -> int:
    """Return what the database holds, also where its log has not been written back yet."""
    with contextlib.closing(sqlite3.connect(server.directory / "bench.db")) as database:
        ((pages,), (size,)) = (database.execute(f"pragma {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * size)


def expected() -> Load:
    """Return one turn of the mean session of bench/agents.py."""
    prompt, reply = mean(PROMPT_TOKENS), mean(REPLY_TOKENS)
    return Load(1, prompt * (1 + FIRST_SHARE) / 2, reply, prompt * FIRST_SHARE / TURNS)


def mean(values: tuple[int, ...]) -> float:
    """Return the mean of `drawn` of bench/agents.py."""
    parts = zip(QUANTILES, (*QUANTILES[1:], 1.0), values, (*values[1:], values[-1]), strict=True)
    return sum((end - start) * (low + high) / 2 for start, end, low, high in parts)


def idle(server: Server) -> np.ndarray:
    """Return the CPU of the serving and the writing processes in a second without calls. [2]."""
    before = server.cpu()
    time.sleep(IDLE_SECONDS)
    return (np.array(server.cpu()) - before) / IDLE_SECONDS


def check(server: Server, constants: np.ndarray, given: argparse.Namespace) -> bool:
    """Play a twentieth; print each figure beside the model's, and return whether all are near."""
    resting = idle(server)
    print(f"without calls: {resting[0] * 1e3:.1f} ms serving and {resting[1] * 1e3:.1f} ms writing in a second")
    turns_per_second = SESSIONS / PART / DAY_SECONDS * TURNS
    given.agents = round(turns_per_second * PAUSE_SECONDS)
    before, started = np.array([*server.cpu(), stored_bytes(server)]), time.monotonic()
    figures = uvloop.run(play_all(server, given))  # returns when the last call has ended
    time.sleep(SETTLE_SECONDS)
    elapsed, turns = time.monotonic() - started, figures["ended_turns"]
    found = (np.array([*server.cpu(), stored_bytes(server)]) - before) / turns
    load = Load(1, figures["mean_prompt_tokens"], figures["mean_reply_tokens"], figures["mean_first_tokens"])
    model = constants @ load.row()
    model[:2] += resting * elapsed / turns
    rows = {
        "serving, ms a turn": (found[0] * 1e3, model[0] * 1e3),
        "writing, ms a turn": (found[1] * 1e3, model[1] * 1e3),
        "CPU, ms a turn": ((found[0] + found[1]) * 1e3, (model[0] + model[1]) * 1e3),
        "stored, kB a turn": (found[2] / 1e3, model[2] / 1e3),
    }
    print(
        f"{given.agents} agents, {figures['turns_per_second']:.1f} turns a second, {turns} turns of {load.prompt:.0f} "
        f"and {load.reply:.0f} tokens, {figures['failed']} failed; CPU of the load a turn: agents "
        f"{figures['agents_cpu_ms']:.1f} ms, stand-in {figures['stand_in_cpu_ms']:.1f}"
    )
    print(f"{'':22}{'found':>10}{'model':>10}")
    for name, (is_, wanted) in rows.items():
        print(f"{name:22}{is_:10.2f}{wanted:10.2f}{is_ / wanted - 1:+8.0%}")
    judged = [rows[name] for name in ("CPU, ms a turn", "stored, kB a turn")]
    return not figures["failed"] and all(abs(is_ / wanted - 1) <= LIMIT for is_, wanted in judged)


def show_sizes(constants: np.ndarray, engine_tokens: float, stream_tokens: float) -> None:
    """Print what the model says of engines that sample so many tokens a second, and of one reply's speed."""
    turn = expected()
    serving, writing, stored = constants @ turn.row()
    print(
        f"a turn: {turn.prompt:.0f} prompt tokens, {turn.reply:.0f} sampled, {serving * 1e3:.1f} ms serving, "
        f"{writing * 1e3:.1f} ms writing, {stored / 1e3:.0f} kB stored"
    )
    print("constants: turn, 1,000 prompt tokens, 1,000 reply tokens, 1,000 first tokens")
    for name, row, unit in zip(("serving ms", "writing ms", "stored kB"), constants, (1e3, 1e3, 1e-3), strict=True):
        print(
            f"{name:12}"
            + "".join(f"{each * unit * many:10.3f}" for each, many in zip(row, (1, 1e3, 1e3, 1e3), strict=True))
        )
    heads = ("engines", "sessions/day", "turns/s", "in flight", "cores", "MB/s in", "GB/day")
    print("".join(f"{head:>14}" for head in heads))
    needed = SESSIONS * TURNS * turn.reply / DAY_SECONDS / engine_tokens
    for engines in (*ENGINES, needed):
        rate = engines * engine_tokens / turn.reply
        sizes = (
            engines,
            rate / TURNS * DAY_SECONDS,
            rate,
            rate * turn.reply / stream_tokens,
            rate * (serving + writing),
            rate * turn.prompt * CHARACTERS_PER_TOKEN / 1e6,
            rate * stored * DAY_SECONDS / 1e9,
        )
        print("".join(f"{size:14,.1f}" for size in sizes))


def main() -> int:
    """Calibrate, print the sizes, and check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="that are measured")
    parser.add_argument("--engine-tokens", type=float, default=5_000.0, help="sampled by an engine in a second")
    parser.add_argument("--stream-tokens", type=float, default=40.0, help="of one reply in a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(warm_up=0.0, scale=1.0, pace=1.0, timeout=120.0, turns=10**9)
    given = parser.parse_args()
    source_text()
    with served(engine_flags=["--any-ids"]) as server:
        constants = calibrate(server)
        show_sizes(constants, given.engine_tokens, given.stream_tokens)
        is_near = check(server, constants, given)
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
