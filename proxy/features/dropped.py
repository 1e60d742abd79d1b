"""What is reported of tools and items that a dialect removes from a request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from proxy.calls.steps import CallStep
from proxy.dialects.registry import HOSTED_TOOLS, ITEM_TYPES
from proxy.dialects.translated import TranslatedCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.metrics import Counted

MAX_TOOL_NAME = 64
DROPPED_TOOLS = "x-turnwise-dropped-tools"
"""Reply header that names the tools which were removed from the request."""
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")


class Dropped(CallStep):
    """Counts what was removed, and names removed tools in the reply."""

    dialects = frozenset({"responses", "messages", "gemini"})
    counters: ClassVar[Mapping[str, Counted]] = {
        "tools": ("turnwise_dropped_tools", "Removed tools that only a hosted service can run", ["tool"]),
        "items": (
            "turnwise_dropped_items",
            "Blocks, items and parts of conversations that only a hosted service can read, in each call that has them",
            ["type"],
        ),
    }
    tools: Counter
    items: Counter

    async def asked(self, running: Running) -> None:
        call = running.call
        assert isinstance(call, TranslatedCall)
        for kind in call.dropped_items:
            self.items.labels(kind if kind in ITEM_TYPES else "other").inc()
        names = [_NOT_A_NAME.sub("", tool)[:MAX_TOOL_NAME] or "unknown" for tool in call.dropped_tools]
        for name in names:
            self.tools.labels(name if name in HOSTED_TOOLS else "other").inc()
        if names:
            running.reply_headers[DROPPED_TOOLS] = ", ".join(names)
