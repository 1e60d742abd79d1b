"""Sampling that a client did not ask for: pinned parameters, and greedy calls that explore without their seed.

A narrower pin wins: of the proxy, the tenant, the policy, the key, the session. A call at temperature 0 teaches
nothing, because no other token could have been sampled. So a share of the sessions samples such calls at a temperature.
The session is chosen, not the call: an episode is of one kind, and comparisons of versions leave explored ones out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, field_validator

from proxy.calls.steps import CallStep
from turnwise.sampling import with_numbers
from turnwise.settings import FromJson, Settings
from turnwise.store.selection import takes
from turnwise.types import Json, Session, Split

if TYPE_CHECKING:
    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.dialects.base import Call
    from proxy.metrics import Counted
    from proxy.services import Services
    from proxy.sessions.memory import Enter

PINNABLE = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
        *("allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("reasoning_effort", "chat_template_kwargs", "thinking_token_budget", "parallel_tool_calls"),
        *("response_format", "structured_outputs"),
    }
)
"""Request fields that a session or a pin can set for all of its calls."""
ASKED = "asked"
"""Key of a turn's sampling with what the call asked for in the place of pinned parameters, None where it set none."""
EXPLORED = "explored"
"""Key of a turn's sampling that is true where a greedy call was sampled at a temperature."""
_EXPLORATION = -1
"""Stands for a version where the sessions that explore are drawn."""


def check_pinnable(sampling: Mapping[str, Any]) -> None:
    """Check that parameters can be set for many calls.

    Raises:
        ValueError: some cannot.
    """
    if refused := sorted(sampling.keys() - PINNABLE):
        raise ValueError(
            f"{', '.join(refused)} cannot be set for a whole session, because it changes more than the sampling of "
            f"a reply; set it in each call, or set one of {', '.join(sorted(PINNABLE))}"
        )


class PinSettings(Settings):
    """Sampling that replaces what calls ask for."""

    sampling_pins: Annotated[dict[str, dict[str, Any]], FromJson] = Field(default={})
    """Sampling parameters that replace those of calls, as JSON: of all under `*`, of some under `tenant:NAME`,
    `policy:NAME` and `key:ID`. A later one of these four wins over an earlier one, and a session's own over all."""
    explore: float = Field(default=0.0, ge=0, le=1)
    """Share of the sessions whose calls at temperature 0, which teach nothing, sample at `explore_temperature`: chosen
    by session, never of `eval` sessions, canaries and hold-outs, and left out where versions are compared."""
    explore_temperature: float = Field(default=1.0, gt=0)

    @field_validator("sampling_pins")
    @classmethod
    def _can_be_pinned(cls, pins: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, sampling in pins.items():
            if name != "*" and name.partition(":")[0] not in ("tenant", "policy", "key"):
                raise ValueError(f"{name!r} pins for nobody; write *, tenant:NAME, policy:NAME or key:ID")
            check_pinnable(sampling)
        return pins


class Pins:
    """Replaces parameters of calls."""

    def __init__(self, settings: PinSettings, policy_name: Callable[[int], str | None]) -> None:
        self._pins: Mapping[str, Json] = settings.sampling_pins
        self._share, self._temperature = settings.explore, settings.explore_temperature
        self._policy_name = policy_name

    def opened(self, session: Session) -> Session:
        """Return a new session as it is stored: with the temperature of its greedy calls if it explores."""
        if self._share and session.split is Split.TRAIN and takes(_EXPLORATION, self._share, session):
            return dataclasses.replace(session, explores=self._temperature)
        return session

    def pinned(self, session: Session, key_id: str) -> Json:
        """Return the parameters that replace those of a call in a session."""
        policy = self._policy_name(session.policy_id)
        names = ("*", f"tenant:{session.tenant}", f"policy:{policy}", f"key:{key_id}")
        merged: Json = {}
        for name in names:
            merged |= self._pins.get(name, {})
        return merged | session.sampling

    def entering(self, session: Session) -> Enter | None:
        return self.enter if self._pins or session.sampling or session.explores is not None else None

    def enter(self, call: Call, session: Session, key_id: str) -> None:
        """Replace a call's parameters; note what it asked for, and whether it explores."""
        used = self.pinned(session, key_id) if self._pins else session.sampling
        asked = call.body
        is_greedy = session.explores is not None and with_numbers({**asked, **used}).get("temperature") == 0
        if is_greedy:
            used = {**used, "temperature": session.explores}
            if {**asked, **used}.get("seed") is not None:  # by it all runs of a task would sample the same
                used["seed"] = None
        if used:
            replaced = {name: asked.get(name) for name, value in used.items() if asked.get(name) != value}
            call.notes = call.notes | ({ASKED: replaced} if replaced else {}) | ({EXPLORED: True} if is_greedy else {})
            call.body = with_numbers({**asked, **used})


class PinStep(Pins, CallStep):
    """Pins what the operator or the session's creator wants, and lets greedy sessions explore."""

    session_fields: ClassVar[Mapping[str, Callable[[Any], None]]] = {"sampling": check_pinnable}
    marks = frozenset({EXPLORED})
    counters: ClassVar[Mapping[str, Counted]] = {
        "explored": ("turnwise_explored", "Greedy calls that were sampled at a temperature", ())
    }
    explored: Counter

    def __init__(self, services: Services) -> None:
        settings, pool = services.settings, services.pool
        assert isinstance(settings, PinSettings)
        super().__init__(settings, lambda policy_id: pool.policy_names.get(policy_id))  # noqa: PLW0108  names are replaced
        services.opened.append(self.opened)

    def sent(self, running: Running) -> None:
        if EXPLORED in running.call.notes and not running.is_sent_again:
            self.explored.inc()
