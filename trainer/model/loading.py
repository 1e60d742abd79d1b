"""Loading a causal LM by transformers: which models are refused, and the names and tensors of a whole version.

Engines start with the base model and load a version into it, or start with the version. So a version of whole weights
has the names of the base model's files, and also the tensors that transformers does not load, such as those that
predict several tokens. A model that transformers would write under other names is refused before it is trained.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from trainer.model.adapters import reach_of
from trainer.model.traits import why_alone
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.types import PolicyKind
from turnwise.version_directory import ADAPTER_CONFIG, local_files, read_json, weight_files, why_not_plain

if TYPE_CHECKING:
    from trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer*",
    "*.tiktoken",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "*processor_config.json",
)
PROJECTOR = re.compile(r"connector|projector|merger")
"""Names of what turns the output of a vision tower into embeddings."""
LORA_ALPHA = 32
"""An adapter is scaled by `LORA_ALPHA / lora_rank`. With one constant for all ranks, the best learning rate hardly
depends on the rank. Schulman et al. 2025, "LoRA Without Regret"."""
LIBRARY_ERRORS = (
    CheckpointException,
    SafetensorError,
    UnpicklingError,
    OSError,
    EOFError,
    ImportError,
    KeyError,
    RuntimeError,
    ValueError,
)
DEQUANTISED = ("fp8", "mxfp4", "compressed-tensors")
"""How weights may be quantised under an adapter: transformers computes with what they stand for."""
PACKED = "bitsandbytes in 4 bits"
"""Weights that stay packed in memory under an adapter; a layer's are unpacked as it is computed. Dettmers et al. 2023
(arXiv:2305.14314)."""
NOT_RELOADED = ("gpt_oss",)
"""Types of models of which vLLM keeps experts and attention sinks that it started with, whatever it loads later."""
HEAD = "lm_head.weight"
WHOLE_MODEL = "; name the directory of a whole causal LM, whose files are of one model, or a model's id"
MAX_REASON = 500


def choose_attention(settings: TrainerSettings, device: torch.device) -> str:
    """Return the attention implementation: of those that the architecture has, the fastest on the device."""
    if settings.attention != "auto":
        return settings.attention
    config = read_config(settings.model)
    known = model_class(config)._model_mapping.get(type(config), None)  # noqa: SLF001  transformers has no other way to ask
    if device.type == "cuda" and getattr(known, "_supports_flex_attn", True):
        return "flex_attention"
    return "sdpa" if getattr(known, "_supports_sdpa", True) and not is_capped(config) else "eager"


def is_capped(config: Any) -> bool:
    """Return whether a model caps the products of its attention, as Gemma 2, which SDPA leaves out in silence."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def read_config(model: str) -> Any:
    from transformers import AutoConfig

    with bad_checkpoint(f"cannot load the model {model!r}", WHOLE_MODEL):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if quantised_by(config) in DEQUANTISED:
        config.quantization_config["dequantize"] = True
    return config


def quantised_by(config: Any) -> str | None:
    """Return how a model's weights are quantised; None if they are not."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    return PACKED if stated.get("load_in_4bit") else str(stated.get("quant_method", "unknown"))


def model_class(config: Any) -> Any:
    """Return the automatic class of transformers for a model: for a wrapper around a text model the wrapper's.

    Engines serve the wrapper, so a version must have its configuration, its names, and its other tensors.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_wrapper = config.get_text_config() is not config
    known = AutoModelForImageTextToText._model_mapping  # noqa: SLF001  transformers has no other way to ask
    return AutoModelForImageTextToText if is_wrapper and type(config) in known else AutoModelForCausalLM


