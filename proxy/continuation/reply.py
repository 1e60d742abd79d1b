"""How a stored turn ended, as far as the text after it depends on that."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """How a stored turn ended, as far as what follows it depends on that."""

    last_token: int | None
    """The last sampled token."""
    ended: bool
    """Whether the last token is an end-of-turn token, rather than a cut by length or a stop string."""
    reasoning: str
    """The thinking that was sampled; empty without any."""
