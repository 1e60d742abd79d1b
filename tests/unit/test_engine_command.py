"""The engine's command line and its error messages."""

import contextlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.ports import free_port

from turnwise.commands.features import engines
from turnwise.engine_plugin import mend_torchvision
from turnwise.engine_plugin.features.reasons import REASON_FILE, tell_why_it_died
from turnwise.errors import BadCheckpoint, EngineError, SettingsError
from turnwise.processes import engine_command, served_model
from turnwise.processes.engine_command import EngineSettings, build_command, check_startable
from turnwise.processes.served_model import check_model_directory, check_served

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def _flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_without_a_gpu_the_engine_runs_on_one_core_without_the_executor_that_spins(model_dir):
    command = build_command(EngineSettings(model=str(model_dir), device="cpu"))
    assert command.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert _flag(command.argv, "--distributed-executor-backend") == "uni"
    assert _flag(command.argv, "--dtype") == "float32"
    assert "--enforce-eager" in command.argv
    assert command.environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_ARENA_MAX": "1",
    }


def test_the_cache_on_a_cpu_holds_32_long_calls_within_limits(tmp_path):
    """SmolLM2: 30 layers x 2 x 3 heads x 64 values x 4 bytes = 46,080 bytes a token; 32 x 512 tokens take 755 MB."""
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    for config, length, expected in (
        (smollm2, 512, 46_080 * 32 * 512),
        (smollm2, 2048, 2 * 2**30),
        (
            {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
            2048,
            128 * 2**20,
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings = EngineSettings(model=str(tmp_path), max_model_len=length, device="cpu")
        argv = build_command(settings).argv
        assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(expected)
        assert argv[argv.index("--block-size") + 1] == "32"


def test_with_a_gpu_it_is_the_official_command_without_the_cpu_flags():
    command = build_command(EngineSettings(model="Qwen/Qwen3-0.6B", device="gpu"))
    assert Path(command.argv[0]).name == "vllm"
    assert command.argv[1:3] == ("serve", "Qwen/Qwen3-0.6B")
    assert not {"--enforce-eager", "--distributed-executor-backend", "--dtype"} & set(command.argv)
    assert command.environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
    }


def test_the_flags_that_capture_needs_are_the_default_on_any_device():
    for device in ("cpu", "gpu"):
        argv = build_command(EngineSettings(model="owner/name", device=device)).argv
        assert _flag(argv, "--logprobs-mode") == "processed_logprobs"
        assert _flag(argv, "--tool-call-parser") == "hermes"
        assert "--enable-auto-tool-choice" in argv
        assert _flag(argv, "--served-model-name") == "name"


def test_lora_enables_vllms_adapter_routes(model_dir):
    settings = EngineSettings(model=str(model_dir), lora=True, max_loras=4, max_cpu_loras=9, device="cpu")
    command = build_command(settings)
    for flag, value in (("--max-loras", "4"), ("--max-cpu-loras", "9")):
        assert command.argv[command.argv.index(flag) + 1] == value
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "--enable-lora" in command.argv


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "engine.example"])
def test_a_non_loopback_address_needs_the_explicit_flag(model_dir, host):
    with pytest.raises(SettingsError, match="--allow-remote"):
        check_startable(EngineSettings(model=str(model_dir), host=host))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_the_missing_file_of_a_model_directory_is_named(model_dir, missing):
    (model_dir / missing).unlink()
    with pytest.raises(BadCheckpoint, match=missing):
        check_model_directory(model_dir)


def test_a_missing_shard_is_named_from_the_index(model_dir):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="model-00002-of-00002"):
        check_model_directory(model_dir)


def test_an_index_that_names_no_files_is_refused(model_dir):
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    with pytest.raises(BadCheckpoint, match="weight_map"):
        check_model_directory(model_dir)


def test_weights_in_four_bits_are_refused_where_vllm_has_no_plug_in_for_them(model_dir):
    (model_dir / "config.json").write_text(json.dumps({"quantization_config": {"load_in_4bit": True}}))
    with pytest.raises(EngineError, match=r"in bitsandbytes' four bits, .*; run `pip install vllm-bnb-plugin "):
        check_served(str(model_dir), gpu=True, lora=True, dtype=None)


