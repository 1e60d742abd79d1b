"""Measure several policies over one base model: `python bench/policies.py --policies 1 8`.

It trains them with the trainer, and prints the share of each part of a batch in the CPU seconds of its main thread, and
what a policy takes on disk.

`python bench/policies.py --serving --policies 50` serves them by a real vLLM with 8 slots for adapters, on the CPU. The
same calls, 8 at once, are made with keys of all policies, with those of 8 policies, and with a key of the base model,
alternately. Every stored turn must have the version of its key's policy, and a sample of them the logprobs that
`transformers` computes with this version's adapter. At the end policies join that start from one of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import torch
from rollouts import SIZES, play, write_model
from servers import proxy_of, real_engine
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from trainer.claims.claims import Claims
from trainer.features import FEATURES, Settings
from trainer.features.policies import Policies
from trainer.model.agent import PolicyAgent
from trainer.update import Updates
from trainer.versions.state import Commits
from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.features.policies import create_policy
from turnwise.store import keys, turns
from turnwise.store.database import Database
from turnwise.types import Json

RANK = 16


def adapted(base: nn.Module, std: float) -> Any:
    """Return a model with an adapter that changes its output."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=32, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=std)
    return model


PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "claims": (Claims, ("next",)),
    "step": (Updates, ("refilled", "batch_of", "with_token_credit", "take")),
    "export": (PolicyAgent, ("export",)),
    "publish": (Commits, ("next_version", "_published")),
    "state": (Commits, ("_write_behind", "settle")),
}
"""The parts of a batch, and the methods that do them; the state is written and acknowledged by a thread."""
BATCHES, GROUPS = 3, 8


def train(num_policies: int, scratch: Path) -> dict[str, Any]:
    """Train policies over one ledger; return shares of the parts, and sizes."""
    database = Database(f"sqlite:///{scratch}/ledger.db")
    database.upgrade()
    size, num_turns = SIZES["small"], 4
    write_model(scratch / "model", size, num_turns)
    with database.write() as conn:
        made = [create_policy(conn, "default", f"p{n}")[0] for n in range(1, num_policies)]
    for policy_id in [0, *(policy.policy_id for policy in made)]:
        play(database, size, 4 * GROUPS * BATCHES, num_turns, policy_id)
    seconds: Counter[str] = Counter()
    for part, (owner, names) in PARTS.items():
        for name in names:
            setattr(owner, name, _timed(getattr(owner, name), part, seconds))
    settings = Settings(
        database=f"sqlite:///{scratch}/ledger.db",
        model=str(scratch / "model"),
        policies_dir=scratch / "policies",
        kind="lora",
        lora_rank=RANK,
        groups_per_batch=GROUPS,
        num_minibatches=2,
        total_batches=BATCHES,
        wait_seconds=0.0,
        progress=False,
        max_logprob_gap=10.0,  # all batches were sampled by version 0
    )
    policies = Policies(settings, features=FEATURES)
    began = time.monotonic()
    policies.learn()
    wall = time.monotonic() - began
    policies.close()
    database.close()
    total = sum(seconds.values())
    files = {
        name: _size(path)
        for name, path in (("version", "v000001"), ("state", "v000001.trainer"))
        for path in [scratch / "policies" / path]
    }
    return {
        "policies": num_policies,
        "batches": num_policies * BATCHES,
        "seconds_a_batch": round(total / num_policies / BATCHES, 3),
        "wall_seconds": round(wall, 1),
        **{f"{part}_share": round(seconds[part] / total, 3) for part in PARTS},
        **{f"{name}_bytes": value for name, value in files.items()},
    }


def _timed(function: Callable[..., Any], part: str, seconds: Counter[str]) -> Callable[..., Any]:
    """Return a function that adds its CPU seconds to those of a part."""

    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds[part] += time.thread_time() - began

    return timed


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


SLOTS, AT_ONCE, RESIDENT, ROUNDS, NUM_JOINS, NUM_COMPARED = 8, 8, 8, 4, 20, 50
LOGPROB_TOLERANCE = 1e-3
"""Largest difference between the logprobs of the engine and of `transformers`, nats; both compute in float32."""


class Calls:
    """Calls through the proxy, a session each, and what must be stored of them."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self.versions: dict[str, int] = {}
        """The version of each session's key."""
        self.from_disk: set[str] = set()
        """Sessions whose call needs an adapter that the calls before it evicted."""
        self._recent: list[int] = []

    async def create(self, name: str, **fields: str) -> tuple[str, int]:
        """Create a policy with a key; return the key, and the version that the policy starts from."""
        policy = await self._client.post("/v1/policies", json={"name": name, **fields})
        key = await self._client.post("/v1/keys", json={"policy": name})
        return key.raise_for_status().json()["key"], policy.raise_for_status().json()["base_version"]

    async def wait_until_served(self) -> None:
        """Wait until all versions are served."""
        for _ in range(1200):
            listed = await self._client.get("/v1/policies", params={"limit": 1000})
            if all(version["status"] == "active" for version in listed.raise_for_status().json()["data"]):
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the engine has not loaded all adapters")

    async def call(self, session_id: str, key: str, version: int) -> float:
        """Make a call of a key whose policy has this version, 0 for the base model; return its milliseconds."""
        self.versions[session_id] = version
        if version:
            if version not in self._recent:
                self.from_disk.add(session_id)
            self._recent = [*(each for each in self._recent if each != version), version][-SLOTS:]
        message = {"role": "user", "content": f"Question {session_id.rpartition('-')[2]}: which city?"}
        body = {"model": "any", "messages": [message], "max_tokens": 16, "ignore_eos": True}
        path, headers = f"/sessions/{session_id}/v1/chat/completions", {"authorization": f"Bearer {key}"}
        began = time.perf_counter()
        (await self._client.post(path, json=body, headers=headers)).raise_for_status()
        return (time.perf_counter() - began) * 1e3


