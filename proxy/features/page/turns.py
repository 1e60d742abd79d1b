"""Routes that show one turn: its tokens, which are the template's own, and their logprobs under the served version.

The stored ids do not say which token is scaffold, which the chat template adds around the text of messages: role
markers, tools, the generation prompt. So each text of the turn's messages is searched for in the decoded prompt, in
order and without white space, because templates and tokenizers change white space at the ends of texts. If a text is
not found, as with templates that rewrite it, only special tokens count as scaffold.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Response

from proxy.features.probes import token_logprobs
from proxy.routes.control import Caller, CheckedRoute, Here, Id, answer, describe_answer
from proxy.sessions.template import ChatTemplate
from turnwise.chains import is_trainable
from turnwise.credit import SessionCredit
from turnwise.errors import Conflict, NotFound
from turnwise.features.images import placed_images, read_media
from turnwise.features.page.turns import session_credit
from turnwise.features.summaries import why_left_out
from turnwise.features.verify.known_tokens import NOT_REPEATABLE, POSITIONS_AT_ONCE
from turnwise.image_urls import image_digests
from turnwise.store import sessions, turns
from turnwise.store import updates as stored_updates
from turnwise.store.database import Connection
from turnwise.store.turns import TurnView
from turnwise.types import TRAINED_ROLES, Json, Logprobs, Role, Session, TokenIds, Turn

router = APIRouter(route_class=CheckedRoute, tags=["sessions"])


IMAGE_HEADERS = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
"""A client chose the file, so a browser runs nothing of it."""
Kind = Literal["prompt", "scaffold", "sampled"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Segment:
    """Tokens that one turn added: text of its messages, what the chat template put around it, or what it sampled."""

    kind: Kind
    """`prompt` also stands for all of the prompt without a tokenizer."""
    turn_id: str
    seq: int
    start: int
    """Position of its first token."""
    end: int
    """Position after its last token."""
    policy_version_first: int
    policy_version_last: int
    role: Role
    is_trainable: bool = False
    """Whether the tokens may carry loss: they are sampled, and neither the turn's outcome nor its role prevents it, nor
    that nothing goes on from a summary."""
    reward: float | None = None
    """The turn's reward under the session's credit policy; null without a reward, and for a prompt."""
    turn_return: float | None = None
    """The turn's reward after discount."""
    advantage: float | None = None
    """The turn's advantage in the last update that trained it; null if none did."""


@dataclasses.dataclass(slots=True)
class Characters:
    """Neighbouring tokens whose bytes are characters only together."""

    start: int
    """Position of the first token."""
    end: int
    """Position after the last token."""
    text: str


@dataclasses.dataclass(slots=True, kw_only=True)
class TurnTokens:
    """The sequence of a turn: its whole prompt and what it sampled, as the model saw them."""

    turn_id: str
    token_ids: TokenIds
    logprobs: list[float | None]
    """Logprob of each token; null for a token that was not sampled."""
    segments: list[Segment]
    """In order, without gaps."""
    pieces: dict[str, str]
    """Text of each token id on its own, with U+FFFD for a part of a character; empty without a tokenizer."""
    characters: list[Characters]
    """Characters that span several tokens, in order."""
    special_ids: list[int]
    """Ids of tokens that mark structure."""
    images: list[Json]
    """The images of the prompt, in order, each with `digest`, and `offset` and `length` of its placeholder."""


@router.get("/turns/{turn_id}/tokens", responses=describe_answer("TokensAnswer"))
async def get_tokens(
    turn_id: Id,
    services: Here,
    principal: Caller,
) -> Response:
    """Return every token of a turn's prompt and reply, with its text, logprob and the turn that added it."""

    def read(connection: Connection) -> TurnTokens:
        session_pk, path = turns.turns_to(connection, turn_id, principal.tenant)
        credit = session_credit(connection, session_pk, path[-1].policy_id)
        updates = stored_updates.trained_in(connection, [session_pk]).get(session_pk, [])
        advantages = {turn: value for _, of_turns in updates for turn, value in of_turns.items()}
        return _tokens(path, services.sessions.template, credit, advantages)

    return answer(await services.database.fetch(read))


