"""Weights from the trainer's memory to vLLM's, without a directory between them.

vLLM loads this package in each of its processes by the entry point `vllm.general_plugins`. It registers a backend for
vLLM's weight transfer: `weight_engine` is the part inside vLLM, `receiver` receives and checks a version, `channel`
carries bytes over a process group of torch's, `layout` defines what the bytes mean. The trainer uses the last two to
send. `cpu_kernels` mends what the CPU's kernels compute after a load, and in batches with adapters. `supports` lets
replies say which ids could be sampled at each token.
"""

from __future__ import annotations

import functools

BACKEND = "turnwise"
"""Name of the backend: `--weight-transfer-config '{"backend": "turnwise"}'`."""
PLUGIN_GROUP = "vllm.general_plugins"


@functools.cache
def register() -> None:
    """Register the backend, mend what vLLM's CPU kernels get wrong, and let replies say what could be sampled.

    vLLM calls this in each of its processes, sometimes more than once; the first call counts.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.engine import logprobs

    from turnwise.engine_plugin import cpu_kernels
    from turnwise.engine_plugin.supports import return_supports

    cpu_kernels.pack_tied_heads(layerwise)
    cpu_kernels.pack_experts(UnquantizedFusedMoEMethod, CPUUnquantizedExperts)
    cpu_kernels.leave_out_tokens_without_adapter(lora_ops, punica_cpu)
    return_supports(logprobs)
    WeightTransferEngineFactory.register_engine(BACKEND, "turnwise.engine_plugin.weight_engine", "TurnwiseWeights")
