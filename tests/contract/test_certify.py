"""What `turnwise certify` hears from the processes that it starts."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from support.migrated import new_database
from support.servers import serving
from support.tiny_models import add_words, load_model, logprobs_of, make_model
from support.trainer_ledger import Rollouts
from support.waiting import WAIT_SECONDS

from turnwise.commands.features.certify import command as certify
from turnwise.commands.features.certify.certificate import KindResult
from turnwise.commands.features.certify.engine_text import EngineText
from turnwise.errors import ChildFailed
from turnwise.store import versions
from turnwise.types import PolicyVersion


@pytest.fixture
def bfloat16_engine() -> Iterator[str]:
    """Yield the address of a server that states its number format and its model as vLLM does."""

    class Stated(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            # Without this parameter vLLM states its settings as one text.
            config: Any = {"model_config": {"dtype": "torch.bfloat16"}}
            config = config if self.path == "/server_info?config_format=json" else str(config)
            models = {"object": "list", "data": [{"id": "tiny", "root": "tiny", "max_model_len": 512}]}
            stated = models if self.path == "/v1/models" else {"vllm_config": config}
            self.wfile.write(json.dumps(stated).encode())

        def log_message(self, *_: object) -> None: ...

    with serving(HTTPServer(("127.0.0.1", 0), Stated)) as url:
        yield url


def test_the_number_format_is_the_one_that_the_engine_states(bfloat16_engine):
    assert certify.engine_dtype(bfloat16_engine) == "bfloat16"
    assert certify.engine_dtype("http://127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        ("import time; time.sleep(60)", TimeoutError, "turnwise train did not end within 1 s"),
        (
            "import os, sys; print('OldError: x', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
            ChildFailed,
            "turnwise train ended with signal SIGKILL",
        ),
        ("raise KeyError('qkv')", ChildFailed, "KeyError: 'qkv'"),
    ],
)
def test_a_command_that_is_killed_or_late_is_told_from_one_that_fails(tmp_path, monkeypatch, program, error, text):
    monkeypatch.setattr("turnwise.processes.stack.command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(certify, "WAIT_SECONDS", 1.0 if error is TimeoutError else WAIT_SECONDS)
    with pytest.raises(error, match=text):
        certify._command(tmp_path / "trainer.log", "train")


class PartialEngine:
    """Computes with transformers what it has loaded, but for the parts that it leaves as they were."""

    def __init__(self, model: Path, ignored: str) -> None:
        self.model, self.ignored, self.base = load_model(model), ignored, model
        self.adapters: dict[str, Any] = {}
        self.text = TEXT.tokens

    def ask(self, path: str, **body: Any) -> Any:
        if path == "/collective_rpc":
            new = load_model(Path(body["kwargs"]["weights_path"])).state_dict()
            kept = {name: value for name, value in new.items() if not (self.ignored and self.ignored in name)}
            self.model.load_state_dict(kept, strict=False)
        elif path == "/v1/load_lora_adapter":
            adapter = peft.PeftModel.from_pretrained(load_model(self.base), body["lora_path"])
            for name, value in adapter.named_parameters():
                if self.ignored and self.ignored in name and "lora_" in name:
                    value.data.zero_()
            self.adapters[body["lora_name"]] = adapter
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/v1/completions":
            return SimpleNamespace(json=lambda: self.completions(body))
        return None

    def completions(self, body: Any) -> Any:
        at = [len(prompt) for prompt in body["prompt"]]
        text = self.text
        log_p = logprobs_of(self.adapters.get(body["model"], self.model), text)
        tops = [{f"token_id:{text[each]}": float(log_p[each - 1])} for each in at]
        return {"choices": [{"index": n, "logprobs": {"top_logprobs": [top]}} for n, top in enumerate(tops)]}


TEXT = EngineText("http://127.0.0.1:1", "base", "float32", [(7 * each) % 11 + 1 for each in range(40)])


@pytest.mark.parametrize("ignored", ["", "down_proj", "q_norm", "layers.1.mlp"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_weights_that_an_engine_does_not_take_are_found_before_any_training(tmp_path, monkeypatch, kind, ignored):
    model = make_model(tmp_path / "model")
    engine = PartialEngine(model, ignored)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    monkeypatch.setattr(EngineText, "ask", engine.ask)
    if ignored and not (kind == "lora" and ignored == "q_norm"):  # an adapter has no norms
        with pytest.raises(ChildFailed, match=r"does not take all weights of a version \(changed: largest gap"):
            certify._changed_weights(str(model), kind, tmp_path / "changed", TEXT)
        return
    gaps = certify._changed_weights(str(model), kind, tmp_path / "changed", TEXT)
    assert 0 <= gaps["max"] < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())
    assert not engine.adapters


@pytest.mark.parametrize("is_right", [True, False])
def test_a_text_of_all_positions_shows_angles_that_are_wrong_from_some_position_on(
    tmp_path, monkeypatch, bfloat16_engine, is_right
):
    """The conversations that are played are shorter: they had called such an engine right."""
    model = add_words(make_model(tmp_path / "model"))
    text = EngineText.longest(bfloat16_engine, str(model), "float32")
    assert (len(text.tokens), max(text.positions)) == (511, 510)
    text = dataclasses.replace(text, tokens=[(7 * each) % 11 + 1 for each in range(511)])  # it has no words of the text
    engine = PartialEngine(model, "")
    engine.text = text.tokens
    if not is_right:
        angles = engine.model.model.rotary_emb.forward
        late = lambda x, position_ids: angles(x, position_ids + (position_ids >= 300))  # noqa: E731
        monkeypatch.setattr(engine.model.model.rotary_emb, "forward", late)
    monkeypatch.setattr(EngineText, "ask", engine.ask)
    found = KindResult("full", stages={"long": certify._long_text(str(model), text)})
    assert found.verdict() == ("right" if is_right else "wrong")


@pytest.mark.parametrize(("play", "chains"), [("play", "4 of 4 turns"), ("play_compacted", "4 of 5 turns")])
def test_every_sampled_token_is_compared_and_turns_that_extend_their_chain_are_counted(tmp_path, play, chains):
    """A template that breaks every chain had shown nowhere."""
    model = make_model(tmp_path / "model")
    database = new_database(tmp_path / "store.db")
    with database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=0, path=str(model)))
    played = Rollouts(database, load_model(model), sampling={"temperature": 1.0})
    getattr(played, play)("base", num_groups=1, group_size=4 if play == "play" else 1)
    database.close()
    stages, extended = certify._compare(f"sqlite:///{tmp_path}/store.db", "float32")
    assert extended == f"{chains} extend their chain"
    assert stages["base"]["versions"] == [0]
    assert stages["base"]["tokens"] == (32 if play == "play" else 24)
    assert stages["base"]["max"] < 1e-5
