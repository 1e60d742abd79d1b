"""Trinity-RFT's `Experience` and `EID`, with numpy arrays.

Tokens are those that the proxy captured, with the id of their turn. Trinity builds experiences in the agent's process;
here they are read from the ledger, so a failure of this process loses none.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.errors import InvalidRequest
from turnwise.types import Json, Logprobs, TokenIds


@dataclasses.dataclass
class EID:
    """Identity of an experience; the run fills in the fields that its workflow leaves empty."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:6])

    @property
    def uid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        return f"{self.batch}/{self.task}"

    def __str__(self) -> str:
        return self.uid

    def to_dict(self) -> Json:
        return dataclasses.asdict(self)


@dataclasses.dataclass(kw_only=True)
class Experience:
    """A trainable unit: a turn of the ledger, or one that a workflow created."""

    eid: EID = dataclasses.field(default_factory=EID)
    tokens: TokenIds
    prompt_length: int = 1
    logprobs: Logprobs | None = None
    reward: float | None = None
    token_level_reward: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    returns: npt.NDArray[np.float32] | None = None
    truncate_status: str | None = None
    """`prompt_truncated`, or `response_truncated`: sampling stopped at a length."""
    info: Json = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    response_text: str | None = None
    prompt_text: str | None = None
    action_mask: npt.NDArray[np.bool_] | None = None
    """True for tokens that the policy sampled. [R]"""
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    chosen: TokenIds | None = None
    rejected: TokenIds | None = None
    chosen_messages: list[Json] | None = None
    rejected_messages: list[Json] | None = None
    multi_modal_inputs: Json | None = None
    teacher_logprobs: Logprobs | None = None
    routed_experts: npt.NDArray[np.uint8] | None = None
    custom_fields: list[Any] = dataclasses.field(default_factory=list)
    turn_id: str | None = None
    """The turn in the ledger; None for an experience that a workflow created."""
    experience_type: str = dataclasses.field(init=False)
    """`multi_turn` if a mask is given, `dpo` if a pair is given, otherwise `single_turn`."""

    def __post_init__(self) -> None:
        if isinstance(self.eid, dict):
            self.eid = EID(**self.eid)
        self.tokens = np.asarray(self.tokens, np.int32)
        for name, kind in _ARRAYS.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, np.asarray(value, kind))
        self.experience_type = self._type()
        if self.experience_type == "dpo":
            self.prompt_length = len(self.tokens)
        if self.experience_type == "single_turn":
            self.action_mask = self._single_turn_mask()

    def _type(self) -> str:
        if self.action_mask is not None:
            return "multi_turn"
        return "dpo" if self.chosen is not None and self.rejected is not None else "single_turn"

    def _single_turn_mask(self) -> npt.NDArray[np.bool_]:
        if self.prompt_length <= 0:
            raise InvalidRequest(f"prompt_length of a single turn must be above 0, not {self.prompt_length!r}")
        if self.truncate_status == "prompt_truncated":
            return np.zeros(0 if self.logprobs is None else len(self.logprobs), np.bool_)
        if len(self.tokens) <= self.prompt_length:
            raise InvalidRequest(
                f"a single turn needs a response: {len(self.tokens)} tokens are no more than its prompt's "
                f"{self.prompt_length!r}"
            )
        return np.ones(len(self.tokens) - self.prompt_length, np.bool_)


_ARRAYS: dict[str, type[np.generic]] = {
    "logprobs": np.float32,
    "token_level_reward": np.float32,
    "advantages": np.float32,
    "returns": np.float32,
    "action_mask": np.bool_,
    "chosen": np.int32,
    "rejected": np.int32,
    "teacher_logprobs": np.float32,
    "routed_experts": np.uint8,
}


def is_complete(turn: Json) -> bool:
    return bool(turn["token_ids"]) and turn["outcome"] in {"exact", "retokenised"}


def experience_of_turn(turn: Json) -> Experience:
    return Experience(
        eid=EID(step=turn["step"], suffix=turn["turn_id"]),
        tokens=np.asarray([*turn["prompt_token_ids"], *turn["token_ids"]], np.int32),
        prompt_length=len(turn["prompt_token_ids"]),
        logprobs=np.asarray(turn["logprobs"], np.float32),
        truncate_status="response_truncated" if turn["finish_reason"] == "length" else None,
        info={
            "session_id": turn["session_id"],
            "model_version": turn["policy_version_first"],
            "model_version_drift": turn["policy_version_last"] - turn["policy_version_first"],
        },
        response_text=turn["response"].get("content"),
        messages=turn["messages"],
        tools=turn["tools"],
        turn_id=turn["turn_id"],
    )
