"""GiGPO: groups within groups, for agents whose runs of a task meet the same states again.

Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training" (arXiv:2505.10978). A turn's advantage is
that of its session in the group, plus ω times that of the turn among all turns of the group that observed the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from trainer.algorithms.algorithm import Group
from trainer.algorithms.grpo import GRPO
from turnwise.credit import Floats, is_uniform


class GiGPO(GRPO):
    """GRPO's loss on advantages of two levels."""

    class Settings(GRPO.Settings):
        """How both levels are weighed."""

        step_weight: float = Field(default=1.0, ge=0)
        """ω, the weight of the advantage among equal states."""
        discount: float = Field(default=0.95, gt=0, le=1)
        """Discount of the session's reward for each turn after this one."""

    settings: Settings

    def advantages(self, group: Group) -> Sequence[Floats]:
        """Return one advantage a turn, for each chain."""
        states = defaultdict(list)
        for number, chain in enumerate(group.chains):
            for turn in chain.turns:
                turns_left = len(chain.turns) - 1 - turn.index
                value = self.settings.discount**turns_left * chain.experience.reward
                states[turn.observed.tobytes()].append((number, turn.index, value))
        of_steps = [np.zeros(len(chain.turns)) for chain in group.chains]
        for met in states.values():
            values = np.array([value for _, _, value in met])
            if len(met) > 1 and not is_uniform(values):
                for (number, index, _), advantage in zip(met, self.centre(values), strict=True):
                    of_steps[number][index] = advantage
        of_sessions = super().advantages(group)
        weight = self.settings.step_weight
        return [whole + weight * step for whole, step in zip(of_sessions, of_steps, strict=True)]
