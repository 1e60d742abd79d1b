"""`GET /v1/turns/{turn_id}/tokens`: a turn's whole sequence token by token, for a person who reads it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from fastapi import APIRouter, Response

from proxy.routes.checked_route import CheckedRoute, Id
from proxy.routes.scaffold import Decode, scaffold_flags, spelled
from proxy.routes.serialise import Caller, Here, answer, describe_answer
from proxy.sessions.template import ChatTemplate
from turnwise.chains import is_trainable
from turnwise.credit import SessionCredit
from turnwise.store import experiences, turns
from turnwise.store.database import Connection
from turnwise.store.updates import trained_in
from turnwise.types import TRAINED_ROLES, Role, TokenIds, Turn

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


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
    """Whether the tokens may carry loss: they are sampled, and neither the turn's outcome nor its role prevents it."""
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


@router.get("/turns/{turn_id}/tokens", responses=describe_answer("TokensAnswer"))
async def get_tokens(
    turn_id: Id,
    services: Here,
    principal: Caller,
) -> Response:
    """Return every token of a turn's prompt and reply, with its text, logprob and the turn that added it."""

    def read(connection: Connection) -> TurnTokens:
        session_pk, path = turns.turns_to(connection, turn_id, principal.tenant)
        credit = experiences.session_credit(connection, session_pk)
        updates = trained_in(connection, [session_pk]).get(session_pk, [])
        advantages = {turn: value for _, of_turns in updates for turn, value in of_turns.items()}
        return _tokens(path, services.sessions.template, credit, advantages)

    return answer(await services.database.fetch(read))


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
                segment.is_trainable = is_trainable(turn) and segment.role in TRAINED_ROLES
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
    )


def characters(token_ids: Sequence[int], pieces: Mapping[int, str], text_of: Decode) -> Iterator[Characters]:
    """Yield the shortest runs of tokens that begin with a part of a character and form whole characters."""
    for start, end, text in spelled(token_ids, pieces, text_of):
        if end - start > 1:
            yield Characters(start, end, text)


def _prompt_parts(turn: Turn, template: ChatTemplate | None, pieces: Mapping[int, str]) -> list[tuple[Kind, int]]:
    """Return kind and length of each part of the prompt that a turn added."""
    if template is None:
        return [("prompt", int(turn.prompt_delta.size))]
    ids = turn.prompt_delta.tolist()
    flags = scaffold_flags(ids, turn.messages, pieces, template.special_tokens, template.text_of)
    return [("scaffold" if flag else "prompt", len(list(same))) for flag, same in itertools.groupby(flags)]
