"""A claimed batch as arrays: which tokens are trained, with what credit and weight, and the rows that compute them.

The trained tokens are one flat table. Rows only say where in a packed forest each of them is predicted. Credit and
weights do not depend on packing, so the loss does not depend on how rows are cut, merged or distributed. Legend: M
trained tokens of the batch, m of a row, N tokens of a row, K turns of an experience.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.batch.chain import Chain
from trainer.batch.forest import Forest, Indices, Keys, Layout, side_by_side
from trainer.batch.selection import Mixed, Pair, why_untrainable
from turnwise.chains import token_keys
from turnwise.types import SessionKey, TokenIds

Aggregation = Literal["token_mean", "session_mean", "session_sum"]
Reals = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Every trained token of a batch, chain by chain."""

    experience: Indices
    session: Indices
    place: Indices
    """Position in the experience's tokens, at least 1. [M]"""
    target: TokenIds
    behaviour: Reals
    """Captured logprob. [M]"""
    advantages: Reals
    temperature: Reals
    """At which it was sampled: behaviour logprobs are those of the scaled distribution. 1 where no ratio is formed: the
    model's own distribution is trained. [M]"""
    on_policy: npt.NDArray[np.bool_]
    """True where the version that is trained now sampled it: there, engine and trainer should agree. [M]"""
    values: Reals | None = None
    """The critic's value of the state before the token, at the start of the batch; None without a critic. [M]"""
    returns: Reals | None = None
    """What the critic learns: advantage plus value, before advantages are normalised. [M]"""

    def __len__(self) -> int:
        return len(self.target)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One packed forward pass of N tokens, of which m are trained."""

    layout: Layout
    predictor: Indices
    token: Indices
    paths: Sequence[tuple[int, Indices]] = ()
    """Each experience with the places of its tokens in the row."""
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the terms of features have in the row, by their names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The experiences of one claim as arrays."""

    experiences: Sequence[Chain]
    table: TokenTable
    tokens_of: Sequence[Indices]
    unit_of: Sequence[int]
    """Which experiences must share a row and an optimizer step: a pair for DPO, else each its own."""
    chosen: Sequence[bool]
    """For DPO, whether the experience is of its pair's better session; else unused."""
    mixed: Mixed | None
    keys: Sequence[Keys]
    """The tokens of each experience, as they are compared: equal tokens of different images differ."""

    @property
    def num_sampled(self) -> int:
        """The number of experiences of the claimed groups, which come first."""
        return len(self.experiences) if self.mixed is None else self.mixed.start

    def weights(self, members: Sequence[int], aggregation: Aggregation, session_tokens: int) -> Reals:
        """Return the weight of every trained token of the table in the optimizer step over `members`. [M].

        `token_mean`: each token of the step counts the same (DAPO, arXiv:2503.14476, eq. 12). `session_mean`: each
        session counts the same, whatever its length. `session_sum`: a session's tokens are summed and divided by the
        constant `session_tokens`, without the bias of either (Dr. GRPO, arXiv:2503.20783, section 3.1).
        """
        chosen = np.zeros(len(self.table), np.bool_)
        for member in members:
            chosen[self.tokens_of[member]] = True
        sessions, counts = np.unique(self.table.session[chosen], return_counts=True)
        if aggregation == "token_mean":
            weights = chosen / max(int(chosen.sum()), 1)
        elif aggregation == "session_mean":
            per_session = np.zeros(int(self.table.session.max(initial=-1)) + 1)
            per_session[sessions] = 1 / (counts * len(sessions))
            weights = np.where(chosen, per_session[self.table.session], 0.0)
        else:
            weights = chosen / max(len(sessions) * session_tokens, 1)
        return np.asarray(weights, np.float32)


