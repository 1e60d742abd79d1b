"""Counts the calls of each arm, and the canaries by their result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import Counter

from proxy.calls.steps import CallStep
from proxy.features.arms.settings import ArmSettings

if TYPE_CHECKING:
    from proxy.calls.capture import Running
    from proxy.metrics import Counted
    from proxy.services import Services
    from proxy.settings import ProxySettings

CANARIES: Counted = ("turnwise_canaries", "Canaries by result", ["result"])


class ArmCalls(CallStep):
    """Counts calls that sample with what is served to them while there are several arms."""

    counters: ClassVar[Mapping[str, Counted]] = {
        "calls": ("turnwise_canary_calls", "Calls during a canary by arm", ["arm"]),
        "canaries": CANARIES,
    }
    calls: Counter

    def __init__(self, services: Services) -> None:
        self._pool = services.pool

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:
        return isinstance(settings, ArmSettings) and bool(settings.canary_share or settings.holdout_share)

    def sent(self, running: Running) -> None:
        beside = self._pool.state(running.place.session.policy_id).beside
        is_first = running.call.policy_version is None and not running.is_sent_again
        if beside and is_first and running.lane is not None:
            arms = {version.version: status.value for status, version in beside.items()}
            self.calls.labels(arms.get(running.lane.version, "control")).inc()
