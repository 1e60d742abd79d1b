"""Models with random weights, and finished sessions in a ledger for the training benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.batch.advantages import by_bucket, compared
from trainer.batch.chain import Chain, chain_of
from turnwise.credit import normalised
from turnwise.store import experiences, rewards, sessions
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.store.turns import append_turns
from turnwise.types import DEFAULT_POLICY, Reward, Session, Turn

GROUP_SIZE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a Qwen3 model, and the lengths of its sessions."""

    model: dict[str, int | bool]
    prompt: int
    """Tokens before the first reply; the sessions of a group share them."""
    observed: int
    """Prompt tokens between two replies."""
    sampled: int
    """Tokens of a reply."""

    @property
    def vocabulary(self) -> int:
        """Return the size of the vocabulary."""
        return int(self.model["vocab_size"])


def _shape(
    vocabulary: int, hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, head_dim: int | None = None
) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
    }


SIZES = {
    "small": Size(model=_shape(768, 128, 384, 3, 4, 2), prompt=64, observed=16, sampled=16),
    "0.5b": Size(
        model=_shape(151_936, 896, 4864, 24, 14, 2) | {"tie_word_embeddings": True},
        prompt=512,
        observed=64,
        sampled=64,
    ),
    "0.6b": Size(
        model=_shape(151_936, 1024, 3072, 28, 16, 8, 128) | {"tie_word_embeddings": True},
        prompt=512,
        observed=128,
        sampled=128,
    ),
    "1.7b": Size(
        model=_shape(151_936, 2048, 6144, 28, 16, 8, 128) | {"tie_word_embeddings": True},
        prompt=512,
        observed=128,
        sampled=128,
    ),
}
"""`small` is the demo's model; `0.5b` has the shape of Qwen2.5-0.5B, 494 million parameters; `0.6b` and `1.7b` have
those of Qwen3."""


def write_model(directory: Path, size: Size, max_turns: int) -> None:
    """Write a model with random weights whose context fits the longest session."""
    torch.manual_seed(0)
    longest = size.prompt + max_turns * (size.observed + size.sampled)
    config = Qwen3Config(**size.model, max_position_embeddings=longest, bos_token_id=None, eos_token_id=0)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def play(database: Database, size: Size, num_sessions: int, num_turns: int, policy_id: int = DEFAULT_POLICY) -> None:
    """Write finished sessions of random tokens with logprobs of about log(1 / vocabulary), as under random weights."""
    for number in range(num_sessions):
        group_id = f"{num_turns}-turns-{number // GROUP_SIZE}" + (f"-of-{policy_id}" if policy_id else "")
        session = Session(
            session_id=f"{group_id}-{number}",
            task_id=f"{num_turns}",
            group_id=group_id,
            group_size=GROUP_SIZE,
            policy_id=policy_id,
        )
        with database.write() as connection:
            sessions.create_session(connection, session)
            append_turns(connection, _turns(session, size, num_turns, number))
            reward = Reward(session_id=session.session_id, value=float(number % GROUP_SIZE == 0))
            rewards.add_rewards(connection, [reward])
            sessions.end_session(connection, session.tenant, session.session_id)


def read(database: Database, num_turns: int, merge: Literal["turn", "chain"]) -> list[Chain]:
    """Return the chains of the sessions of one length, one per chain or one per turn."""
    wanted = SessionFilter(task_id=f"{num_turns}")
    with database.read() as connection:
        return list(map(chain_of, experiences.experiences(connection, wanted, experiences.Shape(merge=merge))))


def advantages(found: Sequence[Chain]) -> list[np.ndarray]:
    """Return GRPO's advantages of the turns of each experience. [K] each."""
    those = compared(found)
    return those.of_turns(by_bucket(those.values, those.buckets, normalised))


def _turns(session: Session, size: Size, num_turns: int, number: int) -> list[Turn]:
    rng = np.random.default_rng([num_turns, number])
    shared = np.random.default_rng([num_turns, 0, number // GROUP_SIZE])
    turns: list[Turn] = []
    for index in range(num_turns):
        fresh = _tokens(rng, size, size.observed) if turns else _tokens(shared, size, size.prompt)
        before = turns[-1].prompt_length + size.sampled if turns else 0
        turns.append(
            Turn(
                turn_id=f"{session.session_id}-{index}",
                session_id=session.session_id,
                policy_id=session.policy_id,
                parent_turn_id=turns[-1].turn_id if turns else None,
                chain_id=f"{session.session_id}-0",
                prompt_delta=fresh,
                prompt_length=before + len(fresh),
                token_ids=_tokens(rng, size, size.sampled),
                logprobs=np.full(size.sampled, -np.log(size.vocabulary), np.float32),
            )
        )
    return turns


def _tokens(rng: np.random.Generator, size: Size, count: int) -> np.ndarray:
    return rng.integers(1, size.vocabulary, count).astype(np.int32)
