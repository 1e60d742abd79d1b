"""Measure the time to the first token on a real vLLM: `python bench/ttft.py [--tokens 8000 24000] [--turns 8]`.

One vLLM serves a random model of one layer on the CPU, behind two proxies: one extends stored tokens, one does not, so
that vLLM renders and tokenises the whole conversation in every turn. The same conversation, in many messages, grows
through both, turn by turn in alternation. Replies are one token that is forced, so that both prompts are the same ids
and vLLM's prefix cache holds what is old in both. Without a bias, the second proxy's prompts would also differ from
the sampled tokens, and the cache would be lost from there on.

Printed for each length: the median time from the request to the first event, and the CPU that vLLM took for a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import torch
from long_text import MANY, Conversation, source_text, tokenizer_directory
from long_turn import CHARACTERS_PER_TOKEN, cpu_seconds, joined, process_tree
from servers import proxy_of, real_engine
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

MODEL = "random"
CONTEXT_TOKENS = 131_072
KV_CACHE_BYTES = 2**30
REPLY_TOKENS = 4
CHARACTERS_PER_MESSAGE = 2_700
"""As in 450 messages of 300,000 tokens."""


def build_model(directory: Path) -> PreTrainedTokenizerBase:
    """Write a model whose prompts cost little; return its tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer_directory())
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return tokenizer


@contextlib.contextmanager
def proxies(engine: str, directory: Path) -> Iterator[dict[str, str]]:
    """Run a proxy with continuation and one without; yield their URLs."""
    with contextlib.ExitStack() as servers:
        urls = {}
        for flag in ("--continuation", "--no-continuation"):
            urls[flag], _ = servers.enter_context(proxy_of(engine, f"sqlite:///{directory}/{flag}.db", flag))
        yield urls


@dataclasses.dataclass
class Player:
    """A conversation that grows through one proxy."""

    url: str
    conversation: Conversation
    forced: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    engine_seconds: list[float] = dataclasses.field(default_factory=list)

    def play(self, session_id: str, engine: list[int]) -> None:
        """Play one turn; note the time to its first event, and the CPU that the engine's processes took."""
        body = self.conversation.request(stream=True, max_tokens=REPLY_TOKENS).decode()
        body = body.replace('"model":"long"', f'"model":"{MODEL}","logit_bias":{{"{self.forced}":100}}')
        http = http_connection(self.url)
        before, started = sum(map(cpu_seconds, engine)), time.perf_counter()
        headers = {"content-type": "application/json", "x-session-id": session_id}
        http.request("POST", "/v1/chat/completions", body.encode(), headers)
        response = http.getresponse()
        first = response.readline()
        self.seconds.append(time.perf_counter() - started)
        raw = first + response.read()
        if response.status != 200:
            raise RuntimeError(f"the proxy answered {response.status}: {raw[:500]!r}")
        http.close()
        self.engine_seconds.append(sum(map(cpu_seconds, engine)) - before)
        self.conversation.extend(joined(raw))


def http_connection(url: str) -> HTTPConnection:
    """Return a connection to a server."""
    return HTTPConnection(urlsplit(url).netloc, timeout=600)


def measure(urls: dict[str, str], engine: list[int], forced: int, num_tokens: int, num_turns: int) -> dict[str, float]:
    """Let one conversation grow through both proxies; return medians over the turns after the first."""
    num_characters = int(num_tokens * CHARACTERS_PER_TOKEN)
    shape = dataclasses.replace(MANY, num_messages=max(4, num_characters // CHARACTERS_PER_MESSAGE))
    players = {flag: Player(url, Conversation(shape, num_characters, 0), forced) for flag, url in urls.items()}
    for _ in range(num_turns + 1):
        for player in players.values():
            player.play(f"ttft-{num_tokens}", engine)
    figures: dict[str, float] = {"tokens": num_tokens}
    for flag, player in players.items():
        name = flag.removeprefix("--").replace("-", "_")
        figures[f"{name}_ms"] = statistics.median(player.seconds[1:]) * 1e3
        figures[f"{name}_engine_cpu_ms"] = statistics.median(player.engine_seconds[1:]) * 1e3
    figures["saved_share"] = 1 - figures["continuation_ms"] / figures["no_continuation_ms"]
    return figures


def main() -> int:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_000, 24_000])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    source_text()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        directory = Path(name)
        (forced,) = build_model(directory / "model").encode(" the", add_special_tokens=False)
        url, process = servers.enter_context(
            real_engine(
                model=str(directory / "model"),
                served_model_name=MODEL,
                max_model_len=CONTEXT_TOKENS,
                kv_cache_bytes=KV_CACHE_BYTES,
            )
        )
        urls = servers.enter_context(proxies(url, directory))
        print(f"{'tokens':>8}{'continued':>13}{'tokenised':>13}{'saved':>8}{'vLLM CPU':>12}{'tokenised':>12}")
        for num_tokens in given.tokens:
            row = measure(urls, process_tree(process.pid), forced, num_tokens, given.turns)
            if given.json:
                print(json.dumps(row))
            print(
                f"{num_tokens:8}{row['continuation_ms']:10.0f} ms{row['no_continuation_ms']:10.0f} ms"
                f"{row['saved_share']:8.0%}{row['continuation_engine_cpu_ms']:9.0f} ms"
                f"{row['no_continuation_engine_cpu_ms']:9.0f} ms",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