def check_trainable(config: Any, settings: TrainerSettings) -> None:
    """Refuse a model whose versions an engine could not load.

    Raises:
        SettingsError: The weights are quantised in a form that is not trained, or all of them are to be trained and
            would be written as another model, or the attention would leave something out.
    """
    if settings.attention == "sdpa" and is_capped(config):
        raise SettingsError(
            f"attention='sdpa' computes {settings.model!r} without the soft cap of its attention: leave it out, or set "
            "attention='eager'"
        )
    method, known = quantised_by(config), (*DEQUANTISED, PACKED)
    if method is not None and (settings.kind is not PolicyKind.LORA or method not in known):
        advice = "set kind='lora', or " if method in known else ""
        raise SettingsError(
            f"the weights of {settings.model!r} are quantised ({method}): an adapter is trained on weights in "
            f"{', '.join(known)}, and whole weights only where they are not quantised; {advice}train and serve "
            "the model that is not quantised"
        )
    if settings.kind is PolicyKind.LORA:
        if settings.vision != "frozen":
            raise SettingsError(
                f"vision={settings.vision!r} trains whole weights, and kind='lora' an adapter: name the layers of the "
                "vision part in lora_targets, or set kind='full'"
            )
        return
    if config.model_type in NOT_RELOADED:
        raise SettingsError(
            f"the model {settings.model!r} ({config.model_type}) has experts and attention sinks that vLLM does not "
            "load into a running engine, so whole weights would be served in part: set kind='lora', and serve on a GPU"
        )
    known = model_class(config)._model_mapping.get(type(config), None)  # noqa: SLF001  as above
    named = list(getattr(config, "architectures", None) or [])
    if known is not None and named and known.__name__ not in named:
        raise SettingsError(
            f"{settings.model!r} is a {named[0]}, and transformers trains and writes it as a {known.__name__}, which "
            "an engine that serves the first one does not load: set kind='lora', or serve a model of the second kind"
        )


def register_flex_attention() -> None:
    """Let transformers cast queries and keys to the dtype of the values, and never take torch's kernel for decoding.

    Under autocast a norm of float32 weights gives them in float32, and some versions of torch have no backward pass for
    a mixture. SDPA casts by itself. Torch takes its kernel for decoding for rows below 128 tokens without a gradient,
    and has none for grouped heads there if a row's queries times the heads of a group exceed a block (seen on a GPU).
    """
    from transformers import AttentionInterface

    AttentionInterface.register("flex_attention", _flex_attention)


def _flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> Any:
    from transformers.integrations.flex_attention import flex_attention_forward

    options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    return flex_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, **options)


def trainable_config(settings: TrainerSettings) -> Any:
    config = read_config(settings.model)
    check_trainable(config, settings)
    return config


def load_model(settings: TrainerSettings, attention: str) -> nn.Module:
    """Load the base model in the precision of `weights_dtype`, with a fresh adapter for LoRA."""
    config = trainable_config(settings)
    with bad_checkpoint(f"cannot load the model {settings.model!r}", WHOLE_MODEL):
        model = model_class(config).from_pretrained(
            settings.model, config=config, dtype=getattr(torch, settings.weights_dtype), attn_implementation=attention
        )
    return prepared(model, settings)


def base_of(model: nn.Module) -> Any:
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base is not None else model


def tied_names(model: Any) -> set[str]:
    if not getattr(model.config, "tie_word_embeddings", False):
        return set()
    first: dict[int, str] = {}
    again = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            again.add(name)
    return again


def load_adapter(model: Any, directory: Path) -> None:
    """Load the adapter of a version's files into the present one of a model.

    Raises:
        BadCheckpoint: It cannot be read, or has another shape.
    """
    from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    with bad_checkpoint(f"the adapter {str(directory)!r} cannot be loaded"):
        saved, own = PeftConfig.from_pretrained(str(directory)), model.peft_config["default"]
        for name in ("r", "lora_alpha", "target_modules"):
            if getattr(saved, name, None) != getattr(own, name):
                raise BadCheckpoint(
                    f"the adapter {str(directory)!r} has {name}={getattr(saved, name, None)!r}, and the trainer's "
                    f"settings give {getattr(own, name)!r}: start from an adapter of the same shape, or set "
                    "lora_rank and lora_targets"
                )
        weights = load_peft_weights(str(directory), device="cpu")
        if reason := why_not_plain(read_json(directory / ADAPTER_CONFIG), weights):
            raise BadCheckpoint(f"the adapter {str(directory)!r} {reason}, and the trainer computes plain LoRA")
        own_names = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        if strange := sorted(weights.keys() ^ own_names):
            which = "lacks" if strange[0] in own_names else "has"
            raise BadCheckpoint(f"the adapter {str(directory)!r} {which} {strange[0]!r}, unlike the trainer's own")
        set_peft_model_state_dict(model, weights)


def copy_tokenizer(source: str, directory: Path) -> None:
    """Give a checkpoint the base model's tokenizer and chat template, byte for byte where the base is a directory."""
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
        return
    for pattern in TOKENIZER_FILES:
        for path in Path(source).glob(pattern):
            shutil.copyfile(path, directory / path.name)


