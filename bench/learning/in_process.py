"""An engine and its proxy without HTTP: batched sampling in this process into the real ledger.

Only the sampling is replaced. The agent is the user's own file, the proxy's template code continues chains, turns are
committed to the ledger before the agent receives a reply, and the weights come from the directory that the trainer
published. All sessions that wait for a reply are sampled as one batch, with the parameters of their sessions, which
are applied here by other code than the trainer's.
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
import xgrammar
from openai.types.chat import ChatCompletion
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from proxy.features.pins import Pins
from proxy.features.supports import truncates
from proxy.sessions.template import ChatTemplate, Continued
from turnwise.features.supports import SUPPORT, pack
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
    """Logprobs under the sampling weights and parameters. [R]"""
    support: list[list[int]]
    """The ids that could be sampled at each token. [R]"""


class Sampler:
    """Samples from a causal LM, many prompts at once."""

    def __init__(self, end_token: int, seed: int) -> None:
        self._end = end_token
        self._random = torch.Generator().manual_seed(seed)
        self._model: Any = None
        self._grammars: Any = None

    def load(self, directory: Path) -> None:
        """Load the weights of a directory in the Hugging Face layout."""
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if self._grammars is None:
            tokenizer, size = AutoTokenizer.from_pretrained(directory), self._model.config.vocab_size
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
            self._grammars = xgrammar.GrammarCompiler(info)

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int, samplings: Sequence[Json]) -> list[Sampled]:
        """Return a reply to each prompt; equal greedy calls are sampled once."""
        calls = list(zip(prompts, samplings, strict=True))
        first: dict[Any, int] = {}
        for index, (prompt, sampling) in enumerate(calls):
            first.setdefault(tuple(prompt) if sampling.get("temperature") == 0 else index, index)
        by_length = sorted(first.values(), key=lambda index: len(prompts[index]))
        replies: dict[int, Sampled] = {}
        for start in range(0, len(by_length), ROWS_AT_ONCE):
            indices = by_length[start : start + ROWS_AT_ONCE]
            chosen = [prompts[index] for index in indices], max_tokens, [samplings[index] for index in indices]
            replies |= zip(indices, self._sample(*chosen), strict=True)
        return [
            replies[first[tuple(prompt) if sampling.get("temperature") == 0 else index]]
            for index, (prompt, sampling) in enumerate(calls)
        ]

    @torch.inference_mode()
    def _sample(self, prompts: Sequence[Sequence[int]], max_tokens: int, samplings: Sequence[Json]) -> list[Sampled]:
        replies = [Sampled([], [], []) for _ in prompts]
        processors = [
            Processor(prompt, asked, matcher(self._grammars, asked, self._end), self._model.config.vocab_size)
            for prompt, asked in zip(prompts, samplings, strict=True)
        ]
        keeps = [truncates(sampling, {}) for sampling in samplings]
        live = torch.arange(len(prompts))
        logits_BV, cache, mask_BT = self._read(prompts)
        for _ in range(max_tokens):
            rows = live.tolist()
            processed = [processors[row].process(logits) for row, logits in zip(rows, logits_BV, strict=True)]
            log_p_BV = torch.log_softmax(torch.stack(processed), dim=-1)
            token_B = torch.multinomial(log_p_BV.exp(), 1, generator=self._random)[:, 0]
            logprob_B = log_p_BV.gather(1, token_B[:, None])[:, 0]
            tokens = token_B.tolist()
            for place, (row, token, logprob) in enumerate(zip(rows, tokens, logprob_B.tolist(), strict=True)):
                replies[row].token_ids.append(token)
                replies[row].logprobs.append(logprob)
                if keeps[row]:
                    replies[row].support.append(log_p_BV[place].isfinite().nonzero()[:, 0].tolist())
                processors[row].accept(token)
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


def matcher(grammars: Any, sampling: Json, end: int) -> Any:
    """Return what walks the grammar of a call; None if it asks for none."""
    regex = (sampling.get("structured_outputs") or {}).get("regex")
    if regex is None:
        return None
    return xgrammar.GrammarMatcher(grammars.compile_regex(regex), override_stop_tokens=[end])


class Processor:
    """What vLLM does to the logits of one reply before it samples, in its order: grammar, penalty, temperature, top."""

    def __init__(self, prompt: Sequence[int], sampling: Json, grammar: Any, size: int) -> None:
        self._sampling, self._grammar = sampling, grammar
        self._seen = torch.zeros(size, dtype=torch.bool)
        self._seen[list(prompt)] = True
        self._bits = xgrammar.allocate_token_bitmask(1, size)

    def accept(self, token: int) -> None:
        self._seen[token] = True
        if self._grammar is not None and not self._grammar.is_terminated():
            self._grammar.accept_token(token)

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        asked, logits_V = self._sampling, logits
        if self._grammar is not None and not self._grammar.is_terminated():
            self._grammar.fill_next_token_bitmask(self._bits)
            xgrammar.apply_token_bitmask_inplace(logits_V, self._bits[0])
        if (penalty := asked.get("repetition_penalty", 1.0)) != 1.0:
            punished_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V = torch.where(self._seen, punished_V, logits_V)
        if (temperature := asked.get("temperature", 1.0)) == 0:
            return torch.where(logits_V == logits_V.max(), 0.0, -torch.inf)
        logits_V = logits_V / temperature
        if not truncates(asked, {}):
            return logits_V
        values, ids = logits_V.sort(descending=True)
        before = values.softmax(-1)
        if top_k := asked.get("top_k"):
            before = values[:top_k].softmax(-1)
        kept = before.cumsum(-1) - before < asked.get("top_p", 1.0)
        kept_ids = ids[: len(kept)][kept]
        return torch.full_like(logits_V, -torch.inf).scatter(0, kept_ids, logits_V[kept_ids])


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
    sampling: Json
    reply: asyncio.Future[ChatCompletion]


class InProcessProxy:
    """Creates clients for agents, records their samples, and follows the published versions."""

    def __init__(self, db: Database, template: ChatTemplate, decode: Any, seed: int, pins: Pins) -> None:
        self._db, self._pins = db, pins
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
            self.load(newest.version, Path(newest.path))
            with self._db.write() as conn:
                serving.activate_version(conn, newest.version)
        return self._version

    def load(self, version: int, directory: Path) -> None:
        """Sample with a version from now on."""
        self._sampler.load(directory)
        self._version = version

    def open(self, sessions: Sequence[Session]) -> list[Chain]:
        """Create the sessions."""
        with self._db.write() as conn:
            return [Chain(create_session(conn, self._pins.opened(session))[0]) for session in sessions]

    def client(self, chain: Chain) -> Any:
        """Return an object that replaces the agent's `AsyncOpenAI` client for the session."""

        async def create(
            *, model: str, messages: list[Json], max_completion_tokens: int, tools: list[Json] | None = None
        ) -> ChatCompletion:
            prompt = self._prompt(chain, messages, tools)
            reply = asyncio.get_running_loop().create_future()
            asked = self._pins.pinned(chain.session, "")
            if asked.get("temperature") == 0 and chain.session.explores is not None:
                asked |= {"temperature": chain.session.explores}
            call = _Call(chain, model, list(messages), tools, prompt, max_completion_tokens, asked, reply)
            self._waiting.append(call)
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
        samplings = [call.sampling for call in calls]
        sampled = self._sampler.sample([call.prompt for call in calls], max_tokens, samplings)
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
            sampling=call.sampling,
            parts={SUPPORT: pack(sampled.support)} if sampled.support else {},
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
