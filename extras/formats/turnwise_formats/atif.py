"""Export of sessions as Agent Trajectory Interchange Format 1.4, a trajectory for each conversation.

A prompt's messages become user and system steps; each sampled reply becomes an agent step with its token ids and
logprobs, and what its tools returned becomes that step's observation.
https://github.com/laude-institute/harbor, RFC 0001.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from turnwise import __version__
from turnwise.client.conversations import AgentConversation, conversations
from turnwise.types import Json

SCHEMA_VERSION = "ATIF-v1.4"


def lines(session: Json) -> Iterator[Json]:
    """Yield a trajectory per conversation of the session."""
    for conversation in conversations(session):
        yield _trajectory(conversation)


def _trajectory(conversation: AgentConversation) -> Json:
    session, last = conversation.session, conversation.path[-1]
    steps = _steps(conversation)
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": session["session_id"],
        "agent": {"name": "turnwise", "version": __version__, "model_name": last["model"]},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn["prompt_length"] for turn in conversation.path),
            "total_completion_tokens": sum(len(turn["token_ids"]) for turn in conversation.path),
            "total_steps": len(steps),
        },
        "extra": {
            "task_id": session["task_id"],
            "run": session["run"],
            "group_id": session["group_id"],
            "reward": session["reward"],
            "termination_reason": session["termination_reason"],
            "chain_id": last["chain_id"],
            "tools": conversation.tools,
        },
    }


def _steps(conversation: AgentConversation) -> list[Json]:
    replies = conversation.replies
    steps: list[dict[str, Any]] = []
    calls: set[str] = set()
    for place, message in enumerate(conversation.messages):
        if message.get("role") == "tool" and message.get("tool_call_id") in calls:
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": message["tool_call_id"], "content": _text(message.get("content"))})
            continue
        step = _step(message, replies.get(place))
        calls = {str(call.get("id")) for call in message.get("tool_calls") or [] if isinstance(call, dict)}
        steps.append({"step_id": len(steps) + 1} | step)
    return steps


def _step(message: Json, reply: Json | None) -> dict[str, Any]:
    role = message.get("role")
    source = "agent" if role == "assistant" else "system" if role in ("system", "developer") else "user"
    step: dict[str, Any] = {"source": source, "message": _text(message.get("content"))}
    if source != "agent":
        return step
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        step["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [_tool_call(call) for call in calls]
    return step if reply is None else step | _sampled(reply)


def _sampled(turn: Json) -> dict[str, Any]:
    return {
        "timestamp": turn["created_at"],
        "model_name": turn["model"],
        "metrics": {
            "prompt_tokens": turn["prompt_length"],
            "completion_tokens": len(turn["token_ids"]),
            "prompt_token_ids": turn["prompt_token_ids"],
            "completion_token_ids": turn["token_ids"],
            "logprobs": turn["logprobs"],
        },
        "extra": {
            "turn_id": turn["turn_id"],
            "outcome": turn["outcome"],
            "policy_version_first": turn["policy_version_first"],
            "policy_version_last": turn["policy_version_last"],
            "rewards": [{"name": line["name"], "value": line["value"]} for line in turn["rewards"]],
        },
    }


def _tool_call(call: Json) -> Json:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):  # sampled arguments need not be a JSON object, the format's must be
        arguments = {"unparsed": function.get("arguments")}
    return {"tool_call_id": call.get("id") or "", "function_name": function.get("name") or "", "arguments": arguments}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)
