"""Logprob and entropy of given tokens, computed without the logits of all tokens, in both directions.

Logits are computed chunk by chunk and the softmax again on the way back, so no float32 copy of all logits is ever held.
From hidden states, logits are never whole in any precision: the output layer is left out of the model's forward pass.
That is only right where it is all that lies between hidden states and logits, so a layer with a bias, and models that
scale, cap or cut their logits, keep their own forward pass. Legend: m trained tokens, U distinct predictors, V
vocabulary, C predictors of a chunk, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.batch.logits import Processing, Scale, pull_back

LOWEST = -1e30
"""Logprob of an id that could not be sampled: so low that no gap check passes it, and finite for entropy and ratios."""
LOGITS_IN_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Float32 logits of a chunk on each type of device: 64 MiB, and 256 MiB where small products leave a GPU idle."""


class OutputLayer:
    """A linear output layer whose module can pass hidden states through."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._forward = module.forward
        self._given: Tensor | None = None
        """Logits that are returned whatever the hidden states are; None to compute them. [V]"""
        self._is_left_out = False
        module.forward = self._pass  # type: ignore[assignment,method-assign]

    @classmethod
    def of(cls, model: Any, compute: Callable[[], Tensor]) -> OutputLayer | None:
        """Return the model's output layer; None unless it is a plain matrix, and the last to change the logits.

        The latter is measured: in one forward pass, which `compute` runs, the layer gives known logits, and the model
        must return them.
        """
        module = model.get_output_embeddings()
        if type(module) is not nn.Linear or module.bias is not None:
            return None
        layer = cls(module)
        marks_V = torch.arange(module.out_features, device=module.weight.device) % 129 - 64.0  # exact in bfloat16
        layer._given = marks_V
        logits = compute()
        layer._given = None
        if logits.shape[-1] == len(marks_V) and bool((logits == marks_V).all()):
            return layer
        module.forward = layer._forward
        return None

    @property
    def weight(self) -> Tensor:
        return self._module.weight

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    def _pass(self, hidden: Tensor) -> Tensor:
        if self._given is not None:
            return self._given.to(hidden.dtype).expand(*hidden.shape[:-1], -1)
        return hidden if self._is_left_out else self._forward(hidden)


def token_logprobs(
    given: Tensor,
    weight_VH: Tensor | None,
    which: Tensor,
    target: Tensor,
    temperature_U: Tensor,
    processing: Processing | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target under its processed and scaled logits, and the entropy there, both [m].

    Both are float32. `given` are hidden states [U, H] with the output layer's weight, or logits [U, V] without it.
    Without `processing`, logits are only scaled.
    """
    found = _Logprobs.apply(given, weight_VH, which, target, temperature_U, processing)  # type: ignore[no-untyped-call]
    logprobs, entropy_U = cast("tuple[Tensor, Tensor]", found)
    return logprobs, entropy_U[which]


