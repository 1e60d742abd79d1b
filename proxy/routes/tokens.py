"""`GET /v1/turns/{turn_id}/tokens`: a turn's whole sequence token by token, for a person who reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from fastapi import APIRouter, Response

from proxy.continuation.template import ChatTemplate
from proxy.routes.checked_route import CheckedRoute, Id
from proxy.routes.scaffold import Decode, scaffold_flags, spelled
from proxy.routes.serialise import Caller, Here, answer, describe_answer
from turnwise.chains import is_trainable
from turnwise.credit import SessionCredit
from turnwise.store import experiences, lineage, trained
from turnwise.store.database import Connection
from turnwise.store.session_records import turn_path
from turnwise.types import TRAINED_ROLES, Json, Role, Turn

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


@router.get("/turns/{turn_id}/tokens", responses=describe_answer("TokensAnswer"))
async def get_tokens(
    turn_id: Id,
    services: Here,
    principal: Caller,
) -> Response:
    """Return every token of a turn's prompt and reply, with its text, logprob and the turn that added it."""

    def read(connection: Connection) -> Json:
        path = turn_path(connection, principal.tenant, turn_id)
        session_pk, _ = lineage.place_of_turn(connection, turn_id)
        credit = experiences.session_credit(connection, session_pk)
        updates = trained.trained_in(connection, [session_pk]).get(session_pk, [])
        advantages = {turn: value for _, of_turns in updates for turn, value in of_turns.items()}
        return _tokens(path, services.sessions.template, credit, advantages)

    return answer(await services.database.fetch(read))


def _tokens(
    path: list[Turn], template: ChatTemplate | None, credit: SessionCredit | None, advantages: Mapping[str, float]
) -> Json:
    segments: list[Json] = []
    logprobs: list[float | None] = []
    end = 0
    ids = [part for turn in path for part in (turn.prompt_delta, turn.token_ids)]
    token_ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
    pieces = {} if template is None else template.token_texts(np.unique(token_ids).tolist())
    special = frozenset[str]() if template is None else template.special_tokens
    for turn in path:
        for kind, length in (*_prompt_parts(turn, template, pieces), ("sampled", int(turn.token_ids.size))):
            if not length:
                continue
            start, end = end, end + length
            credited = _credit(turn, credit, advantages) if kind == "sampled" else NO_CREDIT
            segments.append({"kind": kind, "start": start, "end": end, **_of_turn(turn), **credited})
            has_logprobs = kind == "sampled" and turn.logprobs.size == length
            logprobs += turn.logprobs.astype(float).tolist() if has_logprobs else [None] * length
    return {
        "turn_id": path[-1].turn_id,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "segments": segments,
        "pieces": {str(token): piece for token, piece in pieces.items()},
        "characters": [] if template is None else list(characters(token_ids.tolist(), pieces, template.text_of)),
        "special_ids": [token for token, piece in pieces.items() if piece in special],
    }


def characters(token_ids: Sequence[int], pieces: Mapping[int, str], text_of: Decode) -> Iterator[Json]:
    """Yield the shortest runs of tokens that begin with a part of a character and form whole characters."""
    for start, end, text in spelled(token_ids, pieces, text_of):
        if end - start > 1:
            yield {"start": start, "end": end, "text": text}


def _prompt_parts(turn: Turn, template: ChatTemplate | None, pieces: Mapping[int, str]) -> list[tuple[str, int]]:
    """Return kind and length of each part of the prompt that a turn added."""
    if template is None:
        return [("prompt", int(turn.prompt_delta.size))]
    ids = turn.prompt_delta.tolist()
    flags = scaffold_flags(ids, turn.messages, pieces, template.special_tokens, template.text_of)
    return [("scaffold" if flag else "prompt", len(list(same))) for flag, same in itertools.groupby(flags)]


def _of_turn(turn: Turn) -> Json:
    names = ("turn_id", "seq", "policy_version_first", "policy_version_last")
    return {name: getattr(turn, name) for name in names} | {"role": turn.role or Role.MAIN}


NO_CREDIT: Json = {"is_trainable": False, "reward": None, "turn_return": None, "advantage": None}


def _credit(turn: Turn, credit: SessionCredit | None, advantages: Mapping[str, float]) -> Json:
    return {
        "is_trainable": is_trainable(turn) and (turn.role or Role.MAIN) in TRAINED_ROLES,
        "reward": None if credit is None else credit.turn_rewards.get(turn.turn_id),
        "turn_return": None if credit is None else credit.turn_returns.get(turn.turn_id),
        "advantage": advantages.get(turn.turn_id),
    }
