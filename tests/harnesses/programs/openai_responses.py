"""An agent on OpenAI's SDK and its Responses API, streamed."""

import json

from openai import OpenAI
from shell import MODEL, PARAMETERS, PROMPT, bash

TOOL = {"type": "function", "name": "bash", "description": "Run a command.", "parameters": PARAMETERS, "strict": False}

client = OpenAI()
items = [{"role": "user", "content": PROMPT}]
while True:
    with client.responses.stream(model=MODEL, input=items, tools=[TOOL]) as stream:
        response = stream.get_final_response()
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        output = bash(**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
print(response.output_text)
