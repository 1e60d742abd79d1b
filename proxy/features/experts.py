"""The experts that an engine returns with a reply: stored with its turns, or counted by what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from proxy.calls.steps import CallStep
from proxy.engines.vllm_forms import ROUTED
from turnwise.features.experts import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.metrics import Counted
    from proxy.writer.process import NewTurn


class Experts(CallStep):
    """Gives the writing process what the engine returned of each choice."""

    counters: ClassVar[Mapping[str, Counted]] = {
        "unreadable": (
            "turnwise_unreadable_routing",
            "Turns that are stored without the experts that the engine returned, by what is wrong with these",
            ["reason"],
        )
    }
    unreadable: Counter

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        for (_, choice), turn in zip(sorted(running.captured.choices.items()), turns, strict=False):
            if (experts := choice.beside.get(ROUTED)) is not None:
                start = 0 if turn.parent_turn_id is None else turn.prompt_length - len(turn.prompt_delta)
                turn.given[EXPERTS] = experts, start, turn.prompt_length + len(choice.token_ids)

    def lacking(self, turns: list[NewTurn]) -> None:
        for turn in turns:
            if EXPERTS in turn.problems:
                self.unreadable.labels(turn.problems[EXPERTS]).inc()