def test_all_packages_built_for_another_torch_are_named_at_once_with_what_mends_or_removes_them(monkeypatch, tmp_path):
    """When the two builds differ, `import vllm` fails with an unclear error about torchvision's operators."""
    versions = {"torch": "2.13.0+cpu", "torchaudio": "2.13.0", "torchcodec": None}
    monkeypatch.setattr(engine_command, "installed_version", versions.get)
    assert "imports them: torchaudio; pip uninstall -y torchaudio (" in str(engine_command.packages_problem())
    versions |= {"torchcodec": "0.9", "torchvision": "0.28.0"}
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(mend_torchvision, "installed", lambda: tmp_path / "__init__.py")
    problem = str(engine_command.packages_problem())
    assert (
        "them: torchvision, torchaudio, torchcodec; run `python -m turnwise.engine_plugin.mend_torchvision`" in problem
    )
    assert "and pip uninstall -y torchaudio torchcodec (" in problem


def test_torchvision_of_another_build_is_mended_once_and_accepted_then(tmp_path, monkeypatch):
    file = tmp_path / "__init__.py"
    file.write_text("from . import extension\n")
    monkeypatch.setattr(engine_command, "installed_version", {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.get)
    monkeypatch.setattr(mend_torchvision, "installed", lambda: file)
    assert "turnwise.engine_plugin.mend_torchvision" in str(engine_command.packages_problem())
    mend_torchvision.mend(file)
    mended = file.read_text()
    assert engine_command.packages_problem() is None
    mend_torchvision.mend(file)
    assert file.read_text() == mended
    assert mended.endswith("from . import extension\n")


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        *(("qwen2_5", "hermes"), ("qwen3", "hermes"), ("qwen3_vl", "hermes"), ("smolvlm", "hermes")),
        *(("qwen3_5_think", "qwen3_coder"), ("qwen3_6", "qwen3_coder"), ("nemotron_3_nano", "qwen3_coder")),
        *(("llama3_1", "llama3_json"), ("llama3_2", "llama3_json"), ("glm4moe", "glm45"), ("gemma4", "gemma4")),
        *(("lfm2_2_5", "lfm2"), ("deepseekv3", "deepseek_v3")),
    ],
)
def test_the_parser_of_tool_calls_is_the_one_for_what_the_chat_template_writes(model_dir, template, parser):
    """TRL's package has the chat templates of public models."""
    templates = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    shutil.copyfile(templates / f"{template}.jinja", model_dir / "chat_template.jinja")
    assert _flag(build_command(EngineSettings(model=str(model_dir), device="cpu")).argv, "--tool-call-parser") == parser
    chosen = EngineSettings(model=str(model_dir), tool_call_parser="pythonic", device="cpu")
    assert _flag(build_command(chosen).argv, "--tool-call-parser") == "pythonic"
    none = EngineSettings(model=str(model_dir), tool_call_parser="", device="cpu")
    assert "--enable-auto-tool-choice" not in build_command(none).argv


def test_gpt_oss_gets_the_only_parser_that_vllm_takes_for_it(model_dir):
    model = _write_config(model_dir, model_type="gpt_oss")
    assert _flag(build_command(EngineSettings(model=model, device="cpu")).argv, "--tool-call-parser") == "openai"


@pytest.mark.parametrize(
    "fields", [{"text_config": {"linear_key_head_dim": 128}}, {"quantization_config": {"quant_method": "fp8"}}]
)
def test_gated_delta_nets_and_quantised_weights_are_served_in_bfloat16_on_a_cpu(model_dir, fields):
    model = _write_config(model_dir, **fields)
    assert _flag(build_command(EngineSettings(model=model, device="cpu")).argv, "--dtype") == "bfloat16"
    with pytest.raises(EngineError, match="which vLLM computes on a CPU in bfloat16 alone"):
        check_served(model, gpu=False, lora=False, dtype="float32")
    check_served(model, gpu=True, lora=False, dtype="float32")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "jamba"}, r"\(jamba\) has Mamba's selective scan, of which vLLM has no kernel for a CPU"),
        ({"model_type": "apertus"}, r"\(apertus\) has activations with weights, which vLLM keeps in bfloat16"),
        ({"kv_lora_rank": 512}, r"latent attention \(MLA\), which vLLM computes on a CPU otherwise"),
        (
            {"linear_key_head_dim": 128, "num_experts": 8},
            "in bfloat16 alone, where rounding changes the choice of expe",
        ),
        ({"quantization_config": FP8_BLOCKS}, "FP8 weights in blocks: .* with AMX, which this machine's CPU lacks"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "integer weights of 4 bits: .* with AVX-512"),
        ({"quantization_config": {"config_groups": {"group_0": {"weights": INT4}}}}, "integer weights of 4 bits"),
    ],
)
def test_what_vllm_does_not_compute_or_too_coarsely_on_a_cpu_is_refused_there_before_the_start(
    model_dir, tmp_path, monkeypatch, fields, words
):
    model = _write_config(model_dir, **fields)
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx avx2\n")
    monkeypatch.setattr(served_model, "CPU_INFO", tmp_path / "cpuinfo")
    with pytest.raises(EngineError, match=words):
        check_served(model, gpu=False, lora=False, dtype=None)
    check_served(model, gpu=True, lora=False, dtype=None)


