"""Merges turns into chains and experiences, and says which tokens of two chains, or images, are the same. numpy only.

A turn stores only the tokens after its parent, so a chain's tokens are the concatenation of its turns, and nothing is
tokenised or compared again. Each sampled token is trained exactly once: if chains share their first turns, the first
chain trains them and they are masked in the others.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
import io
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.support import Support, support_json, unpack
from turnwise.types import (
    DEFAULT_POLICY,
    Credit,
    GroupKey,
    Json,
    Logprobs,
    Outcome,
    PlacedImage,
    SessionKey,
    Split,
    TokenIds,
    TrainedIn,
    Turn,
)

TRAINABLE_OUTCOMES = frozenset({Outcome.EXACT, Outcome.RETOKENISED})


ROUTING_DIMENSIONS = 3
HINTS = "hints"
"""Key of `Experience.info`: what people corrected, by turn. The first `kept` tokens of the turn's prompt, and then
`token_ids`, are its prompt with the correction."""
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
    routed_experts: npt.NDArray[np.int16] | None
    """Experts of each token by layer, -1 where they are not known; None if none is. [L, layers, experts a token]"""
    support: Support | None
    """The ids that could be sampled at each token, None where that is not known; None if none is. [L]"""
    images: tuple[PlacedImage, ...] = ()
    """The images among the tokens, in order."""


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


def merge_chain(path: Sequence[Turn], trained_elsewhere: Collection[str] = frozenset()) -> ChainTokens:
    """Concatenate a path's tokens up to the last trained token, and mark the trained tokens.

    The path begins at a root, and at least one of its turns must be trained here, not by an earlier chain
    (`trained_elsewhere`).
    """
    trained = [turn for turn in path if is_trainable(turn) and turn.turn_id not in trained_elsewhere]
    assert trained, "a path without a turn to train is no training sequence"
    used = path[: 1 + next(index for index, turn in enumerate(path) if turn is trained[-1])]
    index_of = {turn.turn_id: k for k, turn in enumerate(trained)}
    parts: list[TokenIds] = []
    indices: list[TokenIds] = []
    logprobs: list[Logprobs] = []
    for turn in used:
        k = index_of.get(turn.turn_id, -1)
        parts += [turn.prompt_delta, turn.token_ids]
        indices += [np.full(turn.prompt_delta.size, -1, np.int32), np.full(turn.token_ids.size, k, np.int32)]
        sampled = turn.logprobs if k >= 0 else np.zeros(turn.token_ids.size, np.float32)
        logprobs += [np.zeros(turn.prompt_delta.size, np.float32), sampled]
    turn_index = np.concatenate(indices)
    return ChainTokens(
        turns=tuple(trained),
        tokens=np.concatenate(parts),
        prompt_length=int(np.argmax(turn_index >= 0)),
        loss_mask=turn_index >= 0,
        turn_index=turn_index,
        logprobs=np.concatenate(logprobs),
        routed_experts=_routing(used, len(turn_index)),
        support=_support(used, index_of),
        images=images_of(used),
    )


def images_of(path: Sequence[Turn]) -> tuple[PlacedImage, ...]:
    """Return the images of a path's prompts, in order."""
    return tuple(PlacedImage.of_json(image) for turn in path for image in turn.images or ())


def token_keys(tokens: TokenIds, images: Sequence[PlacedImage]) -> npt.NDArray[np.integer[Any]]:
    """Return what decides whether two sequences have the same token at a place: its id, or an image's part.

    Placeholders of different images have the same ids. So each id of a placeholder is replaced by a negative number
    that stands for the id, the image and the place in the placeholder. [L]
    """
    if not images:
        return tokens
    keys = tokens.astype(np.int64)
    for image in images:
        own = slice(image.offset, image.offset + image.length)
        for place, token in enumerate(tokens[own].tolist()):
            named = f"{image.digest} {token} {place}".encode()
            keys[image.offset + place] = -1 - int.from_bytes(hashlib.blake2b(named, digest_size=7).digest())
    return keys


def as_root(path: Sequence[Turn]) -> Turn:
    """Return the last turn of a path from a root on with its whole prompt, as if it extended no other turn."""
    *before, turn = path
    parts = [part for each in before for part in (each.prompt_delta, each.token_ids)]
    prompt = np.concatenate([*parts, turn.prompt_delta])
    routing = _routing(path, prompt.size + turn.token_ids.size)
    return dataclasses.replace(
        turn,
        parent_turn_id=None,
        messages=[message for each in before for message in (*each.messages, each.response)] + turn.messages,
        tools=path[0].tools,
        prompt_delta=prompt,
        prompt_length=prompt.size,
        images=[image for each in path for image in each.images or ()] or None,
        routed_experts=None if routing is None else _saved(routing[:-1]),
    )


class RoutingProblem(enum.StrEnum):
    """Why an engine's routing of a call cannot be stored."""

    NOT_BASE64 = "not_base64"
    NOT_AN_ARRAY = "not_an_array"
    WRONG_SHAPE = "wrong_shape"
    WRONG_LENGTH = "wrong_length"
    """It has another number of tokens than the call."""


