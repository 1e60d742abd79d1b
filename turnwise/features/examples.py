"""Pinned examples: the exact prompt of a turn that went wrong, and the check that each later version must pass there.

An example is a copy: the prompt's tokens, the sampling, and what the check reads. It belongs to its tenant and to the
policy that sampled the turn. Whatever deletes the session deletes it too, because it has what was said there, and a
session that is marked as not to be trained is no example. `turnwise examples export` writes what stays: lines for the
agent's own repository, which an import stores without a session.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping

import numpy as np
import sqlalchemy as sa

from turnwise.errors import InvalidRequest, NotFound
from turnwise.features import labels
from turnwise.image_urls import image_digests
from turnwise.sampling import FORCED, GRAMMARS, NOT_REPLAYED, first_of, unreadable
from turnwise.store import rows
from turnwise.store.extensions import Extension
from turnwise.store.policies import find_policy, names_of_policies
from turnwise.store.schema import columns_of, index, metadata, sessions
from turnwise.store.schema import turns as stored_turns
from turnwise.store.selection import session_row
from turnwise.store.statements import insert_rows, read_page
from turnwise.store.turns import TurnView, read_turn
from turnwise.store.versions import known_version
from turnwise.types import DEFAULT_POLICY, TRAINED_ROLES, Json, TokenIds, utc_now

MUST = "must"
"""The label of a session with a pinned example."""
MAX_EXAMPLES = 1000
"""Most examples of one tenant and policy."""
VERSIONS_KEPT = 50
"""Versions whose answers to an example are kept."""
NOT_AGAIN, TOOL_CALL, TEXT, COMMAND, RUBRIC = "not_again", "tool_call", "text", "command", "rubric"
FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    NOT_AGAIN: {},
    TOOL_CALL: {"name": str, "arguments": dict},
    TEXT: {"equals": str, "contains": str},
    COMMAND: {"name": str},
    RUBRIC: {"rubric": str, "least": (int, float)},
}
"""The fields of each kind of check. Only a tool call's arguments may be left out, and the least score of a rubric."""
NEEDED: Mapping[str, int] = {NOT_AGAIN: 0, TOOL_CALL: 1, TEXT: 1, COMMAND: 1, RUBRIC: 1}
"""How many of them a check has at least."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt that each version answers before it is published, and what a right answer is."""

    example_id: str
    """The id of the turn that was pinned."""
    tenant: str
    policy_id: int
    session_id: str | None = None
    """The turn's session; None for an imported example."""
    criterion: Json
    """The check: `kind`, and the fields of this kind."""
    note: str | None = None
    """Free text."""
    prompt: TokenIds
    reply: TokenIds
    """The reply that was pinned."""
    sampling: Json
    messages: list[Json]
    tools: list[Json] | None
    response: Json
    """The pinned reply as a message."""
    answers: Json = dataclasses.field(default_factory=dict)
    """By version how many of its answers are right, and of how many."""
    written_by: str | None = None
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)


examples = sa.Table(
    "examples",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("example_id", sa.Text, primary_key=True),
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk", ondelete="CASCADE")),
    *columns_of(Example, omit=frozenset({"tenant", "example_id", "session_id"})),
    index("ix_examples_session", "session_pk"),
    index("ix_examples_policy", "policy_id"),
)
_ROWS = rows.RowFormat(Example, examples, joined=("session_id",), free_text=("note",))
_JOINED = sa.select(examples, sessions.c.session_id).select_from(examples.outerjoin(sessions))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLine:
    """An example as JSON: what lists and exports show, and an import reads."""

    example_id: str
    policy: str
    """The policy that it is a gate of."""
    session_id: str | None
    """The session of the turn; null for an imported example."""
    check: Json
    """`kind`: `not_again`, `tool_call`, `text`, `command` or `rubric`, with the fields of this kind."""
    note: str | None
    model_digest: str | None
    """Digest of the model whose tokens these are; null where it is not known."""
    prompt_token_ids: list[int]
    reply_token_ids: list[int]
    sampling: Json
    messages: list[Json]
    tools: list[Json] | None
    response: Json
    answers: Json
    """By version how many of its answers were right, and of how many."""
    created_at: datetime.datetime