@pytest.mark.parametrize("known", [None, "flags\t\t: fpu avx2 avx512bw amx_tile\n", "Features\t: asimd\n"])
def test_quantised_weights_are_served_by_a_cpu_that_has_or_may_have_vllm_s_kernels(
    model_dir, tmp_path, monkeypatch, known
):
    monkeypatch.setattr(served_model, "CPU_INFO", tmp_path / "cpuinfo")
    if known is not None:
        (tmp_path / "cpuinfo").write_text(known)
    for stated in (FP8_BLOCKS, {"bits": 4}, {"config_groups": {"group_0": {"weights": INT4}}}):
        check_served(_write_config(model_dir, quantization_config=stated), gpu=False, lora=True, dtype=None)


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_adapters_of_a_mixture_are_refused_on_a_cpu_before_the_start(model_dir, field):
    model = _write_config(model_dir, model_type="new_moe", **{field: 8})
    with pytest.raises(EngineError, match=r"\(new_moe\) is a mixture of experts, .*kind='full'"):
        check_served(model, gpu=False, lora=True, dtype=None)
    check_served(model, gpu=True, lora=True, dtype=None)
    check_served(model, gpu=False, lora=False, dtype=None)


def test_a_model_that_says_it_is_no_mixture_is_none(model_dir):
    """Doge states its number of experts beside `is_moe: false`."""
    check_served(
        _write_config(model_dir, model_type="doge", num_experts=8, is_moe=False), gpu=False, lora=True, dtype=None
    )
    with pytest.raises(EngineError, match="is a mixture of experts"):
        check_served(_write_config(model_dir, num_experts=8, is_moe=True), gpu=False, lora=True, dtype=None)


def test_a_padding_id_outside_of_the_vocabulary_is_refused_by_name(model_dir):
    for padding in (99, -7):
        model = _write_config(model_dir, pad_token_id=padding, vocab_size=99)
        with pytest.raises(EngineError, match=f"has pad_token_id {padding}, outside of its vocabulary of 99 tokens"):
            check_served(model, gpu=True, lora=False, dtype=None)
    for padding in (98, -1, None):
        check_served(_write_config(model_dir, pad_token_id=padding, vocab_size=99), gpu=True, lora=False, dtype=None)


def test_a_vision_tower_of_timm_needs_timm(model_dir, monkeypatch):
    model = _write_config(model_dir, model_type="gemma3n", vision_config={})
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else installed("json"))
    with pytest.raises(EngineError, match="read with timm; run `pip install timm`"):
        check_served(model, gpu=True, lora=False, dtype=None)


@pytest.mark.parametrize("config", [{"model_type": "qwen3_5_text"}, {"model_type": "gemma3", "vision_config": {}}])
def test_a_model_that_needs_torchvision_is_refused_without_it(model_dir, monkeypatch, config):
    model = _write_config(model_dir, **config)
    monkeypatch.setattr(served_model.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EngineError, match=f"type '{config['model_type']}', which vLLM serves only with torchvision"):
        check_served(model, gpu=False, lora=False, dtype=None)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's own list of architectures is read")
