"""Merges turns into chains and experiences, and says which tokens of two chains are the same. numpy only.

A turn stores only the tokens after its parent, so a chain's tokens are the concatenation of its turns, and nothing is
tokenised or compared again. Each sampled token is trained exactly once: if chains share their first turns, the first
chain trains them and they are masked in the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from turnwise.parts import Joined, Keys, Loaded, join_parts, part, root_parts
from turnwise.types import (
    DEFAULT_POLICY,
    Credit,
    GroupKey,
    Json,
    Logprobs,
    Outcome,
    SessionKey,
    Split,
    TokenIds,
    TrainedIn,
    Turn,
)

TRAINABLE_OUTCOMES = frozenset({Outcome.EXACT, Outcome.RETOKENISED})
NOTHING: Loaded = {}


IMPORTED = "imported"
"""Reason of an untrainable turn whose reply was imported: it has tokens, but no policy sampled them."""
NO_POLICY = -1
"""Version of a turn that no policy sampled."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainTokens:
    """One training sequence of L tokens, with K turns trained in it."""

    turns: tuple[Turn, ...]
    """The turns whose sampled tokens are trained here, in order. [K]"""
    tokens: TokenIds
    """Prompt and sampled tokens, including the prompt tokens between turns. [L]"""
    prompt_length: int
    loss_mask: npt.NDArray[np.bool_]
    """True for sampled tokens that are trained. [L]"""
    turn_index: TokenIds
    logprobs: Logprobs
    """Behaviour logprobs; 0 if `loss_mask` is False. [L]"""
    parts: Joined
    """What its turns have beside their tokens, as far as they have it."""


def is_trainable(turn: Turn) -> bool:
    return turn.outcome in TRAINABLE_OUTCOMES and turn.token_ids.size > 0


def is_imported(turn: Turn) -> bool:
    """Return whether the turn's reply was imported, so that only a loss without an importance ratio may train it."""
    return turn.outcome is Outcome.UNTRAINABLE and turn.reason == IMPORTED and turn.token_ids.size > 0


