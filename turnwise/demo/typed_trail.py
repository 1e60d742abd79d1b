"""The trail for agents whose tools are typed functions: the tool's schema is the one that pydantic-ai generates.

Task, conversations and rewards are those of `trail`. Only the text of the tool's schema differs, which the model reads
in every system prompt.
"""

from __future__ import annotations

from typing import Any

from turnwise.demo import trail
from turnwise.demo.trail import warm_up_conversation

__all__ = ["TOOLS", "for_agent", "warm_up_conversation"]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a person up.",
            "parameters": {
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
                "type": "object",
            },
        },
    }
]


def for_agent(task: trail.TrailTask) -> dict[str, Any]:
    return {**task.for_agent(), "answer": task.answer}
