"""Routes that draw a session for a person to rate, take the rating, and say what the ratings are worth so far."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BeforeValidator, StrictBool, model_validator

from proxy.auth import Principal
from proxy.features.feedback.routes import MAX_COMMENT, NewFeedback, post_feedback, told_apart
from proxy.features.feedback.settings import FeedbackSettings
from proxy.routes.control import Body, Caller, CheckedRoute, Here, Id, RewardValue, Text, answer, describe_answer
from proxy.routes.declared import Routes
from turnwise.errors import Conflict
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.features.ratings import draws, estimates, rated
from turnwise.features.ratings.draws import Draw, Pair
from turnwise.features.ratings.estimates import VersionReward
from turnwise.store import policies
from turnwise.store.database import Connection
from turnwise.types import DEFAULT_POLICY_NAME

if TYPE_CHECKING:
    from proxy.routes.models import Answer
    from proxy.services import Services


def _rated(value: object) -> object:
    """Check a rating as what it is.

    Raises:
        ValueError: it is neither a thumb nor a number within the bounds of rewards.
    """
    if isinstance(value, str):
        raise ValueError(f"true, false or a number, not {value[:40]!r}; a text is a `comment`")  # noqa: TRY004  pydantic's
    return told_apart(value)


SOURCE = "asked"
"""Source of the feedback that a rating is."""
PolicyName = Annotated[Text, Query(description="Name of the policy whose sessions are rated.")]
router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["ratings"])


class NewRating(Body):
    """What a person says of the session that they were asked about."""

    session_id: Id
    value: Annotated[StrictBool | RewardValue | None, BeforeValidator(_rated)] = None
    """A thumb, true for up, or a number, which is the reward."""
    comment: str | None = None
    """What was wrong. It is a correction of the session's first turn; without a `value` it counts as a thumb down."""
    better: Id | None = None
    """Of a pair the turn with the better reply."""
    over: Id | None = None
    """The turn with the other one."""
    skip: StrictBool = False
    """The rater cannot say: another one is asked."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> NewRating:
        says = self.value is not None or self.comment is not None
        if says == self.skip:
            raise ValueError("give `value`, `comment` or both; or `skip` alone, where you cannot say")
        if (self.better is None) != (self.over is None):
            raise ValueError("give `better` and `over` together: the turns with the better and with the other reply")
        if self.comment is not None and not 0 < len(self.comment) <= MAX_COMMENT:
            raise ValueError(f"`comment` is a text of at most {MAX_COMMENT} characters")
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextRating:
    """The session that a person is asked about."""

    session_id: str | None
    """Null where no session that is over is left to rate."""
    policy: str
    policy_version: int | None = None
    """The newest version that sampled in it."""
    probability: float | None = None
    """The probability with which the draw took it, which is kept: one over `num_candidates`."""
    num_candidates: int = 0
    """Sessions that the draw could take."""
    rater: str
    asked_at: datetime.datetime | None = None
    leased_until: datetime.datetime | None = None
    """Until then no other rater gets it."""
    rated_at: datetime.datetime | None = None
    rating: float | None = None
    """The reward of its rating; null before it is rated."""
    pair: Pair | None = None
    """Two replies to the same prompt, where the session was forked before a reply."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatingSummary:
    """What a policy's ratings are worth so far."""

    policy: str
    num_rated: int
    """Sessions that a person was asked about and has rated."""
    num_volunteered: int
    """Sessions that have a reward without being asked: they have no probability."""
    num_unrated: int
    missing: int
    """Ratings that are missing until the next version."""
    auroc: float | None
    """How well the head's predictions rank the sessions that were rated later; 0.5 is chance, null is not known."""
    versions: list[VersionReward]
    """Newest first."""


@router.get("/ratings/next", responses=describe_answer("NextRatingAnswer"))
async def next_rating(
    services: Here,
    principal: Caller,
    policy: PolicyName = DEFAULT_POLICY_NAME,
    rater: Annotated[Id | None, Query(description="Who asks; by default the key. Two raters get two sessions.")] = None,
    days: Annotated[float, Query(gt=0, le=3650, description="Older sessions are not drawn.")] = draws.DAYS,
) -> Response:
    """Draw a session for a person to rate: one of those that are over and not rated, each with the same probability.

    Those since the served version come first, and where none of them is left, older ones.
    It is the rater's for ten minutes, and who asks again gets the same one. A session whose rater has left or skipped
    it comes first for others. `GET /v1/sessions/{session_id}/turns` has what was said, and `POST /v1/ratings` takes the
    rating.
    """
    named = await services.database.fetch(policies.find_policy, principal.tenant, policy)
    who = rater or principal.key_id
    drawn = await services.writer.do(draws.next_draw, principal.tenant, named.policy_id, who, days=days)
    if drawn is None:
        return answer(NextRating(session_id=None, policy=policy, rater=who))
    return answer(await _shown(services, drawn, policy))


