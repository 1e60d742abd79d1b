"""Engines that the table is made against: the fake one, and a real vLLM whose sampled tokens a script forces."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from harnesses.entry import ROOT
from harnesses.recorder import Recorder, recording
from support.engines import running_engine
from turnwise_fake_engine import Fault, Rule, RunningFakeEngine, Script
from turnwise_fake_engine.ledger import SeenCall


@dataclasses.dataclass(frozen=True, slots=True)
class FakeEngine:
    """The fake engine: also fails on request, replies slowly, and lists its calls."""

    running: RunningFakeEngine

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def model(self) -> str:
        return self.running.state.script.model

    @property
    def context_tokens(self) -> int:
        return self.running.state.script.max_model_len

    @property
    def calls(self) -> list[SeenCall]:
        return self.running.calls

    def set_script(self, rules: Sequence[Rule], faults: Sequence[Fault] = ()) -> None:
        self.running.calls.clear()
        self.running.state.script.rules[:] = rules
        self.running.state.script.faults[:] = faults

    def forget_calls(self, num_known: int) -> None:
        """Drop the calls after the first `num_known` from the list: those with which a new proxy checks the engine."""
        del self.running.calls[num_known:]


@dataclasses.dataclass(frozen=True, slots=True)
class ForcedEngine:
    """A real vLLM whose replies come from a file that `support.forced_tokens` reads, behind a relay."""

    recorder: Recorder
    model: str
    context_tokens: int
    script_file: Path

    @property
    def url(self) -> str:
        return self.recorder.url

    @property
    def calls(self) -> list[SeenCall]:
        return self.recorder.calls

    def set_script(self, rules: Sequence[Rule], faults: Sequence[Fault] = ()) -> None:
        """Replace the replies, which the engine reads, and the faults, which the relay makes."""
        staged = self.script_file.with_suffix(".new")
        staged.write_text(Script(model=self.model, rules=list(rules)).model_dump_json())
        staged.replace(self.script_file)
        self.recorder.calls.clear()
        self.recorder.faults[:] = [fault.model_copy() for fault in faults]

    def forget_calls(self, num_known: int) -> None:
        del self.recorder.calls[num_known:]


ScriptedEngine = FakeEngine | ForcedEngine


@contextlib.contextmanager
def running_forced_engine(model_dir: Path, directory: Path) -> Iterator[ForcedEngine]:
    """Run a real vLLM with forced tokens until the block ends.

    Args:
        model_dir: where the model is, or where it is built.
        directory: for the log and the script.
    """
    from support.long_context_model import CONTEXT_TOKENS, build_long_context_model  # imports torch

    script = directory / "script.json"
    script.write_text("{}")
    flags = ["--max-model-len", str(CONTEXT_TOKENS), "--logits-processors", "support.forced_tokens:ForcedTokens"]
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"FORCED_TOKENS_SCRIPT": str(script), "PYTHONPATH": os.pathsep.join(paths)}
    model = build_long_context_model(model_dir)
    with (
        running_engine(model, directory / "engine.log", *flags, environment=variables) as engine,
        recording(engine.url) as recorder,
    ):
        yield ForcedEngine(recorder, engine.model, CONTEXT_TOKENS, script)
