"""Which tensors of a checkpoint vLLM leaves out when it loads a model: one that the model has is refused at the start.

The loaders of vLLM's models skip a tensor that has no place in their layers, without a word: with `attention_bias`,
Qwen3 has biases of its output projection in transformers alone. The engine would sample from another model than the
trainer's, and each group would be refused for its logprobs. Tensors that transformers does not compute with either,
such as those of further heads, may be skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NUM_NAMED = 3
DRAFTS = ("MTP", "Eagle", "Medusa", "DFlash")
"""Parts of the names of vLLM's classes that draft tokens."""
OF_WRAPPERS = frozenset({"model", "language_model"})
"""Parts of a tensor's name that say where the text model stands in a wrapper."""


def register() -> None:
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    refuse_unread(DefaultModelLoader, get_pp_group)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, it sees which of the offered tensors some operation takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waiting: dict[int, tuple[str, torch.Tensor]] = {}
        """By the place of their data. A tensor is held here until it is read, so that no other one gets its place."""

    def offer(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._waiting[_place(tensor)] = name, tensor
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waiting:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor) and not each.is_meta:
                    self._waiting.pop(_place(each), None)
        return func(*args, **(kwargs or {}))

    @property
    def unread(self) -> list[str]:
        return [name for name, _ in self._waiting.values()]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def refuse_unread(loader: type[Any], pipeline: Any) -> None:
    """Let `loader`, vLLM's class that reads a model's files, refuse a tensor that it read for nothing.

    `pipeline` returns the group of processes that have a part of the layers each. There, and for a model that drafts
    tokens from the same files, most tensors are another's.
    """
    load, give = loader.load_weights, loader.get_all_weights

    @functools.wraps(load)
    def load_and_compare(self: Any, model: Any, model_config: Any) -> Any:
        reads = Reads()
        self.get_all_weights = lambda *arguments: reads.offer(give(self, *arguments))
        try:
            with reads:
                loaded = load(self, model, model_config)
        finally:
            del self.get_all_weights
        is_whole = pipeline().world_size == 1 and not any(mark in type(model).__name__ for mark in DRAFTS)
        computed = _computed(model_config.hf_text_config) if reads.unread and is_whole else frozenset()
        lost = sorted(name for name in reads.unread if _plain(name) in computed)
        if lost:
            named = ", ".join(map(repr, lost[:NUM_NAMED]))
            raise RuntimeError(
                f"vLLM leaves out {len(lost)} tensors of {model_config.model!r} that transformers computes with, such "
                f"as {named}: it would sample from another model than the trainer's. Serve a checkpoint without them, "
                "or start vLLM with --model-impl transformers"
            )
        return loaded

    loader.load_weights = load_and_compare


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in OF_WRAPPERS)


def _computed(config: Any) -> frozenset[str]:
    """Return the plain names of the tensors that transformers computes with; none of a class that it does not know."""
    from transformers import AutoModel, AutoModelForCausalLM

    for known in (AutoModelForCausalLM, AutoModel):
        try:
            with torch.device("meta"):
                model = known.from_config(config)
            model.tie_weights()
        except (ImportError, KeyError, RuntimeError, TypeError, ValueError):
            continue
        return frozenset(_plain(name) for name, _ in model.named_parameters())
    return frozenset()
