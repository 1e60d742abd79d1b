"""Act as a trainer of rLLM: call its gateway with rLLM's own client, and print the results as JSON."""

import json
import sys

import httpx
from rllm_model_gateway import GatewayClient

with GatewayClient(sys.argv[1]) as gateway:
    session_id = gateway.create_session("rollout-1", metadata={"task": "adds"})
    url = gateway.get_session_url(session_id)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    for is_streamed in (False, True):
        body = {"model": "fake", "messages": messages, "stream": is_streamed}
        answer = httpx.post(f"{url}/chat/completions", json=body, headers={"authorization": "Bearer EMPTY"})
        answer.raise_for_status()
        messages = [*messages, {"role": "assistant", "content": "four"}, {"role": "user", "content": "Sure?"}]
    gateway.flush()
    traces = gateway.get_session_traces(session_id)
    try:
        gateway.get_session_info("nobody")
        missing = None
    except httpx.HTTPStatusError as error:
        missing = error.response.status_code
    found = {
        "health": gateway.health(),
        "info": gateway.get_session_info(session_id),
        "listed": [each["session_id"] for each in gateway.list_sessions()],
        "traces": [trace.model_dump() for trace in traces],
        "one": gateway.get_trace(traces[0].trace_id).trace_id,
        "workers": gateway.list_workers(),
        "missing": missing,
        "stream_ended": answer.text.rstrip().endswith("[DONE]"),
        "deleted": gateway.delete_session(session_id),
        "left": [each["session_id"] for each in gateway.list_sessions()],
    }
print(json.dumps(found))
