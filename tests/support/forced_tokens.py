"""A logits processor for vLLM that forces the tokens which a script's reply has, as a working model would sample them.

The script is a file of the fake engine's rules, read again when the file changes, so that a test changes it between two
runs. A request without a matching rule samples freely, and so do the calls with which a proxy checks an engine, which
have a logit bias. vLLM loads the class by `--logits-processors support.forced_tokens:ForcedTokens`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from turnwise_fake_engine import Reply, Script
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

SCRIPT_VARIABLE = "FORCED_TOKENS_SCRIPT"
"""Environment variable with the path of the script."""
REQUIRED_CALLS = "tags_with_separator"
"""In vLLM's structural tag, the format that allows only calls."""
START_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"


class ForcedReply:
    def __init__(self, processor: ForcedTokens, *, only_calls: bool) -> None:
        self._processor = processor
        self._only_calls = only_calls
        self._token_ids: list[int] | None = None

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Leave the next token of the reply as the only candidate; change nothing without a reply."""
        if self._token_ids is None:
            self._token_ids = self._processor.reply_ids(prompt_ids, only_calls=self._only_calls)
        if not self._token_ids:
            return logits
        position = min(len(output_ids), len(self._token_ids) - 1)
        forced = torch.full_like(logits, float("-inf"))
        forced[self._token_ids[position]] = 0.0
        return forced


class ForcedTokens(AdapterLogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._path = Path(os.environ[SCRIPT_VARIABLE])
        self._read_at = -1
        self._script = Script()

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> ForcedReply | None:
        """Return the processor of one request; None for a call that checks the engine."""
        if params.logit_bias or params.max_tokens == 1:
            return None
        return ForcedReply(self, only_calls=allows_only_calls(params.structured_outputs))

    def reply_ids(self, prompt_ids: Sequence[int], *, only_calls: bool) -> list[int]:
        """Return the tokens of the reply to a prompt; empty without a matching rule."""
        prompt = self._tokenizer.decode(prompt_ids)
        last_message = prompt.split(START_OF_TURN)[-2]
        reply = self._current_script().take_reply(last_message, offers_tools="<tools>" in prompt)
        if reply is None:
            return []
        text = hermes_text(reply, only_calls=only_calls)
        return list(self._tokenizer.encode(text + END_OF_TURN, add_special_tokens=False))

    def _current_script(self) -> Script:
        """Return the script of the file; one that has not changed keeps its counts of the rules."""
        written_at = self._path.stat().st_mtime_ns
        if written_at != self._read_at:
            self._script, self._read_at = Script.load(self._path), written_at
        return self._script


def allows_only_calls(structured_outputs: Any) -> bool:
    """Return whether the grammar of a request allows nothing but calls: with `tool_choice: required`.

    Strict tools without a required call have a grammar as well, which allows text and checks only the calls.
    """
    return structured_outputs is not None and REQUIRED_CALLS in (structured_outputs.structural_tag or "")


def hermes_text(reply: Reply, *, only_calls: bool) -> str:
    """Return a reply as a model with Hermes tool calls writes it; calls alone have no separator."""
    blocks = [reply.text] if reply.text and not only_calls else []
    for call in reply.tool_calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        blocks.append(f"<tool_call>\n{body}\n</tool_call>")
    return ("" if only_calls else "\n").join(blocks)
