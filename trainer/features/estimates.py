"""What an update changes, before engines get it: the mean reward of sessions that other versions sampled, reweighted.

It is the change against the versions that sampled, never a value. The sessions trained neither the new version nor an
ancestor: a share of the single sessions is kept from training for that. One forward pass over some hundred sessions
needs no engine. A version that is certainly worse is not served.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trainer.batch.batch import build
from trainer.batch.chain import Chain
from trainer.batch.logits import Processing
from trainer.batch.logprobs import chunks_of, entropy_of, log_softmax, places_in, scaled_logits
from trainer.batch.selection import TOO_LONG, UNKNOWN_SUPPORT, Unfit, why_untrainable
from trainer.claims.holds import Beside, Hold
from trainer.model.inputs import RowInputs
from trainer.model.model import Policy
from turnwise.features import estimates
from turnwise.features.estimates import ESTIMATE, KEPT_FROM, Logged
from turnwise.features.statistics.off_policy import MIN_SESSIONS, Surprise, surprise_of, why_too_few
from turnwise.settings import Settings
from turnwise.store.database import Connection
from turnwise.store.groups import GroupChange
from turnwise.store.serving import ServingState
from turnwise.types import Json, SessionKey

log = logging.getLogger(__name__)

READS = 3
"""How often more sessions are read in the place of those that have turns without a propensity."""
TIME_SHARE = 0.1
"""Share of the time that estimates take at most: after one of a second, versions of nine seconds are not estimated."""
TOO_SOON = "estimates have taken their share of the time; a later version is estimated"
LATE_MICROS = 60_000_000
"""How much later than a group is ready its transaction may end."""


class EstimateSettings(Settings):
    """What is estimated of a version before engines get it."""

    estimate_sessions: int = Field(default=100, ge=0)
    """Estimate each new version's change of the mean reward from this many sessions, the newest ones that trained
    nothing; fewer than 100 say nothing. 0 estimates nothing."""
    kept_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the single sessions that is kept from training, so that versions can be estimated, once a policy has
    trained 500 sessions. 0 keeps none."""


class KeptSessions(Hold[EstimateSettings]):
    """Keeps a share of the single sessions from training, drawn by their ids."""

    _since = 0
    _has_enough = False

    @classmethod
    def is_on(cls, settings: EstimateSettings) -> bool:
        return settings.kept_share > 0 and settings.estimate_sessions > 0

    def changes(self, conn: Connection, state: ServingState) -> list[GroupChange]:  # noqa: ARG002
        of = self._ledger.policy_id
        self._has_enough = self._has_enough or estimates.num_trained(conn, of) >= KEPT_FROM
        if not self._has_enough:
            return []
        changes, last = estimates.keeping(conn, of, self._settings.kept_share, self._since)
        self._since = max(self._since, last - LATE_MICROS)
        return changes


@dataclasses.dataclass(frozen=True, slots=True)
class Usable:
    """The sessions of which each sampled token has a propensity, newest first; the turns of others, by reason."""

    chains: dict[SessionKey, Sequence[Chain]]
    slices: dict[SessionKey, Mapping[str, Collection[str]]]
    left_out: Counter[str]


