"""The registry of wire formats. A new format is a module of its own and one entry here."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions, TextCompletions
from proxy.dialects.gemini import Gemini
from proxy.dialects.messages import HOSTED_BLOCKS, Messages
from proxy.dialects.response_items import HOSTED_ITEMS
from proxy.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Responses(), Messages(), Gemini())
"""All dialects. The first one answers paths that no other claims with `error_prefixes`."""
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
SESSION_PREFIX = "/sessions/{session_id}"


def dialect_of_path(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Return the dialect whose error shape answers a path that no route serves."""
    if path.startswith("/sessions/"):
        path = "/" + path.removeprefix("/sessions/").partition("/")[2]
    for dialect in DIALECTS:
        if path.startswith(tuple(dialect.error_prefixes)):
            return dialect
    return dialect_of_headers(headers, DIALECTS[0])


def dialect_of_headers(headers: Mapping[bytes, bytes], default: Dialect) -> Dialect:
    return next((each for each in DIALECTS if each.marker_header and each.marker_header in headers), default)
