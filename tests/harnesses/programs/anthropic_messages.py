"""An agent on Anthropic's SDK, streamed."""

from anthropic import Anthropic
from shell import MODEL, PARAMETERS, PROMPT, bash

TOOL = {"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}

client = Anthropic()
messages = [{"role": "user", "content": PROMPT}]
while True:
    with client.messages.stream(model=MODEL, max_tokens=1024, messages=messages, tools=[TOOL]) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": bash(**call.input)} for call in calls]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in message.content if block.type == "text"))
