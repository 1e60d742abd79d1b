"""What is reported of tools and items that a dialect removes from a request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from proxy.calls.steps import CallStep
from proxy.features.formats.messages import HOSTED_BLOCKS
from proxy.features.formats.response_items import HOSTED_ITEMS
from proxy.features.formats.translated import TranslatedCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.metrics import Counted

HOSTED_TOOLS = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "image_generation", "code_interpreter", "computer"),
        *("computer_use_preview", "mcp", "local_shell", "shell", "apply_patch", "tool_search"),
        *("programmatic_tool_calling", "web_fetch", "code_execution", "bash", "text_editor", "memory", "advisor"),
        *("mcp_toolset", "retrieval", "mcpServers"),
        *("googleSearch", "googleSearchRetrieval", "codeExecution", "urlContext", "googleMaps", "fileSearch"),
        *("computerUse", "enterpriseWebSearch", "google_search", "url_context", "google_maps"),
    }
)
"""Tools that OpenAI, Anthropic or Google run on their own servers: requests lose them. Each name is a label value of
the metric; all other names count as `other`."""
ITEM_TYPES = HOSTED_ITEMS | HOSTED_BLOCKS | {"thoughtSignature"}
"""Types of items, blocks and parts that may be dropped; each is a label value of the metric."""
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