class _Logprobs(torch.autograd.Function):
    """Log-softmax, gather and entropy in one, with the output layer inside where its weight is given.

    d log p_t / dz_k = (1[k = t] − p_k) / τ and dH / dz_k = −p_k (log p_k + H) / τ, both by processed logits z. With a
    weight, logits z = h Wᵀ exist for one chunk at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        weight_VH: Tensor | None,
        which: Tensor,
        target: Tensor,
        temperature_U: Tensor,
        processing: Processing | None,
    ) -> tuple[Tensor, Tensor]:
        normaliser_U = torch.empty(len(given), dtype=torch.float32, device=which.device)
        entropy_U, selected = torch.empty_like(normaliser_U), normaliser_U.new_zeros(len(which))
        for chunk in chunks_of(given, weight_VH):
            scaled_CV, _ = scaled_logits(given, weight_VH, temperature_U, processing, chunk)
            log_p_CV, normaliser_U[chunk] = log_softmax(scaled_CV, processing)
            entropy_U[chunk] = entropy_of(log_p_CV, processing)
            place, inside = places_in(chunk, which)
            selected = torch.where(inside, log_p_CV[place, target], selected)
        ctx.processing = processing
        ctx.save_for_backward(given, weight_VH, which, target, temperature_U, normaliser_U, entropy_U)
        ctx.set_materialize_grads(value=False)
        return selected, entropy_U

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_selected: Tensor | None, grad_entropy_U: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        given, weight_VH, which, target, temperature_U, normaliser_U, entropy_U = ctx.saved_tensors
        if grad_selected is None:
            grad_selected = torch.zeros(len(which), device=which.device)
        gradient = torch.empty_like(given)
        # Summed in float32: many small chunks would lose their sum in bfloat16.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # The targets' own part of the logits' gradient is added at once, if no processor changes it chunk by chunk.
        is_direct = weight_VH is None and ctx.processing is None
        pulled_U = torch.zeros_like(normaliser_U).index_add_(0, which, grad_selected)
        for chunk in chunks_of(given, weight_VH):
            scaled_CV, scales = scaled_logits(given, weight_VH, temperature_U, ctx.processing, chunk)
            log_p_CV = scaled_CV.sub_(normaliser_U[chunk, None])
            gradient_CV = _softmax_gradient(
                log_p_CV, pulled_U[chunk], entropy_U[chunk], grad_entropy_U, chunk, ctx.processing
            )
            if not is_direct:
                place, inside = places_in(chunk, which)
                gradient_CV.index_put_((place, target), torch.where(inside, grad_selected, 0.0), accumulate=True)
            if scales:
                pull_back(gradient_CV, scales)
            gradient_CV = (gradient_CV / temperature_U[chunk, None]).to(given.dtype)
            gradient[chunk] = gradient_CV if weight_VH is None else gradient_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += gradient_CV.T @ given[chunk]
        if is_direct:
            own = (grad_selected / temperature_U[which]).to(given.dtype)
            gradient.index_put_((which, target), own, accumulate=True)
        weight_gradient = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return gradient, weight_gradient, None, None, None, None


def places_in(chunk: slice, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each trained token's predictor in a chunk, and whether it lies there. [m] each.

    Other tokens get a place too: to choose some of them by a mask, the CPU would wait for the GPU to count them.
    """
    place = which - chunk.start
    return place.clamp(0, chunk.stop - chunk.start - 1), (which >= chunk.start) & (which < chunk.stop)


def scaled_logits(
    given: Tensor, weight_VH: Tensor | None, temperature_U: Tensor, processing: Processing | None, chunk: slice
) -> tuple[Tensor, Sequence[Scale]]:
    """Return the float32 logits of a chunk after all processors, and where their derivative is not that of a scale."""
    logits_CV = given[chunk] if weight_VH is None else given[chunk] @ weight_VH.T
    temperature_C = temperature_U[chunk, None]
    if processing is None:
        return logits_CV.float() / temperature_C, ()
    processed_CV = logits_CV.to(torch.float32, copy=True)
    scales = processing.apply(processed_CV, chunk)
    return processed_CV.div_(temperature_C), scales


def log_softmax(scaled_CV: Tensor, processing: Processing | None) -> tuple[Tensor, Tensor]:
    normaliser_C = torch.logsumexp(scaled_CV, dim=-1)
    if processing is not None:
        normaliser_C.masked_fill_(normaliser_C == -torch.inf, 0.0)  # masks that contradict one another left nothing
    return scaled_CV.sub_(normaliser_C[:, None]), normaliser_C


def entropy_of(log_p_CV: Tensor, processing: Processing | None) -> Tensor:
    """Return the entropy, of which masked ids are no part; their log-probabilities become finite."""
    p_CV = log_p_CV.exp()
    if processing is not None:
        log_p_CV.clamp_(min=LOWEST)
    return -(p_CV * log_p_CV).sum(-1)


def _softmax_gradient(
    log_p_CV: Tensor,
    pulled_C: Tensor,
    entropy_C: Tensor,
    pulled_entropy_U: Tensor | None,
    chunk: slice,
    processing: Processing | None,
) -> Tensor:
    """Return what the normaliser and the entropy give to the gradient of scaled logits."""
    p_CV = log_p_CV.exp()
    gradient_CV = p_CV * -pulled_C[:, None]
    if pulled_entropy_U is not None:
        log_p_CV = log_p_CV if processing is None else log_p_CV.clamp_(min=LOWEST)
        gradient_CV -= p_CV * (log_p_CV + entropy_C[:, None]) * pulled_entropy_U[chunk, None]
    return gradient_CV


def chunks_of(given: Tensor, weight_VH: Tensor | None) -> Iterator[slice]:
    vocabulary = given.shape[1] if weight_VH is None else len(weight_VH)
    size = max(1, LOGITS_IN_CHUNK.get(given.device.type, LOGITS_IN_CHUNK["cpu"]) // vocabulary)
    for start in range(0, len(given), size):
        yield slice(start, min(start + size, len(given)))
