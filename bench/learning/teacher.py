"""Teachers that answer in vLLM's wire format: of the tiny task, which know its rule, and of the demo's task, trained.

A teacher of the tiny task knows the rule for some classes of prompts. A teacher of the demo's task is a policy that an
earlier run has trained.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import log
from pathlib import Path

import torch
from json_server import serving
from recipes import NUM_CLASSES, VOCABULARY
from transformers import AutoModelForCausalLM

from turnwise.types import Json

RIGHT = 0.98
"""Probability that a teacher gives all right tokens together."""


def logprob(known: str, prompt_class: int, token: int) -> float:
    """Return a teacher's logprob of a token in a session of this class; all tokens are alike where it knows no rule."""
    if str(prompt_class) not in known:
        return -log(VOCABULARY)
    num_right = VOCABULARY // NUM_CLASSES
    if token % NUM_CLASSES == prompt_class % NUM_CLASSES:
        return log(RIGHT / num_right)
    return log((1 - RIGHT) / (VOCABULARY - num_right))


def serving_teacher(known: str) -> AbstractContextManager[str]:
    """Serve a teacher that knows the classes whose digits are in `known`; yield its address, with `/v1`."""

    def reply(request: Json) -> Json:
        prompt_class, *replied = request["prompt"]
        return prompt_logprobs(replied, [logprob(known, prompt_class, token) for token in replied])

    return serving(reply)


def serving_policy(directory: Path) -> AbstractContextManager[str]:
    """Serve the logprobs of a trained policy; yield its address, with `/v1`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    lock = threading.Lock()

    def reply(request: Json) -> Json:
        with lock, torch.inference_mode():
            torch.set_num_threads(1)  # a setting of each thread
            ids = torch.tensor([request["prompt"]])
            log_p_TV = torch.log_softmax(model(ids).logits[0, :-1], -1)
            logprobs = log_p_TV.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return prompt_logprobs(request["prompt"][1:], logprobs)

    return serving(reply)


def prompt_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> Json:
    """Return vLLM's answer to a request with `prompt_logprobs`; the first token of a prompt has no logprob."""
    shown = [{str(token): {"logprob": value}} for token, value in zip(tokens, logprobs, strict=True)]
    return {"choices": [{"prompt_logprobs": [None, *shown]}]}
