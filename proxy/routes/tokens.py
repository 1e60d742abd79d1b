"""`GET /v1/turns/{turn_id}/tokens`: a turn's whole sequence token by token, for a person who reads it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Response

from proxy.auth import Principal
from proxy.continuation.chat_template import ChatTemplate
from proxy.routes.limits import Id, LimitedRoute
from proxy.routes.models import Answer, answer, describe_answer
from proxy.routes.serialise import caller
from proxy.services import Services, services_of
from turnwise.store.session_records import turn_path
from turnwise.types import Json, TokenIds, Turn

router = APIRouter(prefix="/v1", route_class=LimitedRoute, tags=["sessions"])


class Segment(Answer):
    """Tokens that one turn added: its part of the prompt, or what it sampled."""

    kind: Literal["prompt", "sampled"]
    turn_id: str
    seq: int
    start: int
    """Position of its first token."""
    end: int
    """Position after its last token."""
    policy_version_first: int
    policy_version_last: int


class TokensAnswer(Answer):
    """The sequence of a turn: its whole prompt and what it sampled, as the model saw them."""

    turn_id: str
    token_ids: list[int]
    logprobs: list[float | None]
    """Logprob of each token; null for a prompt token."""
    segments: list[Segment]
    """In order, without gaps."""
    pieces: dict[str, str]
    """Text of each token id on its own; empty without a tokenizer."""
    special_ids: list[int]
    """Ids of tokens that mark structure."""


@router.get("/turns/{turn_id}/tokens", responses=describe_answer(TokensAnswer))
async def get_tokens(
    turn_id: Id,
    services: Annotated[Services, Depends(services_of)],
    principal: Annotated[Principal, Depends(caller)],
) -> Response:
    """Return every token of a turn's prompt and reply, with its text, logprob and the turn that added it."""

    def read() -> Json:
        with services.database.read() as connection:
            path = turn_path(connection, principal.tenant, turn_id)
        return _tokens(path, services.sessions.template)

    return answer(await asyncio.to_thread(read))


def _tokens(path: list[Turn], template: ChatTemplate | None) -> Json:
    segments: list[Json] = []
    parts: list[TokenIds] = []
    logprobs: list[float | None] = []
    end = 0
    for turn in path:
        for kind, ids in (("prompt", turn.prompt_delta), ("sampled", turn.token_ids)):
            if not ids.size:
                continue
            start, end = end, end + int(ids.size)
            segments.append(
                {
                    "kind": kind,
                    "turn_id": turn.turn_id,
                    "seq": turn.seq,
                    "start": start,
                    "end": end,
                    "policy_version_first": turn.policy_version_first,
                    "policy_version_last": turn.policy_version_last,
                }
            )
            parts.append(ids)
            has_logprobs = kind == "sampled" and turn.logprobs.size == ids.size
            logprobs += turn.logprobs.astype(float).tolist() if has_logprobs else [None] * int(ids.size)
    token_ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
    pieces = {} if template is None else template.token_texts(np.unique(token_ids).tolist())
    special = frozenset[str]() if template is None else template.special_tokens
    return {
        "turn_id": path[-1].turn_id,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "segments": segments,
        "pieces": {str(token): piece for token, piece in pieces.items()},
        "special_ids": [token for token, piece in pieces.items() if piece in special],
    }
