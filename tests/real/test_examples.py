"""A failure on a real vLLM is pinned: no version that still fails there is served, and one that mends it is."""

import subprocess

import pytest
from support.running_trainer import play_group, running_trainer
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.client import Client
from turnwise.commands.features.examples import _ask as ask
from turnwise.processes.stack import command

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RIGHT = 'The answer is "Oslo".'
CALL = {"messages": [{"role": "user", "content": "Where?"}], "max_completion_tokens": 8, "temperature": 1.0}
MENDING = ("--algorithm", "sft", "--reuse-epochs", "60", "--groups-per-batch", "1", "--max-grad-norm", "100")


def train_once(proxy, model_dir, directory, total: int, *more: str) -> None:
    with running_trainer(proxy, model_dir, directory, "--total-batches", str(total), *more) as trainer:
        assert trainer.wait(WAIT_SECONDS) == 0, (directory / "trainer.log").read_text()[-3000:]


def test_a_version_that_still_fails_is_failed_and_one_that_mends_is_served_and_kept(
    engine, start_proxy, tmp_path, base_weights
):
    proxy = start_proxy(engine.url)
    with Client(proxy.url) as client:
        session = client.create_session(session_id="wrong")
        turn_id = session.openai().chat.completions.create(model="small", **CALL).id
        session.end()
        check = {"kind": "text", "equals": RIGHT}
        ask(client, "PUT", f"/v1/examples/{turn_id}", {"check": check, "note": "It does not answer."})
        for number in range(2):
            play_group(client, number)
        train_once(proxy, engine.model_dir, tmp_path, 1)
        (failed, _) = client.policies()
        assert (failed["version"], failed["status"]) == (1, "failed")
        assert f"it still fails 1 of 1 pinned examples: {turn_id} (0 of 5, now 0 of 5)" in failed["error"]
        client.feedback("demonstration", RIGHT, turn_id=turn_id)
        train_once(proxy, engine.model_dir, tmp_path, 2, *MENDING)
        wait_until(lambda: next(client.policies())["status"] == "active", "version 2 is served")
        mended = next(client.policies())
        with client.create_session(session_id="right").openai() as served:
            replies = [served.chat.completions.create(model="small", **CALL) for _ in range(5)]
        assert RIGHT in [reply.choices[0].message.content for reply in replies]
        (line,) = ask(client, "GET", "/v1/examples")["data"]
    assert line["answers"]["0"] == line["answers"]["1"] == [0, 5]
    assert line["answers"]["2"][0] > 0
    assert (mended["version"], mended["metrics"]["examples_num"]) == (2, 1)
    gate = command("gate", "default@1", "--against", "2", "--database", proxy.database_url)
    gated = subprocess.run(gate, check=False, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (gated.returncode, turn_id in gated.stdout) == (1, True), gated.stderr
