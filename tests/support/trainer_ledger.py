"""A ledger with rollouts of a real, very small policy, for the trainer's tests."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.engine_sampling import processed_logits
from support.tiny_models import VOCABULARY
from transformers import PreTrainedModel

from trainer.features import FEATURES, Settings
from trainer.features.policies import Policies
from trainer.train import Features
from trainer.workflows import OffPolicyWorkflow, OnPolicyWorkflow
from turnwise.chains import IMPORTED
from turnwise.features.policies import create_policy
from turnwise.features.supports import SUPPORT, pack
from turnwise.store import sessions
from turnwise.store.database import Database
from turnwise.store.rewards import add_rewards
from turnwise.store.turns import append_turns
from turnwise.types import DEFAULT_POLICY, IMPORT, Credit, Outcome, Reward, Role, Session, Split, Turn

GOOD = 24
"""Sampled tokens below this are rewarded: training makes them more probable."""


@dataclasses.dataclass
class Rollouts:
    db: Database
    model: PreTrainedModel
    version: int = 0
    num_turns: int = 2
    sampled: int = 4
    credit: Credit = Credit.PROPAGATE
    split: Split = Split.TRAIN
    sampling: dict = dataclasses.field(default_factory=dict)
    """As it is stored."""
    used: dict | None = None
    """As the engine samples; None: as it is stored."""
    window: int | None = None
    """The ids that the engine's penalties see; None for all of prompt and reply."""
    lost: int = 0
    """So many ids of each support that are not stored, the least likely ones first."""
    unknown: int = 0
    """So many tokens at the beginning of each reply whose support is not stored."""
    has_groups: bool = True
    """False plays sessions without a group."""
    gap: float = 0.0
    """Error that is added to the engine's logprobs."""
    policy_id: int = DEFAULT_POLICY
    is_flipped: bool = False
    """True rewards the other tokens."""
    is_rated: bool = True
    """False gives no session a reward."""
    metadata: dict = dataclasses.field(default_factory=dict)
    """Of each session."""

    def play(self, name: str, *, num_groups: int, group_size: int = 4, seed: int = 0) -> None:
        """Play and finish groups of sessions; the same arguments give the same tokens."""
        for group in range(num_groups):
            rng = torch.Generator().manual_seed(seed * 1000 + group)
            prompt = torch.randint(1, VOCABULARY, (6,), generator=rng).tolist()
            for run in range(group_size):
                self._session(f"{name}-{group}", run, group_size, prompt, rng)

    def _session(self, group_id: str, run: int, group_size: int, prompt: list[int], rng: torch.Generator) -> None:
        session_id = f"{group_id}-{run}"
        session = Session(
            session_id=session_id,
            task_id=group_id,
            run=run,
            group_id=group_id if self.split is Split.TRAIN and self.has_groups else None,
            group_size=group_size if self.split is Split.TRAIN and self.has_groups else None,
            split=self.split,
            credit=self.credit,
            policy_id=self.policy_id,
            metadata=self.metadata,
        )
        tokens, turns, rewards = list(prompt), [], []
        fresh = list(prompt)
        for number in range(self.num_turns):
            prompt_length = len(tokens)
            sampled, logprobs, support = self._sample(tokens, rng)
            turn = Turn(
                turn_id=f"{session_id}-t{number}",
                session_id=session_id,
                policy_id=self.policy_id,
                parent_turn_id=turns[-1].turn_id if turns else None,
                chain_id=f"{session_id}-t0",
                prompt_delta=np.array(fresh, np.int32),
                prompt_length=prompt_length,
                token_ids=np.array(sampled, np.int32),
                logprobs=np.array(logprobs, np.float32) + np.float32(self.gap),
                sampling=self.sampling,
                parts={SUPPORT: pack(support)} if "top_k" in self.sampling else {},
                policy_version_first=self.version,
                policy_version_last=self.version,
            )
            turns.append(turn)
            reward = float(np.mean((np.array(sampled) < GOOD) != self.is_flipped))
            rewards.append(Reward(session_id=session_id, step=number, value=reward))
            fresh = [1 + number, 2 + run % 2]
            tokens += sampled + fresh
        with self.db.write() as conn:
            sessions.create_session(conn, session)
            append_turns(conn, turns)
            add_rewards(conn, rewards if self.is_rated else [])
            sessions.end_session(conn, "default", session_id)

    def play_compacted(self, name: str, *, num_groups: int, group_size: int = 4) -> None:
        """Play groups of sessions with two summaries: one in its chain, and one that branches from a context."""
        for group in range(num_groups):
            rng = torch.Generator().manual_seed(group)
            for run in range(group_size):
                self._compacted(f"{name}-{group}", run, group_size, rng)

    def _compacted(self, group_id: str, run: int, group_size: int, rng: torch.Generator) -> None:
        """t0, t1 and the summary t2 are a chain; t3 goes on from t2, and has the summary t4 and the branch t5 after it.

        t5 goes on from t4.
        """
        session_id = f"{group_id}-{run}"
        parents = (None, 0, 1, None, 3, 3)
        said = {number: f"summary {number} of {session_id}, as its harness puts it" for number in (2, 4)}
        turns: list[Turn] = []
        for number, parent in enumerate(parents):
            before = [] if parent is None else path_tokens(turns, turns[parent])
            fresh = torch.randint(1, VOCABULARY, (4,), generator=rng).tolist()
            sampled, logprobs, _ = self._sample(before + fresh, rng)
            quoted = said.get(number - 1)
            turns.append(
                Turn(
                    turn_id=f"{session_id}-t{number}",
                    session_id=session_id,
                    parent_turn_id=None if parent is None else turns[parent].turn_id,
                    chain_id=f"{session_id}-t{number}",
                    messages=[{"role": "user", "content": quoted or f"message {number}"}],
                    response={"role": "assistant", "content": said.get(number, f"reply {number}")},
                    role=Role.SUMMARY if number in said else Role.MAIN,
                    prompt_delta=np.array(fresh, np.int32),
                    prompt_length=len(before) + len(fresh),
                    token_ids=np.array(sampled, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    sampling=self.sampling,
                )
            )
        lines = [Reward(session_id=session_id, step=number, value=0.0) for number in range(6) if number not in said]
        with self.db.write() as conn:
            group = {"group_id": group_id, "group_size": group_size}
            sessions.create_session(conn, Session(session_id=session_id, task_id=group_id, run=run, **group))
            append_turns(conn, turns)
            add_rewards(conn, lines)
            sessions.end_session(conn, "default", session_id)

    def _sample(self, tokens: list[int], rng: torch.Generator) -> tuple[list[int], list[float], list[list[int] | None]]:
        """Return a reply, its logprobs, and the ids that top-k leaves at each token, as far as they are stored."""
        used = self.sampling if self.used is None else self.used
        sampled, logprobs, support = [], [], []
        for place in range(self.sampled):
            with torch.no_grad():
                logits = self.model(torch.tensor([tokens + sampled])).logits[0, -1]
            seen = (tokens, sampled) if self.window is None else ([], sampled[max(0, place - self.window) :])
            logits = processed_logits(logits, *seen, used)
            left = logits.topk(used.get("top_k", len(logits))).indices.tolist()
            log_p = torch.full_like(logits, -torch.inf)
            log_p[left] = torch.log_softmax(logits[left], -1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=rng))
            sampled.append(token)
            logprobs.append(float(log_p[token]))
            kept = [*left[: len(left) - self.lost], token]
            support.append(None if place < self.unknown else sorted(set(kept)))
        return sampled, logprobs, support


