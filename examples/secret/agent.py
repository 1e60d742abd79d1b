"""Keep a secret through a compaction: a loop over a plain OpenAI client with a context of 64 tokens.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py task.json
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

SYSTEM_PROMPT = "Keep the secret."
CONTEXT_TOKENS = 64
COMPACTION_PROMPT = "Summarize our conversation."
SUMMARY_TOKENS = 40


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    """Say all messages of the task; return the reply to the last one."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    messages, text = [system], ""
    for said in task["messages"]:
        messages.append({"role": "user", "content": said})
        completion = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=SUMMARY_TOKENS
        )
        text = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        if completion.usage.total_tokens > CONTEXT_TOKENS:
            summary = await summarize(client, model, messages)
            messages = [system, {"role": "user", "content": f"Summary: {summary}"}]
    return text


async def summarize(client: AsyncOpenAI, model: str, messages: list[dict]) -> str:
    asked = [*messages, {"role": "user", "content": COMPACTION_PROMPT}]
    completion = await client.chat.completions.create(model=model, messages=asked, max_completion_tokens=SUMMARY_TOKENS)
    return completion.choices[0].message.content or ""


async def main(task: dict) -> None:
    async with AsyncOpenAI() as client:
        models = await client.models.list()
        print(await play(client, task, models.data[0].id))


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/dev/stdin")
    asyncio.run(main(json.loads(source.read_text())))
