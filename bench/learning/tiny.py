"""A task that a model of 15 thousand parameters learns in seconds of CPU, through the same ledger and the same trainer.

A prompt is a class token and a random token. Each session has two turns of three sampled tokens; a token is right if it
has the remainder of the class, modulo the number of classes, and the session's reward is the share of right tokens, so
chance is 0.25. Held-out prompts have random tokens that no training prompt has. Sampling is batched in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from in_process import Processor, matcher
from learner import Outcome, Say
from recipes import NUM_CLASSES, VOCABULARY, Recipe, merged
from teacher import serving_teacher
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from proxy.features import Settings as ProxySettings
from proxy.features.pins import Pins
from proxy.features.supports import truncates
from trainer.features import Settings
from trainer.model.loading import model_class, read_config
from trainer.workflows import OffPolicyWorkflow, OnPolicyWorkflow
from turnwise.chains import IMPORTED
from turnwise.features.supports import SUPPORT, pack
from turnwise.store import serving, sessions
from turnwise.store.database import Database
from turnwise.store.rewards import add_rewards
from turnwise.store.turns import append_turns
from turnwise.types import IMPORT, Credit, Json, Reward, Session, Turn
from turnwise.types import Outcome as TurnOutcome

RANDOM_TOKENS = {"train": range(8, 40), "eval": range(40, 48)}
NUM_TURNS = 2
REPLY_TOKENS = 3
GROUPS = 8
GROUP_SIZE = 8
NUM_EVAL_SESSIONS = 256
EVALUATE_EVERY = 4
ENOUGH = 0.85
"""Held-out share of right tokens that counts as learnt."""
MAX_UPDATES = 40

SETTINGS: dict[str, Any] = {
    "learning_rate": 5e-3,
    "betas": [0.9, 0.99],
    "adam_epsilon": 1e-5,
    "algorithm": {"clip_low": 0.3, "clip_high": 0.5},
    "groups_per_batch": GROUPS,
    "num_minibatches": 4,
    "wait_seconds": 0.0,
    "row_tokens": 1024,
    "progress": False,
}
AS_IMPORTED: dict[str, Any] = {
    "outcome": TurnOutcome.UNTRAINABLE,
    "reason": IMPORTED,
    "logprobs": np.zeros(0, np.float32),
    "policy_version_first": -1,
    "policy_version_last": -1,
}
"""Fields of a turn whose reply no policy sampled."""
OWN = ("learning_rate", "max_grad_norm", "groups_per_batch", "buffer_groups", "buffer_min_groups")
"""Settings of a recipe that depend on the size of the task, and are not taken over from the demo's task."""


