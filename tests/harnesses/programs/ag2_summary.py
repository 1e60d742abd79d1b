"""A chat of AG2 that summarises its history between questions."""

import asyncio

from ag2 import Agent, KnowledgeConfig
from ag2.compact import CompactTrigger, SummarizeCompact
from ag2.config import OpenAIConfig
from ag2.knowledge import MemoryKnowledgeStore
from ag2.policies import ConversationPolicy
from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, bash

config = OpenAIConfig(MODEL, base_url=BASE_URL, api_key=API_KEY)
knowledge = KnowledgeConfig(
    MemoryKnowledgeStore(),
    expose_tool=False,
    compact=SummarizeCompact(target=4, config=config),
    compact_trigger=CompactTrigger(max_events=8),
)
agent = Agent(
    "checker", INSTRUCTIONS, config=config, tools=[bash], knowledge=knowledge, assembly=[ConversationPolicy()]
)


async def main() -> None:
    reply = await agent.ask(PROMPT)
    for _ in range(4):
        reply = await reply.ask(PROMPT)
    print(reply.body)


asyncio.run(main())
