"""Tools that OpenAI, Anthropic or Google run on their own servers: no engine serves them, so requests lose them."""

from __future__ import annotations

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
"""Known names: each is a label value of the metric. All other names count as `other`."""
