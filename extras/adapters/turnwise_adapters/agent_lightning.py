"""On which session or turn a reward falls that agent-lightning's `emit_reward` emits.

    tracer.init_worker(0)
    opentelemetry.trace.get_tracer_provider().add_span_processor(RewardProcessor("http://127.0.0.1:8100"))

A reward that is linked to a response (`make_link_attributes({"gen_ai.response.id": completion.id})`) is that turn's,
because the proxy's turns have the ids of the completions. Every other reward is that of the session: the processor's,
or `TURNWISE_SESSION_ID` of an agent under `turnwise run`. Of a reward with several dimensions only the primary one is
posted, as agent-lightning trains on that one alone. OpenTelemetry is not imported: a processor is any class with these
methods.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from turnwise.client import Client
from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.errors import TurnwiseError

log = logging.getLogger(__name__)

SOURCE = "agent-lightning"
INDEXED = re.compile(r"agentlightning\.(reward|link)\.(\d+)\.(name|value|key_match|value_match)")
"""An attribute of one of the span's rewards or links."""
RESPONSE_ID = "gen_ai.response.id"
PRIMARY = "primary"
"""Name that agent-lightning gives a reward without one; here it is the proxy's default."""


class RewardProcessor:
    """A span processor that posts each emitted reward."""

    def __init__(
        self, proxy: str = DEFAULT_BASE_URL, *, session_id: str | None = None, api_key: str | None = None
    ) -> None:
        self._client = Client(proxy, api_key)
        self._session_id = session_id or os.environ.get("TURNWISE_SESSION_ID")

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Do nothing: a span has its rewards when it ends."""

    def _on_ending(self, span: Any) -> None:
        """Do nothing; OpenTelemetry calls this before `on_end`."""

    def on_end(self, span: Any) -> None:
        """Post the rewards of a span; one that the proxy refuses is logged, so that the agent continues.

        Raises:
            ValueError: the reward is linked to no response, and no session is known.
        """
        rewards = rewards_of(span.attributes or {}, self._session_id)
        try:
            if rewards:
                self._client.rewards(rewards)
        except TurnwiseError as error:
            log.error("the rewards %s were not stored: %s", rewards, error)  # noqa: TRY400  the message has the reason

    def shutdown(self) -> None:
        """Close the connection."""
        self._client.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        """Return True: nothing waits."""
        return True


def rewards_of(attributes: Mapping[str, Any], session_id: str | None) -> list[dict[str, Any]]:
    """Return the reward lines of a span: one for each linked turn, or one for the session; none without a reward.

    Raises:
        ValueError: the reward is linked to no response, and no session is known.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {"reward": defaultdict(dict), "link": defaultdict(dict)}
    for name, value in attributes.items():
        if match := INDEXED.fullmatch(name):
            kind, index, field = match.groups()
            found[kind][int(index)][field] = value
    if not found["reward"]:
        return []
    turns = [each["value_match"] for each in found["link"].values() if each.get("key_match") == RESPONSE_ID]
    if not turns and session_id is None:
        raise ValueError("a reward without a link needs a session: pass session_id, or set TURNWISE_SESSION_ID")
    targets = [{"turn_id": turn_id} for turn_id in turns] or [{"session_id": session_id}]
    primary = found["reward"][min(found["reward"])]
    line = {"value": float(primary["value"]), "source": SOURCE}
    if primary["name"] != PRIMARY:
        line["name"] = primary["name"]
    return [{**target, **line} for target in targets]
