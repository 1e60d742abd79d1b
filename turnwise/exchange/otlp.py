"""Sessions as OpenTelemetry traces, one OTLP/JSON request per session, with rewards as scores.

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
from turnwise.credit import latest_lines
from turnwise.store.lineage import TurnView
from turnwise.store.session_records import SessionRecord
from turnwise.types import Json, Outcome, Reward, Session

INTERNAL, CLIENT = 1, 3
"""Kinds of spans."""
FAILED = (Outcome.ERROR, Outcome.ABORTED)


def lines(record: SessionRecord) -> Iterator[Json]:
    """Yield the session's trace as one export request."""
    rewards = latest_lines(record.rewards)
    spans = [_session_span(record.session, [line for line in rewards if line.turn_id is None])]
    for view in record.views():
        own = [line for line in rewards if line.turn_id == view.turn.turn_id]
        spans.append(_turn_span(record.session, view, own))
    resource = {"attributes": _attributes({"service.name": "turnwise", "service.version": __version__})}
    scope = {"name": "turnwise.export", "version": __version__}
    yield {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]}


def scores(record: SessionRecord) -> Iterator[Json]:
    """Yield the session's rewards as scores of Langfuse; a score that is sent again replaces itself."""
    trace_id = trace_id_of(record.session)
    for line in latest_lines(record.rewards):
        score: Json = {
            "id": _hex(trace_id, line.turn_id or "", str(line.step), line.name)[:32],
            "traceId": trace_id,
            "name": line.name,
            "value": line.value,
            "dataType": "NUMERIC",
        }
        if line.turn_id is not None:
            score["observationId"] = span_id_of(record.session, line.turn_id)
        comment = [line.source or "", "" if line.step is None else f"step {line.step}"]
        if any(comment):
            score["comment"] = ", ".join(filter(None, comment))
        yield score


def trace_id_of(session: Session) -> str:
    """Return the trace's id, 32 hexadecimal digits that follow from tenant and session."""
    return _hex(session.tenant, session.session_id)[:32]


def span_id_of(session: Session, turn_id: str) -> str:
    """Return a span's id, 16 hexadecimal digits; an empty turn id gives that of the session's span."""
    return _hex(session.tenant, session.session_id, turn_id)[:16]


def _session_span(session: Session, rewards: Sequence[Reward]) -> Json:
    end = session.ended_at or session.last_active_at
    attributes = {
        "session.id": session.session_id,
        "langfuse.trace.name": session.task_id or session.session_id,
        "langfuse.session.id": session.group_id,
        "langfuse.trace.tags": [session.split.value],
        "turnwise.tenant": session.tenant,
        "turnwise.task_id": session.task_id,
        "turnwise.group_id": session.group_id,
        "turnwise.run": session.run,
        "turnwise.split": session.split.value,
        "turnwise.status": session.status.value,
        "turnwise.termination_reason": session.termination_reason,
        "turnwise.reward": session.reward,
        "langfuse.trace.metadata.reward": session.reward,
        "langfuse.trace.metadata.session_id": session.session_id,
    }
    return {
        "traceId": trace_id_of(session),
        "spanId": span_id_of(session, ""),
        "name": f"session {session.task_id or session.session_id}",
        "kind": INTERNAL,
        "startTimeUnixNano": _nanos(session.created_at),
        "endTimeUnixNano": _nanos(max(end, session.created_at)),
        "attributes": _attributes(attributes),
        "events": [_evaluation(line) for line in rewards],
        "status": {},
    }


def _turn_span(session: Session, view: TurnView, rewards: Sequence[Reward]) -> Json:
    turn = view.turn
    prompt, reply = json.dumps(view.messages, ensure_ascii=False), json.dumps(turn.response, ensure_ascii=False)
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": turn.model,
        "gen_ai.response.id": turn.turn_id,
        "gen_ai.response.finish_reasons": [turn.finish_reason] if turn.finish_reason else None,
        "gen_ai.usage.input_tokens": turn.prompt_length,
        "gen_ai.usage.output_tokens": int(turn.token_ids.size),
        "gen_ai.request.temperature": turn.sampling.get("temperature"),
        "langfuse.observation.type": "generation",
        "langfuse.observation.input": prompt,
        "langfuse.observation.output": reply,
        "session.id": session.session_id,
        "turnwise.step": turn.step,
        "turnwise.chain_id": turn.chain_id,
        "turnwise.parent_turn_id": turn.parent_turn_id,
        "turnwise.outcome": turn.outcome.value,
        "turnwise.reason": turn.reason,
        "turnwise.role": None if turn.role is None else turn.role.value,
        "turnwise.policy_version_first": turn.policy_version_first,
        "turnwise.policy_version_last": turn.policy_version_last,
    }
    end = turn.created_at + dt.timedelta(seconds=turn.duration_seconds)
    return {
        "traceId": trace_id_of(session),
        "spanId": span_id_of(session, turn.turn_id),
        "parentSpanId": span_id_of(session, ""),
        "name": f"chat {turn.model}".strip(),
        "kind": CLIENT,
        "startTimeUnixNano": _nanos(turn.created_at),
        "endTimeUnixNano": _nanos(end),
        "attributes": _attributes(attributes),
        "events": [_evaluation(line) for line in rewards],
        "status": {"code": 2, "message": turn.reason or turn.outcome.value} if turn.outcome in FAILED else {},
    }


def _evaluation(line: Reward) -> Json:
    attributes = {
        "gen_ai.evaluation.name": line.name,
        "gen_ai.evaluation.score.value": float(line.value),
        "gen_ai.evaluation.explanation": line.source,
        "turnwise.step": line.step,
    }
    return {
        "name": "gen_ai.evaluation.result",
        "timeUnixNano": _nanos(line.created_at),
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


def _nanos(instant: dt.datetime) -> str:
    return str(int(instant.timestamp() * 1_000_000) * 1000)


def _hex(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
