"""What vLLM needs to serve a model, such as the parser of tool calls and the number format, read from its files.

A family is recognised by what its files say, not by a list of names, so a new model of a known kind needs no release:
the parser of tool calls by the marks in the chat template, the number format by the kinds of layers.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import BadCheckpoint, EngineError
from turnwise.version_directory import MODEL_CONFIG, local_files, read_json, read_weight_index, weight_files

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM computes on a CPU."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DELTA_NET = "linear_key_head_dim"
"""A field that configurations with gated delta nets have."""
SCAN = "Mamba's selective scan, of which vLLM has no kernel for a CPU"
NOT_ON_CPU = dict.fromkeys(("jamba", "mamba", "falcon_mamba"), SCAN) | {
    "apertus": "activations with weights, which vLLM keeps in bfloat16 also where a CPU computes in float32"
}
"""What a type of model has that a CPU does not compute, or not as transformers does."""
CPU_INFO = Path("/proc/cpuinfo")
LATENT = "kv_lora_rank"
"""A field that configurations with latent attention have."""
QUANTISED = "quantization_config"
HARMONY = "gpt_oss"
"""The model type whose prompts and replies vLLM handles in a way of their own, with one parser."""
PARSERS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v3"),
    ("<start_function_call>", "functiongemma"),
    ("<function_calls>", "olmo3"),
    ('"parameters": dictionary of argument', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)
"""What a chat template writes around tool calls, and vLLM's parser of it. The first one that is found counts."""
OTHER_PARSER = "hermes"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates", "tekken.json")
"""Further files that hold a chat template, or stand for one."""
CODE_TEMPLATES = ("DeepseekV32", "DeepseekV4", "KimiK3", "Inkling")
"""Beginnings of architectures whose chats vLLM renders by code of its own."""
WITHOUT_TORCHVISION = ("idefics3",)
"""Types of models with images that vLLM serves without torchvision."""
WITH_TIMM = ("gemma3n",)
"""Types of models whose vision tower is one of the package timm."""
COMPUTED_OTHERWISE = {
    "BloomForCausalLM": "whose GELU vLLM does not approximate by tanh, so that logprobs differ by 3e-4",
    "Gemma3nForCausalLM": "whose embeddings of each layer vLLM leaves out, so that logprobs differ by 0.3",
}
"""Architectures that vLLM computes otherwise than transformers, which trains them."""
TABLES = (
    "_TEXT_GENERATION_MODELS",
    "_MULTIMODAL_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
    "_PREVIOUSLY_SUPPORTED_MODELS",
)
"""Of vLLM's registry: module and class of each architecture that chats, and the last version that had one."""
DECIDING_FLAGS = ("--model-impl", "--trust-remote-code", "--hf-overrides")
"""With these flags, vLLM serves other code than its registry names for an architecture."""

NO_ENGINE = "no engine on this machine"
"""Name of the trainer's note that `check_served` would refuse its model here."""


def whole_config(model: str) -> dict[str, Any]:
    """Return the configuration of a model; empty for a public model that is not in the cache."""
    directory = local_files(model)
    file = None if directory is None else directory / MODEL_CONFIG
    return {} if file is None or not file.is_file() else read_json(file)


def model_config(model: str) -> dict[str, Any]:
    """Return the configuration of a model's text part, or of a model that is one; empty as `whole_config`."""
    found = whole_config(model)
    text = found.get("text_config", found)
    return text if isinstance(text, dict) else {}


def max_positions(model: str) -> int | None:
    """Return how many positions a model has; None where its configuration does not say it."""
    config = model_config(model)
    stated = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
    return min(stated, default=None)


def equal_positions(model: str) -> int | None:
    """Return up to how many positions an engine serves a model as transformers computes it; None for any.

    With longrope, transformers has other factors for texts beyond some positions, and vLLM for each text of an engine
    that serves longer ones. In Cohere 2's sliding windows vLLM sees one token more.
    """
    config = model_config(model)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("model_type") in ("cohere2", "cohere2_moe"):
        found = config.get("sliding_window")
    elif "short_factor" in rope and "long_factor" in rope:
        found = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    else:
        found = None
    return found if isinstance(found, int) else None


