"""An engine and its proxy without HTTP: batched sampling in this process into the real ledger.

Only the sampling is replaced. The agent is the user's own file, the proxy's template code continues chains, turns are
committed to the ledger before the agent receives a reply, and the weights come from the directory that the trainer
published. All sessions that wait for a reply are sampled as one batch.
Shapes: B rows of a batch, T tokens of the longest prompt, V vocabulary, R tokens of a reply.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from openai.types.chat import ChatCompletion
from transformers import AutoModelForCausalLM, DynamicCache

from proxy.sessions.template import ChatTemplate, Continued
from turnwise.store import serving
from turnwise.store.database import Database
from turnwise.store.sessions import create_session
from turnwise.store.turns import append_turns
from turnwise.types import Json, Session, Turn

Result = TypeVar("Result")

ROWS_AT_ONCE = 64
"""Prompts of similar length per forward pass; on one core more prompts do not fit its cache."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """One reply."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-turn token if it was sampled. [R]"""
    logprobs: list[float]
    """Logprobs under the sampling weights, at temperature 1. [R]"""


class Sampler:
    """Samples at temperature 1 from a causal LM, many prompts at once."""

    def __init__(self, end_token: int, seed: int) -> None:
        self._end = end_token
        self._random = torch.Generator().manual_seed(seed)
        self._model: Any = None

    def load(self, directory: Path) -> None:
        """Load the weights of a directory in the Hugging Face layout."""
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Sampled]:
        """Return a reply to each prompt."""
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        replies: dict[int, Sampled] = {}
        for start in range(0, len(prompts), ROWS_AT_ONCE):
            indices = by_length[start : start + ROWS_AT_ONCE]
            replies |= zip(indices, self._sample([prompts[index] for index in indices], max_tokens), strict=True)
        return [replies[index] for index in range(len(prompts))]

    @torch.inference_mode()
    def _sample(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Sampled]:
        replies = [Sampled([], []) for _ in prompts]
        live = torch.arange(len(prompts))
        logits_BV, cache, mask_BT = self._read(prompts)
        for _ in range(max_tokens):
            log_p_BV = torch.log_softmax(logits_BV, dim=-1)
            token_B = torch.multinomial(log_p_BV.exp(), 1, generator=self._random)[:, 0]
            logprob_B = log_p_BV.gather(1, token_B[:, None])[:, 0]
            for row, token, logprob in zip(live.tolist(), token_B.tolist(), logprob_B.tolist(), strict=True):
                replies[row].token_ids.append(token)
                replies[row].logprobs.append(logprob)
            going = (token_B != self._end).nonzero()[:, 0]
            if not len(going):
                break
            if len(going) < len(live):
                live, token_B, mask_BT = live[going], token_B[going], mask_BT[going]
                cache.batch_select_indices(going)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(live), 1)], dim=1)
            logits_BV = self._forward(token_B[:, None], mask_BT, cache)
        return replies

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, DynamicCache, torch.Tensor]:
        """Return the logits after each prompt [B, V], the cache and the attention mask [B, T]; padded on the left.

        Equal prompts, such as the first prompts of a group, are computed once.
        """
        places: dict[tuple[int, ...], int] = {}
        which = torch.tensor([places.setdefault(tuple(prompt), len(places)) for prompt in prompts])
        width = max(map(len, places))
        ids = torch.tensor([[self._end] * (width - len(prompt)) + list(prompt) for prompt in places])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in places])
        cache = DynamicCache()
        logits = self._forward(ids, mask, cache)
        cache.batch_select_indices(which)
        return logits[which], cache, mask[which]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits after the last of `ids`, which continue the tokens in the cache. [B, V]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


@dataclasses.dataclass(slots=True)
class Chain:
    """The only chain of a session whose agent never edits its history."""

    session: Session
    turns: list[Turn] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Prompt and reply of the last turn."""
    num_messages: int = 0
    """Messages of the last turn's prompt, and its reply."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A request that is waiting for its reply."""

    chain: Chain
    model: str
    messages: list[Json]
    tools: list[Json] | None
    prompt: list[int]
    max_tokens: int
    reply: asyncio.Future[ChatCompletion]


