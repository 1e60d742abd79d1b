"""Imported sessions beside sampled ones, which CHORD trains: drawn for each batch, and put behind what was claimed.

They are drawn by the seed and the count of batches, so a repeated batch trains on the same ones. They are not claimed:
every batch may draw them again.
"""

from __future__ import annotations

import logging

import numpy as np

from trainer.algorithms.algorithm import select
from trainer.algorithms.chord import Chord
from trainer.batch.chain import Chain
from trainer.batch.selection import Mixed, Pair, Selection
from trainer.claims.holds import Beside
from trainer.claims.ledger import RunProgress
from trainer.settings import TrainerSettings
from turnwise.features.imported import imported_groups
from turnwise.types import Json

log = logging.getLogger(__name__)

NUM_GROUPS = 8
"""Imported groups of a batch, drawn again for each batch. Without groups in the import, a session is one."""
_DRAW = 1
"""Distinguishes the random numbers of imported sessions from those that shuffle the batch."""


class Imported(Beside[TrainerSettings]):
    """Draws imported sessions for each batch."""

    @classmethod
    def is_on(cls, settings: TrainerSettings) -> bool:
        return isinstance(settings.algorithm, Chord)

    def selected(self, selection: Selection, at: RunProgress) -> Json:
        algorithm = self._learner.algorithm
        assert isinstance(algorithm, Chord)
        found = self._learner.world.from_first(lambda: self._drawn(at))
        keys = sorted({experience.group_key for experience in found})
        drawn = select(found, keys, algorithm.imitation, self._learner.settings)
        if not drawn.experiences:
            log.warning(
                "no imported session could be mixed in: %d groups were drawn, and left out for these reasons: %s; "
                "import conversations with `turnwise import`",
                len(keys),
                sorted(set(drawn.refused.values())),
            )
        share = algorithm.share(at.num_batches)
        mix_in(selection, drawn, share)
        num_sessions = len({experience.session_key for experience in drawn.experiences})
        return {"num_imported_sessions": num_sessions, "mix_mu": share}

    def _drawn(self, at: RunProgress) -> list[Chain]:
        rng = np.random.default_rng([at.seed, at.num_batches, _DRAW])
        stored = self._ledger.read(lambda conn: imported_groups(conn, self._ledger.policy_id))
        drawn = [stored[index] for index in sorted(rng.permutation(len(stored))[:NUM_GROUPS])]
        return self._ledger.experiences_of(drawn, with_imported=True)


def mix_in(selection: Selection, drawn: Selection, share: float) -> None:
    """Put what was drawn behind what was selected, as pairs of their own where they are pairs."""
    num_own = len(selection.experiences)
    if not drawn.experiences:
        return
    if drawn.pairs is not None:
        own = [Pair(number, is_better=True) for number in range(num_own)]  # sampled sessions are no pairs
        selection.pairs = own + [pair._replace(number=num_own + pair.number) for pair in drawn.pairs]
    selection.experiences = [*selection.experiences, *drawn.experiences]
    selection.advantages = [*selection.advantages, *drawn.advantages]
    selection.mixed = Mixed(num_own, share)
