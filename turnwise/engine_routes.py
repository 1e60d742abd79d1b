"""What all parts know of an engine's routes: the one of chats, and how its list of models is read."""

from __future__ import annotations

from typing import Any

from turnwise.errors import EngineUnavailable

ADDRESS_HINT = "name the address of a vLLM server, without /v1"
CHAT_ROUTE = "/v1/chat/completions"


def read_models(url: str, answer: Any) -> list[tuple[str, str]]:
    """Return the name and the path of each model that an engine serves, its own model first.

    `answer` is the decoded answer to `GET /v1/models`, or the text of one that is not JSON.

    Raises:
        EngineUnavailable: it is no list of models, so another server has this address.
    """
    try:
        found = [(str(model["id"]), str(model.get("root") or model["id"])) for model in answer["data"]]
    except (AttributeError, LookupError, TypeError):
        found = []
    if not found:
        raise EngineUnavailable(
            f"the server at {url} answers GET /v1/models with {str(answer)[:80]!r}, not with models; {ADDRESS_HINT}"
        )
    return found
