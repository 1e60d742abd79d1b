"""How Parquet files are written: rows in groups of a fixed number, experiences as columns, a data set card.

Memory is bounded, and the same rows give the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise import __version__
from turnwise.chains import Experience
from turnwise.features.supports import as_json, support_of
from turnwise.files import create_private
from turnwise.types import Json

ROWS_IN_GROUP = 256


def write_rows(path: Path, columns: Json, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows with these columns, given by pyarrow's types; return how many."""
    import pyarrow.parquet

    schema: Any = pyarrow.schema(columns.items())
    remaining, count = iter(rows), 0
    create_private(path)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(itertools.islice(remaining, ROWS_IN_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def write_parquet(experiences: Iterable[Experience], path: Path) -> int:
    """Write experiences to a Parquet file; return how many.

    Tokens, mask and logprobs cover the whole sequence, [L] each; `turn_rewards` and `returns` have one value per
    trained turn, [K].
    """
    return write_rows(path, _columns(), map(_row, experiences))


def write_dataset(experiences: Iterable[Experience], directory: Path) -> int:
    """Write a directory that `datasets.load_dataset` reads: `data/train.parquet` and a card; return the row count."""
    (directory / "data").mkdir(parents=True, exist_ok=True)
    count = write_parquet(experiences, directory / "data" / "train.parquet")
    (directory / "README.md").write_text(_card(count), encoding="utf-8")
    return count


def _row(experience: Experience) -> Json:
    eid = experience.eid
    return {
        "eid": eid.uid,
        "session_id": experience.session_id,
        "group_id": experience.group_id,
        "task_id": eid.task,
        "run": eid.run,
        "split": experience.split.value,
        "turn_ids": list(experience.turn_ids),
        "turn_steps": list(experience.turn_steps),
        "tokens": experience.tokens,
        "prompt_length": experience.prompt_length,
        "loss_mask": experience.loss_mask,
        "turn_index": experience.turn_index,
        "logprobs": experience.logprobs,
        "support": as_json(support_of(experience)),
        "turn_rewards": experience.turn_rewards,
        "returns": experience.turn_returns,
        "advantages": experience.turn_advantages,
        "reward": experience.own_reward,
        "session_reward": experience.reward,
        "policy_version_first": experience.policy_version_first,
        "policy_version_last": experience.policy_version_last,
        "policy": experience.policy,
    }


def _columns() -> Json:
    import pyarrow

    return {
        "eid": pyarrow.string(),
        "session_id": pyarrow.string(),
        "group_id": pyarrow.string(),
        "task_id": pyarrow.string(),
        "run": pyarrow.int32(),
        "split": pyarrow.string(),
        "turn_ids": pyarrow.list_(pyarrow.string()),
        "turn_steps": pyarrow.list_(pyarrow.int32()),
        "tokens": pyarrow.list_(pyarrow.int32()),
        "prompt_length": pyarrow.int32(),
        "loss_mask": pyarrow.list_(pyarrow.bool_()),
        "turn_index": pyarrow.list_(pyarrow.int32()),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "support": pyarrow.list_(pyarrow.list_(pyarrow.int32())),
        "turn_rewards": pyarrow.list_(pyarrow.float64()),
        "returns": pyarrow.list_(pyarrow.float64()),
        "advantages": pyarrow.list_(pyarrow.float64()),
        "reward": pyarrow.float64(),
        "session_reward": pyarrow.float64(),
        "policy_version_first": pyarrow.int32(),
        "policy_version_last": pyarrow.int32(),
        "policy": pyarrow.string(),
    }


def _card(count: int) -> str:
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.parquet
tags:
- reinforcement-learning
- turnwise
---

# Experiences captured by Turnwise {__version__}

{count} training sequences, as a trainer sees them. Each row is one chain of turns, or one turn, with the exact token
ids that the model was given and sampled.

| column | content |
|---|---|
| `tokens` | prompt and sampled token ids |
| `prompt_length` | tokens before the first sampled one |
| `loss_mask` | true where a token was sampled and is trained |
| `turn_index` | which of `turn_ids` sampled the token, -1 where none did |
| `logprobs` | logprobs under the policy that sampled; 0 where `loss_mask` is false |
| `support` | ids that top-k, top-p and min-p left to sample from, null where they are not known or cut nothing off |
| `turn_rewards`, `returns` | reward and return of each turn in `turn_ids` |
| `advantages` | advantage of each turn; before training that of `grpo`, null without a group |
| `reward` | reward of these turns: the session's, or with step-wise credit the sum of their own |
| `session_reward` | reward of the whole session |
| `policy_version_first`, `policy_version_last` | oldest and newest policy version among the turns |
| `policy` | name of the policy that sampled the turns |
| `eid` | batch/task/run/step/suffix |
"""