@router.get("/images/{digest}", responses={200: {"content": {"image/*": {}}}})
async def get_image(digest: Id, services: Here, principal: Caller) -> Response:
    """Return the file of an image that a message names as `image:DIGEST`."""
    found = await services.database.fetch(read_media, principal.tenant, [digest], session_id=principal.session_id)
    if digest not in found:
        raise NotFound(f"there is no image {digest!r:.80}", param="digest")
    image = found[digest]
    return Response(image.content, media_type=image.media_type, headers=IMAGE_HEADERS)


def _tokens(
    path: list[Turn], template: ChatTemplate | None, credit: SessionCredit | None, advantages: Mapping[str, float]
) -> TurnTokens:
    segments: list[Segment] = []
    logprobs: list[float | None] = []
    end = 0
    ids = [part for turn in path for part in (turn.prompt_delta, turn.token_ids)]
    token_ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
    pieces = {} if template is None else template.token_texts(np.unique(token_ids).tolist())
    special = frozenset[str]() if template is None else template.special_tokens
    for turn in path:
        parts: list[tuple[Kind, int]] = [*_prompt_parts(turn, template, pieces), ("sampled", int(turn.token_ids.size))]
        for kind, length in parts:
            if not length:
                continue
            start, end = end, end + length
            segment = Segment(
                kind=kind,
                turn_id=turn.turn_id,
                seq=turn.seq,
                start=start,
                end=end,
                policy_version_first=turn.policy_version_first,
                policy_version_last=turn.policy_version_last,
                role=turn.role or Role.MAIN,
            )
            segments.append(segment)
            if kind == "sampled":
                is_left_out = why_left_out(turn) is not None
                segment.is_trainable = is_trainable(turn) and segment.role in TRAINED_ROLES and not is_left_out
                segment.advantage = advantages.get(turn.turn_id)
                if credit is not None:
                    segment.reward = credit.turn_rewards.get(turn.turn_id)
                    segment.turn_return = credit.turn_returns.get(turn.turn_id)
            has_logprobs = kind == "sampled" and turn.logprobs.size == length
            logprobs += turn.logprobs.astype(float).tolist() if has_logprobs else [None] * length
    return TurnTokens(
        turn_id=path[-1].turn_id,
        token_ids=token_ids,
        logprobs=logprobs,
        segments=segments,
        pieces={str(token): piece for token, piece in pieces.items()},
        characters=[] if template is None else list(characters(token_ids.tolist(), pieces, template.text_of)),
        special_ids=[token for token, piece in pieces.items() if piece in special],
        images=[image for turn in path for image in placed_images(turn)],
    )


def characters(token_ids: Sequence[int], pieces: Mapping[int, str], text_of: Decode) -> Iterator[Characters]:
    """Yield the shortest runs of tokens that begin with a part of a character and form whole characters."""
    for start, end, text in spelled(token_ids, pieces, text_of):
        if end - start > 1:
            yield Characters(start, end, text)


def _prompt_parts(turn: Turn, template: ChatTemplate | None, pieces: Mapping[int, str]) -> list[tuple[Kind, int]]:
    if template is None:
        return [("prompt", int(turn.prompt_delta.size))]
    ids = turn.prompt_delta.tolist()
    flags = scaffold_flags(ids, turn.messages, pieces, template.special_tokens, template.text_of)
    return [("scaffold" if flag else "prompt", len(list(same))) for flag, same in itertools.groupby(flags)]


MAX_TOKENS = 2048
IDS_AT_ONCE = 500_000


@dataclasses.dataclass(slots=True, kw_only=True)
class RecomputedLogprobs:
    """The logprobs of a turn's sampled tokens when they were sampled, and now."""

    turn_id: str
    policy_version_first: int
    """The version that sampled the first token."""
    policy_version_last: int
    policy_version: int
    """The version that is served now."""
    before: Logprobs
    """As stored: one for each sampled token."""
    after: list[float | None]
    """Under the served version, with the turn's temperature, top-p, top-k and min-p, for the first 2048 tokens; null
    for a token that it cannot sample under these."""


