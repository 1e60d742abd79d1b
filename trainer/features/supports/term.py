"""From a claim to the logits of a row: whose distribution is computed again, and with which processors."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainer.batch.batch import Batch, Row
from trainer.batch.chain import Chain
from trainer.features.supports.processors import RowProcessors, SampledTurn
from trainer.features.supports.turns import TurnProcessors, Vocabulary, processors_of
from trainer.model.terms import Term
from trainer.settings import TrainerSettings


class Supports(Term):
    """The processors of a chain's turns, turn by turn, None where logits were only scaled."""

    name = "supports"

    def __init__(self, settings: TrainerSettings) -> None:
        self._vocabulary = Vocabulary(settings.model)
        self._forms_ratios = settings.algorithm.needs_behaviour

    def of_chain(self, chain: Chain) -> Chain:
        """Without ratios the model's own distribution is trained: one id that is left has the logprob 0 whatever it is.

        The chain then has the core's reasons, so that these tokens are not compared with the engine's.
        """
        return with_processors(chain, self._vocabulary) if self._forms_ratios else chain

    def on_logits(self, batch: Batch, row: Row) -> RowProcessors | None:
        members, places = batch.table.experience[row.token], batch.table.place[row.token]
        turns: list[SampledTurn] = []
        turn, place = np.full(len(places), -1, np.int64), np.zeros(len(places), np.int64)
        for member in np.unique(members):
            chain = batch.experiences[member]
            for number, found in enumerate(chain.terms.get(self.name, ())):
                if found is not None:
                    own, sampled = np.flatnonzero(members == member), np.flatnonzero(chain.turn_index == number)
                    inside = own[chain.turn_index[places[own]] == number]
                    turn[inside], place[inside] = len(turns), places[inside] - sampled[0]
                    prompt, reply = chain.tokens[: sampled[0]], chain.tokens[sampled]
                    turns.append(SampledTurn(processors=found, prompt=prompt, sampled=reply))
        return RowProcessors(turns=turns, turn=turn, place=place) if turns else None


def with_processors(chain: Chain, vocabulary: Vocabulary | None) -> Chain:
    """Return a chain with what is applied to its logits; without `vocabulary` what needs none."""
    found = processors_of(chain, vocabulary)
    is_known = np.ones(len(chain.tokens), np.bool_)
    for turn, each in enumerate(found):
        if isinstance(each, TurnProcessors) and each.is_known is not None:
            is_known[chain.turn_index == turn] = each.is_known
    applied = [each if isinstance(each, TurnProcessors) else None for each in found]
    return dataclasses.replace(
        chain,
        without_ratio=[each if isinstance(each, str) else None for each in found],
        is_known=is_known,
        terms={**chain.terms, Supports.name: applied} if any(applied) else chain.terms,
    )
