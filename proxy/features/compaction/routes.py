"""The routes of formats with context management, in the place of the core's, and that of OpenAI's compaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter

from proxy.dialects.base import Action, Call, WireRoute
from proxy.features.compaction.edits import FIELD, Clearing, read_edits
from proxy.features.compaction.messages import ManagedMessages
from proxy.features.compaction.responses import CompactRoute, ManagedResponses
from proxy.features.compaction.step import clear
from proxy.features.other_routes import CountEndpoint, StoredReplyEndpoint
from proxy.routes.calls import Endpoint, SampleEndpoint
from proxy.routes.declared import Routes

if TYPE_CHECKING:
    from proxy.auth import Principal
    from proxy.services import Services
    from turnwise.types import Json


class EditedCount(CountEndpoint):
    """Counts the tokens of a prompt before and after its edits; a summary is not made."""

    async def count(self, call: Call, principal: Principal) -> tuple[int, Json]:
        num_tokens, answer = await super().count(call, principal)
        given = call.original.get(FIELD)
        if given is None:
            return num_tokens, answer
        left = num_tokens
        for edit in read_edits(given):
            if isinstance(edit, Clearing) and (cleared := await clear(self._services, call, principal, edit)):
                left -= cleared["cleared_input_tokens"]
        return num_tokens, answer | {"input_tokens": left, FIELD: {"original_input_tokens": num_tokens}}


ENDPOINTS: dict[Action, type[Endpoint]] = {
    Action.SAMPLE: SampleEndpoint,
    Action.COMPACT: SampleEndpoint,
    Action.COUNT_TOKENS: EditedCount,
    Action.GET_REPLY: StoredReplyEndpoint,
}


def _endpoints(services: Services) -> Iterable[tuple[WireRoute, Endpoint]]:
    responses, messages, compact = ManagedResponses(), ManagedMessages(), CompactRoute()
    for dialect in (responses, messages):
        for route in dialect.routes:
            own = compact if route.action is Action.COMPACT else dialect
            yield route, ENDPOINTS[route.action](services, own, route)


ROUTES = Routes(router=APIRouter(), actions={}, endpoints=_endpoints)