def build(
    experiences: Sequence[Chain],
    advantages: Sequence[npt.NDArray[np.float64]],
    *,
    policy_version: int,
    pairs: Sequence[Pair] | None = None,
    mixed: Mixed | None = None,
    needs_behaviour: bool = True,
) -> Batch:
    """Return the batch of these chains; each sampled token is in exactly one of them.

    `advantages` are those of each chain's turns, [K], or of its tokens, [L]. `pairs` has each chain's where DPO trains
    them. `needs_behaviour` says whether an importance ratio is formed for each token of the chains that are not mixed
    in.
    """
    sessions: dict[tuple[int, SessionKey], int] = {}
    members = [(0 if pairs is None else pairs[n].number, each.session_key) for n, each in enumerate(experiences)]
    num_sampled = len(experiences) if mixed is None else mixed.start
    has_ratio = [needs_behaviour and n < num_sampled for n in range(len(experiences))]
    places = [_trained(each, needs_behaviour=ratio) for each, ratio in zip(experiences, has_ratio, strict=True)]
    counts = [len(place) for place in places]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    columns = list(zip(experiences, places, advantages, strict=True))
    table = TokenTable(
        experience=np.repeat(np.arange(len(experiences)), counts),
        session=np.repeat([sessions.setdefault(each, len(sessions)) for each in members], counts).astype(int),
        place=_joined([p for _, p, _ in columns], np.int64),
        target=_joined([e.tokens[p] for e, p, _ in columns], np.int32),
        behaviour=_joined([e.logprobs[p] for e, p, _ in columns], np.float32),
        advantages=_joined([a[e.turn_index[p] if len(a) == len(e.turn_ids) else p] for e, p, a in columns], np.float32),
        temperature=_joined(
            [_scale(e, p, has_ratio=ratio) for ratio, (e, p, _) in zip(has_ratio, columns, strict=True)], np.float32
        ),
        on_policy=np.repeat(
            [e.policy_version_first == e.policy_version_last == policy_version for e in experiences], counts
        ).astype(np.bool_),
    )
    return Batch(
        experiences=experiences,
        table=table,
        tokens_of=[np.arange(starts[i], starts[i + 1]) for i in range(len(experiences))],
        unit_of=list(range(len(experiences))) if pairs is None else [pair.number for pair in pairs],
        chosen=[pairs is None or pairs[n].is_better for n in range(len(experiences))],
        mixed=mixed,
        keys=[token_keys(experience.tokens, experience.parts) for experience in experiences],
    )


def trained_turns(batch: Batch) -> set[str]:
    found: set[str] = set()
    for experience, tokens in zip(batch.experiences, batch.tokens_of, strict=True):
        turns = np.unique(experience.turn_index[batch.table.place[tokens]])
        found.update(experience.turn_ids[turn] for turn in turns)
    return found


def turn_advantages(batch: Batch) -> list[npt.NDArray[np.float64]]:
    """Return the mean advantage of each turn's tokens, 0 for turns that are not trained; [K] an experience."""
    found = []
    for experience, tokens in zip(batch.experiences, batch.tokens_of, strict=True):
        turns = experience.turn_index[batch.table.place[tokens]]
        size = len(experience.turn_ids)
        sums = np.bincount(turns, weights=batch.table.advantages[tokens], minlength=size)
        found.append(sums / np.maximum(np.bincount(turns, minlength=size), 1))
    return found


