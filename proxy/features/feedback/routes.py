"""Routes for what people say: thumbs, ratings, comments, edited and chosen replies, and what is trained of each.

The kinds have TensorZero's names. Thumbs and ratings become lines of the reward ledger. An edited or chosen reply
becomes a group of sessions that SFT and DPO train, see `turnwise.store.feedback`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, StrictBool, model_validator

from proxy.auth import Principal
from proxy.dialects.base import template_arguments
from proxy.features.feedback.prompts import hinted_ids, reply_ids
from proxy.features.feedback.settings import FeedbackRewards, FeedbackSettings
from proxy.features.limits import CallLimits
from proxy.routes.control import (
    Body,
    Caller,
    CheckedRoute,
    Here,
    Id,
    RewardValue,
    Text,
    answer,
    describe_answer,
    page,
)
from proxy.routes.declared import Routes
from proxy.routes.rewards import IdempotencyKey, body_digest
from proxy.sessions.template import ChatTemplate, Unsafe
from proxy.settings import ProxySettings
from turnwise.chains import as_root, is_trainable, token_keys
from turnwise.errors import Conflict, InvalidRequest
from turnwise.features import feedback
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.image_urls import image_digests
from turnwise.parts import join_parts
from turnwise.store import selection, sessions, turns
from turnwise.store.database import Connection
from turnwise.store.turns import TurnView
from turnwise.types import MAX_REWARD, Json, Session, Turn

if TYPE_CHECKING:
    from proxy.routes.models import Answer
    from proxy.services import Services

MAX_COMMENT = 10_000
MAX_REPLY = 200_000
MAX_OVER = 16
MAX_GROUP_TOKENS = 2**20
"""Most tokens of all sessions that a demonstration makes, which are stored in one transaction."""
MAX_HINT = 32_768
"""Most tokens of a correction with what follows it in its turn's prompt; one of more is stored and not trained."""
BETTER_REPLY = "This would be a better reply:\n\n{}"
"""How an edited reply is told to the policy that teaches."""

_PUBLIC = tuple(each.name for each in dataclasses.fields(Feedback) if each.name not in ("tenant", "content"))
router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["rewards"])


def told_apart(value: object) -> object:
    """Check a value as what it is; else its errors would be those of each kind, and the first one of them shown.

    Raises:
        ValueError: it is of no kind, or not within its kind's bounds.
    """
    if isinstance(value, int | float) and not abs(value) <= MAX_REWARD:
        raise ValueError(f"{str(value)[:40]} is no number from -1e6 to 1e6")
    if isinstance(value, str) and not 1 <= len(value) <= MAX_REPLY:
        raise ValueError(f"a text has 1 to {MAX_REPLY} characters, not {len(value)}")
    if not isinstance(value, int | float | str | None):
        raise ValueError(f"true or false, a number or a text, not a {type(value).__name__}")  # noqa: TRY004  pydantic's
    return value


class NewFeedback(Body):
    """What a person said about a turn, or about a session."""

    turn_id: Id | None = None
    """The turn: the id of the completion that the client got."""
    session_id: Id | None = None
    kind: FeedbackKind
    """`boolean` for a thumb, `float` for a number or a rating, `comment`, or `demonstration` for a better reply."""
    value: Annotated[
        StrictBool | RewardValue | Annotated[str, Field(min_length=1, max_length=MAX_REPLY)] | None,
        BeforeValidator(told_apart),
    ] = None
    """True or false, a number, or the text of a comment or an edited reply. Left out, a demonstration is the turn's own
    reply, chosen over those in `over`. `null` withdraws the feedback of this target, kind and name."""
    name: Id = "feedback"
    """For thumbs and ratings the name of the reward. Feedback of the same target, kind and name replaces the earlier
    one, so feedback of several people needs several names."""
    scale: tuple[RewardValue, RewardValue] | None = None
    """The lowest and the highest rating, such as [1, 5]: they count as a thumb down and a thumb up."""
    over: Annotated[list[Id], Field(max_length=MAX_OVER)] = Field(default=[])
    """Turns with other replies to the same prompt, which the demonstration was preferred to."""
    source: Text | None = None

    @property
    def is_withdrawal(self) -> bool:
        return self.value is None and "value" in self.model_fields_set and not self.over

    @model_validator(mode="after")
    def _fits_its_kind(self) -> NewFeedback:
        value, kind = self.value, self.kind
        if self.turn_id is None and (self.session_id is None or kind is FeedbackKind.DEMONSTRATION):
            raise ValueError("give `turn_id`, or for a whole session `session_id`; a demonstration needs `turn_id`")
        if (self.scale and kind is not FeedbackKind.FLOAT) or (self.over and kind is not FeedbackKind.DEMONSTRATION):
            raise ValueError("`scale` is for kind `float`, `over` for kind `demonstration`")
        is_right = {
            FeedbackKind.BOOLEAN: isinstance(value, bool),
            FeedbackKind.FLOAT: isinstance(value, float | int) and not isinstance(value, bool),
            FeedbackKind.COMMENT: isinstance(value, str) and len(value) <= MAX_COMMENT,
            FeedbackKind.DEMONSTRATION: isinstance(value, str) or (value is None and bool(self.over)),
        }
        if self.is_withdrawal:
            return self
        if not is_right[kind]:
            raise ValueError(
                f"`value` of kind `{kind}` is {WANTED[kind]}, not {value if value is None else type(value).__name__!r}"
            )
        if (
            self.scale is not None
            and not self.is_withdrawal
            and not self.scale[0] <= float(value or 0.0) <= self.scale[1] != self.scale[0]
        ):
            raise ValueError(f"`value` {value!r} does not lie on the scale {list(self.scale)}")
        return self


