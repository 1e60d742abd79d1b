"""A loop on LiteLLM that replays its messages as LiteLLM dumps them."""

import json

import litellm
from shell import MODEL, PARAMETERS, PROMPT, bash

TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}}

messages = [{"role": "user", "content": PROMPT}]
while True:
    reply = litellm.completion(model=f"openai/{MODEL}", messages=messages, tools=[TOOL], num_retries=2)
    message = reply.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        output = bash(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
print(message.content)