@pytest.mark.parametrize(
    ("architecture", "lora", "words"),
    [
        ("GPT2LMHeadModel", True, r"of which vLLM serves no adapters; .*kind='full'"),
        ("GPT2LMHeadModel", False, None),
        ("BloomForCausalLM", False, "whose GELU vLLM does not approximate by tanh"),
        ("Gemma3nForCausalLM", False, "whose embeddings of each layer vLLM leaves out"),
        ("MistralForCausalLM", True, None),
        ("GPTNeoXForCausalLM", True, None),
        ("BambaForCausalLM", False, "that vLLM serves no longer, since version 0.23.0"),
        ("Dots1ForCausalLM", True, None),
        ("PersimmonForCausalLM", False, None),
        ("T5ForConditionalGeneration", False, "that vLLM does not serve"),
        ("BertForMaskedLM", False, "that vLLM does not serve"),
        ("NobodysForCausalLM", False, "that vLLM does not serve"),
    ],
)
def test_an_architecture_that_vllm_does_not_serve_is_refused_by_its_name_before_the_start(
    model_dir, architecture, lora, words
):
    """Mistral inherits adapters from Llama; vLLM serves GPT-NeoX, and Dots since it left, with transformers' code."""
    model = _write_config(model_dir, architectures=[architecture], is_encoder_decoder=architecture.startswith("T5"))
    if words is None:
        check_served(model, gpu=True, lora=lora, dtype=None)
        return
    with pytest.raises(EngineError, match=rf"\({architecture}\) is of an architecture {words}"):
        check_served(model, gpu=True, lora=lora, dtype=None)
    for flags in (("--model-impl", "transformers"), ("--model_impl=transformers",), ("--trust-remote-code",)):
        check_served(model, gpu=True, lora=lora, dtype=None, vllm_flags=flags)


@pytest.mark.parametrize("registry", ["{**{}}", "{}"])
def test_where_vllm_or_transformers_cannot_be_asked_vllm_decides(model_dir, tmp_path, monkeypatch, registry):
    class Unfit:
        __spec__ = None

        def __getattr__(self, name: str) -> None:
            raise RuntimeError("operator torchvision::nms does not exist")

    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (models / "registry.py").write_text("\n".join(f"{table} = {registry}" for table in served_model.TABLES))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", Unfit())
    check_served(_write_config(model_dir, architectures=["NewForCausalLM"]), gpu=True, lora=True, dtype=None)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]},
        },
        {"model_type": "cohere2", "sliding_window": 1024},
    ],
)
def test_an_engine_serves_no_texts_that_vllm_computes_otherwise_than_transformers(model_dir, fields):
    """Phi-4-mini: an engine of 131072 positions computes a text of 10 tokens with the factors of long ones."""
    model = _write_config(model_dir, max_position_embeddings=131072, **fields)
    for device in ("cpu", "gpu"):
        engine = EngineSettings(model=model, device=device)
        assert _flag(build_command(engine).argv, "--max-model-len") == "1024"
    longer = engine.model_copy(update={"max_model_len": 1025})
    with pytest.raises(SettingsError, match=r"otherwise than transformers, .*; set at most 1024"):
        engine_command.check_model_fits(longer)
    engine_command.check_model_fits(longer, is_trained=False)
    right = engine.model_copy(update={"max_model_len": 1024})
    engine_command.check_model_fits(right)
    assert engine_command.length_note(right) is None
    assert engine_command.length_note(engine, ("--max-model-len=2048",)) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "up to 1024 tokens, because as an engine for more vLLM computes it otherwise than transformers"),
        (("--max-model-len", "1025"), "with max_model_len=1025, which is more than 1024, vLLM computes it otherwise"),
    ],
)
def test_an_engine_without_a_trainer_says_what_limits_its_texts_and_takes_a_larger_length(
    model_dir, monkeypatch, flags, words
):
    monkeypatch.setattr(engine_command, "packages_problem", lambda: None)
    monkeypatch.setattr(engine_command.EngineCommand, "execute", lambda _: None)
    _write_config(model_dir, model_type="cohere2", sliding_window=1024, max_position_embeddings=8192)
    result = CliRunner().invoke(engines.engine, ["--model", str(model_dir), "--port", str(free_port()), *flags])
    assert (result.exit_code, result.exception) == (0, None)
    assert words in result.stderr


def test_a_missing_vllm_is_reported_with_the_command_that_installs_it(model_dir, monkeypatch):
    monkeypatch.setattr(engine_command.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EngineError, match=r"pip install .*\[engine-cpu\]"):
        check_startable(EngineSettings(model=str(model_dir)))


def test_a_missing_gpu_is_refused(model_dir, monkeypatch):
    monkeypatch.setattr(engine_command, "packages_problem", lambda: None)
    monkeypatch.setattr(engine_command, "num_gpus", lambda: 0)
    with pytest.raises(EngineError, match="--device cpu"):
        check_startable(EngineSettings(model=str(model_dir), device="gpu"))


def _write_config(directory: Path, **values: object) -> str:
    (directory / "config.json").write_text(json.dumps(values))
    return str(directory)


