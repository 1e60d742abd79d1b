"""What an engine computes of one text, asked of the engine itself: under the model as it is, or under other weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx2
import numpy as np

from turnwise.engine_routes import read_models
from turnwise.errors import ChildFailed
from turnwise.features.verify.known_tokens import logprobs_request, read_logprobs
from turnwise.tokenizer import load_tokenizer

LONGEST_TEXT = 4096
"""Tokens of the text, where the model has as many positions."""
NUM_COMPARED = 32
"""Positions of a text that are compared."""
TIMEOUT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class EngineText:
    """A text, and the engine that computes the logprobs of some of its tokens; its first model is version 0."""

    url: str
    name: str
    dtype: str
    tokens: list[int]

    @classmethod
    def longest(cls, url: str, model: str, dtype: str) -> EngineText:
        """Return a text of as many tokens as the engine takes, up to `LONGEST_TEXT`."""
        served = httpx2.get(f"{url}/v1/models", timeout=TIMEOUT_SECONDS, trust_env=False).json()
        most = min(LONGEST_TEXT, int(served["data"][0].get("max_model_len") or LONGEST_TEXT)) - 1
        words = " ".join(f"Line {number}: which word comes next?" for number in range(most))
        tokens = [int(token) for token in load_tokenizer(model)[0].encode(words, add_special_tokens=False)][:most]
        return cls(url, read_models(url, served)[0][0], dtype, tokens)

    @property
    def positions(self) -> list[int]:
        return sorted({round(each) for each in np.linspace(1, len(self.tokens) - 1, NUM_COMPARED)})

    def logprobs(self) -> list[float]:
        body = logprobs_request(self.name, self.tokens, self.positions, {})
        return read_logprobs(self.ask("/v1/completions", **body).json(), self.tokens, self.positions)

    def load(self, path: str) -> None:
        """Replace the base weights, and forget what was computed with the old ones."""
        self.ask("/pause?mode=keep&clear_cache=true")
        self.ask("/collective_rpc", method="reload_weights", kwargs={"weights_path": path})
        self.ask("/resume")

    def ask(self, path: str, **body: Any) -> httpx2.Response:
        reply = httpx2.post(self.url + path, json=body or None, timeout=TIMEOUT_SECONDS, trust_env=False)
        if reply.status_code != httpx2.codes.OK:
            raise ChildFailed(f"the engine refused POST {path}: {reply.text:.300}")
        return reply
