"""Adapters that vLLM would apply in part are refused by what no layer takes; whole weights load beside adapters.

vLLM looks each of its layers up in an adapter, and says nothing of what is left: an adapter with a prefix, a layer or a
vision tower that the engine's model has not would be served without that part, and calls would sample with something
that nobody trained. From outside it cannot be told from a small change.
"""

from __future__ import annotations

import functools
from typing import Any

NUM_NAMED = 3


def register() -> None:
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    load_beside_adapters(LoRAModelRunnerMixin)
    refuse_unplaced(LoRAModelManager, get_pp_group)


def refuse_unplaced(manager: type[Any], pipeline: Any) -> None:
    """Let a manager of adapters refuse one with factors that none of its layers takes.

    `pipeline` returns the group of processes that have a part of the layers each; there nothing is refused.
    """
    add = manager._add_adapter  # noqa: SLF001  all ways to add one come through it

    @functools.wraps(add)
    def compare_and_add(self: Any, adapter: Any) -> None:
        taken = {name for parts in self.packed_modules.values() for name in parts} | set(self.modules)
        lost = sorted(name for name in adapter.loras if name not in taken and ".experts" not in name)
        if lost and pipeline().world_size == 1:
            named = ", ".join(map(repr, lost[:NUM_NAMED]))
            raise ValueError(
                f"the adapter has factors of {len(lost)} of {len(adapter.loras)} modules that no layer of the served "
                f"model takes, such as {named}: it would be applied in part. Compare the names of its tensors with "
                "those of the model's"
            )
        add(self, adapter)

    manager._add_adapter = compare_and_add  # noqa: SLF001


def load_beside_adapters(runner: type[Any]) -> None:
    """Let an engine that accepts adapters load whole weights of every model.

    An adapted layer holds its weights one level deeper. The loaders of some models, such as Granite 4's and GPT-OSS's,
    look tensors up by the names that files have, and would end at the first one. Names of experts stay as they are,
    because loaders that adapt experts expect the deeper ones.
    """
    load = runner.load_lora_model

    def plain(named: Any, *arguments: Any, **options: Any) -> Any:
        for name, parameter in named(*arguments, **options):
            yield name if ".experts." in name else name.replace(".base_layer.", "."), parameter

    @functools.wraps(load)
    def load_and_rename(self: Any, *arguments: Any, **options: Any) -> Any:
        model = load(self, *arguments, **options)
        for module in model.modules():
            if "load_weights" in vars(type(module)):
                module.named_parameters = functools.partial(plain, module.named_parameters)
        return model

    runner.load_lora_model = load_and_rename