class Estimates(Beside[EstimateSettings]):
    """Estimates the updated weights; every process calls it in step."""

    _not_before = 0.0
    """When the next estimate may be made, on the monotonic clock."""

    @classmethod
    def is_on(cls, settings: EstimateSettings) -> bool:
        return settings.estimate_sessions > 0

    def why_unpublished(self, policy_version: int) -> tuple[Json, str | None]:
        """Return the estimate, and why weights that come from this version must not be served; None where they may.

        Raises:
            Unfit: A chain cannot be computed in one of several processes.
        """
        started = time.monotonic()
        usable = self._learner.world.from_first(lambda: self._usable() if started >= self._not_before else None)
        if usable is None:
            return {ESTIMATE: estimates.nothing(TOO_SOON)}, None
        if len(usable.chains) < MIN_SESSIONS:  # nothing is computed
            num = len(usable.chains)
            return {ESTIMATE: estimates.nothing(why_too_few(num, MIN_SESSIONS), num, usable.left_out)}, None
        found, why = self._estimated(usable, policy_version)
        seconds = time.monotonic() - started
        self._not_before = started + seconds / TIME_SHARE
        if ESTIMATE in found:
            found[ESTIMATE]["seconds"] = seconds
        return found, why

    def _estimated(self, usable: Usable, policy_version: int) -> tuple[Json, str | None]:
        try:
            weights = self._weights(usable, policy_version)
        except Unfit as error:
            if self._learner.world.size > 1:
                raise
            log.warning("the version is not estimated: %s; set a smaller max_chain_tokens", error)
            return {}, None
        broken = [key for key, (weight, _) in weights.items() if not weight < math.inf]
        if broken:
            return {}, f"the logprobs of {len(broken)} of {len(weights)} sessions are not finite under these weights"
        estimated = estimates.estimate(self._logged(usable, weights), usable.left_out)
        why = why_worse(estimated)
        log.log(logging.WARNING if estimated["is_off"] else logging.INFO, "%s", estimates.in_words(estimated))
        if why is not None:
            log.error("the version is kept and not served: %s", why)
        return {ESTIMATE: estimated} | gauges(estimated), why

    def _usable(self) -> Usable:
        wanted = self._settings.estimate_sessions
        usable = Usable({}, {}, Counter())
        before: int | None = None
        for _ in range(READS):
            found = self._read(wanted - len(usable.chains), before)
            for key, stored in found.experiences.items():
                chains = self._ledger.chains(stored)
                reasons = [reason for chain in chains for reason in self._without_propensity(chain)]
                reasons += [estimates.INCOMPLETE] * found.unread.get(key, 0)
                usable.left_out.update(reason.partition(":")[0] for reason in reasons)
                if chains and not reasons:
                    usable.chains[key], usable.slices[key] = chains, found.slices[key]
            before = found.oldest
            if before is None or len(usable.chains) == wanted:
                break
        return usable

    def _read(self, most: int, before: int | None) -> estimates.Candidates:
        of, roles = self._ledger.policy_id, self._ledger.settings.train_roles
        return self._ledger.read(
            lambda conn: estimates.candidates(conn, most, before=before, roles=roles, policy_id=of)
        )

    def _without_propensity(self, chain: Chain) -> list[str]:
        """Return for each turn without a propensity under these weights why it has none."""
        most = self._ledger.settings.max_chain_tokens
        if most is not None and len(chain.tokens) > most:
            return [TOO_LONG] * len(chain.turn_ids)
        if (unfit := self._learner.policy.why_unfit(chain)) is not None:
            return [unfit] * len(chain.turn_ids)
        unknown = set(chain.turn_index[chain.loss_mask & ~chain.is_known].tolist())
        reasons = why_untrainable(chain)
        return [why or UNKNOWN_SUPPORT for turn, why in enumerate(reasons) if why is not None or turn in unknown]

    def _weights(self, usable: Usable, policy_version: int) -> dict[SessionKey, tuple[float, Surprise]]:
        """Return log π − log μ of each session, and how surprising its tokens are."""
        chains = [chain for of_session in usable.chains.values() for chain in of_session]
        credit = [np.zeros(len(chain.turn_ids)) for chain in chains]
        batch = build(chains, credit, policy_version=policy_version)
        policy = self._learner.policy
        columns = self._learner.without_gradient(lambda row: moments(policy, row), batch, range(len(chains)), 3)
        logprobs, entropies, variances = columns.astype(np.float64)
        places: dict[SessionKey, list[np.ndarray]] = defaultdict(list)
        for chain, own in zip(chains, batch.tokens_of, strict=True):
            places[chain.session_key].append(own)
        found = {}
        for key, of_session in places.items():
            own = np.concatenate(of_session)
            behaviour = batch.table.behaviour[own].astype(np.float64)
            gained = float((logprobs[own] - behaviour).sum())
            found[key] = gained, surprise_of(logprobs[own], behaviour, entropies[own], variances[own])
        return found

    def _logged(self, usable: Usable, weights: Mapping[SessionKey, tuple[float, Surprise]]) -> list[Logged]:
        pattern = self._ledger.settings.kind_pattern
        kinds = {key: estimates.task_kind(chains[0].task_id, pattern) for key, chains in usable.chains.items()}
        return [
            Logged(
                log_weight=weights[key][0],
                surprise=weights[key][1],
                reward=chains[0].reward,
                cluster=chains[0].group_key,
                version=max(chain.policy_version_last for chain in chains),
                tenant=chains[0].tenant,
                slices={**usable.slices[key], "task": [kinds[key]] if kinds[key] else []},
            )
            for key, chains in usable.chains.items()
        ]


def moments(policy: Policy, inputs: RowInputs) -> Tensor:
    """Return the logprobs of a row's trained tokens, and the mean of −log π and its variance there. [3, m]."""
    given, weight_VH = policy.with_head(policy.output(inputs))
    return moments_of(given, weight_VH, inputs.which, inputs.target, inputs.temperature, inputs.processing)


@torch.no_grad()
def moments_of(
    given: Tensor,
    weight_VH: Tensor | None,
    which: Tensor,
    target: Tensor,
    temperature_U: Tensor,
    processing: Processing | None = None,
) -> Tensor:
    """Return what `token_logprobs` returns, bit by bit, and the variance of log π, of logits computed once. [3, m]."""
    found_U = torch.empty(2, len(given), dtype=torch.float32, device=given.device)
    selected = found_U.new_zeros(len(which))
    for chunk in chunks_of(given, weight_VH):
        log_p_CV, _ = log_softmax(scaled_logits(given, weight_VH, temperature_U, processing, chunk)[0], processing)
        entropy_C = entropy_of(log_p_CV, processing)
        place, inside = places_in(chunk, which)
        selected = torch.where(inside, log_p_CV[place, target], selected)
        off_CV = log_p_CV + entropy_C[:, None]
        variance_C = (log_p_CV.exp() * off_CV * off_CV).sum(-1)  # a square alone overflows where p is 0
        found_U[:, chunk] = torch.stack([entropy_C, variance_C])
    return torch.stack([selected, *found_U[:, which]])


def why_worse(estimated: Json) -> str | None:
    """Return why a version must not be served: the mean reward certainly falls."""
    high = estimated["high"]
    return None if high is None or high >= 0 else f"estimated: {estimates.in_words(estimated)}"


def gauges(estimated: Json) -> Json:
    """Return the numbers of an estimate as they are recorded."""
    names = {
        "change": "estimate_change",
        "mean_weight": "estimate_mean_weight",
        "logged_share": "estimate_logged_share",
    }
    return {gauge: estimated[name] for name, gauge in names.items() if estimated[name] is not None}