@router.post("/ratings", responses=describe_answer("NextRatingAnswer"))
async def post_rating(wanted: NewRating, request: Request, services: Here, principal: Caller) -> Response:
    """Store the rating of a session that was drawn. It becomes the session's reward, by the table `feedback_rewards`.

    A comment is also a correction, and a pair a demonstration, as `POST /v1/feedback` takes them. A later rating
    replaces an earlier one, and the request can be repeated.
    """
    principal.require_session(wanted.session_id)

    def check(connection: Connection) -> str:
        drawn = draws.draw_of(connection, principal.tenant, wanted.session_id)
        return policies.get_policy(connection, drawn.policy_id).name

    policy = await services.database.fetch(check)
    if wanted.skip:
        put_back = await services.writer.do(draws.put_back, principal.tenant, wanted.session_id)
        return answer(await _shown(services, put_back, policy))
    for said in _beside(wanted):
        await post_feedback(said, request, services, principal)
    given, reward = _rating(wanted, services, principal)
    kept = await services.writer.do(
        draws.rate,
        principal.tenant,
        wanted.session_id,
        reward,
        given,
        written_by=principal.key_id,
        retrain=services.settings.retrain_revised,
    )
    return answer(await _shown(services, kept, policy))


@router.get("/ratings", responses=describe_answer("RatingSummaryAnswer"))
async def summarise_ratings(services: Here, principal: Caller, policy: PolicyName = DEFAULT_POLICY_NAME) -> Response:
    """Return what each version of a policy is worth: by the ratings that were asked for alone, and by the head."""

    def read(connection: Connection) -> RatingSummary:
        named = policies.find_policy(connection, principal.tenant, policy)
        known = rated.sessions_of(connection, named.policy_id, principal.tenant)
        asked = sum(one.source is rated.RatingSource.ASKED for one in known)
        volunteered = sum(one.source is rated.RatingSource.VOLUNTEERED for one in known)
        return RatingSummary(
            policy=policy,
            num_rated=asked,
            num_volunteered=volunteered,
            num_unrated=len(known) - asked - volunteered,
            missing=draws.missing(asked + volunteered),
            auroc=estimates.auroc(known),
            versions=estimates.of_versions(known),
        )

    return answer(await services.database.fetch(read))


def _beside(wanted: NewRating) -> list[NewFeedback]:
    """Return what a rating is beside its reward."""
    said = []
    if wanted.better is not None and wanted.over is not None:
        demonstration = FeedbackKind.DEMONSTRATION
        said.append(NewFeedback(turn_id=wanted.better, over=[wanted.over], kind=demonstration, source=SOURCE))
    if wanted.comment is not None:
        comment = FeedbackKind.COMMENT
        said.append(NewFeedback(session_id=wanted.session_id, kind=comment, value=wanted.comment, source=SOURCE))
    return said


def _rating(wanted: NewRating, services: Services, principal: Principal) -> tuple[Feedback | None, float]:
    """Return a rating as feedback and as a reward; a comment alone that is a reward itself is no other feedback."""
    assert isinstance(services.settings, FeedbackSettings)
    table = services.settings.feedback_rewards
    if wanted.value is None and "correction" in table:
        return None, table["correction"]
    value = False if wanted.value is None else wanted.value
    is_thumb = isinstance(value, bool)
    given = Feedback(
        session_id=wanted.session_id,
        tenant=principal.tenant,
        kind=FeedbackKind.BOOLEAN if is_thumb else FeedbackKind.FLOAT,
        content={"value": value},
        source=SOURCE,
        written_by=principal.key_id,
    )
    return given, (table["up"] if value else table["down"]) if is_thumb else value


async def _shown(services: Services, drawn: Draw, policy: str) -> NextRating:
    if drawn.session_id is None:
        raise Conflict("the session was deleted while it was rated; ask for the next one")
    pair = await services.database.fetch(draws.pair_of, drawn.tenant, drawn.session_id)
    same = {name: getattr(drawn, name) for name in _SAME}
    return NextRating(policy=policy, probability=drawn.probability, pair=pair, **same)


_SAME = (
    *("session_id", "policy_version", "num_candidates", "rater", "asked_at", "leased_until", "rated_at", "rating"),
)


def _answers() -> list[type[Answer]]:
    from proxy.routes.models import answer_model

    return [answer_model("NextRatingAnswer", NextRating), answer_model("RatingSummaryAnswer", RatingSummary)]


ROUTES = Routes(
    router=router,
    actions={"GET /v1/ratings/next": "read", "POST /v1/ratings": "reward", "GET /v1/ratings": "read"},
    answers=_answers,
)