@router.get("/turns/{turn_id}/logprobs", responses=describe_answer("RecomputedAnswer"))
async def recompute_logprobs(
    turn_id: Id,
    services: Here,
    principal: Caller,
) -> Response:
    """Recompute the logprobs of a turn's sampled tokens under the version that its policy is served with.

    The engine samples one token for each.
    """

    def read(connection: Connection) -> tuple[TurnView, Session]:
        view = turns.read_turn(connection, principal.tenant, turn_id)
        session = sessions.read_session(connection, principal.tenant, view.turn.session_id)
        return view, dataclasses.replace(session, policy_id=view.turn.policy_id, arm=None)

    view, session = await services.database.fetch(read)
    _check_repeatable(view)
    lane = await services.pool.loaded(services.pool.lane(session))  # that most of the policy's sessions sample with
    version = lane.version
    turn = view.turn
    token_ids = [*view.prompt_token_ids.tolist(), *turn.token_ids.tolist()][: turn.prompt_length + MAX_TOKENS]
    step = max(1, min(POSITIONS_AT_ONCE, IDS_AT_ONCE // len(token_ids)))
    after: list[float] = []
    for start in range(turn.prompt_length, len(token_ids), step):
        positions = list(range(start, min(start + step, len(token_ids))))
        after += await token_logprobs(lane.engine, lane.model, token_ids, positions, turn.sampling)
    if lane.version != version:
        raise Conflict(f"version {lane.version} was loaded in the place of {version} meanwhile; ask again")
    return answer(
        RecomputedLogprobs(
            turn_id=turn_id,
            policy_version_first=turn.policy_version_first,
            policy_version_last=turn.policy_version_last,
            policy_version=version,
            before=turn.logprobs.astype(float),
            after=[each if math.isfinite(each) else None for each in after],
        )
    )


def _check_repeatable(view: TurnView) -> None:
    if not is_trainable(view.turn) or not view.turn.token_ids.size:
        raise Conflict("this turn has no logprobs that could be compared: it is not trainable, or sampled nothing")
    if image_digests(view.messages):
        raise Conflict("an engine computes logprobs of tokens without images, and this turn's prompt has some")
    if names := [name for name in NOT_REPEATABLE if view.turn.sampling.get(name)]:
        raise Conflict(f"this turn was sampled with {', '.join(names)}, whose effect depends on earlier tokens")


BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that holds a part of a character."""
MAX_PARTS = 8
"""Tokens that are tried together: a character has at most four bytes, and a token may end one and begin the next."""
Decode = Callable[[Sequence[int]], str]


def scaffold_flags(
    token_ids: Sequence[int],
    messages: Sequence[Json],
    pieces: Mapping[int, str],
    special: frozenset[str],
    decode: Decode,
) -> list[bool]:
    """Return for each token of a prompt, or of the part that a turn added, whether the chat template added it.

    `pieces` has the text of each token on its own, `special` the texts of the special tokens; `decode` returns the
    text of several tokens.
    """
    text, spans = _solid_text(token_ids, pieces, decode)
    found = _find_all([_without_space(each) for message in messages for each in _texts(message)], text)
    if found is None:
        return [pieces[token] in special for token in token_ids]
    flags = [True] * len(token_ids)
    for start, end in found:
        first, behind = spans[start][0], spans[end - 1][1]
        flags[first:behind] = [False] * (behind - first)
    return flags


def _solid_text(
    token_ids: Sequence[int], pieces: Mapping[int, str], decode: Decode
) -> tuple[str, list[tuple[int, int]]]:
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    for start, end, text in spelled(token_ids, pieces, decode):
        parts.append(_without_space(text))
        spans += [(start, end)] * len(parts[-1])
    return "".join(parts), spans


def spelled(token_ids: Sequence[int], pieces: Mapping[int, str], decode: Decode) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and text of each token, or of the fewest tokens that form whole characters together."""
    at = 0
    while at < len(token_ids):
        text, end = pieces[token_ids[at]], at + 1
        if BROKEN in text:
            text, end = _whole_character(token_ids, at, decode) or (text, end)
        yield at, end, text
        at = end


def _whole_character(token_ids: Sequence[int], at: int, decode: Decode) -> tuple[str, int] | None:
    """Return the text of the fewest tokens from here that hold whole characters, and where they end; None without."""
    for behind in range(at + 2, min(at + MAX_PARTS, len(token_ids)) + 1):
        if BROKEN not in (text := decode(token_ids[at:behind])):
            return text, behind
    return None


def _find_all(wanted: Sequence[str], text: str) -> list[tuple[int, int]] | None:
    found: list[tuple[int, int]] = []
    behind = 0
    for each in filter(None, wanted):
        start = text.find(each, behind)
        if start < 0:
            return None
        behind = start + len(each)
        found.append((start, behind))
    return found


def _texts(message: Json) -> Iterator[str]:
    thinking = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thinking, str):
        yield thinking
    content: Any = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))


def _without_space(text: str) -> str:
    return "".join(text.split())