async def make_calls(calls: Calls, served: Sequence[tuple[str, int]], count: int) -> dict[str, dict[str, float]]:
    """Call policies, of which the first is the base model; return milliseconds by session, of each way of calling."""
    order = random.Random(29).choices(range(1, len(served)), k=count)
    ways = {"all": order, "resident": [each % RESIDENT + 1 for each in order], "base": [0] * count}
    elapsed: dict[str, dict[str, float]] = {way: {} for way in (*ways, "evicted", "again", "join")}
    places = asyncio.Semaphore(AT_ONCE)

    async def one(way: str, number: int, policy: int) -> None:
        async with places:
            session_id = f"{way}-{number}"
            elapsed[way][session_id] = await calls.call(session_id, *served[policy])

    for number, each in enumerate(served):
        await calls.call(f"first-{number}", *each)
    for part in range(ROUNDS):
        for way, wanted in ways.items():
            if way == "resident":
                for number in range(1, RESIDENT + 1):
                    await calls.call(f"load-{part}-{number}", *served[number])
            await asyncio.gather(*(one(way, each, wanted[each]) for each in range(part, count, ROUNDS)))
    for number in reversed(range(1, len(served))):
        await one("evicted", number, number)
        await one("again", number, number)
    for number, base in enumerate(order[:NUM_JOINS]):
        began = time.perf_counter()
        key, version = await calls.create(f"join-{number}", base=f"p{base}@{served[base][1]}")
        await calls.call(f"join-{number}", key, version)
        elapsed["join"][f"join-{number}"] = (time.perf_counter() - began) * 1e3
    return elapsed


def compare_stored(database: Database, calls: Calls, forward: Callable[[int, list[int], int], Tensor]) -> Json:
    """Compare the stored turns with the calls, and the logprobs of some of them with those of `transformers`."""
    with database.read() as conn:
        views = [turns.read_turns(conn, "default", name)[0][0] for name in calls.versions]
    pairs = [(view.turn, calls.versions[view.turn.session_id]) for view in views]
    gaps: list[float] = []
    other_gaps: list[float] = []
    versions = sorted(set(calls.versions.values()) - {0})
    for view in random.Random(30).sample([view for view in views if view.turn.session_id[:4] == "all-"], NUM_COMPARED):
        ids, stored = [*view.prompt_token_ids.tolist(), *view.turn.token_ids.tolist()], view.turn.logprobs.copy()
        version = calls.versions[view.turn.session_id]
        for each, found in ((version, gaps), (versions[versions.index(version) - 1], other_gaps)):
            computed = forward(each, ids, view.turn.prompt_length)
            found.append(float((computed - torch.tensor(stored)).abs().max()))
    return {
        "turns": len(views),
        "wrong_versions": sum({turn.policy_version_first, turn.policy_version_last} != {own} for turn, own in pairs),
        "not_exact": sum(turn.outcome != "exact" for turn, _ in pairs),
        "wrong_logprobs": sum(gap > LOGPROB_TOLERANCE for gap in gaps),
        "logprob_gap": max(gaps),
        "least_gap_of_another_adapter": min(other_gaps),
    }


async def serve(num_policies: int, num_calls: int, scratch: Path) -> Json:
    """Serve policies by one engine; return milliseconds of calls, and what is stored of them."""
    base = build_small_model(scratch / "model", SmallModelSpec(num_warm_up_steps=60))
    names = [f"p{number}" for number in range(1, num_policies + 1)]
    for number, name in enumerate(names):
        torch.manual_seed(number)
        model = adapted(Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32), std=0.1)
        model.save_pretrained(scratch / name, save_embedding_layers=False)
    database_url = f"sqlite:///{scratch}/ledger.db"
    database = Database(database_url)
    database.upgrade()
    with database.write() as conn:
        _, admin = keys.create_key(conn, "default", keys.KeyRole.ADMIN, "bench")
    slots = {"lora": True, "max_lora_rank": RANK, "max_loras": SLOTS, "max_cpu_loras": SLOTS}
    with real_engine(model=str(base), **slots) as (engine, _), proxy_of(engine, database_url) as (url, _):
        async with httpx2.AsyncClient(
            base_url=url, timeout=120, headers={"authorization": f"Bearer {admin}"}
        ) as client:
            calls = Calls(client)
            served = [(admin, 0), *[await calls.create(name, path=str(scratch / name)) for name in names]]
            await calls.wait_until_served()
            elapsed = await make_calls(calls, served, num_calls)
    for (_, version), name in zip(served[1:], names, strict=True):
        model.load_adapter(scratch / name, f"v{version}")

    @torch.inference_mode()
    def forward(version: int, ids: list[int], prompt_length: int) -> Tensor:
        model.set_adapter(f"v{version}")
        logits = model(torch.tensor([ids])).logits[0, prompt_length - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[prompt_length:])[:, None])[:, 0]

    line = {"policies": num_policies, "load_average": os.getloadavg()[0], **compare_stored(database, calls, forward)}
    for way, found in elapsed.items():
        taken = sorted(found.values())
        times = {"p50": statistics.median(taken), "p99": taken[int(0.99 * len(taken))], "max": taken[-1]}
        line[way] = {"calls": len(taken), "from_disk": len(calls.from_disk & found.keys()), **times}
    database.close()
    return line


def main() -> None:
    """Print a line of JSON for each number of policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--serving", action="store_true", help="serve them by a real vLLM with 8 slots")
    parser.add_argument("--calls", type=int, default=400, help="calls of each way of --serving")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for count in given.policies:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            line = asyncio.run(serve(count, given.calls, scratch)) if given.serving else train(count, scratch)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
