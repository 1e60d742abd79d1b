"""An agent on OpenAI's SDK and its chat API, streamed."""

import json

from openai import OpenAI
from shell import MODEL, PARAMETERS, PROMPT, bash

TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}}

client = OpenAI()
messages = [{"role": "user", "content": PROMPT}]
while True:
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        output = bash(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
print(message.content)