def described(settings: TrainerSettings) -> dict[str, str]:
    """Return what a row of the model may hold and what an adapter changes, from its configuration alone.

    Raises:
        BadCheckpoint: There is no such model, or transformers does not know it.
        SettingsError: It cannot be trained with these settings.
    """
    config = trainable_config(settings)
    reason = why_alone(config.get_text_config())
    rows = "shared by chains with a common beginning" if reason is None else f"of one chain each, because {reason}"
    with bad_checkpoint(f"cannot load the model {settings.model!r}", WHOLE_MODEL), torch.device("meta"):
        model = model_class(config).from_config(config)
    if settings.kind is not PolicyKind.LORA:
        return {"rows": rows}
    return {"rows": rows, "adapter": str(reach_of(model, settings.lora_targets, name=settings.model))}


def prepared(model: Any, settings: TrainerSettings) -> nn.Module:
    """Return the model in training mode without noise, with an adapter for LoRA; a wrapper's other parts are frozen."""
    if settings.kind is PolicyKind.LORA:
        from peft import LoraConfig, get_peft_model

        reach = reach_of(model, settings.lora_targets, name=settings.model)
        log.info("the adapter changes %s", reach)
        adapter = LoraConfig(
            r=settings.lora_rank, lora_alpha=LORA_ALPHA, target_modules=reach.targets, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapter)
    elif model.config.get_text_config() is not model.config:
        model.requires_grad_(requires_grad=False)
        for part in (model.get_decoder(), model.get_output_embeddings()):
            part.requires_grad_(requires_grad=True)
        for name, parameter in model.named_parameters():
            if settings.vision == "all" or (settings.vision == "projector" and PROJECTOR.search(name)):
                parameter.requires_grad_(requires_grad=True)
    model.train()
    return _without_noise(cast("nn.Module", model))


def _without_noise(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # a function drops by it
                setattr(module, name, 0.0)
        if any("jitter" in name for name in vars(module)):  # a router; in Phi-3.5-MoE the jitter counts in serving too
            module.training = False
    return model


@contextlib.contextmanager
def bad_checkpoint(problem: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise BadCheckpoint(f"{problem}: {reason_of(error)}{advice}") from error


def reason_of(error: BaseException) -> str:
    """Return the first sentence of a library's error.

    What follows it is a traceback of each process, a list of all tensors, or advice to load files that are not trusted.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    sentence = " ".join(str(error).split()).partition(". ")[0]
    return sentence[:MAX_REASON].removesuffix(".") or type(error).__name__


def has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def use_liger(model: Any) -> None:
    """Replace norm, rotary embedding and SwiGLU of a model by liger-kernel's, where it knows the architecture.

    The loss is left as it is: it is computed in chunks already.
    """
    patch = importlib.import_module("liger_kernel.transformers").monkey_patch
    known = getattr(patch, "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    if model.config.model_type in known:
        patch._apply_liger_kernel_to_instance(  # noqa: SLF001  liger's own entry for models that exist already
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )


def check_names(published: Collection[str], base: str) -> None:
    """Refuse a model whose versions would have these names, unlike the files of the base model.

    Raises:
        SettingsError: They would.
    """
    known = _files_of(base)
    if known and (strange := set(published) - known.keys() - {HEAD}):
        raise SettingsError(
            f"transformers writes {len(strange)} tensors of {base!r} under names that its files do not have, such as "
            f"{min(strange)!r}, and an engine that serves those files would not load them: save the model with "
            "transformers first and serve the result, or set kind='lora'"
        )


def carried(model: Any, published: Mapping[str, Tensor], base: str) -> dict[str, Tensor]:
    """Return the tensors of the base model's files that are in no version otherwise, without a head that is tied."""
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    rest = {name: file for name, file in _files_of(base).items() if name not in published}
    found: dict[str, Tensor] = {}
    for file in sorted(set(rest.values())):
        with safe_open(file, "pt") as opened:
            names = [name for name, place in rest.items() if place == file and not (is_tied and name.endswith(HEAD))]
            found.update({name: opened.get_tensor(name) for name in names})
    return found


def _files_of(base: str) -> dict[str, str]:
    """Return the file of each tensor of a model; empty where its files are no safetensors."""
    directory = local_files(base)
    found: dict[str, str] = {}
    for path in [] if directory is None else weight_files(directory):
        with safe_open(path, "pt") as opened:
            found.update(dict.fromkeys(opened.keys(), str(path)))
    return found
