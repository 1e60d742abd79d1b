"""Find out where somebody's boss is, by text commands, through any OpenAI-compatible server.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none python agent.py task.json
"""

import asyncio
import json
import re
import sys
from pathlib import Path

from openai import AsyncOpenAI

OPENING = [
    {"role": "system", "content": 'Reply with lookup("name") or answer("city") only.'},
    {"role": "user", "content": 'Where is the boss of "Tom"?'},
    {"role": "assistant", "content": 'lookup("Tom")'},
    {"role": "user", "content": 'boss="Anna"'},
    {"role": "assistant", "content": 'lookup("Anna")'},
    {"role": "user", "content": 'city="Bern"'},
    {"role": "assistant", "content": 'answer("Bern")'},
]
MAX_TURNS = 3
COMMAND = re.compile(r'lookup\("(\w+)"\)')


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    """Return the model's last reply: its answer, or what is no command."""
    messages = [*OPENING, {"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=12, temperature=0.8
        )
        text = completion.choices[0].message.content or ""
        command = COMMAND.fullmatch(text.strip())
        if command is None:
            return text
        result = task["records"].get(command[1], "nobody")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    return ""


async def main(task: dict) -> None:
    async with AsyncOpenAI() as client:
        models = await client.models.list()
        print(await play(client, task, models.data[0].id))


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/dev/stdin")
    asyncio.run(main(json.loads(source.read_text())))
