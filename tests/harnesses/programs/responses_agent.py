"""An agent with one tool on OpenAI's Responses API, streamed; the address comes from OPENAI_BASE_URL."""

import json
import os
import subprocess
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "strict": False,
}

client = OpenAI()
items = [{"role": "user", "content": sys.argv[1]}]
while True:
    with client.responses.stream(model=os.environ["OPENAI_MODEL"], input=items, tools=[TOOL]) as stream:
        response = stream.get_final_response()
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        command = json.loads(call.arguments)["command"]
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": ran.stdout + ran.stderr})
print(response.output_text)
