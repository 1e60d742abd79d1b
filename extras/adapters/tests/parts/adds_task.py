"""A verifiers environment of one task, whose harness asks the model once in its own process."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf


class AddsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.root_reply == "four" or "four" in str(trace.nodes[-1]))


class AddsConfig(vf.TasksetConfig):
    pass


class AddsTaskset(vf.Taskset[AddsTask, AddsConfig]):
    def load(self) -> list[AddsTask]:
        return [AddsTask(vf.TaskData(name="adds", prompt="What is 2 + 2?"), self.config.task)]


class OneCallConfig(vf.HarnessConfig):
    pass


class OneCallHarness(vf.Harness[OneCallConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        async with httpx.AsyncClient() as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                headers={"authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
            )
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AddsTaskset", "OneCallHarness"]