def checked(given: Json) -> Json:
    """Return a check without what it does not set.

    Raises:
        InvalidRequest: it has another kind or field, or lacks one.
    """
    kind, fields = given.get("kind"), {name: value for name, value in given.items() if value is not None}
    if kind not in FIELDS:
        raise InvalidRequest(f"a check's `kind` is one of {', '.join(FIELDS)}, not {kind!r:.80}", param="check")
    known = FIELDS[kind]
    del fields["kind"]
    for name, value in fields.items():
        if name not in known or not isinstance(value, known[name]) or isinstance(value, bool) or value == "":
            shown = ", ".join(f"`{each}`" for each in known) or "no other field"
            raise InvalidRequest(f"a check of kind {kind!r} has {shown}, not {name}={value!r:.80}", param="check")
    needed = list(known)[:1] if kind != TEXT else list(known)
    if sum(name in fields for name in needed) != NEEDED[kind]:
        raise InvalidRequest(f"a check of kind {kind!r} needs {' or '.join(needed)}", param="check")
    if kind == COMMAND and ("/" in fields["name"] or fields["name"].startswith(".")):
        raise InvalidRequest(
            f"a command is the name of a file in the trainer's `examples.commands`, not {fields['name']!r:.80}",
            param="check",
        )
    if kind == RUBRIC and not 0 <= fields.get("least", 0.5) <= 1:
        raise InvalidRequest(f"a rubric's `least` is from 0 to 1, not {fields['least']!r}", param="check")
    return {"kind": kind, **fields}


def pin(
    conn: sa.Connection,
    tenant: str,
    turn_id: str,
    check: Json,
    *,
    note: str | None = None,
    written_by: str | None = None,
) -> Example:
    """Make an example of a turn, in place of the one that it is, and label its session.

    Raises:
        InvalidRequest: the turn cannot be sampled again from what is stored of it, or may not be trained.
    """
    view = read_turn(conn, tenant, turn_id)
    session = session_row(conn, tenant, view.turn.session_id, lock=True)
    if reason := _why_not(view, is_trained=bool(session.train)):
        raise InvalidRequest(f"turn {turn_id!r} cannot be pinned: {reason}", param="turn_id")
    example = Example(
        example_id=turn_id,
        tenant=tenant,
        policy_id=view.turn.policy_id,
        session_id=view.turn.session_id,
        criterion=checked(check),
        note=note,
        prompt=view.prompt_token_ids,
        reply=view.turn.token_ids,
        sampling=view.turn.sampling,
        messages=view.messages,
        tools=view.tools,
        response=view.turn.response,
        written_by=written_by,
    )
    _store(conn, example, session.session_pk)
    label = labels.Label(label=MUST, note=note, written_by=written_by)
    labels.set_label(conn, tenant, view.turn.session_id, label)
    return example


def pin_session(conn: sa.Connection, tenant: str, session_id: str, *, note: str | None, written_by: str | None) -> None:
    """Pin a session's last reply as one that must not come again; where a turn of it is pinned, change its label."""
    session_pk = session_row(conn, tenant, session_id, lock=True).session_pk
    if conn.execute(sa.select(examples.c.example_id).where(examples.c.session_pk == session_pk)).first():
        labels.set_label(conn, tenant, session_id, labels.Label(label=MUST, note=note, written_by=written_by))
        return
    turn_id = last_reply(conn, tenant, session_id)
    pin(conn, tenant, turn_id, {"kind": NOT_AGAIN}, note=note, written_by=written_by)


def last_reply(conn: sa.Connection, tenant: str, session_id: str) -> str:
    """Return the id of a session's last turn with sampled tokens.

    Raises:
        InvalidRequest: it has none.
    """
    c, session_pk = stored_turns.c, session_row(conn, tenant, session_id).session_pk
    is_own = sa.or_(c.role.is_(None), c.role.in_([role.value for role in TRAINED_ROLES]))
    has_reply = c.session_pk == session_pk, is_own, sa.func.length(c.token_ids) > 0
    last = conn.execute(sa.select(c.turn_id).where(*has_reply).order_by(c.seq.desc()).limit(1)).scalar_one_or_none()
    if last is None:
        raise InvalidRequest(f"session {session_id!r} has no reply to pin", param="session_id")
    return str(last)