def minibatches(batch: Batch, count: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Yield the experiences of each optimizer step: groups shuffled, then cut into `count` parts of similar size.

    Groups stay together where the cut allows it, so that what their prompts share is computed once. A session, and
    for DPO a pair, is never cut. What is mixed in is cut apart, so that each step gets its share of it.
    """
    sampled = _parts(batch, range(batch.num_sampled), count, rng)
    if batch.mixed is None:
        yield from sampled
        return
    others = _parts(batch, range(batch.num_sampled, len(batch.experiences)), count, rng)
    for step in itertools.zip_longest(sampled, others, fillvalue=()):
        yield [member for part in step for member in part]


def _parts(batch: Batch, members: Sequence[int], count: int, rng: np.random.Generator) -> Iterator[list[int]]:
    groups = sorted({batch.experiences[member].group_key for member in members})
    rank = {groups[index]: order for order, index in enumerate(rng.permutation(len(groups)))}
    blocks: dict[tuple[int, int | SessionKey], list[int]] = {}
    paired = len({batch.unit_of[member] for member in members}) < len(members)
    for index in members:
        experience = batch.experiences[index]
        key = batch.unit_of[index] if paired else experience.session_key
        blocks.setdefault((rank[experience.group_key], key), []).append(index)
    ordered = [blocks[key] for key in sorted(blocks, key=lambda key: key[0])]
    count = min(count, len(ordered))
    for part in np.array_split(np.arange(len(ordered)), max(count, 1)):
        yield [index for block in part for index in ordered[block]]


def pack(batch: Batch, members: Iterable[int], row_tokens: int | None) -> list[Row]:
    """Return rows of at most `row_tokens` tokens that compute the members' trained tokens, without padding.

    A chain, or a pair, that is longer than that is a separate row. With `row_tokens=None` each has a row of its own,
    and the chains of a pair share no token.
    """
    units: dict[int, list[int]] = {}
    for member in members:
        if len(batch.tokens_of[member]):
            units.setdefault(batch.unit_of[member], []).append(member)
    if row_tokens is None:
        return [_row(batch, unit, *side_by_side([_inputs(batch, each) for each in unit])) for unit in units.values()]
    rows: list[Row] = []
    forest, inside = Forest(), list[int]()
    for unit in units.values():
        inputs = [_inputs(batch, member) for member in unit]
        over = forest.num_tokens + sum(map(forest.num_new_tokens, inputs)) > row_tokens
        if inside and over:
            rows.append(_forest_row(batch, forest, inside))
            forest, inside = Forest(), []
        for tokens in inputs:
            forest.insert(tokens)
        inside.extend(unit)
    if inside:
        rows.append(_forest_row(batch, forest, inside))
    return rows


def _trained(experience: Chain, *, needs_behaviour: bool) -> Indices:
    fit = np.array([reason is None for reason in why_untrainable(experience, needs_behaviour=needs_behaviour)])
    places = np.flatnonzero(experience.loss_mask)
    assert not experience.loss_mask[:1].any(), "the first token has no predecessor that could predict it"
    trained: Indices = places[fit[experience.turn_index[places]]]
    return trained[experience.is_known[trained]] if needs_behaviour else trained


def _scale(experience: Chain, places: Indices, *, has_ratio: bool) -> Reals:
    scale: Reals = experience.temperatures[experience.turn_index[places]]
    return scale if has_ratio else np.ones_like(scale)


def _inputs(batch: Batch, member: int) -> Keys:
    """Return the tokens that must be computed: nothing after the last trained token's predecessor."""
    last = batch.table.place[batch.tokens_of[member][-1]]
    return batch.keys[member][:last]


def _forest_row(batch: Batch, forest: Forest, members: Sequence[int]) -> Row:
    layout = forest.lay_out()
    return _row(batch, members, layout, [forest.places(_inputs(batch, member)) for member in members])


def _row(batch: Batch, members: Sequence[int], layout: Layout, places: Sequence[Indices]) -> Row:
    trained = [batch.tokens_of[member] for member in members]
    if any(batch.keys[member] is not batch.experiences[member].tokens for member in members):
        tokens = layout.tokens.astype(np.int32)
        for member, own in zip(members, places, strict=True):
            tokens[own] = batch.experiences[member].tokens[: len(own)]
        layout = dataclasses.replace(layout, tokens=tokens)
    return Row(
        layout=layout,
        predictor=np.concatenate([own[batch.table.place[of] - 1] for own, of in zip(places, trained, strict=True)]),
        token=np.concatenate(trained),
        paths=list(zip(members, places, strict=True)),
    )


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    joined: npt.NDArray[Any] = np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype)
    return joined
