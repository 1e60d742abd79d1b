"""Export of sessions as OpenTelemetry traces, one OTLP/JSON request per session, with rewards as scores.

The root span is the session, each turn is a span below it, named by the semantic conventions for generative AI.
Langfuse reads its own attributes (`langfuse.*`); a reward is an evaluation event of its span, and for Langfuse a score.
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from turnwise import __version__
from turnwise.types import Json, Outcome

INTERNAL, CLIENT = 1, 3
"""Kinds of spans."""
FAILED = (Outcome.ERROR, Outcome.ABORTED)


def lines(session: Json) -> Iterator[Json]:
    """Yield the session's trace as one export request."""
    rewards: list[Json] = session["rewards"]
    spans = [_session_span(session, [line for line in rewards if line["turn_id"] is None])]
    for turn in session["turns"]:
        own = [line for line in rewards if line["turn_id"] == turn["turn_id"]]
        spans.append(_turn_span(session, turn, own))
    resource = {"attributes": _attributes({"service.name": "turnwise", "service.version": __version__})}
    scope = {"name": "turnwise.export", "version": __version__}
    yield {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}


def scores(session: Json) -> Iterator[Json]:
    """Yield the session's rewards as scores of Langfuse; a score that is sent again replaces itself."""
    trace_id = trace_id_of(session)
    for line in session["rewards"]:
        score: Json = {
            "id": _hex(trace_id, line["turn_id"] or "", str(line["step"]), line["name"])[:32],
            "traceId": trace_id,
            "name": line["name"],
            "value": line["value"],
            "dataType": "NUMERIC",
        }
        if line["turn_id"] is not None:
            score["observationId"] = span_id_of(session, line["turn_id"])
        comment = [line["source"] or "", "" if line["step"] is None else f"step {line['step']}"]
        if any(comment):
            score["comment"] = ", ".join(filter(None, comment))
        yield score


def trace_id_of(session: Json) -> str:
    """Return the trace's id, 32 hexadecimal digits that follow from tenant and session."""
    return _hex(session["tenant"], session["session_id"])[:32]


def span_id_of(session: Json, turn_id: str) -> str:
    """Return a span's id, 16 hexadecimal digits; an empty turn id gives that of the session's span."""
    return _hex(session["tenant"], session["session_id"], turn_id)[:16]


def _session_span(session: Json, rewards: Sequence[Json]) -> Json:
    end = session["ended_at"] or session["last_active_at"]
    attributes = {
        "session.id": session["session_id"],
        "langfuse.trace.name": session["task_id"] or session["session_id"],
        "langfuse.session.id": session["group_id"],
        "langfuse.trace.tags": [session["split"]],
        "turnwise.tenant": session["tenant"],
        "turnwise.task_id": session["task_id"],
        "turnwise.group_id": session["group_id"],
        "turnwise.run": session["run"],
        "turnwise.split": session["split"],
        "turnwise.status": session["status"],
        "turnwise.termination_reason": session["termination_reason"],
        "turnwise.reward": session["reward"],
        "langfuse.trace.metadata.reward": session["reward"],
        "langfuse.trace.metadata.session_id": session["session_id"],
        "langfuse.trace.metadata.tenant": session["tenant"],
    }
    return {
        "traceId": trace_id_of(session),
        "spanId": span_id_of(session, ""),
        "name": f"session {session['task_id'] or session['session_id']}",
        "kind": INTERNAL,
        "startTimeUnixNano": _nanos(session["created_at"]),
        "endTimeUnixNano": _nanos(max(end, session["created_at"], key=dt.datetime.fromisoformat)),
        "attributes": _attributes(attributes),
        "events": [_evaluation(line) for line in rewards],
        "status": {},
    }


def _turn_span(session: Json, turn: Json, rewards: Sequence[Json]) -> Json:
    prompt, reply = json.dumps(turn["messages"], ensure_ascii=False), json.dumps(turn["response"], ensure_ascii=False)
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": turn["model"],
        "gen_ai.response.id": turn["turn_id"],
        "gen_ai.response.finish_reasons": [turn["finish_reason"]] if turn["finish_reason"] else None,
        "gen_ai.usage.input_tokens": turn["prompt_length"],
        "gen_ai.usage.output_tokens": len(turn["token_ids"]),
        "gen_ai.request.temperature": turn["sampling"].get("temperature"),
        "langfuse.observation.type": "generation",
        "langfuse.observation.input": prompt,
        "langfuse.observation.output": reply,
        "session.id": session["session_id"],
        "turnwise.step": turn["step"],
        "turnwise.chain_id": turn["chain_id"],
        "turnwise.parent_turn_id": turn["parent_turn_id"],
        "turnwise.outcome": turn["outcome"],
        "turnwise.reason": turn["reason"],
        "turnwise.role": turn["role"],
        "turnwise.policy_version_first": turn["policy_version_first"],
        "turnwise.policy_version_last": turn["policy_version_last"],
    }
    return {
        "traceId": trace_id_of(session),
        "spanId": span_id_of(session, turn["turn_id"]),
        "parentSpanId": span_id_of(session, ""),
        "name": f"chat {turn['model']}".strip(),
        "kind": CLIENT,
        "startTimeUnixNano": _nanos(turn["created_at"]),
        "endTimeUnixNano": _nanos(turn["created_at"], turn["duration_seconds"]),
        "attributes": _attributes(attributes),
        "events": [_evaluation(line) for line in rewards],
        "status": {"code": 2, "message": turn["reason"] or turn["outcome"]} if turn["outcome"] in FAILED else {},
    }


def _evaluation(line: Json) -> Json:
    attributes = {
        "gen_ai.evaluation.name": line["name"],
        "gen_ai.evaluation.score.value": float(line["value"]),
        "gen_ai.evaluation.explanation": line["source"],
        "turnwise.step": line["step"],
    }
    return {
        "name": "gen_ai.evaluation.result",
        "timeUnixNano": _nanos(line["created_at"]),
        "attributes": _attributes(attributes),
    }


def _attributes(values: Json) -> list[Json]:
    """Return attributes in OTLP's form, without those that have no value."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}


def _nanos(instant: str, seconds: float = 0.0) -> str:
    """Return nanoseconds since 1970 of an ISO time, or of the instant so many seconds after it."""
    return str(int((dt.datetime.fromisoformat(instant).timestamp() + seconds) * 1_000_000) * 1000)


def _hex(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