class TinyRun:
    """A ledger, sessions that are sampled into it, and the trainer that learns from it."""

    def __init__(
        self,
        settings: dict[str, Any],
        seed: int,
        directory: Path,
        *,
        has_rewards: bool = True,
        model: Path | None = None,
        sampling: Json | None = None,
        explore: float = 0.0,
    ) -> None:
        url = f"sqlite:///{directory / 'ledger.db'}"
        self.db = Database(url)
        self.db.upgrade()
        model = model or make_model(directory / "model", seed)
        values = {"database": url, "model": str(model), "policies_dir": directory / "policies"}
        config = Settings(**merged(SETTINGS, settings, values))
        workflow = OffPolicyWorkflow if config.workflow == "off_policy" else OnPolicyWorkflow
        self.workflow = workflow.build_from_config(config, enable_jit=False)
        self.state = self.workflow.setup(seed)
        self._random = np.random.default_rng(seed)
        self._torch = torch.Generator().manual_seed(seed)
        self._has_rewards = has_rewards
        self._pins = Pins(ProxySettings(sampling_pins={"*": sampling or {}}, explore=explore), lambda _: None)
        self._grammars: Any = None
        if sampling and "structured_outputs" in sampling:
            info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(model), vocab_size=VOCABULARY)
            self._grammars = xgrammar.GrammarCompiler(info)
        self.num_to_target: int | None = None
        self.credit = Credit.PROPAGATE
        self.num_sessions = 0
        self._groups = config.groups_per_batch
        self._num_groups = 0
        self._follow()

    def play_groups(self) -> None:
        """Play the next training tasks, each with a whole group, and store sessions, turns and rewards."""
        prompts = [prompt for prompt in self.prompts("train", self._groups) for _ in range(GROUP_SIZE)]
        places = [(self._num_groups + index // GROUP_SIZE, index % GROUP_SIZE) for index in range(len(prompts))]
        names = [f"{group}-{run}" for group, run in places]
        held = [
            self._pins.opened(
                Session(
                    session_id=name,
                    task_id=f"class-{prompt[0]}-{group}",
                    run=run,
                    group_id=f"g{group}",
                    group_size=GROUP_SIZE,
                    credit=self.credit,
                )
            )
            for name, prompt, (group, run) in zip(names, prompts, places, strict=True)
        ]
        asked = [self._asked(session) for session in held]
        replies, logprobs, supports = self.play_as(prompts, asked)
        rewards = self.reward_lines(names, prompts, replies)
        if self.num_to_target is None and np.mean([line.value for line in rewards]) >= ENOUGH:
            self.num_to_target = self.num_sessions + len(prompts)
        for first in range(0, len(prompts), GROUP_SIZE):
            own = range(first, first + GROUP_SIZE)
            rows = [
                dataclasses.replace(
                    turn,
                    sampling=asked[index],
                    parts={SUPPORT: pack(of_turn[index])} if truncates(asked[index], {}) else {},
                )
                for index in own
                for turn, of_turn in zip(
                    self.turns_of(names[index], prompts[index], replies[index], logprobs[index]), supports, strict=True
                )
            ]
            with self.db.write() as conn:  # a short transaction: a thread of the trainer writes too
                for index in own:
                    sessions.create_session(conn, held[index])
                append_turns(conn, rows)
                add_rewards(conn, rewards[first : first + GROUP_SIZE])
                for index in own:
                    sessions.end_session(conn, "default", names[index])
        self._num_groups += self._groups
        self.num_sessions += len(prompts)

    def reward_lines(self, names: Sequence[str], prompts: Sequence[list[int]], replies: np.ndarray) -> list[Reward]:
        """Return the rewards of new sessions: the share of right tokens; 0 for a run that has none."""
        values = rewards_of(prompts, replies) if self._has_rewards else [0.0] * len(prompts)
        return [Reward(session_id=name, value=value) for name, value in zip(names, values, strict=True)]

    def store_imported(self, num_groups: int, *, is_paired: bool) -> None:
        """Store imported sessions of right tokens, each in a group with one of random tokens if `is_paired`."""
        shape = (num_groups, NUM_TURNS, REPLY_TOKENS)
        prompts = self.prompts("train", num_groups)
        classes = np.array([prompt[0] for prompt in prompts])[:, None, None] % NUM_CLASSES
        right = self._random.integers(2, VOCABULARY // NUM_CLASSES, shape) * NUM_CLASSES + classes
        replies = [right, self._random.integers(8, VOCABULARY, shape)] if is_paired else [right]
        with self.db.write() as conn:
            for group, prompt in enumerate(prompts):
                for number, tokens in enumerate(replies):
                    name = f"imported-{group}-{number}"
                    in_group = {"group_id": f"imported-{group}", "group_size": len(replies), "run": number}
                    sessions.create_session(conn, Session(session_id=name, opened_by=IMPORT, **in_group))
                    turns = self.turns_of(name, prompt, tokens[group], np.zeros(shape[1:]))
                    append_turns(conn, [dataclasses.replace(turn, **AS_IMPORTED) for turn in turns])
                    add_rewards(conn, [Reward(session_id=name, value=1.0 - number)])
                    sessions.end_session(conn, "default", name)

    def update(self) -> Json:
        """Train on one batch and sample from the new version; return the batch's gauges."""
        metrics, self.state = self.workflow.step(self.state)
        self.workflow.commits.finish_writing()  # the version is read from its directory
        self._follow()
        return metrics

    def evaluate(self, count: int = NUM_EVAL_SESSIONS) -> float:
        """Return the mean reward of held-out prompts; nothing is stored."""
        prompts = self.prompts("eval", count)
        asked = [self._asked(Session(session_id="held-out"))] * count
        return float(np.mean(rewards_of(prompts, self.play_as(prompts, asked)[0])))

    def close(self) -> None:
        """Close the ledger."""
        self.workflow.close()
        self.db.close()

    def _follow(self) -> None:
        """Load the newest published version."""
        with self.db.read() as conn:
            newest = serving.serving_state(conn).newest
        assert newest is not None, "the trainer publishes version 0 at its start"
        self.version = newest.version
        self._model = model_class(read_config(newest.path)).from_pretrained(newest.path, dtype=torch.float32).eval()

    def prompts(self, split: str, count: int) -> list[list[int]]:
        """Return new prompts: a class and a random token of the split."""
        classes = self._random.integers(1, NUM_CLASSES + 1, count)
        others = self._random.choice(RANDOM_TOKENS[split], count)
        return [[int(which), int(other)] for which, other in zip(classes, others, strict=True)]

    def _asked(self, session: Session) -> Json:
        """Return the sampling of a session's calls."""
        asked = self._pins.pinned(session, "")
        return asked if session.explores is None else asked | {"temperature": session.explores}

    def play(self, prompts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sampled tokens of each session and their logprobs, [B, turns, reply tokens] each."""
        return self.play_as(prompts, [{}] * len(prompts))[:2]

    def play_as(
        self, prompts: Sequence[list[int]], asked: Sequence[Json]
    ) -> tuple[np.ndarray, np.ndarray, list[list[list[list[int]]]]]:
        """Return the sampled tokens of each session, their logprobs, and the ids that could be sampled.

        The first two are [B, turns, reply tokens], the ids by turn, session and token.
        """
        tokens = np.array(prompts)
        replies, logprobs, supports = [], [], []
        for number in range(NUM_TURNS):
            reply, reply_logprobs, known = self.sample_as(tokens, REPLY_TOKENS, asked)
            replies.append(reply)
            logprobs.append(reply_logprobs)
            supports.append(known)
            tokens = np.hstack([tokens, reply, np.full((len(tokens), 1), between(number))])
        return np.stack(replies, 1), np.stack(logprobs, 1), supports

    def sample(self, prompts: np.ndarray, num_tokens: int = REPLY_TOKENS) -> tuple[np.ndarray, np.ndarray]:
        """Return a reply to each prompt and its logprobs under the newest version, [B, num_tokens] each."""
        return self.sample_as(prompts, num_tokens, [{}] * len(prompts))[:2]

    @torch.inference_mode()
    def sample_as(
        self, prompts: np.ndarray, num_tokens: int, asked: Sequence[Json]
    ) -> tuple[np.ndarray, np.ndarray, list[list[list[int]]]]:
        """Return replies that are sampled as is asked, their logprobs, and the ids that could be sampled."""
        tokens, logprobs = torch.from_numpy(prompts), []
        supports: list[list[list[int]]] = [[] for _ in prompts]
        rows = [
            Processor(row.tolist(), each, matcher(self._grammars, each, 0), VOCABULARY) if each else None
            for row, each in zip(prompts, asked, strict=True)
        ]
        for _ in range(num_tokens):
            logits = self._model(tokens).logits[:, -1]
            log_p = torch.log_softmax(
                torch.stack([one if row is None else row.process(one) for row, one in zip(rows, logits, strict=True)]),
                -1,
            )
            sampled = torch.multinomial(log_p.exp(), 1, generator=self._torch)
            logprobs.append(log_p.gather(1, sampled))
            tokens = torch.cat([tokens, sampled], 1)
            for index, (row, token) in enumerate(zip(rows, sampled[:, 0].tolist(), strict=True)):
                if row is not None:
                    row.accept(token)
                    supports[index].append(log_p[index].isfinite().nonzero()[:, 0].tolist())
        return tokens[:, -num_tokens:].numpy(), torch.cat(logprobs, 1).numpy(), supports

    def turns_of(self, session_id: str, prompt: list[int], replies: np.ndarray, logprobs: np.ndarray) -> list[Turn]:
        """Return the turns of a session that the newest version sampled."""
        return [
            self.turn(session_id, number, prompt, replies[number], logprobs[number]) for number in range(len(replies))
        ]

    def turn(self, session_id: str, number: int, prompt: list[int], reply: np.ndarray, logprobs: np.ndarray) -> Turn:
        """Return a turn of a session that the newest version sampled; the first one has the session's prompt."""
        return Turn(
            turn_id=f"{session_id}-t{number}",
            session_id=session_id,
            parent_turn_id=f"{session_id}-t{number - 1}" if number else None,
            chain_id=f"{session_id}-t0",
            prompt_delta=np.array([between(number - 1)] if number else prompt, np.int32),
            prompt_length=len(prompt) + number * (REPLY_TOKENS + 1),
            token_ids=reply.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            policy_version_first=self.version,
            policy_version_last=self.version,
        )


def make_model(directory: Path, seed: int) -> Path:
    """Write a Qwen3 with random weights, whose tokens are letters."""
    letters = {letter: index for index, letter in enumerate(string.ascii_letters[:VOCABULARY])}
    tokenizer = Tokenizer(BPE(letters, []))
    tokenizer.decoder = ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a").save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def learn_tiny(
    name: str,
    recipe: Recipe,
    seed: int,
    directory: Path,
    say: Say,
    *,
    max_updates: int = MAX_UPDATES,
    model: Path | None = None,
) -> Outcome:
    """Train on the tiny task until an evaluation is good enough, or until the maximum number of updates.

    `model` is a directory with random weights and a vocabulary of the task's size, in place of the task's own.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    settings = {
        key: value
        for key, value in merged(recipe.settings, recipe.tiny).items()
        if key not in OWN or key in recipe.tiny
    }
    with contextlib.ExitStack() as stack:
        if recipe.teachers:
            settings["algorithm"]["teachers"] = [
                {"url": stack.enter_context(serving_teacher(known)), "model": "teacher", "tasks": f"class-[{known}]-*"}
                for known in recipe.teachers
            ]
        asked = {"sampling": recipe.sampling | recipe.tiny_sampling, "explore": recipe.explore}
        run = TinyRun(settings, seed, directory, has_rewards=not recipe.teachers, model=model, **asked)
        stack.callback(run.close)
        run.store_imported(recipe.num_imported, is_paired=settings["algorithm"].get("imitation") == "dpo")
        outcome = Outcome(name=name, seed=seed, before=run.evaluate())
        run.play_groups()
        staleness: list[float] = []
        for number in range(1, max_updates + 1):
            run.play_groups()  # with the version before the one in training, as with a real trainer
            metrics = run.update()
            staleness.append(metrics.get("staleness_mean", 0.0))
            if number % EVALUATE_EVERY == 0:
                outcome.num_updates = run.state.progress.policy_version
                outcome.curve.append((outcome.num_updates, run.evaluate()))
                say(outcome, metrics)
                if outcome.curve[-1][1] >= ENOUGH:
                    break
        outcome.after = outcome.curve[-1][1]
        outcome.num_sessions, outcome.num_to_target = run.num_sessions, run.num_to_target
        outcome.num_tokens = run.num_sessions * NUM_TURNS * REPLY_TOKENS
        outcome.staleness = sum(staleness) / len(staleness)
    outcome.cpu_seconds = time.process_time() - started
    outcome.passed = outcome.after >= ENOUGH
    return outcome


def between(turn: int) -> int:
    """Return the prompt token between a turn and the next."""
    return 5 + turn


def rewards_of(prompts: Sequence[list[int]], replies: np.ndarray) -> list[float]:
    """Return the share of right tokens of each session. `replies` [B, turns, reply tokens]."""
    classes = np.array([prompt[0] for prompt in prompts])[:, None, None]
    rewards: list[float] = (replies % NUM_CLASSES == classes % NUM_CLASSES).mean((1, 2)).tolist()
    return rewards
