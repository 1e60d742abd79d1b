"""An agent with one tool on Anthropic's SDK, streamed; the address comes from ANTHROPIC_BASE_URL."""

import os
import subprocess
import sys

from anthropic import Anthropic

TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}

client = Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    with client.messages.stream(
        model=os.environ["ANTHROPIC_MODEL"], max_tokens=1024, messages=messages, tools=[TOOL]
    ) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        ran = subprocess.run(call.input["command"], shell=True, capture_output=True, text=True, check=False)
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": ran.stdout + ran.stderr})
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in message.content if block.type == "text"))