def is_pinned(conn: sa.Connection, tenant: str, example_id: str) -> bool:
    return conn.execute(sa.select(examples.c.example_id).where(*_is(tenant, example_id))).first() is not None


def unpin(conn: sa.Connection, tenant: str, example_id: str) -> None:
    """Remove an example, and with the last one of its session the label.

    Raises:
        NotFound: the tenant has no such example.
    """
    found = _row(conn, tenant, example_id)
    conn.execute(sa.delete(examples).where(*_is(tenant, example_id)))
    others = sa.select(examples.c.example_id).where(examples.c.session_pk == found.session_pk)
    if found.session_id is not None and not conn.execute(others.limit(1)).first():
        labels.remove_label(conn, tenant, found.session_id, MUST)


def unpin_session(conn: sa.Connection, tenant: str, session_id: str) -> None:
    session_pk = session_row(conn, tenant, session_id, lock=True).session_pk
    conn.execute(sa.delete(examples).where(examples.c.session_pk == session_pk))
    labels.remove_label(conn, tenant, session_id, MUST)


def of_policy(conn: sa.Connection, policy_id: int, tenant: str | None = None) -> list[Example]:
    """Return the examples that are a policy's gate, without those of sessions that may not be trained any more."""
    is_usable = sa.or_(examples.c.session_pk.is_(None), sessions.c.train == 1)
    wanted = [examples.c.policy_id == policy_id, is_usable]
    if tenant is not None:
        wanted.append(examples.c.tenant == tenant)
    found = _JOINED.where(*wanted).order_by(examples.c.tenant, examples.c.example_id)
    return [_ROWS.record(row) for row in conn.execute(found)]


def list_lines(
    conn: sa.Connection, tenant: str, *, limit: int | None = None, after: str | None = None
) -> tuple[list[ExampleLine], bool]:
    """Return a tenant's examples behind the one named `after`, by id, and whether there are more."""
    found = _JOINED.where(examples.c.tenant == tenant).order_by(examples.c.example_id)
    if after is not None:
        found = found.where(examples.c.example_id > after)
    page, has_more = (conn.execute(found).all(), False) if limit is None else read_page(conn, found, limit)
    names, digest = names_of_policies(conn), _model_digest(conn)
    return [_line(_ROWS.record(row), names, digest) for row in page], has_more


def read_line(conn: sa.Connection, tenant: str, example_id: str) -> ExampleLine:
    """Return an example.

    Raises:
        NotFound: the tenant has no such example.
    """
    return _line(_ROWS.record(_row(conn, tenant, example_id)), names_of_policies(conn), _model_digest(conn))


def import_line(conn: sa.Connection, tenant: str, line: Json, *, written_by: str | None = None) -> bool:
    """Store an exported example without a session; return False for one that is stored already.

    Raises:
        InvalidRequest: it is no exported example, or its tokens are another model's.
        NotFound: the tenant has no policy of its name.
    """
    own, given = _model_digest(conn), line.get("model_digest")
    if own is not None and given is not None and own != given:
        raise InvalidRequest(
            f"the tokens of example {line.get('example_id')!r:.80} are those of the model {given!r:.80}, and this is "
            f"{own!r}: pin the failure again with this model"
        )
    example = _example_of(line, tenant, find_policy(conn, tenant, str(line.get("policy", "default"))).policy_id)
    if is_pinned(conn, tenant, example.example_id):
        return False
    _store(conn, dataclasses.replace(example, written_by=written_by), None)
    return True


def add_answers(conn: sa.Connection, example: Example, version: int, right: int, num: int) -> None:
    """Keep how many of a version's answers are right, unless the example was pinned again meanwhile."""
    is_same = *_is(example.tenant, example.example_id), examples.c.created_at == rows.to_micros(example.created_at)
    stored = conn.execute(sa.select(examples.c.answers).where(*is_same).with_for_update()).scalar_one_or_none()
    if stored is None:
        return
    answers = json.loads(stored) | {str(version): [right, num]}
    newest = sorted(answers, key=int)[-VERSIONS_KEPT:]
    conn.execute(
        sa.update(examples).where(*is_same).values(answers=rows.dump({name: answers[name] for name in newest}))
    )