def chain_paths(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return all root-to-leaf paths of a session's turns, in the order in which the chains started.

    Turns that are not trainable and have no trainable descendants are removed first, so that an aborted attempt does
    not split the chain that its retry continues.
    """
    wanted = _leading_to_trainable(turns)
    by_id = {turn.turn_id: turn for turn in turns}
    paths: list[list[Turn]] = []
    path_of_tip: dict[str | None, list[Turn]] = {}
    for turn in turns:
        if turn.turn_id not in wanted:
            continue
        path = path_of_tip.pop(turn.parent_turn_id, None)
        if path is None:
            path = lineage(turn, by_id)
            paths.append(path)
        else:
            path.append(turn)
        path_of_tip[turn.turn_id] = path
    return paths


def merge_chain(
    path: Sequence[Turn], trained_elsewhere: Collection[str] = frozenset(), loaded: Loaded = NOTHING
) -> ChainTokens:
    """Concatenate a path's tokens up to the last trained token, and mark the trained tokens.

    The path begins at a root, and at least one of its turns must be trained here, not by an earlier chain
    (`trained_elsewhere`).
    """
    trained = [turn for turn in path if is_trainable(turn) and turn.turn_id not in trained_elsewhere]
    assert trained, "a path without a turn to train is no training sequence"
    used = path[: 1 + next(index for index, turn in enumerate(path) if turn is trained[-1])]
    index_of = {turn.turn_id: k for k, turn in enumerate(trained)}
    tokens: list[TokenIds] = []
    indices: list[TokenIds] = []
    logprobs: list[Logprobs] = []
    for turn in used:
        k = index_of.get(turn.turn_id, -1)
        tokens += [turn.prompt_delta, turn.token_ids]
        indices += [np.full(turn.prompt_delta.size, -1, np.int32), np.full(turn.token_ids.size, k, np.int32)]
        sampled = turn.logprobs if k >= 0 else np.zeros(turn.token_ids.size, np.float32)
        logprobs += [np.zeros(turn.prompt_delta.size, np.float32), sampled]
    turn_index = np.concatenate(indices)
    return ChainTokens(
        turns=tuple(trained),
        tokens=np.concatenate(tokens),
        prompt_length=int(np.argmax(turn_index >= 0)),
        loss_mask=turn_index >= 0,
        turn_index=turn_index,
        logprobs=np.concatenate(logprobs),
        parts=join_parts(used, index_of, loaded),
    )


def token_keys(tokens: TokenIds, joined: Joined) -> Keys:
    """Return what decides whether two sequences have the same token at a place: its id, or what a part says. [L].

    The parts are those of the sequence.
    """
    keys: Keys = tokens
    for name, value in joined.items():
        keys = part(name).tell_apart(keys, value)
    return keys


def as_root(path: Sequence[Turn]) -> Turn:
    """Return the last turn of a path from a root on with its whole prompt, as if it extended no other turn."""
    *before, turn = path
    tokens = [ids for each in before for ids in (each.prompt_delta, each.token_ids)]
    prompt = np.concatenate([*tokens, turn.prompt_delta])
    return dataclasses.replace(
        turn,
        parent_turn_id=None,
        messages=[message for each in before for message in (*each.messages, each.response)] + turn.messages,
        tools=path[0].tools,
        prompt_delta=prompt,
        prompt_length=prompt.size,
        parts=root_parts(path),
    )


def merge_session(turns: Sequence[Turn], loaded: Loaded = NOTHING) -> list[ChainTokens]:
    """Return a session's training sequences; each trainable token is trained in exactly one of them."""
    merged: list[ChainTokens] = []
    trained: set[str] = set()
    for path in chain_paths(turns):
        chain = merge_chain(path, trained, loaded)  # its leaf is trainable, and in no other path
        trained.update(turn.turn_id for turn in chain.turns)
        merged.append(chain)
    return merged


def split_session(turns: Sequence[Turn], loaded: Loaded = NOTHING) -> list[ChainTokens]:
    """Return one sequence per trainable turn, which begins with the turn's whole prompt."""
    by_id = {turn.turn_id: turn for turn in turns}
    singles: list[ChainTokens] = []
    for turn in turns:
        if is_trainable(turn):
            path = lineage(turn, by_id)
            singles.append(merge_chain(path, {ancestor.turn_id for ancestor in path[:-1]}, loaded))
    return singles


def lineage(turn: Turn, by_id: dict[str, Turn]) -> list[Turn]:
    path = [turn]
    while path[-1].parent_turn_id is not None:
        path.append(by_id[path[-1].parent_turn_id])
    path.reverse()
    return path


def _leading_to_trainable(turns: Sequence[Turn]) -> set[str]:
    wanted: set[str] = set()
    for turn in reversed(turns):
        if is_trainable(turn) or turn.turn_id in wanted:
            wanted.add(turn.turn_id)
            if turn.parent_turn_id is not None:
                wanted.add(turn.parent_turn_id)
    return wanted


@dataclasses.dataclass(frozen=True, slots=True)
class EID:
    """Identity of an experience, as in Trinity-RFT."""

    batch: str = ""
    task: str = ""
    run: int = 0
    step: int = 0
    suffix: str = ""

    @property
    def uid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The trainable unit: one turn, or one chain of turns merged into one sequence."""

    session_id: str
    group_id: str
    tenant: str = "default"
    task_id: str = ""
    run: int = 0
    turn_ids: tuple[str, ...]
    """The turns whose sampled tokens are trained here, in order. [K]"""
    turn_steps: tuple[int, ...]
    """Step of each turn. [K]"""
    tokens: TokenIds
    """Prompt and sampled tokens, including the prompt tokens between turns. [L]"""
    prompt_length: int
    """Number of tokens before the first sampled token."""
    loss_mask: npt.NDArray[np.bool_]
    """True for sampled tokens that are trained. [L]"""
    turn_index: TokenIds
    """Index in `turn_ids` of the turn that sampled the token; -1 for prompt tokens. [L]"""
    logprobs: Logprobs
    """Behaviour logprobs; 0 if `loss_mask` is False. [L]"""
    turn_messages: tuple[Sequence[Json], ...] = ()
    """What the prompt of each turn adds to the reply before it, as messages; empty where it is not known. [K]"""
    parts: Joined = dataclasses.field(default_factory=dict)
    """What its turns have beside their tokens, as far as they have it; a feature reads its own."""
    turn_rewards: npt.NDArray[np.float64]
    """Reward of each turn after credit assignment. [K]"""
    turn_own_rewards: npt.NDArray[np.float64]
    """The part of `turn_rewards` that was posted for the turn itself; the rest belongs to its step or session. [K]"""
    turn_returns: npt.NDArray[np.float64]
    """Return of each turn: `turn_rewards` after bonus and discount. [K]"""
    turn_shares: npt.NDArray[np.float64]
    """What 1 more for the session adds to the reward, and to the return, of each turn. [2, K]"""
    turn_advantages: npt.NDArray[np.float64] | None = None
    """Advantage of each turn in the last update that trained all of them, or the expected one; None if neither is
    known. [K]"""
    reward: float
    """Reward of the whole session."""
    policy_version_first: int
    """Oldest policy version among the turns."""
    policy_version_last: int
    """Newest policy version among the turns."""
    policy_id: int = DEFAULT_POLICY
    """The policy that sampled the turns."""
    policy: str | None = None
    """Its name; None where that is not read, as in a trainer."""
    split: Split = Split.TRAIN
    trained_in: tuple[TrainedIn, ...] = ()
    """The updates that trained one of its turns, oldest first."""
    metrics: Json = dataclasses.field(default_factory=dict)
    info: Json = dataclasses.field(default_factory=dict)

    @property
    def eid(self) -> EID:
        return EID(self.group_id, self.task_id, self.run, self.turn_steps[0], self.turn_ids[0])

    @property
    def own_reward(self) -> float:
        """The reward of these turns: the session's, or step by step the sum of their own."""
        return float(self.turn_rewards.sum()) if self.is_by_step else self.reward

    @property
    def is_by_step(self) -> bool:
        return bool(self.info.get("credit") == Credit.STEP_WISE)

    @property
    def group_key(self) -> GroupKey:
        return self.tenant, self.group_id

    @property
    def session_key(self) -> SessionKey:
        return self.tenant, self.session_id