class InProcessProxy:
    """Creates clients for agents, records their samples, and follows the published versions."""

    def __init__(self, db: Database, template: ChatTemplate, decode: Any, seed: int) -> None:
        self._db = db
        self._template = template
        self._decode = decode
        (end,) = template.end_tokens
        self._sampler = Sampler(end, seed)
        self._version = -1
        self._waiting: list[_Call] = []
        self.num_sampled_tokens = 0

    def follow(self) -> int:
        """Load the newest published version, as a reload does; return its number."""
        with self._db.read() as conn:
            newest = serving.serving_state(conn).newest
        if newest is not None and newest.version != self._version:
            self._sampler.load(Path(newest.path))
            self._version = newest.version
            with self._db.write() as conn:
                serving.activate_version(conn, newest.version)
        return self._version

    def open(self, sessions: Sequence[Session]) -> list[Chain]:
        """Create the sessions."""
        with self._db.write() as conn:
            return [Chain(create_session(conn, session)[0]) for session in sessions]

    def client(self, chain: Chain) -> Any:
        """Return an object that replaces the agent's `AsyncOpenAI` client for the session."""

        async def create(
            *, model: str, messages: list[Json], max_completion_tokens: int, tools: list[Json] | None = None
        ) -> ChatCompletion:
            prompt = self._prompt(chain, messages, tools)
            reply = asyncio.get_running_loop().create_future()
            self._waiting.append(_Call(chain, model, list(messages), tools, prompt, max_completion_tokens, reply))
            return await reply

        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    async def serve(self, plays: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run the agents until all are done; when all of them wait for replies, sample one batch."""
        running = [asyncio.ensure_future(play) for play in plays]
        while not all(play.done() for play in running):
            await asyncio.sleep(0)  # each agent with a reply continues to its next call or to its end
            if self._waiting:
                self._answer()
        return [play.result() for play in running]

    def _prompt(self, chain: Chain, messages: list[Json], tools: list[Json] | None) -> list[int]:
        if not chain.turns:
            return self._template.tokenise(self._template.render(messages, tools, {}, generate=True))
        last = chain.tokens[-1]
        replied = chain.num_messages - 1
        between = self._template.next_ids(Continued(messages, replied, last, "", tools, {}, keep_thinking=False))
        return chain.tokens + between.tolist()

    def _answer(self) -> None:
        """Sample replies to all waiting calls, commit the turns, and then reply."""
        calls, self._waiting = self._waiting, []
        (max_tokens,) = {call.max_tokens for call in calls}
        sampled = self._sampler.sample([call.prompt for call in calls], max_tokens)
        turns = [self._turn(call, one) for call, one in zip(calls, sampled, strict=True)]
        with self._db.write() as conn:
            append_turns(conn, turns)
        for call, one, turn in zip(calls, sampled, turns, strict=True):
            chain = call.chain
            chain.turns.append(turn)
            chain.tokens = call.prompt + one.token_ids
            chain.num_messages = len(call.messages) + 1
            self.num_sampled_tokens += len(one.token_ids)
            call.reply.set_result(_completion(turn))

    def _turn(self, call: _Call, sampled: Sampled) -> Turn:
        chain, turn_id = call.chain, f"chatcmpl-{uuid.uuid4().hex}"
        return Turn(
            turn_id=turn_id,
            session_id=chain.session.session_id,
            parent_turn_id=chain.turns[-1].turn_id if chain.turns else None,
            chain_id=chain.turns[0].turn_id if chain.turns else turn_id,
            model=call.model,
            messages=call.messages[chain.num_messages :],
            tools=None if chain.turns else call.tools,
            response=reply_message(self._decode(sampled.token_ids, skip_special_tokens=True)),
            prompt_delta=np.array(call.prompt[len(chain.tokens) :], np.int32),
            prompt_length=len(call.prompt),
            token_ids=np.array(sampled.token_ids, np.int32),
            logprobs=np.array(sampled.logprobs, np.float32),
            finish_reason="stop" if sampled.token_ids[-1] in self._template.end_tokens else "length",
            policy_version_first=self._version,
            policy_version_last=self._version,
        )


def reply_message(text: str) -> Json:
    """Return the assistant's message as the engine's Hermes parser parses a text: tool calls, or only content."""
    try:
        calls = [json.loads(found) for found in _TOOL_CALL.findall(text)]
        functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
    except (ValueError, TypeError, KeyError):
        functions = []
    if not functions:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text.partition("<tool_call>")[0] or None,
        "tool_calls": [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function} for function in functions
        ],
    }


def _completion(turn: Turn) -> ChatCompletion:
    finish = "tool_calls" if turn.response.get("tool_calls") else turn.finish_reason
    choice = {"index": 0, "message": turn.response, "finish_reason": finish}
    return ChatCompletion.model_validate(
        {"id": turn.turn_id, "object": "chat.completion", "created": 0, "model": turn.model, "choices": [choice]}
    )
