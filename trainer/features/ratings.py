"""Few ratings: a policy is trained at each ten new ones, also on unrated sessions by what a head predicts of them.

One pass over ten sessions hardly moves a policy; the clip of the ratio holds it in several. A head, fitted to all that
is rated, predicts a reward h of each session, so that a sentinel sees a policy that learns what people do not like.
With `control` it also trains: a session is worth λ h, and one that people were asked about λ h + (rating − λ h) / p,
with the probability p of being asked. So the mean is that of the ratings, whatever the head is worth, and the head
removes noise. λ is fitted to predictions of heads that did not know the ratings.

A batch that is interrupted is claimed again, and may take other unrated sessions: nothing of the first one is recorded
but predictions, which the second one replaces.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import model_validator

from trainer.batch.advantages import AT_BASELINE, FIRST, UNIFORM
from trainer.batch.chain import Chain
from trainer.batch.selection import IMPOSSIBLE, Selection, offer
from trainer.claims.holds import Beside
from trainer.claims.ledger import RunProgress
from trainer.features.examples.playing import of_policy
from trainer.features.sentinels import MEASURES, Sentinel
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.features.ratings.chains import chains_of
from turnwise.features.ratings.draws import PER_VERSION
from turnwise.features.ratings.head import Features, Space, fit, left_out, shuffled
from turnwise.features.ratings.predictions import Prediction, keep
from turnwise.features.ratings.rated import RatedSession, sessions_of
from turnwise.features.sentinels import Played, played
from turnwise.features.statistics.intervals import power_tuned
from turnwise.settings import Settings
from turnwise.store.database import Connection
from turnwise.types import Json, SessionKey

Reals = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]
NUM_UNRATED = 50
"""The newest unrated sessions that are trained beside ten rated ones."""
MOST_RATED = 500
"""The newest rated sessions that a head is fitted to, beside those of the batch: each costs a forward pass."""
MIN_PREDICTED = 10
EQUAL = UNIFORM, AT_BASELINE, FIRST
"""Why the algorithm has no advantage for a session; beside what a head predicts of others it has one."""
OBSERVED: tuple[Sentinel, ...] = (
    "broken_calls",
    "failed_calls",
    "questions",
    "refusals",
    "repeats",
    "empty",
    "given_up",
)
"""The sentinels that tell the head of a session. How long its replies are is not among them: a policy finds that."""
NUM_SIGNALS = len(OBSERVED) + 3
"""Those, how many turns were asked for again, and the mean and the least logprob of the sampled tokens."""
MOST_SCORES = 8
"""Judges whose scores tell the head, those that scored most sessions; each is one more column to fit."""
FIRST_SHARE = 0.5
"""λ before there are `MIN_PREDICTED` ratings of sessions that a head has predicted without them."""
OF_BOTH: Mapping[str, Any] = {"groups_per_batch": PER_VERSION, "singles_per_group": 1, "wait_seconds": None}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "newest": {**OF_BOTH, "num_minibatches": 1, "reuse_epochs": 8},
    "control": {**OF_BOTH, "num_minibatches": 2, "reuse_epochs": 2},
}
"""What the setting `ratings` sets, of what is not set."""


class RatingSettings(Settings):
    """Whether a policy is trained on few ratings."""

    ratings: Literal["off", "newest", "control"] = "off"
    """Train a policy of which people rate few sessions at each ten new ratings. `newest`: these ten, in eight passes.
    `control`: also fifty unrated sessions, in two passes, by a head's predictions that the ratings correct. Both change
    the defaults of `groups_per_batch`, `singles_per_group`, `wait_seconds`, `num_minibatches` and `reuse_epochs`."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_ratings(cls, values: Any) -> Any:
        return {**DEFAULTS.get(str(values.get("ratings")), {}), **values} if isinstance(values, dict) else values


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The sessions that a head sees: all rated ones, and the unrated ones of the present batch."""

    sessions: Sequence[RatedSession]
    chains: Mapping[SessionKey, Sequence[Chain]]
    observed: Reals
    """What the head is told of each session beside its tokens, scores of judges last. [N, S - 2]"""
    num_candidates: int
    """Sessions of the versions that sampled the batch, and of those between that the weights come from."""
    claimed: frozenset[SessionKey]

    @property
    def is_rated(self) -> Chosen:
        return np.array([one.rating is not None for one in self.sessions])

    @property
    def is_claimed(self) -> Chosen:
        """Which ratings are new: [N]."""
        return np.array([one.rating is not None and one.key in self.claimed for one in self.sessions])


class ByHead(Beside[TrainerSettings]):
    """Predicts the sessions of a batch of rated ones, and unrated ones beside them.

    With `control` it adds the unrated ones to the batch, and gives all the advantages of the corrected predictions.
    """

    @classmethod
    def is_on(cls, settings: TrainerSettings) -> bool:
        return isinstance(settings, RatingSettings) and settings.ratings != "off"

    def selected(self, selection: Selection, at: RunProgress) -> Json:
        is_equal = {key for key, why in selection.refused.items() if why in EQUAL}
        chosen = [*selection.experiences, *(chain for chain in selection.fit if chain.group_key in is_equal)]
        if not any(chain.is_single for chain in chosen):
            return {}
        claimed = frozenset(chain.session_key for chain in chosen)
        world = self._learner.world
        known = world.from_first(lambda: self._known(claimed, at))
        if known is None:
            return {}
        features = self._features(known)
        # On the first one alone: another GPU may round another way, and all must train the same.
        credit, gauges = world.from_first(lambda: self._valued(known, features))
        if credit and trains_by_head(self._ledger.settings):
            self._credit(selection, known, credit)
        return gauges

    def _known(self, claimed: frozenset[SessionKey], at: RunProgress) -> Known | None:
        """Return what the head sees; None where the batch has no single session that is rated."""
        of, roles, longest = self._ledger.policy_id, self._ledger.settings.train_roles, self._settings.max_chain_tokens
        every = self._ledger.read(lambda conn: sessions_of(conn, of))
        versions = {one.policy_version for one in every if one.key in claimed}
        rated = [one for one in every if one.rating is not None]
        newest = {one.key for one in rated[-MOST_RATED:]}
        # What versions sampled that were undone is not trained.
        came_from = {version for version in at.recent_versions if version >= min(versions, default=0)}
        own = [one for one in every if one.policy_version in versions | came_from]
        chosen = [one for one in rated if one.key in newest or one.key in claimed]
        chosen += [one for one in own if one.rating is None][-NUM_UNRATED:]
        pks = [one.session_pk for one in chosen]
        chains: dict[SessionKey, list[Chain]] = {}
        for chain in self._ledger.chains(self._ledger.read(lambda conn: chains_of(conn, pks, of, roles))):
            is_short = longest is None or len(chain.tokens) <= longest
            if is_short and self._learner.policy.why_unfit(chain) is None:
                chains.setdefault(chain.session_key, []).append(chain)
        seen = [one for one in chosen if one.key in chains]
        turns = self._ledger.read(lambda conn: played(conn, [one.session_pk for one in seen]))
        told = np.array([observed(turns.get(one.session_pk)) for one in seen]).reshape(len(seen), NUM_SIGNALS - 2)
        known = Known(seen, chains, np.hstack([told, scored(seen)]), len(own), claimed)
        return known if known.is_claimed.any() else None

    def _valued(self, known: Known, features: Features) -> tuple[dict[SessionKey, float], Json]:
        """Return the advantage of each session of the batch, none where all are worth the same, and gauges."""
        is_rated, is_claimed = known.is_rated, known.is_claimed
        ratings = as_shares([one.rating for one in known.sessions if one.rating is not None])
        space = Space.of(features)
        means, deviations = fit(features.of(is_rated), ratings, space).predict(features)
        is_earlier = is_rated & ~is_claimed
        said = [(one, mean, deviation) for one, mean, deviation in zip(known.sessions, means, deviations, strict=True)]
        made = [each for each in said if each[0].rating is None]
        sessions = list(known.sessions)
        if is_earlier.any():
            before = fit(features.of(is_earlier), ratings[is_earlier[is_rated]], space)
            new = zip(np.flatnonzero(is_claimed), *before.predict(features.of(is_claimed)), strict=True)
            for number, mean, deviation in new:
                if sessions[number].predicted is None:
                    made.append((sessions[number], mean, deviation))
                    sessions[number] = dataclasses.replace(sessions[number], predicted=float(mean))
        self._keep(made)
        share = share_of([one for one in sessions if one.rating is not None], ratings)
        rated = dict(zip((one.key for one in sessions if one.rating is not None), ratings.tolist(), strict=True))
        batch = [n for n, one in enumerate(sessions) if one.rating is None or is_claimed[n]]
        portion = known.num_candidates / len(batch)
        values = np.array([corrected(sessions[n], rated, share * float(means[n]), portion) for n in batch])
        spread = float(values.std())
        rated_ones = features.of(is_rated)
        space_of_rated = Space.of(rated_ones)
        gauges: Json = {
            "num_predicted_sessions": int((~is_rated).sum()),
            "head_share": share,
            "head_auroc": left_out(rated_ones, ratings, space_of_rated),
            "head_auroc_shuffled": shuffled(rated_ones, ratings, space_of_rated),
        }
        # Ten equal ratings compare nothing: advantages would be the head's noise, at full size.
        if not spread > 0 or np.ptp(ratings[is_claimed[is_rated]]) == 0:
            return {}, gauges
        advantages = ((values - values.mean()) / spread).tolist()
        return dict(zip((sessions[n].key for n in batch), advantages, strict=True)), gauges

    def _features(self, known: Known) -> Features:
        """Return the features of the sessions under the present weights; every process computes them."""
        policy = self._learner.policy
        of_text = set(policy.base.get_decoder().modules())  # and not of images
        layers = [layer for layer in policy.layers(policy.model) if layer in of_text]
        states, seen = list[Reals](), of_policy(policy)

        def keep_last(_: object, __: object, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            states.append(hidden[0, -1].detach().float().cpu().numpy().astype(np.float64))

        logprobs = np.full((len(known.sessions), 2), np.nan)
        watched = layers[2 * len(layers) // 3 - 1].register_forward_hook(keep_last)
        try:
            for number, session in enumerate(known.sessions):
                chain = known.chains[session.key][-1]
                # The logits behind all tokens of a long session would not fit into memory.
                seen.behind(torch.tensor([chain.tokens.tolist()], device=policy.device), None)
                sampled = chain.logprobs[chain.loss_mask & (chain.logprobs > IMPOSSIBLE)]
                if len(sampled):
                    logprobs[number] = sampled.mean(), sampled.min()
        finally:
            watched.remove()
        return Features(np.stack(states), np.hstack([known.observed, logprobs]))

    def _keep(self, predicted: Sequence[tuple[RatedSession, float, float]]) -> None:
        made = [
            Prediction(
                tenant=one.tenant,
                session_id=one.session_id,
                policy_id=self._ledger.policy_id,
                policy_version=one.policy_version,
                mean=float(mean),
                deviation=float(deviation),
            )
            for one, mean, deviation in predicted
        ]

        def write(conn: Connection) -> None:
            keep(conn, made)

        self._ledger.write(write)

    def _credit(self, selection: Selection, known: Known, credit: Mapping[SessionKey, float]) -> None:
        """Put the unrated sessions behind the rated ones, and give each chain the advantage of its session."""
        settings, algorithm = self._learner.settings, self._learner.algorithm
        unrated = [key for key in known.chains if key in credit and key not in known.claimed]
        found = [chain for key in unrated for chain in known.chains[key]]
        keys = {chain.group_key for chain in found}
        fit_ones = offer(found, keys, settings, (), algorithm.reward, needs_behaviour=algorithm.needs_behaviour).fit
        given = zip(selection.experiences, selection.advantages, strict=True)
        kept = [(chain, advantages) for chain, advantages in given if chain.session_key not in credit]
        rated = [chain for chain in selection.fit if chain.session_key in credit]
        kept += [(chain, np.full(len(chain.turn_ids), credit[chain.session_key])) for chain in [*rated, *fit_ones]]
        selection.experiences = [chain for chain, _ in kept]
        selection.advantages = [advantages for _, advantages in kept]
        for key in {chain.group_key for chain in rated}:
            if selection.refused.get(key) in EQUAL:
                del selection.refused[key]


def trains_by_head(settings: TrainerSettings) -> bool:
    return isinstance(settings, RatingSettings) and settings.ratings == "control"


def check_ratings(settings: TrainerSettings) -> None:
    """Check that the algorithm trains by one advantage a session, where a head gives it.

    Raises:
        SettingsError: It does not.
    """
    algorithm = settings.algorithm
    if trains_by_head(settings) and (
        algorithm.trains_pairs or algorithm.credits_tokens or not algorithm.needs_behaviour
    ):
        raise SettingsError(
            f"ratings='control' gives each session an advantage, and the algorithm '{algorithm}' does not train by it: "
            "use 'grpo' or another one with a baseline, or ratings='newest'"
        )


def observed(one: Played | None) -> list[float]:
    """Return what the head is told of a session beside its tokens, NaN for what it does not show.

    As [S - 2].
    """
    if one is None:
        return [np.nan] * (len(OBSERVED) + 1)
    found = [MEASURES[name](one) for name in OBSERVED]
    return [np.nan if value is None else value for value in [*found, asked_again(one)]]


def scored(sessions: Sequence[RatedSession]) -> Reals:
    """Return what judges say of each session, a column a judge, NaN where one has not scored it. [N, J]."""
    counts = Counter(name for one in sessions for name in one.scores)
    names = sorted(sorted(counts), key=lambda name: -counts[name])[:MOST_SCORES]
    return np.array([[one.scores.get(name, np.nan) for name in names] for one in sessions]).reshape(
        len(sessions), len(names)
    )


def asked_again(one: Played) -> float:
    """Return the share of turns that take the place of an earlier one: the client has retried, or a person edited."""
    calls = [turn for turn in one.turns if "#" not in turn.turn_id]
    places = [turn.parent_turn_id or json.dumps(turn.messages, sort_keys=True) for turn in calls]
    return 1 - len(set(places)) / max(len(places), 1)


def as_shares(ratings: Sequence[float]) -> Reals:
    """Return ratings as numbers from 0 to 1: as they are, or from the lowest to the highest."""
    given = np.array(ratings, np.float64)
    low, high = min(0.0, float(given.min())), max(1.0, float(given.max()))
    shares: Reals = (given - low) / (high - low)
    return shares


def share_of(rated: Sequence[RatedSession], ratings: Reals) -> float:
    """Return the λ of the least variance, from 0 to 1, of the ratings that were predicted without them."""
    pairs = [(one.predicted, rating) for one, rating in zip(rated, ratings, strict=True) if one.predicted is not None]
    if len(pairs) < MIN_PREDICTED:
        return FIRST_SHARE
    said, was = np.array(pairs, np.float64).T
    return power_tuned(was, said)


def corrected(session: RatedSession, rated: Mapping[SessionKey, float], predicted: float, portion: float) -> float:
    """Return λ h + (rating − λ h) / p of a session that people were asked about, and λ h of an unrated one.

    `portion` is how many sessions could be asked about for each one of the batch. A rating that nobody has asked for
    has no probability, and is taken as it is.
    """
    if session.key not in rated:
        return predicted
    asked = 1.0 if session.probability is None else min(1.0, session.probability * portion)
    return predicted + (rated[session.key] - predicted) / asked
