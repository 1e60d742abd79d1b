"""An agent that rewards itself with agent-lightning's own `emit_reward`, under its own tracer.

Only emitter and tracer are loaded: the packages around them import LiteLLM, AgentOps and the rest of agent-lightning.
"""

import asyncio
import sys
import sysconfig
import types
from pathlib import Path

import openai
from opentelemetry import trace

ROOT = Path(sysconfig.get_path("purelib")) / "agentlightning"
for name in ("", ".tracer", ".store", ".utils"):
    package = types.ModuleType(f"agentlightning{name}")
    package.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    sys.modules[package.__name__] = package

from agentlightning.emitter import emit_message, emit_reward  # noqa: E402
from agentlightning.tracer.otel import OtelTracer  # noqa: E402
from agentlightning.utils.otel import make_link_attributes  # noqa: E402
from turnwise_adapters.agent_lightning import RewardProcessor  # noqa: E402


async def rollout(url: str, session_id: str) -> None:
    tracer = OtelTracer()
    tracer.init_worker(0)
    trace.get_tracer_provider().add_span_processor(RewardProcessor(url, session_id=session_id))
    agent = openai.AsyncOpenAI(base_url=f"{url}/sessions/{session_id}/v1", api_key="none")
    async with tracer.trace_context("rollout"):
        messages = [{"role": "user", "content": "What is 2 + 2?"}]
        first = await agent.chat.completions.create(model="fake", messages=messages)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": "Sure?"})
        await agent.chat.completions.create(model="fake", messages=messages)
        emit_message("no reward")
        emit_reward(0.25, attributes=make_link_attributes({"gen_ai.response.id": first.id}))
        emit_reward({"right": 1.0, "short": 0.5}, primary_key="right")


asyncio.run(rollout(*sys.argv[1:]))
