"""The experts that an engine returns with a reply: asked for of the new tokens alone, and counted where unreadable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from proxy.calls.steps import CallStep
from turnwise.features.experts import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.calls.capture import Running
    from proxy.metrics import Counted

FIRST = "routed_experts_prompt_start"
"""Request field: the first token whose experts the reply has."""


class Experts(CallStep):
    """Asks an engine that returns experts for those of the tokens that the call's turns store."""

    marks = frozenset({EXPERTS})
    unpacked: ClassVar[Mapping[str, Counted]] = {
        EXPERTS: (
            "turnwise_unreadable_routing",
            "Turns that are stored without the experts that the engine returned, by what is wrong with these",
            ["reason"],
        )
    }

    def sent(self, running: Running) -> None:
        call, place = running.call, running.place
        if place.prompt is None:  # also of a call that was sent with one, and is sent again
            call.engine_fields.pop(FIRST, None)
            return
        # The last token before this turn's own was not routed when it was sampled, so its experts are this turn's.
        call.engine_fields[FIRST] = place.prompt.num_ids - len(place.between) - 1