WANTED = {
    FeedbackKind.BOOLEAN: "true or false",
    FeedbackKind.FLOAT: "a number",
    FeedbackKind.COMMENT: f"a text of at most {MAX_COMMENT} characters",
    FeedbackKind.DEMONSTRATION: "the text of a better reply; left out, the turn was chosen over those in `over`",
}


@router.post("/feedback", responses=describe_answer("FeedbackAnswer"))
async def post_feedback(
    wanted: NewFeedback,
    request: Request,
    services: Here,
    principal: Caller,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Store what a person said; later feedback of the same target, kind and name replaces it.

    A thumb or a rating becomes a reward, by the table `feedback_rewards`. An edited or chosen reply becomes a group of
    sessions with rewards 1 and 0 that SFT, DPO and CHORD train. A comment or an edited reply is a correction, which the
    algorithm of this name trains. The request can be repeated.
    """
    if wanted.is_withdrawal:
        return await _withdraw(services, principal, wanted)
    template = services.sessions.template
    clean = services.stored_document(wanted.value)
    given, group = await services.database.fetch(_feedback, template, principal, wanted, clean)
    budgets = services.steps.of(CallLimits).budgets
    if group and (budgets.are_set or principal.has_budget):
        await budgets.check(principal)
    stored = await services.writer.do(
        feedback.add,
        given,
        reward=_reward(wanted, services.settings),
        group=group,
        idempotency_key=idempotency_key,
        body_digest=body_digest(await request.body()),
        retrain=services.settings.retrain_revised,
    )
    if stored.group_id == given.group_id:
        budgets.charge(principal, _num_tokens(group))
    return answer(_feedback_json(stored))


@router.delete("/feedback", responses=describe_answer("FeedbackAnswer"))
async def delete_feedback(
    kind: FeedbackKind,
    services: Here,
    principal: Caller,
    turn_id: Id | None = None,
    session_id: Id | None = None,
    name: Id = "feedback",
) -> Response:
    """Withdraw what a person said, with its reward and the sessions that it has made; none is no error.

    It is that of a turn, or with `session_id` alone of a whole session. What was trained stays trained; with
    `retrain_revised` its group is trained again without it.
    """
    if turn_id is None and session_id is None:
        raise InvalidRequest("give `turn_id`, or for a whole session `session_id`", param="turn_id")
    wanted = NewFeedback(turn_id=turn_id, session_id=session_id, kind=kind, name=name, value=None)
    return await _withdraw(services, principal, wanted)


async def _withdraw(services: Services, principal: Principal, wanted: NewFeedback) -> Response:
    session_id = await services.database.fetch(_session_of, principal, wanted)
    target = _as_given(principal, wanted, session_id, {"value": None})
    retrain = services.settings.retrain_revised
    return answer(_feedback_json(await services.writer.do(feedback.withdraw, target, retrain=retrain)))


def _as_given(principal: Principal, wanted: NewFeedback, session_id: str, content: Json) -> Feedback:
    return Feedback(
        session_id=session_id,
        tenant=principal.tenant,
        turn_id=wanted.turn_id or "",
        kind=wanted.kind,
        name=wanted.name,
        content=content,
    )


def _session_of(connection: Connection, principal: Principal, wanted: NewFeedback) -> str:
    session_id = wanted.session_id
    if wanted.turn_id is not None:
        session_id = selection.session_of_turn(connection, principal.tenant, wanted.turn_id, session_id)
    assert session_id is not None
    principal.require_session(session_id)
    return session_id


@router.get("/feedback", responses=describe_answer("FeedbackPage"))
async def list_feedback(
    services: Here,
    principal: Caller,
    session_id: Id | None = None,
    source: Text | None = None,
    after: Id | None = None,
) -> Response:
    """List the feedback in force of a session and its turns, oldest first, on one page; or all that a source said.

    That of a source comes by session, 100 on a page; `after` is the last `session_id` of the page before.
    """
    if session_id is not None and source is None:
        found = await services.database.fetch(feedback.feedback_of, principal.tenant, session_id)
        return page(map(_feedback_json, found))
    if source is None or session_id is not None:
        raise InvalidRequest("give `session_id`, or `source` for what it said of all sessions", param="session_id")
    listed = await services.database.fetch(feedback.feedback_from, principal.tenant, source, after=after)
    return page(map(_feedback_json, listed[0]), has_more=listed[1])


def _feedback(
    connection: Connection,
    template: ChatTemplate | None,
    principal: Principal,
    wanted: NewFeedback,
    clean: float | str | None,
) -> tuple[Feedback, list[feedback.Member]]:
    """Return the feedback as a record, and the sessions of a demonstration's group, the better reply first.

    Of a text that is not what it is `clean`, without what may not be stored, nothing is trained.
    """
    session_id = _session_of(connection, principal, wanted)
    original = sessions.read_session(connection, principal.tenant, session_id)
    if isinstance(clean, str) and not original.record:
        raise Conflict(
            f"session {session_id!r} is not recorded (`record` is false), and no text about it is stored; post a thumb "
            "or a rating",
            param="value",
            code="session_not_recorded",
        )
    content: Json = {"value": clean}
    content |= {} if wanted.scale is None else {"scale": list(wanted.scale)}
    content |= {"over": wanted.over} if wanted.over else {}
    given = _as_given(principal, wanted, session_id, content)
    given = dataclasses.replace(given, source=wanted.source, written_by=principal.key_id)
    group: list[feedback.Member] = []
    if clean != wanted.value:
        return given, group
    if given.kind is FeedbackKind.DEMONSTRATION:
        given = dataclasses.replace(given, group_id=feedback.new_group_id())
        group = _group(connection, template, principal, given, original)
    if isinstance(wanted.value, str) and (hint := _hint(connection, template, given)) is not None:
        given = dataclasses.replace(given, content=content | {"hint": hint})
    return given, group


def _hint(connection: Connection, template: ChatTemplate | None, given: Feedback) -> Json | None:
    """Return a comment or an edited reply as it is put into the prompt of its turn, or of its session's first turn."""
    if given.turn_id:
        view = turns.read_turn(connection, given.tenant, given.turn_id, whole_prompt=True)
    else:
        first, _ = turns.read_turns(connection, given.tenant, given.session_id, limit=1, whole_prompt=True)
        if not first:
            return None
        (view,) = first
    text = given.content["value"]
    return hint_of(template, view, text if given.kind is FeedbackKind.COMMENT else BETTER_REPLY.format(text))


def _group(
    connection: Connection, template: ChatTemplate | None, principal: Principal, given: Feedback, original: Session
) -> list[feedback.Member]:
    over = given.content.get("over", ())
    if given.turn_id in over:
        raise InvalidRequest(f"turn {given.turn_id!r} cannot be preferred to itself; leave it out", param="over")
    paths = [turns.turns_to(connection, turn_id, given.tenant)[1] for turn_id in (given.turn_id, *dict.fromkeys(over))]
    asked = [as_root(path) for path in paths]
    if not paths[0][-1].prompt_length:
        raise InvalidRequest(
            f"turn {given.turn_id!r} is stored without its tokens, because it was redacted or not recorded; send the "
            "reply as kind `comment`",
            param="turn_id",
        )
    original = dataclasses.replace(original, policy_id=asked[0].policy_id)
    for turn in asked[1:]:
        principal.require_session(turn.session_id)
        keys, first_keys = (token_keys(each.prompt_delta, join_parts([each], (), {})) for each in (turn, asked[0]))
        if not np.array_equal(keys, first_keys):
            raise InvalidRequest(
                f"turn {turn.turn_id!r} replies to another prompt than turn {given.turn_id!r}; give turns that were "
                "sampled from the same one",
                param="over",
            )
    text: str | None = given.content["value"]
    if text is None and not is_trainable(asked[0]):
        raise InvalidRequest(f"turn {given.turn_id!r} has no reply that was captured exactly", param="turn_id")
    token_ids = asked[0].token_ids if text is None else np.array(_reply_ids(template, asked[0], text), np.int32)
    others = [
        path
        for path, turn in zip(paths, asked, strict=True)
        # No reply is preferred to another one with the same tokens.
        if is_trainable(turn) and not np.array_equal(turn.token_ids, token_ids)
    ]
    size = 1 + len(others)
    better = feedback.sampled(paths[0], given, original, 0, size)
    if text is not None:
        better = feedback.written(better, text, token_ids)
    group = [better, *(feedback.sampled(path, given, original, 1 + at, size) for at, path in enumerate(others))]
    if _num_tokens(group) > MAX_GROUP_TOKENS:
        raise InvalidRequest(
            f"the demonstration would store {_num_tokens(group)} tokens, and the limit is {MAX_GROUP_TOKENS}; name "
            "fewer turns in `over`",
            param="over",
        )
    return group


def _num_tokens(group: Sequence[feedback.Member]) -> int:
    return sum(one.turn.prompt_length + int(one.turn.token_ids.size) for one in group)


def _reply_ids(template: ChatTemplate | None, turn: Turn, text: str) -> list[int]:
    if template is None or not turn.messages:
        reason = "the proxy has no tokenizer" if template is None else "its prompt is not a conversation"
    else:
        try:
            return reply_ids(template, turn.messages, text, turn.tools, template_arguments(turn.sampling))
        except Unsafe:
            reason = "the chat template does not render it after its own generation prompt"
    raise InvalidRequest(
        f"the edited reply to turn {turn.turn_id!r} cannot be tokenised: {reason}; send it as kind `comment`",
        param="value",
    )


def hint_of(template: ChatTemplate | None, view: TurnView, text: str) -> Json | None:
    """Return a turn's prompt with a correction in it, as its first `kept` tokens and those that follow.

    None where the template does not render it, or where it would be nearly all of a long prompt again.
    """
    if template is None or not view.messages or image_digests(view.messages):
        return None
    prompt = view.prompt_token_ids
    try:
        hinted = np.array(
            hinted_ids(template, view.messages, text, view.tools, template_arguments(view.turn.sampling)), np.int32
        )
    except Unsafe:
        return None
    length = min(len(prompt), len(hinted))
    differs = np.flatnonzero(prompt[:length] != hinted[:length])
    kept = int(differs[0]) if len(differs) else length
    added = hinted[kept:].tolist()
    return {"turn_id": view.turn.turn_id, "kept": kept, "token_ids": added} if len(added) <= MAX_HINT else None


def _reward(wanted: NewFeedback, settings: ProxySettings) -> float | None:
    assert isinstance(settings, FeedbackSettings)
    table: FeedbackRewards = settings.feedback_rewards
    up, down = table["up"], table["down"]
    if wanted.value is None or isinstance(wanted.value, str):
        return table.get("correction")
    if wanted.scale is None:
        return (up if wanted.value else down) if isinstance(wanted.value, bool) else wanted.value
    low, high = wanted.scale
    return down + (up - down) * (wanted.value - low) / (high - low)


def _feedback_json(record: Feedback) -> Json:
    content = record.content
    named = {"value": content["value"], "scale": content.get("scale"), "over": content.get("over", [])}
    is_kept = content["value"] is not None or named["over"]
    note = feedback.TRAINED_BY.get((record.kind, content["value"] is not None)) if is_kept else None
    named["training_note"] = note
    return {name: getattr(record, name) for name in _PUBLIC} | {"turn_id": record.turn_id or None} | named


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import answer_model, field, page_model

    one = answer_model(
        "FeedbackAnswer",
        Feedback,
        "What a person said about a session or a turn.",
        only=_PUBLIC,
        turn_id=field(str | None, "The turn that it is about; null for the whole session."),
        value=field(bool | float | str | None, "The thumb, rating, text or edited reply; null for a choice."),
        scale=field(list[float] | None, "The lowest and the highest rating; null without a scale."),
        over=field(list[str], "The turns that a demonstration was preferred to."),
        training_note=field(str | None, "Which algorithms train it; null for a thumb or a rating, which are rewards."),
    )
    return one, page_model("FeedbackPage", one, "The feedback of a session.")


ROUTES = Routes(
    router=router,
    actions={"POST /v1/feedback": "reward", "DELETE /v1/feedback": "reward", "GET /v1/feedback": "read"},
    answers=_answers,
)
