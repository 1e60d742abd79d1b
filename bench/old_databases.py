"""Bring databases of commits before 0.2 over: `python bench/old_databases.py c1c6420c 5f57fd44`.

Each commit itself plays mixed sessions through its proxy over its stand-in engine, of two tenants, with and without
groups, tools, feedback, demonstrations, forks and labels, and trains a batch of them. Its own `turnwise db copy` puts
the same into PostgreSQL. From each of both, `turnwise db import-unreleased` brings everything over; all columns that
the old and the new tables share are then compared by digests of their rows, `turnwise verify` reads what is stored, and
this commit's trainer takes the next step with the old trainer's state.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import sqlalchemy as sa

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "extras/fake_engine")]
from support.ports import free_port  # noqa: E402  of the tests
from support.private_postgres import PrivatePostgres  # noqa: E402
from turnwise_fake_engine import tokens  # noqa: E402

WAIT_SECONDS = 600
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
TRANSLATED = {"turns": {"policy_id"}}
"""Columns that have other values on purpose: null was the policy of a turn's session."""
OF_PROCESSES = {"alembic_version", "leases", "trainer_status", "weight_servers"}
TRAINING = ("--kind", "lora", "--groups-per-batch", "4", "--wait-seconds", "1", "--max-staleness", "100")
OF_ANOTHER_MODEL = ("--max-logprob-gap", "1000")  # the stand-in engine has no weights


