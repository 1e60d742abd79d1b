"""What lists say of a session's rating, and what `turnwise doctor` says of a policy's ratings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa

from turnwise.features.ratings.draws import forget, missing, rating_draws
from turnwise.features.ratings.predictions import predicted_rewards
from turnwise.features.ratings.rated import sessions_of
from turnwise.store.extensions import Column, Extension
from turnwise.store.policies import names_of_policies
from turnwise.store.schema import sessions
from turnwise.store.statements import is_among


def _read(conn: sa.Connection, _: str, tenant: str | None, names: Collection[Any] | None) -> dict[str, str]:
    held, draw, guess = sessions.c, rating_draws.c, predicted_rewards.c
    wanted = [] if tenant is None else [held.tenant == tenant]
    if names is not None:
        wanted.append(is_among(conn.dialect, held.session_id, names))
    asked = sa.select(held.session_id, draw.rated_at).join_from(rating_draws, sessions).where(*wanted)
    made = sa.select(held.session_id, guess.mean, guess.deviation)
    guesses = conn.execute(made.join_from(predicted_rewards, sessions).where(*wanted))
    said = {session_id: f"predicted {mean:.2f} ± {deviation:.2f}" for session_id, mean, deviation in guesses}
    return said | {session_id: "asked" if rated_at is None else "rated" for session_id, rated_at in conn.execute(asked)}


RATING = Column(
    name="rating",
    of=frozenset({"session"}),
    read=_read,
    empty=None,
    kind=str | None,
    description="Whether a person who was asked has rated it: `asked`, then `rated`. Of others what the policy's head "
    "predicts, as `predicted 0.81 ± 0.10`.",
    is_always_on=True,
)


def _findings(conn: sa.Connection, tenant: str | None) -> Iterator[tuple[str, str]]:
    """Say of each policy that people were asked about how many ratings are missing until its next version."""
    c = rating_draws.c
    asked = sa.select(c.policy_id, c.tenant).distinct().order_by(c.policy_id, c.tenant)
    names = names_of_policies(conn)
    for policy_id, of_tenant in conn.execute(asked if tenant is None else asked.where(c.tenant == tenant)).all():
        known = sessions_of(conn, policy_id, of_tenant)
        num_rated = sum(one.rating is not None for one in known)
        of = f"policy {names.get(policy_id)!r}: {num_rated} sessions are rated, and {len(known) - num_rated} are not"
        yield "ratings", f"{of}; {missing(num_rated)} ratings are missing until the next version"


EXTENSION = Extension(
    tables_of_tenants=(rating_draws,),
    tables_of_sessions=(predicted_rewards,),
    after_deletion=forget,
    columns=(RATING,),
    findings=_findings,
)