def path_tokens(turns: list[Turn], last: Turn) -> list[int]:
    """Return the tokens of a turn with its whole prompt."""
    before = next((path_tokens(turns, turn) for turn in turns if turn.turn_id == last.parent_turn_id), [])
    return [*before, *last.prompt_delta.tolist(), *last.token_ids.tolist()]


def store_imported(db: Database, group_id: str, prompt: list[int], replies: dict[float, list[int]]) -> None:
    with db.write() as conn:
        for number, (reward, reply) in enumerate(replies.items()):
            session_id = f"{group_id}-{number}"
            of_group = {"group_id": group_id, "group_size": len(replies), "opened_by": IMPORT}
            sessions.create_session(conn, Session(session_id=session_id, task_id=group_id, run=number, **of_group))
            turn = Turn(
                turn_id=f"{session_id}-t0",
                session_id=session_id,
                chain_id=f"{session_id}-t0",
                prompt_delta=np.array(prompt, np.int32),
                prompt_length=len(prompt),
                token_ids=np.array(reply, np.int32),
                outcome=Outcome.UNTRAINABLE,
                reason=IMPORTED,
                policy_version_first=-1,
                policy_version_last=-1,
            )
            append_turns(conn, [turn])
            add_rewards(conn, [Reward(session_id=session_id, value=reward, source=IMPORT)])
            sessions.end_session(conn, "default", session_id)


def settings_for(directory: Path, model: Path, **changes: Any) -> Settings:
    """Return the settings of a trainer over `ledger.db` in a directory: small batches, and no wait for more groups."""
    values: dict[str, Any] = {
        "database": f"sqlite:///{directory / 'ledger.db'}",
        "model": str(model),
        "policies_dir": directory / "policies",
        "groups_per_batch": 3,
        "singles_per_group": 1,
        "num_minibatches": 1,
        "learning_rate": 3e-3,
        "wait_seconds": 0.0,
        "progress": False,
    }
    return Settings(**(values | changes))


def write_settings(file: Path, directory: Path, model: Path, **changes: Any) -> Path:
    """Write the settings of a trainer's process over `ledger.db` in a directory; return the file."""
    values: dict[str, Any] = {
        "database": f"sqlite:///{directory / 'ledger.db'}",
        "model": str(model),
        "policies_dir": str(directory / "policies"),
        "max_staleness": 10,
        "row_tokens": 48,
        "num_threads": 1,
        "wait_seconds": 0.0,
        "progress": False,
    }
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in (values | changes).items()))
    return file


def new_policy(db: Database, name: str, base: str = "default") -> int:
    """Create a policy; return its number."""
    with db.write() as conn:
        return create_policy(conn, "default", name, base)[0].policy_id


def train_policies(settings: Settings, features: Features = FEATURES, **changes: Any) -> dict[int, Any]:
    """Train all policies of a ledger in this process until the last batch of each; return their states."""
    policies = Policies(settings, dataclasses.replace(features, **changes))
    try:
        policies.learn()
    except BaseException:
        for training in policies.trainings:  # as the end of a process does
            training.commits.close()
            training.checkpoints.close()
        raise
    policies.close()
    return policies.states


def train(settings: Settings) -> Any:
    """Run a trainer in this process until its last batch; return its state."""
    kind = OffPolicyWorkflow if settings.workflow == "off_policy" else OnPolicyWorkflow
    workflow = kind.build_from_config(settings, enable_jit=False)
    try:
        state = workflow.learn(workflow.setup(settings.seed))
    except BaseException:
        workflow.commits.close()  # the end of a process ends its thread
        workflow.checkpoints.close()  # and releases its lock
        raise
    workflow.close()
    return state