def run(tree: Path, *words: str) -> str:
    """Run a command of the commit that lies in `tree` to its end, and return what it printed."""
    argv = [sys.executable, "-m", "turnwise", *words]
    done = subprocess.run(argv, check=False, cwd=tree, env=environment(tree), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"turnwise {' '.join(words)} in {tree} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def environment(tree: Path) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("TURNWISE")}
    return others | {"PYTHONPATH": f"{tree}:{tree}/extras/fake_engine", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def serving(tree: Path, database: str) -> Iterator[str]:
    """Run the commit's proxy over its stand-in engine; yield its address."""
    engine, proxy = free_port(), free_port()
    of_engine = ("fake-engine", "--port", str(engine))
    of_proxy = ("proxy", "--engine", f"http://127.0.0.1:{engine}", "--database", database, "--port", str(proxy))
    with (tree / "log").open("w") as log, contextlib.ExitStack() as running:
        for words in (of_engine, of_proxy):
            argv = [sys.executable, "-m", "turnwise", *words]
            process = subprocess.Popen(argv, cwd=tree, env=environment(tree), stdout=log, stderr=log)
            running.callback(process.wait, WAIT_SECONDS)
            running.callback(process.terminate)
        url, deadline = f"http://127.0.0.1:{proxy}", time.monotonic() + WAIT_SECONDS
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{url}/readyz").status_code == 200:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"no proxy at {url}: {(tree / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield url


def play(url: str, keys: Mapping[str, str], num_sessions: int) -> None:
    """Play the sessions: every request must succeed."""
    rng = random.Random(5)
    with contextlib.ExitStack() as clients:
        own, other, admin = (
            clients.enter_context(httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120))
            for key in keys.values()
        )
        send(admin, "/v1/policies", {"name": "support"})
        for number in range(num_sessions):
            play_session(own if number % 5 < 3 else rng.choice([own, other]), number, rng)


def send(http: httpx2.Client, path: str, body: Mapping[str, Any], method: str = "POST") -> Any:
    return http.request(method, path, json=body).raise_for_status().json()


def play_session(http: httpx2.Client, number: int, rng: random.Random) -> None:
    kind, session_id, run = number % 5, f"s{number}", number // 5
    body: dict[str, Any] = {"session_id": session_id, "metadata": {"n": number}, "user_id": rng.choice([None, "kim"])}
    if kind < 3:
        body |= {"task_id": f"t{number // 20}", "group_id": f"g{number // 20}-{kind}", "group_size": 4, "run": run % 4}
    elif kind == 3 and number % 2:
        body |= {"split": "eval", "task_id": f"e{number}"}
    send(http, "/v1/sessions", body)
    messages: list[Any] = []
    for turn in range(1 + number % 3):
        messages.append({"role": "user", "content": f"Frage {rng.randint(0, 9999)} über Kim, {turn}"})
        asked = {"model": "fake", "messages": messages, "max_tokens": 8, "temperature": 1.0}
        asked |= {"tools": TOOLS} if number % 4 == 0 else {}
        reply = send(http, f"/sessions/{session_id}/v1/chat/completions", asked)
        message, turn_id = reply["choices"][0]["message"], reply["id"]
        messages.append({name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)})
        messages += [
            {"role": "tool", "tool_call_id": each["id"], "content": "42"} for each in message.get("tool_calls") or ()
        ]
    if kind != 4:
        send(http, "/v1/rewards", {"session_id": session_id, "value": float(run % 2)})
        if number % 3 == 0:
            send(http, "/v1/rewards", {"turn_id": turn_id, "value": 0.25, "name": "style"})
        send(http, f"/v1/sessions/{session_id}/end", {})
    about = {(10, 3): ("boolean", True), (10, 1): ("comment", "gut"), (25, 4): ("demonstration", "Besser.")}
    for (every, rest), (said, value) in about.items():
        if number % every == rest:
            send(http, "/v1/feedback", {"turn_id": turn_id, "kind": said, "value": value})
    if number % 50 == 7:
        send(http, f"/v1/turns/{turn_id}/fork", {"session_id": f"f{number}"})
    if number % 20 == 9:
        send(http, f"/v1/sessions/{session_id}/labels/golden", {"note": "schön"}, "PUT")


def write_model(directory: Path) -> Path:
    """Write a tiny model with random weights for the tokens of the stand-in engine."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokens.write_tokenizer(directory)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": tokens.VOCABULARY_SIZE}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=4096)).save_pretrained(directory)
    return directory


def train(tree: Path, database: str, model: Path, version: int) -> None:
    """Let the commit's trainer publish this version of the default policy, and end it."""
    places = ("--database", database, "--model", str(model), "--policies-dir", str(model.parent / "policies"))
    argv, deadline = (
        [sys.executable, "-m", "turnwise", "train", *places, *TRAINING, *OF_ANOTHER_MODEL],
        time.monotonic() + WAIT_SECONDS,
    )
    newest = sa.text("SELECT max(version) FROM policy_versions WHERE policy_id = 0 AND path NOT LIKE '%/model'")
    engine = sa.create_engine(driven(database))
    with (model.parent / "trainer.log").open("w") as log:
        process = subprocess.Popen(argv, cwd=tree, env=environment(tree), stdout=log, stderr=log)
        while True:
            with engine.connect() as conn:
                if (conn.execute(newest).scalar() or 0) >= version:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                process.kill()
                raise SystemExit(f"no version {version}: {(model.parent / 'trainer.log').read_text()[-2000:]}")
            time.sleep(0.5)
        process.terminate()
        if process.wait(WAIT_SECONDS):
            raise SystemExit(f"the trainer ended with {process.returncode}")
    engine.dispose()


def driven(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:")


def digests(url: str, columns: Mapping[str, set[str]] | None = None) -> dict[str, tuple[set[str], int, str]]:
    """Return of each table its columns, the number of its rows, and a digest of them in the columns that are given."""
    engine = sa.create_engine(driven(url))
    found = {}
    with engine.connect() as conn:
        for name in sorted({*sa.inspect(conn).get_table_names()} - OF_PROCESSES):
            table = sa.Table(name, sa.MetaData(), autoload_with=conn, resolve_fks=False)
            shared = set(table.c.keys()) & (columns or {}).get(name, set(table.c.keys()))
            chosen = [table.c[each] for each in sorted(shared)]
            rows = [repr([same(value) for value in row]) for row in conn.execute(sa.select(*chosen))] if chosen else []
            found[name] = set(table.c.keys()), len(rows), hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
    engine.dispose()
    return found


def same(value: Any) -> Any:
    """Return a value as both databases give it: a JSON text in the one is an object in the other."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value


def bring_over(old: str, new: str, model: Path) -> str:
    """Bring a database over, compare it, and take a training step; return what was found."""
    counts = json.loads(run(ROOT, "db", "import-unreleased", old, "--database", new, "--json"))
    before, after = digests(old), digests(new)
    shared = {name: before[name][0] & after[name][0] - TRANSLATED.get(name, set()) for name in before}
    before, after = digests(old, shared), digests(new, shared)
    different = [name for name in before if before[name][1:] != after[name][1:]]
    (mismatches,) = re.findall(r"(\d+) mismatches", run(ROOT, "verify", "--database", new))
    if different or mismatches != "0":
        raise SystemExit(f"{new}: other rows in {different}; {mismatches} mismatches")
    trained = digests(new)["trained_sessions"][1]
    train(ROOT, new, model, 2)
    versions, more = digests(new)["policy_versions"][1], digests(new)["trained_sessions"][1] - trained
    rows = {name: counts[name] for name in ("sessions", "turns", "rewards", "feedback", "policies", "api_keys")}
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rows.items())
    return f"{said}; {len(before)} tables equal, 0 mismatches; {trained} + {more} trained, {versions} versions"


def replay(commit: str, num_sessions: int, directory: Path, postgres: PrivatePostgres) -> None:
    tree = directory / "tree"
    tree.mkdir()
    archived = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archived, check=True)
    old = f"sqlite:///{directory}/old.db"
    run(tree, "db", "upgrade", "--database", old)
    keys = {}
    for tenant, role in (("default", "agent"), ("blue", "agent"), ("default", "admin")):
        named = ("--tenant", tenant, "--role", role, "--name", f"{tenant}-{role}", "--database", old)
        keys[f"{tenant}-{role}"] = re.findall(r"\btw-\S+", run(tree, "keys", "create", *named))[0]
    with serving(tree, old) as url:
        play(url, keys, num_sessions)
    model = write_model(directory / "model")
    train(tree, old, model, 1)
    copied = postgres.url(postgres.create_database())
    run(tree, "db", "copy", "--from", old, "--to", copied)
    policies, kept = model.parent / "policies", model.parent / "kept"
    subprocess.run(["cp", "-a", policies, kept], check=True)
    for source, target in ((old, f"sqlite:///{directory}/new.db"), (copied, postgres.url(postgres.create_database()))):
        print(f"{commit}, {source.partition(':')[0]}: {bring_over(source, target, model)}", flush=True)
        subprocess.run(["rm", "-r", policies], check=True)
        subprocess.run(["cp", "-a", kept, policies], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--sessions", type=int, default=500)
    given = parser.parse_args()
    postgres = PrivatePostgres()
    postgres.start()
    try:
        for commit in given.commits:
            with tempfile.TemporaryDirectory() as directory:
                replay(commit, given.sessions, Path(directory), postgres)
    finally:
        postgres.close()


if __name__ == "__main__":
    main()
