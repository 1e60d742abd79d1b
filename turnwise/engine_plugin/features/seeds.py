"""Seeded calls on a CPU whose prompt is computed in parts: the token after a part is thrown away, and its draw undone.

vLLM undoes the draw by the generator's offset, which a CPU's generator has not, and would end with "CPU Generator does
not use offset". A prompt is computed in parts where several are long, and where a recurrent layer keeps a state within
it. Here the generator's state from before the draw is put back.
"""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        undo_draws(GPUModelRunner)


def undo_draws(runner: type[Any]) -> None:
    """Let a runner of models put the state of seeded requests back whose sampled token is thrown away."""
    sample, keep = runner._sample, runner._bookkeeping_sync  # noqa: SLF001  vLLM has no public place between the two

    @functools.wraps(sample)
    def sample_and_undo(self: Any, *arguments: Any, **options: Any) -> Any:
        before = {index: generator.get_state() for index, generator in _of_parts(self).items()}
        sampled = sample(self, *arguments, **options)
        for index, state in before.items():
            self.input_batch.generators[index].set_state(state)
        return sampled

    @functools.wraps(keep)
    def keep_without_offsets(self: Any, *arguments: Any, **options: Any) -> Any:
        undone = _of_parts(self)
        for index in undone:
            del self.input_batch.generators[index]
        try:
            return keep(self, *arguments, **options)
        finally:
            self.input_batch.generators.update(undone)

    runner._sample, runner._bookkeeping_sync = sample_and_undo, keep_without_offsets  # noqa: SLF001


def _of_parts(runner: Any) -> dict[int, Any]:
    """Return the generators of requests of whose prompt only a part is computed, by their place in the batch."""
    mask = runner.discard_request_mask.np
    return {index: generator for index, generator in runner.input_batch.generators.items() if mask[index]}
