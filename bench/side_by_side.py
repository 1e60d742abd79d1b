"""The same task learnt by TRL's GRPO and by Turnwise, each alone on the same cores: time and tokens to the same reward.

The task is the small twin of the recipe reverse-text: one call, a reward from 0 to 1, SmolLM2-135M-Instruct with an
adapter, 32-bit floats. Both get the same tasks, sampling, batches, optimizer, adapter and clipping, and take one
optimizer step a batch, which spares TRL a second forward of each batch. TRL samples with transformers in the training
process, its only way on a CPU, with a thread for each core. Turnwise runs as users run it: `turnwise recipe`, with
vLLM, proxy and trainer as processes that share the cores. The target is reached at the end of the first batch where
the newest two batches of training sessions have this mean; every session is of a task that was not trained before.
TRL then stops, Turnwise after all its batches: they are counted until the target only.

    python bench/side_by_side.py trl
    python bench/side_by_side.py turnwise

`make setup .venv/.real` makes the environment: TRL is among the tests' tools, and the weights come with `.venv/.real`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demos.recipe import RecipeTask, make_task, reward
from turnwise.commands.recipe import find_recipe
from turnwise.default_models.pretrained import write_pretrained

RECIPE = "reverse-text"
GROUP_SIZE = 8
POLL_SECONDS = 2.0
TEMPERATURE, MAX_TOKENS = 0.8, 16
"""As the recipe's agent samples."""


@dataclass
class Observed:
    """What a training did. All times are in seconds since the epoch."""

    batch_size: int
    """Training sessions a batch."""
    started: float = field(default_factory=time.time)
    sessions: list[tuple[float, float, int]] = field(default_factory=list)
    """End, reward and sampled tokens of each training session, in order."""
    begun: float = 0.0
    """When the first one began."""
    updates: list[tuple[float, int]] = field(default_factory=list)
    """When each batch was trained, and its tokens with a gradient: not those of groups with equal rewards."""
    clock: list[tuple[float, float]] = field(default_factory=list)
    """CPU time of all processes at some times."""
    held_out: tuple[float, float] | None = None
    """Reward of held-out tasks before training and at the end."""

    def count_to(self, target: float) -> int | None:
        """Return the number of sessions until two batches had this mean reward; None if they never had."""
        rewards, window = [reward for _, reward, _ in self.sessions], 2 * self.batch_size
        counts = range(window, len(rewards) + 1, self.batch_size)
        return next((count for count in counts if sum(rewards[count - window : count]) >= target * window), None)

    def result(self, target: float) -> dict[str, Any]:
        """Return what it took until the reward was reached, or until the end."""
        count = self.count_to(target)
        sessions = self.sessions[: count or len(self.sessions)]
        end, newest = sessions[-1][0], sessions[-2 * self.batch_size :]
        trained = [tokens for at, tokens in self.updates if at <= end]
        return {
            "is_reached": count is not None,
            "reward": round(sum(reward for _, reward, _ in newest) / len(newest), 3),
            "start_seconds": round(self.begun - self.started, 1),
            "seconds": round(end - self.begun, 1),
            "cpu_seconds": round(self._cpu_until(end) - self._cpu_until(self.begun), 1),
            "num_updates": len(trained),
            "num_sessions": len(sessions),
            "num_sampled_tokens": sum(tokens for _, _, tokens in sessions),
            "num_trained_tokens": sum(trained),
            "held_out": self.held_out,
            "batches": [
                round(sum(reward for _, reward, _ in sessions[first : first + self.batch_size]) / self.batch_size, 2)
                for first in range(0, len(sessions) - self.batch_size + 1, self.batch_size)
            ],
            "load_average": os.getloadavg()[1],
        }

    def _cpu_until(self, when: float) -> float:
        return max((seconds for at, seconds in self.clock if at <= when), default=0.0)


