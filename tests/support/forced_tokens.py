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
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from turnwise.fake_engine import Reply, Script

SCRIPT_VARIABLE = "FORCED_TOKENS_SCRIPT"
"""Environment variable with the path of the script."""
START_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"


class ForcedReply:
    """Forces the tokens of one request's reply."""

    def __init__(self, processor: ForcedTokens, *, calls_must_be_json: bool) -> None:
        self._processor = processor
        self._calls_must_be_json = calls_must_be_json
        self._token_ids: list[int] | None = None

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Leave the next token of the reply as the only candidate; change nothing without a reply."""
        if self._token_ids is None:
            self._token_ids = self._processor.reply_ids(prompt_ids, calls_must_be_json=self._calls_must_be_json)
        if not self._token_ids:
            return logits
        position = min(len(output_ids), len(self._token_ids) - 1)
        forced = torch.full_like(logits, float("-inf"))
        forced[self._token_ids[position]] = 0.0
        return forced


class ForcedTokens(AdapterLogitsProcessor):
    """Forces the replies of the script."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._path = Path(os.environ[SCRIPT_VARIABLE])
        self._read_at = -1
        self._script = Script()

    def is_argmax_invariant(self) -> bool:
        """Return False: greedy sampling is forced as well."""
        return False

    def new_req_logits_processor(self, params: Any) -> ForcedReply | None:
        """Return the processor of one request; None for a call that checks the engine."""
        if params.logit_bias or params.max_tokens == 1:
            return None
        # With `tool_choice: required` vLLM lets the model sample nothing but a JSON list of calls.
        return ForcedReply(self, calls_must_be_json=params.structured_outputs is not None)

    def reply_ids(self, prompt_ids: Sequence[int], *, calls_must_be_json: bool) -> list[int]:
        """Return the tokens of the reply to a prompt; empty without a matching rule."""
        prompt = self._tokenizer.decode(prompt_ids)
        last_message = prompt.split(START_OF_TURN)[-2]
        reply = self._current_script().take_reply(last_message, offers_tools="<tools>" in prompt)
        if reply is None:
            return []
        text = json_text(reply) if calls_must_be_json and reply.tool_calls else hermes_text(reply)
        return list(self._tokenizer.encode(text + END_OF_TURN, add_special_tokens=False))

    def _current_script(self) -> Script:
        """Return the script of the file; one that has not changed keeps its counts of the rules."""
        written_at = self._path.stat().st_mtime_ns
        if written_at != self._read_at:
            self._script, self._read_at = Script.load(self._path), written_at
        return self._script


def hermes_text(reply: Reply) -> str:
    """Return a reply as a model with Hermes tool calls writes it."""
    blocks = [reply.text] if reply.text else []
    for call in reply.tool_calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        blocks.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(blocks)


def json_text(reply: Reply) -> str:
    """Return the tool calls of a reply in the form that vLLM demands when a call is required."""
    return json.dumps([{"name": call.name, "parameters": call.arguments} for call in reply.tool_calls])
