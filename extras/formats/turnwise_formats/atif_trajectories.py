"""Import of ATIF trajectories: agent steps become replies, observations become tool results.

Token ids of a trajectory are kept. Where some agent steps have token ids, only those are trained; a trajectory without
any is tokenised. Trajectories with the same session id are one session.
"""

from __future__ import annotations

import json
from typing import Any

from turnwise.errors import BadLine
from turnwise.types import Json
from turnwise_formats.values import check_whole, instant


def key_of(document: Json) -> str | None:
    """Return the trajectory's session."""
    session_id = document.get("session_id")
    return session_id if isinstance(session_id, str) and session_id else None


def drafts_of(document: Json) -> list[Json]:
    """Return the session with this trajectory.

    Raises:
        BadLine: it is not an ATIF trajectory, or has no agent step.
    """
    if not str(document.get("schema_version") or "").startswith("ATIF-"):
        raise BadLine(f"its schema_version is {document.get('schema_version')!r}, not ATIF's")
    steps = document.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise BadLine("its steps are not a list of objects")
    agent, extra = _object(document.get("agent")), _object(document.get("extra"))
    messages: list[Json] = []
    steps_of: dict[int, Json] = {}
    for step in steps:
        if step.get("source") == "agent" and not step.get("is_copied_context"):
            steps_of[len(messages)] = step
        messages += _messages(step)
    check_whole(messages)
    conversation = _conversation(messages, steps_of, extra.get("tools") or agent.get("tool_definitions"))
    rewards = {"reward": extra.get("reward")}
    task_id = extra.get("task_id")
    known_task = task_id if isinstance(task_id, str) else None
    return [{"conversations": [conversation], "rewards": rewards, "task_id": known_task}]


def _conversation(messages: list[Json], steps_of: dict[int, Json], tools: Any) -> Json:
    sampled = {index: ids for index, step in steps_of.items() if (ids := _sampled(step)) is not None}
    return {
        "messages": messages,
        "trained": list(sampled or steps_of),
        "tools": tools,
        "model": next((str(step["model_name"]) for step in steps_of.values() if step.get("model_name")), ""),
        "sampled": sampled,
        "created_at": {n: at for n, step in steps_of.items() if (at := instant(step.get("timestamp"))) is not None},
    }


def _messages(step: Json) -> list[Json]:
    source = step.get("source")
    if source not in ("system", "user", "agent"):
        raise BadLine(f"a step has the source {source!r}; system, user and agent are known")
    if source != "agent":
        return [{"role": source, "content": step.get("message") or ""}, *_results(step)]
    reply: Json = {"role": "assistant", "content": step.get("message")}
    if step.get("reasoning_content"):
        reply["reasoning"] = step["reasoning_content"]
    calls = step.get("tool_calls") or []
    if calls:
        reply["tool_calls"] = [_tool_call(call) for call in calls]
        reply["content"] = step.get("message") or None
    return [reply, *_results(step)]


def _tool_call(call: Any) -> Json:
    if not isinstance(call, dict) or not call.get("function_name"):
        raise BadLine(f"a tool call {call!r:.80} has no function_name")
    arguments = call.get("arguments")
    unparsed = arguments.get("unparsed") if isinstance(arguments, dict) and len(arguments) == 1 else None
    text = unparsed if isinstance(unparsed, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": str(call.get("tool_call_id") or ""),
        "type": "function",
        "function": {"name": str(call["function_name"]), "arguments": text},
    }


def _results(step: Json) -> list[Json]:
    """Return what a step observed: results of its calls, or a text of the environment."""
    found: list[Json] = []
    for result in _object(step.get("observation")).get("results") or []:
        content = result.get("content") if isinstance(result, dict) else None
        if content is None:
            raise BadLine(f"an observation {result!r:.80} has no content, so the model read what is not known")
        if result.get("source_call_id"):
            found.append({"role": "tool", "tool_call_id": result["source_call_id"], "content": content})
        else:
            found.append({"role": "user", "content": content})
    return found


def _sampled(step: Json) -> Json | None:
    metrics = _object(step.get("metrics"))
    prompt, ids = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
    if not prompt or not ids:
        return None
    return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": metrics.get("logprobs") or []}


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
