"""Follow a trail of people with one tool, through any OpenAI-compatible server.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py task.json
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

SYSTEM_PROMPT = 'Look people up, then reply: The answer is "CITY".'

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a person up.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
]


def lookup(records: dict, arguments: str) -> str:
    try:
        record = records[json.loads(arguments)["name"]]
    except (ValueError, TypeError, KeyError):
        record = {"error": "nobody"}
    return json.dumps(record)


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    """Return the model's answer, or "" if it has not answered after its last lookup."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(task["max_lookups"] + 1):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_completion_tokens=64
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = lookup(task["records"], call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def main(task: dict) -> None:
    async with AsyncOpenAI() as client:
        models = await client.models.list()
        print(await play(client, task, models.data[0].id))


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/dev/stdin")
    asyncio.run(main(json.loads(source.read_text())))
