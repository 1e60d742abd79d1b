"""Few ratings: a policy is trained at each ten new ones, also on unrated sessions by what a head predicts of them.

One pass over ten sessions hardly moves a policy; the clip of the ratio holds it in several. A head, fitted to all that
is rated, predicts a reward λ h of each session. Those that people were asked about have λ h + (rating − λ h) / p with
the probability p of being asked. So the mean is that of the ratings, whatever the head is worth, and the head removes
noise. λ is fitted to predictions that were made before their ratings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from trainer.batch.chain import Chain
from trainer.batch.selection import Selection, offer
from trainer.claims.holds import Beside
from trainer.claims.ledger import RunProgress
from turnwise.features.ratings.chains import chains_of
from turnwise.features.ratings.draws import PER_VERSION
from turnwise.features.ratings.head import SIGNALS, Features, fit
from turnwise.features.ratings.predictions import Prediction, keep
from turnwise.features.ratings.rated import RatedSession, sessions_of
from turnwise.settings import Settings
from turnwise.store.database import Connection
from turnwise.types import Json, SessionKey

Reals = npt.NDArray[np.float64]
NUM_UNRATED = 50
"""The newest unrated sessions that are trained beside ten rated ones."""
MIN_PREDICTED = 10
FIRST_SHARE = 0.5
"""λ before there are `MIN_PREDICTED` ratings of sessions that the head had predicted."""
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
    `control`: also fifty unrated sessions, in two passes, by a head's predictions that the ratings correct. It changes
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
    num_candidates: int
    """Sessions of the versions that sampled the batch."""


class ByHead(Beside[RatingSettings]):
    """Adds unrated sessions to a batch of rated ones, and gives all the advantages of the corrected predictions."""

    @classmethod
    def is_on(cls, settings: RatingSettings) -> bool:
        return settings.ratings == "control"

    def selected(self, selection: Selection, at: RunProgress) -> Json:  # noqa: ARG002
        claimed = {chain.session_key for chain in selection.experiences}
        known = self._learner.world.from_first(lambda: self._known(claimed))
        if known is None:
            return {}
        features = self._features(known)
        is_rated = np.array([one.rating is not None for one in known.sessions])
        ratings = as_shares([one.rating for one in known.sessions if one.rating is not None])
        of_rated = Features(features.states[is_rated], features.signals[is_rated])
        means, deviations = fit(of_rated, ratings, features).predict(features)
        self._learner.world.from_first(lambda: self._keep(known, means, deviations))
        share = share_of([one for one in known.sessions if one.rating is not None], ratings)
        rated = dict(zip((one.key for one in known.sessions if one.rating is not None), ratings, strict=True))
        batch = [n for n, one in enumerate(known.sessions) if one.rating is None or one.key in claimed]
        portion = known.num_candidates / len(batch)
        values = np.array([corrected(known.sessions[n], rated, share * float(means[n]), portion) for n in batch])
        spread = float(values.std())
        if spread > 0:
            credit = dict(zip((known.sessions[n].key for n in batch), (values - values.mean()) / spread, strict=True))
            self._credit(selection, known, credit)
        return {"num_predicted_sessions": int((~is_rated).sum()), "head_share": share}

    def _known(self, claimed: Collection[SessionKey]) -> Known | None:
        """Return what the head sees; None where the batch has no single session that is rated."""
        of, roles = self._ledger.policy_id, self._ledger.settings.train_roles
        every = self._ledger.read(lambda conn: sessions_of(conn, of))
        versions = [one.policy_version for one in every if one.key in claimed]
        if not versions:
            return None
        own = [one for one in every if one.policy_version >= min(versions)]
        unrated = [one for one in own if one.rating is None][-NUM_UNRATED:]
        chosen = [one for one in every if one.rating is not None] + unrated
        pks = [one.session_pk for one in chosen]
        chains: dict[SessionKey, list[Chain]] = {}
        for chain in self._ledger.chains(self._ledger.read(lambda conn: chains_of(conn, pks, of, roles))):
            chains.setdefault(chain.session_key, []).append(chain)
        return Known([one for one in chosen if one.key in chains], chains, len(own))

    def _features(self, known: Known) -> Features:
        """Return the features of the sessions under the present weights; every process computes them."""
        policy = self._learner.policy
        layers, states = policy.layers(policy.model), list[Reals]()

        def keep_last(_: object, __: object, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            states.append(hidden[0, -1].detach().float().cpu().numpy().astype(np.float64))

        signals = np.full((len(known.sessions), len(SIGNALS)), np.nan)
        watched = layers[2 * len(layers) // 3 - 1].register_forward_hook(keep_last)
        try:
            for number, session in enumerate(known.sessions):
                chain = known.chains[session.key][-1]
                policy.next_logprobs(chain.tokens.tolist())
                sampled = chain.logprobs[chain.loss_mask]
                signals[number, SIGNALS.index("mean_logprob")] = sampled.mean() if len(sampled) else np.nan
                signals[number, SIGNALS.index("least_logprob")] = sampled.min() if len(sampled) else np.nan
        finally:
            watched.remove()
        return Features(np.stack(states), signals)

    def _keep(self, known: Known, means: Reals, deviations: Reals) -> None:
        made = [
            Prediction(
                tenant=one.tenant,
                session_id=one.session_id,
                policy_id=self._ledger.policy_id,
                policy_version=one.policy_version,
                mean=float(mean),
                deviation=float(deviation),
            )
            for one, mean, deviation in zip(known.sessions, means, deviations, strict=True)
            if one.rating is None
        ]

        def write(conn: Connection) -> None:
            keep(conn, made)

        self._ledger.write(write)

    def _credit(self, selection: Selection, known: Known, credit: Mapping[SessionKey, float]) -> None:
        """Put the unrated sessions behind the rated ones, and give each chain the advantage of its session."""
        settings, algorithm = self._learner.settings, self._learner.algorithm
        claimed = {chain.session_key for chain in selection.experiences}
        found = [
            chain for key, chains in known.chains.items() if key in credit and key not in claimed for chain in chains
        ]
        keys = {chain.group_key for chain in found}
        fit_ones = offer(found, keys, settings, (), algorithm.reward, needs_behaviour=algorithm.needs_behaviour).fit
        rated = [
            np.full(len(chain.turn_ids), credit[chain.session_key]) if chain.session_key in credit else given
            for chain, given in zip(selection.experiences, selection.advantages, strict=True)
        ]
        unrated = [np.full(len(chain.turn_ids), credit[chain.session_key]) for chain in fit_ones]
        selection.experiences = [*selection.experiences, *fit_ones]
        selection.advantages = [*rated, *unrated]


def as_shares(ratings: Sequence[float]) -> Reals:
    """Return ratings as numbers from 0 to 1: as they are, or from the lowest to the highest."""
    given = np.array(ratings, np.float64)
    low, high = min(0.0, float(given.min())), max(1.0, float(given.max()))
    shares: Reals = (given - low) / (high - low)
    return shares


def share_of(rated: Sequence[RatedSession], ratings: Reals) -> float:
    """Return the λ of the least variance, from 0 to 1, of the ratings whose predictions were made before them."""
    pairs = [(one.predicted, rating) for one, rating in zip(rated, ratings, strict=True) if one.predicted is not None]
    if len(pairs) < MIN_PREDICTED:
        return FIRST_SHARE
    said, was = np.array(pairs, np.float64).T
    return float(np.clip(np.cov(said, was)[0, 1] / max(float(said.var(ddof=1)), 1e-9), 0.0, 1.0))


def corrected(session: RatedSession, rated: Mapping[SessionKey, float], predicted: float, portion: float) -> float:
    """Return λ h + (rating − λ h) / p of a session that people were asked about, and λ h of an unrated one.

    `portion` is how many sessions could be asked about for each one of the batch. A rating that nobody has asked for
    has no probability, and is taken as it is.
    """
    if session.key not in rated:
        return predicted
    asked = 1.0 if session.probability is None else min(1.0, session.probability * portion)
    return predicted + (rated[session.key] - predicted) / asked