def test_linear_attention_that_vllm_has_no_code_for_is_refused_before_the_start(model_dir):
    """MiniMax left vLLM with 0.23, and transformers' code of it ends vLLM at the start."""
    kinds = ["linear_attention", "full_attention"]
    _write_config(model_dir, model_type="minimax", architectures=["MiniMaxForCausalLM"], layer_types=kinds)
    with pytest.raises(EngineError, match="whose linear attention vLLM computes only with code of its own"):
        check_served(str(model_dir), gpu=True, lora=False, dtype=None)


@pytest.mark.parametrize(("name", "is_served"), [("DiffLlamaForCausalLM", False), ("DogeForCausalLM", True)])
def test_a_model_whose_attention_vllm_cannot_replace_is_refused_before_the_start(model_dir, name, is_served):
    """DiffLlama's layer calls transformers' attention twice, and vLLM ends at its start."""
    _write_config(model_dir, model_type=name.removesuffix("ForCausalLM").lower(), architectures=[name])
    with contextlib.nullcontext() if is_served else pytest.raises(EngineError, match="that vLLM does not serve"):
        check_served(str(model_dir), gpu=True, lora=False, dtype=None)


def test_no_more_tokens_are_asked_for_than_the_model_has_positions(model_dir):
    model = _write_config(model_dir, max_position_embeddings=1024)
    assert _flag(build_command(EngineSettings(model=model, device="cpu")).argv, "--max-model-len") == "1024"
    with pytest.raises(SettingsError, match=r"max_model_len=2048 is more than the 1024 positions"):
        check_startable(EngineSettings(model=model, max_model_len=2048, device="cpu"))
    longer = _write_config(model_dir, text_config={"max_position_embeddings": 40960})
    assert _flag(build_command(EngineSettings(model=longer, device="cpu")).argv, "--max-model-len") == "2048"


@pytest.mark.parametrize("fields", [{"hidden_size": 64, "num_attention_heads": 4}, {"n_embd": 64, "n_head": 4}])
def test_a_head_size_that_vllm_cannot_compute_on_a_cpu_is_refused_before_the_start(model_dir, monkeypatch, fields):
    monkeypatch.setattr(engine_command, "packages_problem", lambda: None)
    model = _write_config(model_dir, **fields)  # 64 / 4 = 16
    with pytest.raises(EngineError, match=r"attention heads of size 16, and on a CPU vLLM computes only the sizes 32"):
        check_startable(EngineSettings(model=model, port=free_port(), device="cpu"))
    monkeypatch.setattr(engine_command, "num_gpus", lambda: 1)
    check_startable(EngineSettings(model=model, port=free_port(), device="gpu"))


@pytest.mark.parametrize(("rank", "largest"), [(1, "1"), (4, "8"), (12, "16"), (16, "16"), (24, "32"), (300, "320")])
def test_vllm_gets_the_next_largest_rank_that_it_has(model_dir, rank, largest):
    command = build_command(EngineSettings(model=str(model_dir), lora=True, max_lora_rank=rank, device="cpu"))
    assert _flag(command.argv, "--max-lora-rank") == largest


def test_an_engine_that_died_answers_with_the_exception_that_ended_it(monkeypatch, tmp_path):
    """The engine's process writes the reason, and the process that answers calls reads it."""
    monkeypatch.setenv(REASON_FILE, str(tmp_path / "reason"))

    class Core:
        def _send_engine_dead(self) -> None:
            """The client learns that the engine dies."""

    class Dead(Exception):
        def __init__(self) -> None:
            super().__init__("See stack trace.")

    tell_why_it_died(Core, Dead)
    assert str(Dead()) == "See stack trace."
    try:
        int("CPU")
    except ValueError:
        Core()._send_engine_dead()
    assert str(Dead()) == "See stack trace. ValueError: invalid literal for int() with base 10: 'CPU'"
    assert str(Dead()) == Dead().CLIENT_MESSAGE, "vLLM 0.33 answers with this"


def test_a_model_without_a_chat_template_is_refused_before_anything_starts(tmp_path):
    """Otherwise the engine starts for half a minute, and the proxy dies five times."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="has no chat template, so no agent can call it"):
        served_model.check_chat_template(str(tmp_path), ())
    served_model.check_chat_template(str(tmp_path), ("--chat-template", "chat.jinja"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    served_model.check_chat_template(str(tmp_path), ())
