"""Imported sessions that are mixed into reinforcement learning: which of them, and with what weight.

They are drawn from the ledger by the seed and the count of batches, so a repeated batch trains on the same ones. They
are not claimed: every batch may draw them again.
"""

from __future__ import annotations

import logging

import numpy as np

from trainer.learning.batch import Batch, build
from trainer.learning.mixing import mu_of
from trainer.learning.selection import Selection, joined, select
from trainer.loop.state import Progress
from trainer.parallel import World
from trainer.settings import TrainerSettings
from trainer.source import Source
from turnwise.types import Json

log = logging.getLogger(__name__)

_DRAW = 1
"""Distinguishes these random numbers from those that shuffle the batch."""


class ImportedSessions:
    """Adds imported sessions to the selection of a batch."""

    def __init__(self, env: Source, rule: TrainerSettings) -> None:
        self._env = env
        self._rule = rule

    def added(self, chosen: Selection, progress: Progress, world: World) -> tuple[Selection, int, Json]:
        """Return the selection with imported experiences at its end, their number, and gauges."""
        if self._rule.mix_imported is None:
            return chosen, 0, {}
        rng = np.random.default_rng([progress.seed, progress.num_batches, _DRAW])
        found = world.share(self._env.imported(self._rule.mix_groups, rng) if world.is_first else None)
        keys = sorted({experience.group_key for experience in found})
        drawn = select(found, keys, self._rule.mix_imported, self._rule)
        if not drawn.experiences:
            log.warning(
                "no imported session could be mixed in: %d groups were drawn, and left out for these reasons: %s; "
                "import conversations with `turnwise import`",
                len(keys),
                sorted(set(drawn.refused.values())),
            )
        num_sessions = len({experience.session_key for experience in drawn.experiences})
        gauges = {"num_imported_sessions": num_sessions, "mix_mu": mu_of(progress.num_batches, self._rule)}
        return joined(chosen, drawn), len(drawn.experiences), gauges

    def batch_of(self, chosen: Selection, num_imported: int, progress: Progress) -> Batch:
        """Return the batch of a selection that ends with so many imported experiences."""
        return build(
            chosen.experiences,
            chosen.advantages,
            policy_version=progress.policy_version,
            pairs=chosen.pairs,
            chosen=chosen.chosen,
            num_imported=num_imported,
            mu=mu_of(progress.num_batches, self._rule) if num_imported else 0.0,
        )
