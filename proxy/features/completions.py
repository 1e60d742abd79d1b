"""`/v1/completions`, OpenAI's legacy form: a text has no conversation, so every choice of it starts a new chain."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from proxy.dialects.base import MAX_MESSAGES, STREAM, Call, Dialect, WireRoute, sampled_tokens
from proxy.dialects.chat import check_kinds, number_of_choices
from turnwise.errors import InvalidRequest
from turnwise.types import Json, Turn


class TextCompletions(Dialect):
    """OpenAI's legacy completions, as vLLM serves them."""

    name = "completions"
    routes: ClassVar[Sequence[WireRoute]] = (
        WireRoute(
            path="/v1/completions",
            summary="Continue a text or token ids, as OpenAI's completions",
            required=("prompt",),
            properties={
                "prompt": {"type": ["string", "array"]},
                "stream": STREAM,
                "n": {"type": "integer", "minimum": 1},
            },
        ),
    )
    engine_route = "/v1/completions"
    id_prefix = "cmpl-"
    object_names = ("text_completion", "text_completion")

    def parse(self, body: Json, *, failed_tool_text: str = "") -> Call:  # noqa: ARG002
        prompts = number_of_prompts(body.get("prompt"))
        if prompts > MAX_MESSAGES:
            raise InvalidRequest(f"`prompt` has {prompts} entries; at most {MAX_MESSAGES} are served.", param="prompt")
        check_kinds(body, {"metadata": dict, "model": str})
        if body.get("echo"):
            raise InvalidRequest("`echo` mixes the prompt with what was sampled; ask without it.", param="echo")
        return Call(
            dialect=self,
            body=body,
            model=body.get("model") or "",
            messages=[],
            stream=bool(body.get("stream")),
            num_choices=prompts * number_of_choices(body),
            wants_logprobs=body.get("logprobs") is not None,
            wants_token_ids=bool(body.get("return_token_ids")),
        )

    def rebuild_choice(self, call: Call, turn: Turn, index: int, texts: Mapping[int, str]) -> Json:
        text = turn.response.get("content") or ""
        logprobs = None
        if call.wants_logprobs:
            sampled = sampled_tokens(turn, texts)
            tokens = [token for token, _ in sampled]
            logprobs = {
                "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
                "token_logprobs": [logprob for _, logprob in sampled],
                "tokens": tokens,
                "top_logprobs": [{token: logprob} for token, logprob in sampled],
            }
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": turn.finish_reason}
        if call.wants_token_ids:  # each prompt is the whole one: no call of this route extends another
            choice |= {"token_ids": turn.token_ids.tolist(), "prompt_token_ids": turn.prompt_delta.tolist()}
        return choice


def number_of_prompts(prompt: Any) -> int:
    """Return how many prompts a request holds: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str) and prompt:
        return 1
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return 1
        if all(isinstance(one, str) for one in prompt) or all(isinstance(one, list) and one for one in prompt):
            return len(prompt)
    raise InvalidRequest(
        "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists.", param="prompt"
    )
