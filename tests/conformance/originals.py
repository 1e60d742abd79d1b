"""Run an original class and Turnwise's on the same proxy, and print the results as one line of JSON.

This runs in the environment of `setup.sh`, never in the project's: `originals.py versions | compare URL CASES`.
"""

import asyncio
import gc
import importlib
import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

gc.disable()  # almost nothing that is imported becomes garbage
sys.path.insert(0, str(Path(__file__).parents[2]))

from turnwise.workflows import trinity as ours  # noqa: E402

Json = dict[str, Any]
MODEL = "fake"


def without_multi_modal_modules() -> None:
    """Replace a multi-modal module that needs Trinity's vLLM, and a log writer: text does not use them."""
    images = types.ModuleType("trinity.common.models.mm_utils")
    images.should_use_processor = lambda _: False
    images.combine_output_token_ids = lambda _, inputs: inputs
    images.vLLMMultiModalRender = None
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = object
    sys.modules.update({images.__name__: images, writer.__name__: writer})


class Scripted:
    """An agent's own code, the same for both: calls per step, a reward from what was sampled, when to stop."""

    @property
    def max_step_num(self) -> int:
        return len(self.plan["calls"])

    def ask(self, step_num: int) -> Json:
        messages = [{"role": "user", "content": f"step {step_num}"}]
        return {"model": MODEL, "messages": messages, "n": self.plan.get("n", 1)}

    def continues(self, step_num: int) -> bool:
        if step_num == self.plan.get("break"):
            raise RuntimeError("the tool crashed")
        return step_num != self.plan.get("stop")

    def judge(self, exps: list[Any], step_num: int = 0) -> float:
        return 0.25 * step_num + sum(len(exp.tokens) for exp in exps) / 8

    def step(self, step_num: int) -> bool:
        for _ in range(self.plan["calls"][step_num]):
            self.talk(self.ask(step_num))
        return self.continues(step_num)

    def talk(self, body: Json) -> None:
        if not self.plan.get("stream"):
            self.client.chat.completions.create(**body)
            return
        for _ in self.client.chat.completions.create(**body, stream=True):
            pass

    def reward(self, exps: list[Any], *args: int, **kwargs: int) -> float:
        return self.judge(exps, *args, **kwargs)

    async def step_async(self, step_num: int) -> bool:
        client = self.model.get_openai_async_client()
        for _ in range(self.plan["calls"][step_num]):
            await client.chat.completions.create(**self.ask(step_num))
        return self.continues(step_num)

    async def reward_async(self, exps: list[Any], *args: int, **kwargs: int) -> float:
        return self.judge(exps, *args, **kwargs)


def original_model(base_url: str) -> Any:
    from trinity.common.config import InferenceModelConfig
    from trinity.common.models.model import ModelWrapper

    config = InferenceModelConfig(
        model_path=MODEL, engine_type="external", enable_openai_api=True, enable_history=True, api_key="none"
    )
    return ModelWrapper(config=config, api_address=base_url)


def made_by(base: type, task: Any, model: Any, plan: Json) -> Json:
    workflow = type("Ported", (Scripted, base), {"plan": plan})(task=task, model=model)
    failure = None
    made: list[Any] = []
    try:
        made = asyncio.run(workflow.run_async()) if workflow.asynchronous else workflow.run()
    except RuntimeError as error:
        failure = str(error)
    return {"failure": failure, "experiences": [plain(exp) for exp in made]}


def plain(exp: Any) -> Json:
    return {
        "tokens": exp.tokens.tolist(),
        "tokens_dtype": str(exp.tokens.dtype).removeprefix("torch."),
        "prompt_length": exp.prompt_length,
        "logprobs": exp.logprobs.tolist(),
        "logprobs_dtype": str(exp.logprobs.dtype).removeprefix("torch."),
        "action_mask": exp.action_mask.tolist(),
        "reward": exp.reward,
        "metrics": exp.metrics,
        "response_text": exp.response_text,
        "experience_type": exp.experience_type,
        "truncate_status": exp.truncate_status,
        "eid": {name: value for name, value in exp.eid.to_dict().items() if name != "suffix"},
        "ids": [exp.eid.tid, exp.eid.rid, exp.eid.sid],
    }


def compare_trinity(url: str, number: int, name: str, plan: Json) -> Json:
    """Run one plan with the original class and with Turnwise's, each in a session of its own."""
    from trinity.common.workflows import step_wise_workflow as originals
    from trinity.common.workflows.workflow import Task as OriginalTask

    original_session = original_model(f"{url}/sessions/original-{number}")
    original = made_by(getattr(originals, name), OriginalTask(), original_session, plan)
    model = ours.ModelWrapper(url, model=MODEL)
    ported = made_by(getattr(ours, name), ours.Task(), model, plan)
    steps = [turn["step"] for turn in model.client.turns(model.session_id)]
    return {"original": original, "ours": ported, "stored_steps": steps}


def compare(url: str, cases: str) -> list[Json]:
    """Run all cases of Trinity-RFT in this one process: importing it takes longer than running them."""
    without_multi_modal_modules()
    return [compare_trinity(url, number, name, plan) for number, (name, plan) in enumerate(json.loads(cases))]


def versions() -> Json:
    without_multi_modal_modules()
    for name in ("trinity.common.models.model", "verl"):
        importlib.import_module(name)
    return {name: importlib.metadata.version(name) for name in ("trinity-rft", "verl")}


if __name__ == "__main__":
    print(json.dumps({"versions": versions, "compare": compare}[sys.argv[1]](*sys.argv[2:])))
