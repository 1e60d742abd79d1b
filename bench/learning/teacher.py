"""Teachers for the tiny task that speak vLLM's wire format; each knows the rule for some classes of prompts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import log

from json_server import serving
from recipes import NUM_CLASSES, VOCABULARY

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
        shown = [{str(token): {"logprob": logprob(known, prompt_class, token)}} for token in replied]
        return {"choices": [{"prompt_logprobs": [None, *shown]}]}

    return serving(reply)
