"""Episodes as a real `verl.DataProto`, with every tensor of rLLM's own transform.

Only this module needs torch and verl; `rows` selects the tokens of a row without them. Shapes: N rows, P maximum length
of a prompt, R maximum length of a response.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl import DataProto

from turnwise.errors import InvalidRequest
from turnwise.types import Json
from turnwise.workflows import Episode
from turnwise_verl.rows import VerlRow, is_kept, rows_of, task_of


def to_data_proto(episodes: Sequence[Episode], task_ids: Sequence[str], config: Any, pad_token_id: int) -> DataProto:
    """Return the rows of all episodes as one batch, in the order of the verl batch, whose tasks have these ids.

    Of verl's configuration `data.max_prompt_length`, `data.max_response_length`, `rllm.stepwise_advantage` and
    `rllm.compact_filtering` are read. Masks are computed from lengths, so the padding token may occur in text.

    Raises:
        InvalidRequest: no episode has a captured token.
    """
    stepwise = bool(config.rllm.stepwise_advantage.enable)
    rows_by_episode = [
        rows_of(episode, task_of(episode, position, task_ids), stepwise=stepwise)
        for position, episode in enumerate(episodes)
    ]
    rows = [row for rows in rows_by_episode for row in rows]
    if not rows:
        raise InvalidRequest(
            f"none of {len(episodes)} episodes holds a captured token: set Step.model_output to what "
            "rollout_engine.get_model_response returned"
        )
    return DataProto.from_dict(
        tensors=_tensors(rows, config.data.max_prompt_length, config.data.max_response_length, pad_token_id),
        non_tensors=_non_tensors(rows, dict(config.rllm.compact_filtering)),
        meta_info={"repeat_counts": [len(rows) for rows in rows_by_episode]},
    )


def _tensors(rows: list[VerlRow], max_prompt: int, max_response: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    # A prompt that is too long is truncated at its start, a response at its end.
    prompt_rows = [row.tokens.prompt[-max_prompt:] for row in rows]
    prompts = _filled(prompt_rows, max_prompt, pad_token_id, torch.long, left=True)
    responses = _filled([row.tokens.response for row in rows], max_response, pad_token_id, torch.long)
    response_lengths = [min(len(row.tokens.response), max_response) for row in rows]
    attention_mask = torch.cat(
        [
            _filled([[1] * len(prompt) for prompt in prompt_rows], max_prompt, 0, torch.long, left=True),
            _filled([[1] * length for length in response_lengths], max_response, 0, torch.long),
        ],
        dim=1,
    )
    return {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1) * attention_mask,
        "prompts": prompts,
        "responses": responses,
        "response_mask": _filled([row.tokens.mask for row in rows], max_response, 0, torch.long),
        "traj_rewards": _at_end([row.trajectory_reward for row in rows], response_lengths, max_response),
        "step_rewards": _at_end([row.step_reward for row in rows], response_lengths, max_response),
        "rollout_log_probs": _filled([row.tokens.logprobs for row in rows], max_response, 0.0, torch.float32),
    }


def _filled(
    rows: Sequence[Sequence[float]], width: int, filler: float, dtype: torch.dtype, *, left: bool = False
) -> torch.Tensor:
    filled = torch.full((len(rows), width), filler, dtype=dtype)
    for n, row in enumerate(rows):
        values = torch.tensor(row[:width], dtype=dtype)
        start = width - len(values) if left else 0
        filled[n, start : start + len(values)] = values
    return filled


def _at_end(rewards: list[float], lengths: list[int], width: int) -> torch.Tensor:
    """Return each reward at the last token of its response and 0 elsewhere: [N, R]."""
    placed = torch.zeros((len(rewards), width), dtype=torch.float32)
    for n, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if length:
            placed[n, length - 1] = reward
    return placed


def _non_tensors(rows: list[VerlRow], filtering: Json) -> dict[str, np.ndarray[Any, Any]]:
    batch_id = str(uuid.uuid4())
    return {
        "episode_ids": np.array([row.episode.id for row in rows]),
        "trajectory_ids": np.array([row.trajectory_id for row in rows]),
        "step_ids": np.array([row.step_id for row in rows]),
        "batch_ids": np.array([batch_id] * len(rows)),
        "step_nums": np.array([row.step_num for row in rows]),
        "is_correct": np.array([row.episode.is_correct for row in rows]),
        "termination_reasons": np.array([row.termination_reason.value for row in rows]),
        "metrics": np.array([row.episode.metrics for row in rows], dtype=object),
        "is_valid": np.array([is_kept(row, filtering) for row in rows]),
        "is_last_step": np.array([row.is_last_step for row in rows]),
        "is_pad_step": np.array([False] * len(rows)),
    }
