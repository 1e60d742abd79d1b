"""`turnwise verify` against a real vLLM: captured logprobs are reproduced, and one changed value is named."""

import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import sqlalchemy as sa
from compose import compose_file
from openai import OpenAI
from support.checkpoints import write_perturbed
from support.commands import verify
from support.control_plane import wait_for_status
from support.engines import RunningEngine, running_engine
from support.migrated import writing
from support.proxies import running_proxy

from turnwise.processes.engine_command import EngineSettings, build_command
from turnwise.processes.installation import Finding, Severity, engine_findings
from turnwise.store.schema import policy_versions

pytestmark = pytest.mark.engine
SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "extra_body": {"top_k": 20}},
    {
        "temperature": 0.8,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {"300": 2.0},
        "extra_body": {"repetition_penalty": 1.2, "min_tokens": 4, "bad_words": ["the"]},
    },
]


@pytest.fixture(scope="module")
def captured(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a conversation of three turns for each way of sampling."""
    place = tmp_path_factory.mktemp("captured") / "turnwise.db"
    with running_proxy(engine.url, f"sqlite:///{place}", place.parent) as proxy:
        wait_for_status(proxy, 0)
        for number, sampling in enumerate(SAMPLINGS):
            client = OpenAI(base_url=f"{proxy.url}/sessions/s{number}/v1", api_key="none")
            messages: list = [{"role": "user", "content": "Follow each boss from Kim."}]
            for _ in range(3):
                reply = client.chat.completions.create(
                    model="small", messages=messages, max_completion_tokens=8, **sampling
                )
                messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "On."}]
    return place


def test_captured_logprobs_are_reproduced(captured, engine):
    status, report = verify(f"sqlite:///{captured}", "--engine", engine.url)
    assert status == 0, report
    assert report["checked"]["turns with logprobs recomputed"] == 9
    assert report["largest_logprob_gap"] < 1e-3


def test_captured_logprobs_are_those_of_the_published_files(captured):
    """An engine that samples with other weights agrees with itself; the files do not agree with it."""
    status, report = verify(f"sqlite:///{captured}", "--forward")
    assert status == 0, report
    assert report["checked"]["turns with logprobs recomputed"] == 12
    assert not any("cannot be applied again" in reason for reason in report["not_checked"]), report["not_checked"]
    assert report["largest_logprob_gap"] < 1e-3


def test_files_that_the_engine_did_not_serve_are_named(captured, engine, tmp_path):
    changed = tmp_path / "turnwise.db"
    shutil.copy(captured, changed)
    other = write_perturbed(engine.model_dir, tmp_path / "other", 1)
    with writing(f"sqlite:///{changed}") as connection:
        connection.execute(sa.update(policy_versions).values(path=str(other)))
    status, report = verify(f"sqlite:///{changed}", "--forward")
    assert status == 1
    assert any("the files give" in mismatch["problem"] for mismatch in report["mismatches"])


def _parsed_by_vllm(*argvs: list[str]) -> list[dict[str, object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that vLLM imports
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    return [vars(make_arg_parser(FlexibleArgumentParser()).parse_args(argv)) for argv in argvs]


def test_vllm_accepts_the_flags_of_turnwise_engine_and_of_the_compose_file():
    settings = EngineSettings(
        model="owner/name",
        gpus=[0, 1],
        device="gpu",
        tensor_parallel=2,
        gpu_memory=0.4,
        lora=True,
        reasoning_parser="qwen3",
        dtype="bfloat16",
        max_lora_rank=12,
        max_model_len=4096,
    )
    command = build_command(settings)
    variables = {"ENGINE_FLAGS": "--enable-lora --max-lora-rank 16 --max-loras 2", "ENGINE_TENSOR_PARALLEL": "2"}
    gpu = compose_file.services("gpu", variables)["engine"]
    cpu = compose_file.services("cpu", {})["engine-cpu"]
    built, composed, composed_for_cpu = _parsed_by_vllm(
        list(command.argv[2:]), shlex.split(gpu["command"]), shlex.split(cpu["command"])
    )
    assert (composed_for_cpu["max_model_len"], composed_for_cpu["dtype"]) == (2048, "float32")
    assert built["tensor_parallel_size"] == composed["tensor_parallel_size"] == 2
    assert built["gpu_memory_utilization"] == composed["gpu_memory_utilization"] == 0.4
    assert built["enable_lora"] is composed["enable_lora"] is True
    assert (built["max_model_len"], built["dtype"], built["max_lora_rank"]) == (4096, "bfloat16", 16)
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "0,1"


def _tool_calls(url: str) -> Finding:
    (found,) = [each for each in engine_findings(url) if each.check == "tool calls"]
    return found


def test_the_doctor_finds_a_parser_that_leaves_calls_as_text(engine, small_model_dir, tmp_path):
    """The model is made to say what its template writes for a call, and only one of the two parsers knows that form."""
    assert _tool_calls(engine.url).verdict is Severity.OK
    with running_engine(small_model_dir, tmp_path / "engine.log", "--tool-call-parser", "pythonic") as running:
        found = _tool_calls(running.url)
    assert (found.verdict, "come back as text" in found.text) == (Severity.FAIL, True), found.text
