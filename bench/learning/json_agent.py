r"""The agent of `make demo` with commands in JSON, and the pin of the proxy that requires a schema of its replies.

TURNWISE_PROXY_SAMPLING_PINS="$(python bench/learning/json_agent.py)" \
    make demo ARGS="--agent bench/learning/json_agent.py"
"""

import json

from openai import AsyncOpenAI

OPENING = [
    {"role": "system", "content": 'Reply with {"lookup": "name"} or {"answer": "city"} only.'},
    {"role": "user", "content": 'Where is the boss of "Tom"?'},
    {"role": "assistant", "content": '{"lookup": "Tom"}'},
    {"role": "user", "content": 'boss="Anna"'},
    {"role": "assistant", "content": '{"lookup": "Anna"}'},
    {"role": "user", "content": 'city="Bern"'},
    {"role": "assistant", "content": '{"answer": "Bern"}'},
]
MAX_TURNS = 3


def one_string(name: str) -> dict:
    """Return the schema of an object with one string, a word."""
    word = {"type": "string", "pattern": "^[A-Za-z]{1,16}$"}
    return {"type": "object", "properties": {name: word}, "required": [name], "additionalProperties": False}


SCHEMA = {"anyOf": [one_string("lookup"), one_string("answer")]}


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    """Return the answer as a text command, which the task grades; else the reply that is no command."""
    messages = [*OPENING, {"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=16, temperature=0.8
        )
        text = completion.choices[0].message.content or ""
        try:
            ((command, value),) = json.loads(text).items()
        except (ValueError, AttributeError):
            return text
        if command != "lookup":
            return f'{command}("{value}")'
        result = task["records"].get(str(value), "nobody")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    return ""


if __name__ == "__main__":
    schema = {"type": "json_schema", "json_schema": {"name": "command", "schema": SCHEMA, "strict": True}}
    print(json.dumps({"*": {"response_format": schema}}))