def _why_not(view: TurnView, *, is_trained: bool) -> str | None:
    turn = view.turn
    if not is_trained:
        return "its session is marked as not to be trained"
    if not len(view.prompt_token_ids) or not len(turn.token_ids):
        return f"its tokens are not stored ({turn.reason or turn.outcome.value})"
    if image_digests(view.messages):
        return "its prompt has images"
    return why_not_sampled(turn.sampling)


def why_not_sampled(sampling: Json) -> str | None:
    """Return why a gate cannot sample as a call asked; None where it can."""
    name = unreadable(sampling) or next(
        (found for rules in (GRAMMARS, FORCED, NOT_REPLAYED) if (found := first_of(rules, sampling))), None
    )
    return None if name is None else f"the gate samples without a grammar or a budget, and the call has `{name}`"


def _is(tenant: str, example_id: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return examples.c.tenant == tenant, examples.c.example_id == example_id


def _row(conn: sa.Connection, tenant: str, example_id: str) -> rows.StoredRow:
    found = conn.execute(_JOINED.where(*_is(tenant, example_id))).one_or_none()
    if found is None:
        raise NotFound(f"there is no example {example_id!r}; `turnwise examples` lists them", param="example_id")
    return found


def _store(conn: sa.Connection, example: Example, session_pk: int | None) -> None:
    conn.execute(sa.delete(examples).where(*_is(example.tenant, example.example_id)))
    of_policy = examples.c.tenant == example.tenant, examples.c.policy_id == example.policy_id
    if conn.execute(sa.select(sa.func.count()).where(*of_policy)).scalar_one() >= MAX_EXAMPLES:
        raise InvalidRequest(f"the policy has {MAX_EXAMPLES} examples, which is the limit; unpin one")
    insert_rows(conn, examples, [_ROWS.row(example, session_pk=session_pk)])


def _model_digest(conn: sa.Connection) -> str | None:
    base = known_version(conn, 0)
    return None if base is None else base.model_digest


def _line(example: Example, names: Mapping[int, str], digest: str | None) -> ExampleLine:
    return ExampleLine(
        **{name: getattr(example, name) for name in _SAME},
        check=example.criterion,
        policy=names.get(example.policy_id, names[DEFAULT_POLICY]),
        model_digest=digest,
        prompt_token_ids=example.prompt.tolist(),
        reply_token_ids=example.reply.tolist(),
    )


_SAME = tuple(
    field.name
    for field in dataclasses.fields(ExampleLine)
    if field.name in {each.name for each in dataclasses.fields(Example)}
)


def _example_of(line: Json, tenant: str, policy_id: int) -> Example:
    try:
        prompt, reply = (np.array(line[f"{name}_token_ids"], np.int32) for name in ("prompt", "reply"))
        kinds: dict[str, type | tuple[type, ...]] = {
            "example_id": str,
            "check": dict,
            "sampling": dict,
            "messages": list,
            "response": dict,
            "tools": (list, type(None)),
            "note": (str, type(None)),
        }
        given = {name: line.get(name) for name in kinds}
        wrong = next((name for name, kind in kinds.items() if not isinstance(given[name], kind)), None)
        if wrong is not None or prompt.ndim != 1 or not len(prompt) or reply.ndim != 1:
            raise InvalidRequest(f"an exported example has no {wrong or 'prompt'} {given.get(wrong or '')!r:.80}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"this is no line of `turnwise examples export`: {error!r:.200}") from error
    if reason := why_not_sampled(given["sampling"]):
        raise InvalidRequest(f"example {given['example_id']!r} cannot be imported: {reason}")
    given["criterion"] = checked(given.pop("check"))
    return Example(tenant=tenant, policy_id=policy_id, prompt=prompt, reply=reply, **given)


EXTENSION = Extension(tables_of_tenants=(examples,), tables_of_sessions=(examples,))
