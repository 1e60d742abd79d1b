"""Comparison of the tokenizer of an import with the one that an engine serves."""

from __future__ import annotations

import httpx2

from turnwise.errors import BadLine, EngineUnavailable, EngineUnsuitable
from turnwise.exchange.imports.tokenise import Tokeniser
from turnwise.tokenizer import ContentFormat
from turnwise.types import Json

TIMEOUT_SECONDS = 60.0
FORMATS: tuple[ContentFormat, ...] = ("string", "openai")
USER: Json = {"role": "user", "content": "What is 2 + 2?"}
CONVERSATIONS: tuple[list[Json], ...] = (
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}],
)


def use_engines_template(tokeniser: Tokeniser, engine_url: str) -> None:
    """Choose how contents are rendered, so that prompts have the tokens that the engine gives them.

    Raises:
        EngineUnavailable: the engine does not answer.
        EngineUnsuitable: it tokenises a conversation differently.
    """
    served = [_served_ids(engine_url.rstrip("/"), messages, tokeniser.arguments) for messages in CONVERSATIONS]
    for content_format in FORMATS:
        tokeniser.content_format = content_format
        if [_own_ids(tokeniser, messages) for messages in CONVERSATIONS] == served:
            return
    raise EngineUnsuitable(
        f"the engine at {engine_url} tokenises conversations differently from this tokenizer; name the served model's "
        "own directory by --tokenizer, and its arguments by --template-arguments"
    )


def _own_ids(tokeniser: Tokeniser, messages: list[Json]) -> list[int] | None:
    try:
        return tokeniser.prompt_ids(messages, None)
    except BadLine:
        return None


def _served_ids(engine_url: str, messages: list[Json], arguments: Json) -> list[int] | None:
    """Return the tokens that the engine gives a conversation; None where its template refuses it."""
    body: Json = {"messages": messages, "add_generation_prompt": True}
    if arguments:
        body["chat_template_kwargs"] = arguments
    try:
        response = httpx2.post(f"{engine_url}/tokenize", json=body, timeout=TIMEOUT_SECONDS)
    except httpx2.HTTPError as error:
        raise EngineUnavailable(
            f"the engine at {engine_url} cannot be reached ({type(error).__name__}: {error}); check the URL"
        ) from error
    if response.status_code == 400:
        return None
    if response.status_code != 200:
        raise EngineUnavailable(f"the engine at {engine_url} answered {response.status_code} to POST /tokenize")
    ids: list[int] = response.json()["tokens"]
    return ids
