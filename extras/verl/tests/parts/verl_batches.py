"""Print Turnwise's batches as real `verl.DataProto`, and the results of verl's own functions: `verl_batches.py URL`."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

ROOT = Path(__file__).parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "extras" / "verl")]

from turnwise_verl import AgentWorkflowEngine  # noqa: E402

from turnwise.client import AsyncClient  # noqa: E402
from turnwise.workflows import (  # noqa: E402
    Episode,
    ModelOutput,
    RolloutEngine,
    SessionRolloutEngine,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    Workflow,
)

Json = dict[str, Any]


def config(*, stepwise: bool) -> Any:
    return OmegaConf.create(
        {
            "data": {"max_prompt_length": 4, "max_response_length": 6},
            "rllm": {
                "stepwise_advantage": {"enable": stepwise},
                "compact_filtering": {"enable": True, "mask_timeout": True, "mask_env_done": False},
            },
        }
    )


def output(prompt: list[int], sampled: list[int]) -> ModelOutput:
    return ModelOutput(prompt_ids=prompt, completion_ids=sampled, logprobs=[-float(t) for t in sampled])


def two_steps() -> Episode:
    steps = [
        Step(model_output=output([1, 2], [3]), reward=0.5),
        Step(model_output=output([1, 2, 3, 4, 5], [6, 7]), reward=2.0),
    ]
    trajectory = Trajectory(name="solver", steps=steps, reward=2.5)
    return Episode(
        id="a:0",
        trajectories=[trajectory],
        termination_reason=TerminationReason.ENV_DONE,
        is_correct=True,
        metrics={"m": 1},
    )


def one_long_step() -> Episode:
    steps = [Step(model_output=output([1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]), reward=1.0)]
    trajectory = Trajectory(name="solver", steps=steps, reward=1.0)
    return Episode(id="a:1", trajectories=[trajectory], termination_reason=TerminationReason.TIMEOUT)


def plain(batch: DataProto) -> Json:
    tensors = {name: {"dtype": str(t.dtype), "rows": t.tolist()} for name, t in batch.batch.items()}
    others = {name: column.tolist() for name, column in batch.non_tensor_batch.items() if name != "batch_ids"}
    batch_ids = set(batch.non_tensor_batch["batch_ids"].tolist())
    return {"tensors": tensors, "others": others, "num_batch_ids": len(batch_ids), "meta": batch.meta_info}


def batches(url: str) -> Json:
    episodes = [two_steps(), None, Episode(id="a:2", trajectories=[Trajectory()]), one_long_step()]
    ids = ["a"] * 4
    by_mode = {}
    for mode, stepwise in [("trajectory", False), ("step", True)]:
        engine = AgentWorkflowEngine(Asking, {}, RolloutEngine(), config=config(stepwise=stepwise))
        by_mode[mode] = engine.transform_results_for_verl(episodes, np.array(ids))
        engine.shutdown()
    return {
        **{mode: plain(batch) for mode, batch in by_mode.items()},
        "verl": apply_verls_functions(by_mode["trajectory"]),
        "executed": executed(url),
    }


def apply_verls_functions(batch: DataProto) -> Json:
    asked = DataProto.from_dict(tensors={"dummy": torch.arange(4)[:, None]})
    repeated = asked.sample_level_repeat(batch.meta_info["repeat_counts"])
    joined = repeated.union(batch)
    padded, num_padded = pad_dataproto_to_divisor(joined, 4)
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards=batch.batch["step_rewards"],
        response_mask=batch.batch["response_mask"],
        index=batch.non_tensor_batch["step_ids"],
    )
    return {
        "dummy": joined.batch["dummy"][:, 0].tolist(),
        "padded": [len(padded), num_padded],
        "chunks": [len(chunk) for chunk in padded.chunk(2)],
        "concatenated": len(DataProto.concat([batch, batch])),
        "advantage_signs": advantages.sign().tolist(),
    }


class Asking(Workflow):
    """One call for each run; the task sets the reward."""

    async def run(self, task: Json, uid: str, **_: Any) -> None:
        self.reset(task, uid)
        messages = [{"role": "user", "content": task["q"]}]
        model_output = await self.rollout_engine.get_model_response(messages)
        step = Step(chat_completions=messages, model_output=model_output, reward=task["reward"])
        self.commit(trajectory=Trajectory(name="solver", steps=[step]))
        raise TerminationEvent(TerminationReason.ENV_DONE)


def executed(url: str) -> Json:
    """Execute a real verl batch into a real verl batch; tasks with equal ids are not adjacent."""
    tasks = [{"q": "x", "reward": 1.0}, {"q": "y", "reward": 2.0}, {"q": "x", "reward": 1.0}]
    asked = DataProto.from_dict(
        tensors={"dummy": torch.zeros(3, 1)},
        non_tensors={"extra_info": np.array(tasks, object), "task_ids": np.array(["a", "b", "a"], object)},
        meta_info={"validate": True},
    )

    async def go() -> Json:
        async with AsyncClient(url) as client:
            engine = AgentWorkflowEngine(
                Asking, {}, SessionRolloutEngine(client), config=config(stepwise=False), n_parallel_tasks=2
            )
            try:
                batch = await engine.execute_tasks_verl(asked)
            finally:
                engine.shutdown()
            sessions = [session async for session in client.sessions() if session["task_id"] in ("a", "b")]
            return {**plain(batch), "splits": [session["split"] for session in sessions]}

    return asyncio.run(go())


if __name__ == "__main__":
    print(json.dumps(batches(sys.argv[1])))
