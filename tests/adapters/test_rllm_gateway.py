"""rLLM's own gateway client against our gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.proxies import running_proxy
from support.waiting import wait_until

from turnwise.fake_engine import Script, running_fake_engine, tokens
from turnwise.processes.stack import free_port
from turnwise.processes.supervisor import is_ready

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".adapters" / "rllm" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run tests/adapters/setup.sh first")


def test_rllms_client_gets_its_sessions_and_traces(tmp_path: Path) -> None:
    script = Script.model_validate({"rules": [{"reply": {"text": "four"}}]})
    port = free_port()
    with (
        running_fake_engine(script) as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
    ):
        command = [sys.executable, "-m", "turnwise.adapters.rllm_gateway", "--proxy", proxy.url, "--port", str(port)]
        gateway = subprocess.Popen(command, env=os.environ)
        try:
            wait_until(lambda: is_ready(f"http://127.0.0.1:{port}/health"), "the gateway answers")
            client = [PYTHON, Path(__file__).parent / "parts" / "rllm_client.py", f"http://127.0.0.1:{port}"]
            done = subprocess.run(
                list(map(str, client)), env={}, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            gateway.terminate()
            gateway.wait(10)
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    first, second = found["traces"]
    assert first["prompt_token_ids"] == tokens.encode(tokens.render(first["messages"], None))
    assert first["completion_token_ids"] == tokens.encode("four<|im_end|>")
    assert len(first["logprobs"]) == len(first["completion_token_ids"])
    whole = [*first["prompt_token_ids"], *first["completion_token_ids"]]
    assert second["prompt_token_ids"][: len(whole)] == whole
    assert [trace["metadata"]["outcome"] for trace in found["traces"]] == ["exact", "exact"]
    assert (found["info"]["trace_count"], found["info"]["metadata"]) == (2, {"task": "adds"})
    assert (found["listed"], found["one"], found["workers"]) == (["rollout-1"], first["trace_id"], [])
    assert (found["missing"], found["stream_ended"]) == (404, True)
    assert (found["deleted"], found["left"]) == (2, [])
