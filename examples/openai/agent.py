"""Answer a question with a tool, by the loop of OpenAI's guide to function calling."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8100/v1")

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> str:
    return f"It rains in {city}, at 7 degrees."


messages = [{"role": "user", "content": "Do I need an umbrella in Oslo?"}]

while True:
    completion = client.chat.completions.create(model="gpt-4.1-mini", messages=messages, tools=tools)
    message = completion.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

print(message.content)
