"""Act as a rollout of AReaL: call its proxy server with AReaL's own client, and print the results as JSON.

Only the client is loaded: the packages around it import torch, Ray and the rest of AReaL.
"""

import asyncio
import json
import sys
import sysconfig
import types
from pathlib import Path

import aiohttp
import openai

ROOT = Path(sysconfig.get_path("purelib")) / "areal"
for name in (
    "",
    ".utils",
    ".infra",
    ".infra.utils",
    ".experimental",
    ".experimental.openai",
    ".experimental.openai.proxy",
):
    package = types.ModuleType(f"areal{name}")
    package.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    sys.modules[package.__name__] = package
cache = types.ModuleType("areal.experimental.openai.cache")
cache.InteractionCache = object
sys.modules[cache.__name__] = cache

from areal.experimental.openai.proxy.client_session import OpenAIProxyClient  # noqa: E402


async def rollout(url: str) -> dict:
    async with aiohttp.ClientSession() as http:
        client = OpenAIProxyClient(session=http, base_url=url, task_id="adds", admin_api_key="none")
        async with client:
            agent = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=client.session_api_key)
            messages = [{"role": "user", "content": "What is 2 + 2?"}]
            first = await agent.chat.completions.create(model="fake", messages=messages)
            messages.append({"role": "assistant", "content": first.choices[0].message.content})
            messages.append({"role": "user", "content": "Sure?"})
            second = await agent.chat.completions.create(model="fake", messages=messages)
            await client.set_reward(first.id, 0.25)
            await client.set_last_reward(1.0)
        return {"session_id": client.session_id, "ids": [first.id, second.id]}


print(json.dumps(asyncio.run(rollout(sys.argv[1]))))