def head_size(config: dict[str, Any]) -> int | None:
    """Return the size of an attention head; None where the configuration does not say it."""
    heads = config.get("num_attention_heads", config.get("n_head", config.get("n_heads")))
    width = config.get("hidden_size", config.get("n_embd", config.get("d_model")))
    size: int | None = config.get("head_dim") or (width // heads if heads and width else None)
    return size


def tool_parser_of(model: str) -> str:
    """Return the name of vLLM's parser of the tool calls that a model writes."""
    if model_config(model).get("model_type") == HARMONY:
        return "openai"
    template = _chat_template(local_files(model))
    return next((parser for mark, parser in PARSERS if mark in template), OTHER_PARSER)


def _chat_template(directory: Path | None) -> str:
    if directory is None:
        return ""
    file, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return str(read_json(settings).get("chat_template") or "") if settings.is_file() else ""


def check_chat_template(model: str, vllm_flags: Sequence[str]) -> None:
    """Refuse a model whose chats neither vLLM nor the proxy could render.

    Raises:
        BadCheckpoint: it has no chat template, and vLLM's flags name none.
    """
    directory = local_files(model)
    if directory is None or any(flag.startswith(("--chat-template", "--tokenizer")) for flag in vllm_flags):
        return
    if any(name.startswith(CODE_TEMPLATES) for name in whole_config(model).get("architectures") or ()):
        return
    if not _chat_template(directory) and not any((directory / name).exists() for name in OTHER_TEMPLATES):
        raise BadCheckpoint(
            f"the model {model!r} has no chat template, so no agent can call it: serve its instruct version, or put a "
            "chat_template.jinja beside its tokenizer"
        )


def cpu_dtype_of(model: str) -> str:
    """Return the number format in which vLLM computes a model on a CPU.

    It has gated delta nets, and weights that are quantised, in bfloat16 alone.
    """
    needs_16_bits = DELTA_NET in model_config(model) or QUANTISED in whole_config(model)
    return "bfloat16" if needs_16_bits else "float32"


def has_experts(model: str) -> bool:
    config = model_config(model)
    # Nemotron-H and Doge state experts that they lack.
    if "moe" not in config.get("layers_block_type", ["moe"]) or config.get("is_moe") is False:
        return False
    return any(isinstance(config.get(name), int) and config[name] > 1 for name in EXPERTS)


def check_served(model: str, *, gpu: bool, lora: bool, dtype: str | None, vllm_flags: Sequence[str] = ()) -> None:
    """Refuse a model that vLLM would refuse only after its start, or at the first call.

    Raises:
        EngineError: vLLM cannot compute it here, or needs a package that is not installed.
    """
    config = whole_config(model)
    kind = str(config.get("model_type"))
    has_images = "vision_config" in config and kind not in WITHOUT_TORCHVISION
    if (has_images or kind.startswith("qwen3_5")) and importlib.util.find_spec("torchvision") is None:
        raise EngineError(
            f"the model {model!r} is of the type {kind!r}, which vLLM serves only with torchvision; install the "
            "release that belongs to this torch with pip, or run `make setup`"
        )
    if kind in WITH_TIMM and importlib.util.find_spec("timm") is None:
        raise EngineError(
            f"the model {model!r} is of the type {kind!r}, whose images vLLM and transformers read with timm; run "
            "`pip install timm`"
        )
    _check_padding(model)
    is_packed = bool((config.get(QUANTISED) or {}).get("load_in_4bit"))
    if is_packed and importlib.util.find_spec("vllm_bnb_plugin") is None:
        raise EngineError(
            f"the weights of {model!r} are in bitsandbytes' four bits, which vLLM serves only with its plug-in; run "
            "`pip install vllm-bnb-plugin bitsandbytes`, or serve the model that is not quantised"
        )
    if not any(flag.replace("_", "-").startswith(DECIDING_FLAGS) for flag in vllm_flags):
        _check_architecture(model, lora=lora)
    if not gpu:
        _check_on_cpu(model, kind, lora=lora, dtype=dtype)


def _check_padding(model: str) -> None:
    text = model_config(model)
    padding, size = text.get("pad_token_id"), text.get("vocab_size")
    if isinstance(padding, int) and isinstance(size, int) and not -1 <= padding < size:
        raise EngineError(
            f"the config.json of {model!r} has pad_token_id {padding}, outside of its vocabulary of {size} tokens, and "
            "no embedding can be made of it; write the id of a token there, or null"
        )


def _check_architecture(model: str, *, lora: bool) -> None:
    """Refuse an architecture by what the installed vLLM's source says, which is not imported for it.

    Raises:
        EngineError: vLLM does not serve it, or no adapters of it.
    """
    config = whole_config(model)
    name = next(iter(config.get("architectures") or ()), None)
    vllm = importlib.util.find_spec("vllm")
    models = Path() if vllm is None or vllm.origin is None else Path(vllm.origin).parent / "model_executor" / "models"
    if name is None or not (models / "registry.py").is_file():
        return
    known = _tables(models / "registry.py")
    if known is None:
        return  # another release of vLLM
    *served, no_longer = known
    found = next((table[name] for table in served if name in table), None)
    problem = None
    if found is None and (config.get("is_encoder_decoder") or not _is_served_by_transformers(name)):
        since = f" no longer, since version {no_longer[name]}" if name in no_longer else ""
        is_not = "serves" if since else "does not serve"
        problem = f"that vLLM {is_not}{since}; serve another model, or pass --model-impl or --trust-remote-code to vLLM"
    elif found is None and "linear_attention" in (config.get("layer_types") or ()):
        problem = "whose linear attention vLLM computes only with code of its own, and it has none; serve another model"
    elif name in COMPUTED_OTHERWISE:
        problem = f"{COMPUTED_OTHERWISE[name]}; serve another model"
    elif lora and found is not None and not _takes_adapters(models, *found):
        problem = "of which vLLM serves no adapters; train all weights (kind='full') and serve without --lora"
    if problem is not None:
        raise EngineError(f"the model {model!r} ({name}) is of an architecture {problem}")


def _tables(registry: Path) -> list[dict[str, Any]] | None:
    """Return `TABLES`; None where one is missing, or is not written as a constant."""
    found = {
        node.targets[0].id: node.value
        for node in ast.parse(registry.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    try:
        return [ast.literal_eval(found[table]) for table in TABLES]
    except (KeyError, ValueError):
        return None


def _is_served_by_transformers(name: str) -> bool:
    """Return whether vLLM serves an architecture that it does not name, with the code of transformers."""
    try:
        known: Any = getattr(importlib.import_module("transformers"), name, None)
    except (ImportError, OSError, RuntimeError, ValueError):  # what a class imports does not fit: vLLM says it
        return True
    if not callable(getattr(known, "can_generate", None)) or known._is_stateful:  # noqa: SLF001  vLLM keeps its states only in code of its own
        return False
    is_asked_for = known.can_generate() and (known.is_backend_compatible() or known._can_set_attn_implementation())  # noqa: SLF001  as vLLM asks
    return bool(is_asked_for and _calls_attention_once(known.__module__))


def _calls_attention_once(module: str) -> bool:
    """Return whether a function of transformers' module calls the attention that vLLM replaces exactly once.

    It finds no layer in one that calls it twice, as that of DiffLlama does. True where the module has no attention.
    """
    file = importlib.util.find_spec(module)
    if file is None or file.origin is None:
        return True
    num_calls = []
    for function in ast.walk(ast.parse(Path(file.origin).read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            assigned = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AnnAssign))]
            found = [node for node in assigned if node.value and "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)]
            targets = [node.targets if isinstance(node, ast.Assign) else [node.target] for node in found]
            names = {ast.unparse(each) for some in targets for each in some}
            called = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
            num_calls += [sum(name in names for name in called)] if names else []
    return not num_calls or 1 in num_calls


def _takes_adapters(models: Path, module: str, name: str) -> bool:
    """Return whether a class of vLLM inherits from SupportsLoRA; also true where its source is not among these."""
    file = models / f"{module.removeprefix('vllm.model_executor.models.')}.py"
    if name == "SupportsLoRA" or not file.is_file():
        return True
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return any(_takes_adapters(models, module, ast.unparse(base)) for base in node.bases)
        if isinstance(node, ast.ImportFrom) and node.module and any(each.name == name for each in node.names):
            is_model = node.level == 1 or node.module.startswith("vllm.model_executor.models.")
            return is_model and _takes_adapters(models, node.module, name)
    return False


def _check_on_cpu(model: str, kind: str, *, lora: bool, dtype: str | None) -> None:
    size = head_size(model_config(model))
    if size is not None and size not in CPU_HEAD_SIZES:
        raise EngineError(
            f"the model {model!r} has attention heads of size {size}, and on a CPU vLLM computes only the "
            f"sizes {', '.join(map(str, CPU_HEAD_SIZES))}; serve another model, or use a GPU"
        )
    needed, another = cpu_dtype_of(model), "serve another model, or use a GPU"
    if kind in NOT_ON_CPU:
        problem = f"has {NOT_ON_CPU[kind]}; {another}"
    elif LATENT in model_config(model):
        problem = "has latent attention (MLA), which vLLM computes on a CPU otherwise than transformers, by up to 0.08 "
        problem += f"nats a token; {another}"
    elif (lacking := _lacking(whole_config(model).get(QUANTISED) or {})) is not None:
        problem = f"has {lacking}, which this machine's CPU lacks; serve the model that is not quantised, or use a GPU"
    elif needed != "float32" and has_experts(model):
        problem = f"is a mixture of experts that vLLM computes on a CPU in {needed} alone, where rounding changes the "
        problem += f"choice of experts; {another}"
    elif lora and has_experts(model):
        problem = "is a mixture of experts, and on a CPU vLLM has no kernel for adapters of one; train all weights "
        problem += "(kind='full') and serve without --lora, or use a GPU"
    elif dtype not in (None, needed) and needed != "float32":
        problem = f"has gated delta nets or quantised weights, which vLLM computes on a CPU in {needed} alone, and "
        problem += f"dtype={dtype!r}; leave it out"
    else:
        return
    raise EngineError(f"the model {model!r} ({kind}) {problem}")


def _lacking(stated: dict[str, Any]) -> str | None:
    """Return how weights are quantised and what instructions vLLM's kernels of it need, if this CPU lacks them."""
    known = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else ""
    groups = [group.get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
    for each in groups or [stated]:
        if each.get("num_bits", each.get("bits")) == 4 and each.get("type", "int") == "int":
            what, needed = "integer weights of 4 bits: vLLM computes them with AVX-512", "avx512bw"
        elif each.get("weight_block_size") or each.get("strategy") == "block":
            what, needed = "FP8 weights in blocks: vLLM computes them with AMX", "amx_tile"
        else:
            continue
        if "flags" in known and f" {needed}" not in known:
            return what
    return None


def check_model_directory(directory: Path) -> None:
    """Refuse a directory without a complete model.

    Raises:
        BadCheckpoint: a file is missing, with its name, or the index of its weights cannot be read.
    """
    if not directory.is_dir():
        raise BadCheckpoint(f"there is no model directory {str(directory)!r}; name an existing one, or a model's id")
    missing = [name for name in (MODEL_CONFIG, "tokenizer_config.json") if not (directory / name).is_file()]
    if shards := set(read_weight_index(directory).values()):
        missing += sorted(shard for shard in shards if not (directory / shard).is_file())
    elif not weight_files(directory):
        missing.append("model.safetensors")
    if missing:
        raise BadCheckpoint(
            f"the model directory {str(directory)!r} is incomplete: no {', '.join(missing)}; "
            "copy it again, or build it again"
        )
