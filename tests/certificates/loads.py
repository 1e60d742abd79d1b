"""Load an adapter and whole weights into vLLM in one process: `python -m certificates.loads DIRECTORY [FLAG=VALUE …]`.

It prints, as JSON, by how much vLLM's logprobs of a text differ from the trainer's: for a random adapter, and for
random weights that are loaded into the running model twice. It takes a tenth of the time of `turnwise certify`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainer.features import Settings
from trainer.forward import change_at_random
from trainer.model.loading import check_trainable, read_config
from turnwise.commands.features.certify.certificate import LARGEST_GAP
from turnwise.errors import TurnwiseError
from turnwise.processes.served_model import check_served, cpu_dtype_of
from turnwise.types import PolicyKind

NUM_TOKENS, RANK = 40, 16
LIMITS = {"float32": LARGEST_GAP, "bfloat16": 0.1}
"""Largest gap in float32 and the mean one in bfloat16 after a load, in nats."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def _is_possible(model: str, kind: PolicyKind) -> bool:
    try:
        check_served(model, gpu=False, lora=kind is PolicyKind.LORA, dtype=None)
        check_trainable(read_config(model), Settings(model=model, kind=kind))
    except TurnwiseError:
        return False
    return True


def compare(model: str, flags: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Return the largest and the mean difference by what was loaded, in nats."""
    os.environ.update(ENVIRONMENT)
    kinds = [kind for kind in PolicyKind if _is_possible(model, kind)]
    tokens, positions = torch.randint(0, 500, (NUM_TOKENS,)).tolist(), range(1, NUM_TOKENS)
    expected = {
        kind: torch.tensor(change_at_random(model, kind, scratch / kind, tokens, positions, "float32")[0])
        for kind in kinds
    }
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": RANK} if PolicyKind.LORA in kinds else {}
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 * 2**20, "block_size": 32}
    engine = LLM(model=model, dtype=cpu_dtype_of(model), enforce_eager=True, **sizes, **lora, **flags)
    found: dict[str, Any] = {"dtype": cpu_dtype_of(model)}

    def measure(name: str, kind: PolicyKind, request: Any = None) -> None:
        engine.reset_prefix_cache()
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        reply = engine.generate(TokensPrompt(prompt_token_ids=tokens), asked, lora_request=request, use_tqdm=False)[0]
        places = zip(reply.prompt_logprobs[1:], tokens[1:], strict=True)
        own = torch.tensor([found_there[token].logprob for found_there, token in places])
        gap = (own - expected[kind]).abs()
        found[name] = {"max": float(gap.max()), "mean": float(gap.mean())}

    measure("unchanged", kinds[0])
    if lora:
        measure("adapter", PolicyKind.LORA, LoRARequest("adapter", 1, str(scratch / PolicyKind.LORA)))
    for name in ("weights", "weights again") if PolicyKind.FULL in kinds else ():
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(scratch / PolicyKind.FULL)})
        measure(name, PolicyKind.FULL)
    return found


if __name__ == "__main__":
    given = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    with tempfile.TemporaryDirectory() as place:
        result = compare(sys.argv[1], given, Path(place))
    sys.stdout.write(json.dumps(result) + "\n")
