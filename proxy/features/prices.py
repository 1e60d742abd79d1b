"""What a call costs: by its tokens, its cached tokens, and its share of its engine's seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from pydantic import Field

from proxy.calls.steps import CallStep
from turnwise.features.prices import CHARGE, COST, Charge
from turnwise.settings import FromJson, Settings

if TYPE_CHECKING:
    from proxy.calls.capture import Running
    from proxy.services import Services
    from proxy.settings import ProxySettings
    from proxy.writer.process import NewTurn

Price = Annotated[Decimal, Field(ge=0, le=10**6, max_digits=20)]
PriceTable = Annotated[dict[Literal["prompt", "cached", "sampled", "engine_second"], Price], Field(min_length=1)]
Priced = Annotated[str, Field(pattern=r"^(\*|(engine|model|policy):.+)$")]


class PriceSettings(Settings):
    """What calls cost."""

    prices: Annotated[dict[Priced, PriceTable], FromJson] = Field(default={})
    """Prices of calls, as JSON: of all under `*`, of some under `engine:URL`, `model:NAME` (as engines serve it) and
    `policy:NAME`. The last of these four that fits a call is its table, with `prompt`, `cached` and `sampled` per
    million tokens, and `engine_second`. Without `cached` such tokens cost as much as others of the prompt."""
    currency: str = Field(default="USD", pattern=r"^\w{1,16}$")
    """What the prices are in."""


@dataclasses.dataclass(slots=True)
class DividedTime:
    """The seconds of one engine, divided among the calls that run in them."""

    num_calls: int = 0
    call_share: float = 0.0
    """The sum of one call's shares; what a call has of it is the difference between its end and its start."""
    _divided_at: float = 0.0

    def divide(self) -> float:
        """Divide the seconds since the last division among the calls that ran; return `call_share`."""
        now = time.perf_counter()
        if self.num_calls:
            self.call_share += (now - self._divided_at) / self.num_calls
        self._divided_at = now
        return self.call_share


class Prices(CallStep):
    """Charges each call that reached an engine, with its first turn."""

    columns = (COST,)

    def __init__(self, services: Services) -> None:
        settings = services.settings
        assert isinstance(settings, PriceSettings)
        self._prices, self._currency = settings.prices, settings.currency
        self._needs_usage = any("cached" in table for table in settings.prices.values())
        self._pool = services.pool
        self._times: defaultdict[str, DividedTime] = defaultdict(DividedTime)
        """By the engine's URL."""

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:
        return isinstance(settings, PriceSettings) and bool(settings.prices)

    def sent(self, running: Running) -> None:
        assert running.lane is not None
        if Prices in running.kept:  # another engine may have lost it, whose seconds it does not pay for
            self._leave(running)
        time_of_engine, call = self._times[running.lane.engine.url], running.call
        running.kept[Prices] = time_of_engine, time_of_engine.divide()
        time_of_engine.num_calls += 1
        options = call.body.get("stream_options") or {}
        if self._needs_usage and call.stream and isinstance(options, dict) and not options.get("include_usage"):
            call.engine_fields |= {"stream_options": {"include_usage": True}}

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        if (charge := self._charge(running, turns, self._leave(running))) is not None:
            turns[0].extra[CHARGE] = charge

    def ended(self, running: Running) -> None:
        self._leave(running)  # it has no turn with tokens

    def _leave(self, running: Running) -> float:
        """Divide its engine's seconds without a call from now on; return its share of them."""
        time_of_engine, begun = running.kept.pop(Prices)
        share: float = time_of_engine.divide() - begun
        time_of_engine.num_calls -= 1
        return share

    def _charge(self, running: Running, turns: list[NewTurn], share: float) -> Charge | None:
        """Return what a call costs with its share of its engine's seconds; None where no table of prices fits it."""
        lane, policy_id = running.lane, running.place.session.policy_id
        assert lane is not None
        policy = self._pool.policy_names.get(policy_id)
        names = f"policy:{policy}", f"model:{lane.engine.model}", f"engine:{lane.engine.url}", "*"
        table = next((self._prices[name] for name in names if name in self._prices), None)
        if table is None:
            return None
        nothing, num_prompt, num_cached = Decimal(0), turns[0].prompt_length, 0
        with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError, ValueError):  # an engine need not say it
            said = msgspec.json.decode(running.usage)["prompt_tokens_details"]["cached_tokens"]
            num_cached = min(num_prompt, max(0, int(said)))
        tokens = table.get("prompt", nothing) * (num_prompt - num_cached)
        tokens += table.get("cached", table.get("prompt", nothing)) * num_cached
        tokens += table.get("sampled", nothing) * sum(len(turn.token_ids) for turn in turns)
        cost = tokens / 10**6 + table.get("engine_second", nothing) * Decimal(share)
        return running.principal.root_key_id, policy_id, self._currency, cost