def changed_settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return the trainer's settings that both have in place of the recipe's."""
    return {
        "groups_per_batch": given.groups,
        "num_minibatches": 1,
        "num_warmup_updates": 2,
        "learning_rate": given.learning_rate,
    }


def play_trl(model: Path, out: Path, given: argparse.Namespace) -> Observed:
    """Train with TRL's `GRPOTrainer`."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainer.features import Settings
    from trainer.model.loading import LORA_ALPHA

    torch.set_num_threads(given.threads)
    recipe = find_recipe(RECIPE)
    settings = tomllib.loads((recipe / "small.toml").read_text(encoding="utf-8"))
    ours = Settings(model=str(model), **settings["trainer"] | changed_settings(given))
    of_recipe = {"file": str(recipe / "recipe.py"), "options": settings["demo"]["options"]}

    def task(split: Any, number: int) -> RecipeTask:
        return make_task(split, number, given.seed, **of_recipe)

    observed = Observed(batch_size=GROUP_SIZE * given.groups)
    waiting = [0]
    """Tokens of the batch that was played last, as far as they will have a gradient."""

    def rewards(completions: Any, completion_ids: Any, index: list[int], split: Any, **_: Any) -> list[float]:
        found = [
            reward(task(where, number), completion[0]["content"])
            for where, number, completion in zip(split, index, completions, strict=True)
        ]
        if split[0] == "train":
            now, lengths = time.time(), [len(ids) for ids in completion_ids]
            observed.clock.append((now, time.process_time()))
            observed.sessions.extend((now, *each) for each in zip(found, lengths, strict=True))
            groups = [slice(first, first + GROUP_SIZE) for first in range(0, len(found), GROUP_SIZE)]
            waiting[0] = sum(sum(lengths[group]) for group in groups if len(set(found[group])) > 1)
            print(f"{now - observed.begun:6.0f} s  reward {sum(found) / len(found):.2f}", flush=True)
        return found

    class Stop(TrainerCallback):  # type: ignore[misc]
        """Ends the training at the target, or when the time is over."""

        def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
            observed.updates.append((time.time(), waiting[0]))
            is_over = len(observed.updates) >= given.batches or time.time() - observed.begun > given.seconds
            control.should_training_stop = is_over or observed.count_to(given.target) is not None

    def dataset(split: Any, count: int) -> Any:
        made = [task(split, number).for_agent()["messages"] for number in range(count)]
        return Dataset.from_dict({"prompt": made, "index": list(range(count)), "split": [split] * count})

    adapter = LoraConfig(r=ours.lora_rank, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    config = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=given.rows,
        gradient_accumulation_steps=observed.batch_size // given.rows,
        per_device_eval_batch_size=given.eval_tasks,
        num_generations=GROUP_SIZE,
        num_generations_eval=1,
        max_steps=ours.total_batches,
        temperature=TEMPERATURE,
        max_completion_length=MAX_TOKENS,
        learning_rate=given.learning_rate,
        warmup_steps=ours.num_warmup_updates,
        lr_scheduler_type=ours.schedule,
        adam_beta2=ours.betas[1],
        max_grad_norm=ours.max_grad_norm,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=given.seed,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=rewards,
        train_dataset=dataset("train", given.batches * given.groups),
        eval_dataset=dataset("eval", given.eval_tasks),
        callbacks=[Stop()],
        peft_config=adapter,
        args=config,
    )
    before = trainer.evaluate()["eval_reward"]
    observed.begun = time.time()
    observed.clock.append((observed.begun, time.process_time()))
    trainer.train()
    observed.held_out = (float(before), float(trainer.evaluate()["eval_reward"]))
    return observed


def play_turnwise(model: Path, out: Path, given: argparse.Namespace) -> Observed:
    """Train with `turnwise recipe`."""
    from turnwise.settings import variable_name
    from turnwise.store.database import Database
    from turnwise.store.selection import SessionFilter
    from turnwise.store.sessions import list_sessions
    from turnwise.store.turns import read_turns
    from turnwise.store.updates import updates_after
    from turnwise.types import Split

    observed = Observed(batch_size=GROUP_SIZE * given.groups)
    flags = {"seed": given.seed, "num-eval-tasks": given.eval_tasks, "out": out, "model": model}
    flags |= {"groups-per-batch": given.groups, "max-versions": given.batches, "target-reward": 1}
    command = [sys.executable, "-m", "turnwise", "recipe", RECIPE, "--small"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    variables = {variable_name("trainer", name): str(value) for name, value in changed_settings(given).items()}
    with subprocess.Popen(command, env=os.environ | variables) as process:
        while process.poll() is None:
            observed.clock.append((time.time(), cpu_seconds(process.pid)))
            time.sleep(POLL_SECONDS)
    database = Database(f"sqlite:///{out / 'turnwise.db'}")
    with database.read() as connection:
        listed, _ = list_sessions(connection, SessionFilter(split=Split.TRAIN), limit=100_000)
        observed.begun = min(each.created_at.timestamp() for each in listed)
        for each in listed:
            if each.ended_at is not None:
                turns, _ = read_turns(connection, each.tenant, each.session_id)
                num_tokens = sum(len(view.turn.token_ids) for view in turns)
                observed.sessions.append((each.ended_at.timestamp(), each.reward or 0.0, num_tokens))
        observed.sessions.sort()
        updates = updates_after(connection, 0)
        observed.updates = [(each.created_at.timestamp(), each.num_tokens) for each in updates]
    database.close()
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    observed.held_out = (report["reward_before"], report["reward_after"])
    return observed


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a process and its descendants, and of those that have ended."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            stats[int(path.parent.name)] = path.read_text().rpartition(") ")[2].split()
    tree = {root}
    while more := {pid for pid, stat in stats.items() if int(stat[1]) in tree} - tree:
        tree |= more
    return sum(sum(map(int, stats[pid][11:15])) for pid in tree & stats.keys()) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run one of the two and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["trl", "turnwise"])
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--seconds", type=float, default=600, help="of TRL's training, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of TRL; each process of Turnwise has one")
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--groups", type=int, default=4, help=f"a batch, of {GROUP_SIZE} sessions each")
    parser.add_argument("--batches", type=int, default=12, help="most batches")
    parser.add_argument("--rows", type=int, default=16, help="rows that TRL trains at once")
    parser.add_argument("--eval-tasks", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/side-by-side"))
    given = parser.parse_args()
    play = {"trl": play_trl, "turnwise": play_turnwise}[given.trainer]
    observed = play(write_pretrained(given.out / "SmolLM2-135M-Instruct"), given.out / given.trainer, given)
    print(json.dumps(observed.result(given.target), indent=2))


if __name__ == "__main__":
    main()