def pack_routing(encoded: str | bytes, start: int, num_tokens: int) -> bytes | RoutingProblem:
    """Return the part of an engine's routing that a turn stores, or why it cannot be stored.

    The routing is an .npy array in base64, of all tokens of the call but the last, or of those that the turn stores.
    `start` is the place of the turn's first token that is not its parent's; `num_tokens` counts the call's prompt and
    sampled tokens.
    """
    try:
        array = base64.b64decode(encoded, validate=True)
    except ValueError:
        return RoutingProblem.NOT_BASE64
    try:
        found = np.lib.format.read_array(io.BytesIO(array), allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, EOFError, OSError, MemoryError):
        return RoutingProblem.NOT_AN_ARRAY
    if found.dtype.kind not in "iu":
        return RoutingProblem.NOT_AN_ARRAY
    if found.ndim != ROUTING_DIMENSIONS:
        return RoutingProblem.WRONG_SHAPE
    first = max(start - 1, 0)
    if len(found) not in (num_tokens - 1, num_tokens - 1 - first):
        return RoutingProblem.WRONG_LENGTH
    return _saved(found[len(found) - (num_tokens - 1 - first) :])


def _saved(array: npt.NDArray[Any]) -> bytes:
    with io.BytesIO() as stored:
        np.save(stored, array, allow_pickle=False)
        return stored.getvalue()


def _routing(path: Sequence[Turn], length: int) -> npt.NDArray[np.int16] | None:
    routing: npt.NDArray[np.int16] | None = None
    place = 0
    for turn in path:
        if turn.routed_experts is not None:
            own = np.load(io.BytesIO(turn.routed_experts), allow_pickle=False)
            if routing is None:
                routing = np.full((length, *own.shape[1:]), -1, np.int16)
            if own.shape[1:] == routing.shape[1:]:
                start = max(place - 1, 0)
                own = own[: length - start]
                routing[start : start + len(own)] = own
        place += turn.prompt_delta.size + turn.token_ids.size
    return routing


def _support(path: Sequence[Turn], trained: Collection[str]) -> Support | None:
    """Return the support of a path's tokens, from what its trained turns have of it."""
    support: list[TokenIds | None] = []
    for turn in path:
        support += [None] * turn.prompt_delta.size
        own = unpack(turn.support) if turn.support is not None and turn.turn_id in trained else []
        support += own if len(own) == turn.token_ids.size else [None] * turn.token_ids.size
    return support if any(ids is not None for ids in support) else None


def merge_session(turns: Sequence[Turn]) -> list[ChainTokens]:
    """Return a session's training sequences; each trainable token is trained in exactly one of them."""
    merged: list[ChainTokens] = []
    trained: set[str] = set()
    for path in chain_paths(turns):
        chain = merge_chain(path, trained)  # its leaf is trainable, and in no other path
        trained.update(turn.turn_id for turn in chain.turns)
        merged.append(chain)
    return merged


def split_session(turns: Sequence[Turn]) -> list[ChainTokens]:
    """Return one sequence per trainable turn, which begins with the turn's whole prompt."""
    by_id = {turn.turn_id: turn for turn in turns}
    singles: list[ChainTokens] = []
    for turn in turns:
        if is_trainable(turn):
            path = lineage(turn, by_id)
            singles.append(merge_chain(path, {ancestor.turn_id for ancestor in path[:-1]}))
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

    eid: EID
    session_id: str
    group_id: str
    tenant: str = "default"
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
    routed_experts: npt.NDArray[np.int16] | None = None
    """Experts by layer to which the engine routed each token, -1 where they are not known; None if none is.
    [L, layers, experts a token]"""
    support: Support | None = None
    """The sorted ids that top-k, top-p and min-p left to sample from at each token, None where that is not known or
    nothing was cut off; None if it is known of none. [L]"""
    images: tuple[PlacedImage, ...] = ()
    """The images among the tokens, in order; with their files in the experiences of a claim."""
    turn_rewards: npt.NDArray[np.float64]
    """Reward of each turn after credit assignment. [K]"""
    turn_own_rewards: npt.NDArray[np.float64]
    """The part of `turn_rewards` that was posted for the turn itself; the rest belongs to its step or session. [K]"""
    turn_returns: npt.NDArray[np.float64]
    """Return of each turn: `turn_rewards` after bonus and discount. [K]"""
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


def experience_json(experience: Experience) -> Json:
    """Return an experience as the API's JSON; as in Trinity-RFT, mask, logprobs and support begin after the prompt."""
    after = experience.prompt_length
    return {
        "eid": dataclasses.asdict(experience.eid),
        "session_id": experience.session_id,
        "group_id": experience.group_id,
        "status": experience.info.get("status"),
        "turn_ids": list(experience.turn_ids),
        "turn_steps": list(experience.turn_steps),
        "tokens": experience.tokens.tolist(),
        "prompt_length": after,
        "loss_mask": experience.loss_mask[after:].tolist(),
        "logprobs": [float(value) for value in experience.logprobs[after:]],
        "support": support_json(None if experience.support is None else experience.support[after:]),
        "reward": experience.own_reward,
        "return": experience.turn_returns.tolist(),
        "advantage": None if experience.turn_advantages is None else experience.turn_advantages.tolist(),
        "turn_rewards": experience.turn_rewards.tolist(),
        "turn_own_rewards": experience.turn_own_rewards.tolist(),
        "session_reward": experience.reward,
        "policy_version_first": experience.policy_version_first,
        "policy_version_last": experience.policy_version_last,
        "policy": experience.policy,
        "split": experience.split.value,
        "trained_in": experience.trained_in,
        "metrics": experience.metrics,
        "info": experience.info,
        **({"images": [image.as_json() for image in experience.images]} if experience.images else {}),
    }
