"""Serialisation of a turn between two processes."""

from __future__ import annotations

import dataclasses
import datetime
import pickle

import numpy as np
import pytest

from turnwise.types import Outcome, Role, Turn

WHOLE = Turn(
    turn_id="t",
    session_id="s",
    tenant="acme",
    parent_turn_id="p",
    chain_id="c",
    role=Role.SUB_AGENT,
    role_reason="corrected",
    seq=3,
    step=2,
    dialect="messages",
    model="m",
    messages=[{"role": "user", "content": "\N{SNOWMAN}"}],
    tools=[{"type": "function"}],
    sampling={"temperature": 0.5},
    response={"role": "assistant"},
    prompt_delta=np.array([1, 2**31 - 1], np.int32),
    prompt_length=2,
    token_ids=np.array([-1, 3, 4], np.int32),
    logprobs=np.array([-0.1, -np.inf, -1e-38], np.float32),
    finish_reason="stop",
    outcome=Outcome.RETOKENISED,
    reason="media",
    policy_version_first=7,
    policy_version_last=8,
    history_digest=b"\0h",
    messages_digest=b"m",
    dialogue_digest=b"d",
    request_key="k#0",
    request_digest=b"r",
    inferred_by="key",
    created_at=datetime.datetime(2026, 11, 21, 15, 4, 5, 999_999, datetime.UTC),
    ttft_seconds=0.25,
    duration_seconds=1.5,
    routed_experts=b"e",
    digest=b"h",
)


@pytest.mark.parametrize("turn", [WHOLE, Turn(turn_id="t", session_id="s", chain_id="c")], ids=["whole", "bare"])
def test_a_turn_is_deserialised_unchanged(turn):
    arrived = pickle.loads(pickle.dumps(turn))
    for field in dataclasses.fields(Turn):
        sent, got = getattr(turn, field.name), getattr(arrived, field.name)
        assert type(got) is type(sent)
        if isinstance(sent, np.ndarray):
            assert got.dtype == sent.dtype
            assert got.tobytes() == sent.tobytes()
        else:
            assert got == sent


def test_the_sample_sets_every_field():
    bare = Turn(turn_id="", session_id="", chain_id="")
    for field in dataclasses.fields(Turn):
        assert not np.array_equal(getattr(WHOLE, field.name), getattr(bare, field.name)), field.name
