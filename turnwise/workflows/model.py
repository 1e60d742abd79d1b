"""Trinity-RFT's `ModelWrapper`: a model with a history of its samples.

The history is the ledger. Trinity patches one method of one client to record replies; here the clients are unchanged,
and the samples of all their methods, including streamed and parsed replies, are read from the session. A wrapper uses
one session at a time. Headers that are computed for every call name the session and the step, so a client that an
agent keeps stays valid from run to run.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from turnwise.client import Client, wire
from turnwise.client.connection import step_header
from turnwise.errors import InvalidRequest, NotFound
from turnwise.types import Json
from turnwise.workflows.experience import Experience, experience_of_turn, is_complete

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

SESSION_HEADER = "X-Session-Id"


class SessionHeaders(Mapping[str, str]):
    """The current session and step of a wrapper, as headers."""

    def __init__(self, model: ModelWrapper) -> None:
        self._model = model

    def _now(self) -> dict[str, str]:
        return {SESSION_HEADER: self._model.session_id, **step_header(self._model.step)}

    def __getitem__(self, name: str) -> str:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class ModelWrapper:
    """The rollout model of one run: clients that sample in its session, and their samples."""

    def __init__(
        self,
        client: Client | str,
        *,
        model: str | None = None,
        enable_history: bool = True,
        generate_kwargs: Json | None = None,
        session: wire.SessionFields | None = None,
    ) -> None:
        """Use a new session with these fields, which starts with the first call or with `open`.

        Clones share the client, which may be given by the proxy's base URL. Without `model` its name is read from the
        proxy. Experiences may be extracted only with `enable_history`, but the ledger stores them in any case.
        """
        self.client = Client(client) if isinstance(client, str) else client
        self._model = model
        self.enable_history = enable_history
        self.generate_kwargs = dict(generate_kwargs or {})
        self.session: wire.SessionFields = {**session} if session else {}
        self.workflow_state: Json = {}
        self.async_client = self.client.asynchronous()
        self._begin()

    def _begin(self) -> None:
        self.session_id = self.session.get("session_id") or uuid.uuid4().hex
        self.step: int | None = None
        """The step of the next calls; None makes each call its own step."""
        self._is_over = False
        self._last_turn_id: str | None = None

    def clone_with_isolated_history(self, **session: Any) -> ModelWrapper:
        clone = copy.copy(self)
        clone.session = {**self.session, **session}  # type: ignore[typeddict-item]
        if "session_id" not in session:
            clone.session.pop("session_id", None)
        clone.workflow_state = {}
        clone._begin()  # noqa: SLF001 a clone is made from inside
        return clone

    def open(self, **fields: Unpack[wire.SessionFields]) -> None:
        self.client.create_session(**self._opening(fields))

    async def open_async(self, **fields: Unpack[wire.SessionFields]) -> None:
        await self.async_client.create_session(**self._opening(fields))

    def _opening(self, fields: wire.SessionFields) -> wire.SessionFields:
        if self._is_over:
            self._begin()
        return {**fields, **self.session, "session_id": self.session_id}

    def reward(self, value: float, *, step: int | None = None) -> int:
        return self.client.rewards([wire.reward_line(value, session_id=self.session_id, step=step)])[0]

    async def reward_async(self, value: float, *, step: int | None = None) -> int:
        line = wire.reward_line(value, session_id=self.session_id, step=step)
        return (await self.async_client.rewards([line]))[0]

    def end(self, reason: str | None = None) -> None:
        """End the session in the ledger; its history can be read until the next session is created."""
        self._is_over = True
        self.step = None
        self.client.end_session(self.session_id, reason=reason)

    async def end_async(self, reason: str | None = None) -> None:
        self._is_over = True
        self.step = None
        await self.async_client.end_session(self.session_id, reason=reason)

    @property
    def model_path(self) -> str:
        return self.model_name

    @property
    def model_name(self) -> str:
        return self._model or self.client.served_model()

    @property
    def api_address(self) -> str:
        return self.client.base_url

    @property
    def api_key(self) -> str:
        return self.client.api_key

    @property
    def base_url(self) -> str:
        return f"{self.client.base_url}/sessions/{wire.segment(self.session_id)}/v1"

    def get_openai_client(self) -> OpenAI:
        client = self.client.pool.sync(f"{self.client.base_url}/v1", self.client.api_key, SessionHeaders(self))
        client.model_path = self.model_name  # type: ignore[attr-defined]
        return client

    def get_openai_async_client(self) -> AsyncOpenAI:
        client = self.client.pool.asynchronous(f"{self.client.base_url}/v1", self.client.api_key, SessionHeaders(self))
        client.model_path = self.model_name  # type: ignore[attr-defined]
        return client

    def chat(self, messages: list[Json], **kwargs: Any) -> list[Experience]:
        body = self._asking(kwargs, messages=messages)
        return self._sampled(self.get_openai_client().chat.completions.create(**body))

    async def chat_async(self, messages: list[Json], **kwargs: Any) -> list[Experience]:
        body = self._asking(kwargs, messages=messages)
        return await self._sampled_async(await self.get_openai_async_client().chat.completions.create(**body))

    def generate(self, prompts: list[str], **kwargs: Any) -> list[Experience]:
        """Complete each prompt, without a chat template; return all replies to the first prompt, then to the next."""
        if not prompts:
            return []
        body = self._asking(kwargs, prompt=prompts)
        return self._sampled(self.get_openai_client().completions.create(**body))

    async def generate_async(self, prompts: list[str], **kwargs: Any) -> list[Experience]:
        if not prompts:
            return []
        body = self._asking(kwargs, prompt=prompts)
        return await self._sampled_async(await self.get_openai_async_client().completions.create(**body))

    def _asking(self, kwargs: Json, **what: Any) -> Json:
        return {"model": self.model_name, **self.generate_kwargs, **kwargs, **what}

    def _sampled(self, completion: ChatCompletion | Completion) -> list[Experience]:
        turn_ids = choice_ids(completion.id, len(completion.choices))
        return [experience_of_turn(self.client.turn(turn_id, prompt="whole")) for turn_id in turn_ids]

    async def _sampled_async(self, completion: ChatCompletion | Completion) -> list[Experience]:
        turn_ids = choice_ids(completion.id, len(completion.choices))
        return [experience_of_turn(await self.async_client.turn(turn_id, prompt="whole")) for turn_id in turn_ids]

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the samples of this session since the last extraction that cleared the history, in order.

        Raises:
            InvalidRequest: history is not enabled.
        """
        since = self._since()
        try:
            turns = list(self.client.turns(self.session_id, prompt="whole", **since))
        except NotFound:  # nothing was sampled yet, and the session was not opened
            turns = []
        return self._remembered(turns, clear_history)

    async def extract_experience_from_history_async(self, clear_history: bool = True) -> list[Experience]:
        since = self._since()
        try:
            turns = [turn async for turn in self.async_client.turns(self.session_id, prompt="whole", **since)]
        except NotFound:  # nothing was sampled yet, and the session was not opened
            turns = []
        return self._remembered(turns, clear_history)

    def _since(self) -> Json:
        if not self.enable_history:
            raise InvalidRequest("history is not enabled: make the ModelWrapper with enable_history=True")
        return wire.given({"after": self._last_turn_id})

    def _remembered(self, turns: list[Json], clear_history: bool) -> list[Experience]:
        if clear_history and turns:
            self._last_turn_id = turns[-1]["turn_id"]
        return [experience_of_turn(turn) for turn in turns if is_complete(turn)]


def choice_ids(completion_id: str, num_choices: int) -> list[str]:
    return [completion_id, *(f"{completion_id}#{index}" for index in range(1, num_choices))]
