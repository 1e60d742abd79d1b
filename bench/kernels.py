"""Measure attention and loss against their dense forms: `python bench/kernels.py [--device cuda]`.

Attention: sessions of one group share their prompt and lie in one row. The row is computed under the forest's rule
(FlexAttention with a block mask on a GPU; SDPA with the rule as a mask on a CPU), against a row for each session.
Loss: logprob and entropy from hidden states, chunk by chunk, against whole logits, and with the logits of one reply
penalised, truncated to 20 ids a token, or masked by a grammar. Each pair must agree; forward and backward are timed
together, alternately, and the best round counts. On a CPU only the ratios mean anything.
Supports: bytes of a turn of 200 tokens in the engine's reply and in the store, and the time to read and pack them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.batch.forest import Forest, Layout, block_mask, dense_mask
from trainer.batch.logprobs import token_logprobs
from trainer.features.supports.grammars import GrammarMasks
from trainer.features.supports.processors import Processing, RowProcessors, SampledTurn, TurnProcessors
from turnwise.engine_plugin.features.supports import from_text, to_text
from turnwise.features.supports import pack, unpack

TURN_TOKENS, SUPPORT_SIZES = 200, (3, 20, 300)
HEADS, HEAD_WIDTH = 4, 32
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference between two ways, relative to the largest value."""


def sessions(count: int, prompt: int, own: int) -> list[np.ndarray]:
    """Return token sequences that share their prompt."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100, prompt)
    return [np.concatenate([shared, rng.integers(0, 100, own)]).astype(np.int32) for _ in range(count)]


def seconds_of(ways: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the best time of each way."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def peak_bytes(run: Callable[[], Tensor]) -> int | None:
    """Return the most memory that a GPU held during the run; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    return int(torch.cuda.max_memory_allocated())


def attention(device: torch.device, *, count: int, prompt: int, own: int, rounds: int) -> dict[str, Any]:
    """Measure attention over one row of sessions with a shared prompt."""
    sequences = sessions(count, prompt, own)
    forest = Forest()
    for tokens in sequences:
        forest.insert(tokens)
    layout = forest.lay_out()
    places = [torch.from_numpy(forest.places(tokens)).to(device) for tokens in sequences]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (3, 1, HEADS, len(layout.tokens), HEAD_WIDTH)
    inputs = torch.randn(shape, device=device, dtype=dtype, generator=generator, requires_grad=True)
    forest_kernel = _forest_kernel(layout, device)

    def in_forest() -> Tensor:
        return _with_gradient(inputs, forest_kernel(*inputs))

    def apart() -> Tensor:
        parts = [scaled_dot_product_attention(*inputs[..., place, :], is_causal=True) for place in places]
        return _with_gradient(inputs, *parts)

    outputs = forest_kernel(*inputs)
    for place in places:
        alone = scaled_dot_product_attention(*inputs[..., place, :], is_causal=True)
        _check("attention", outputs[..., place, :], alone)
    best = seconds_of({"forest": in_forest, "apart": apart}, rounds)
    return {
        "tokens": len(layout.tokens),
        "tokens_apart": sum(map(len, sequences)),
        "fewer_tokens": sum(map(len, sequences)) / len(layout.tokens),
        "attended_pairs": int((layout.positions + 1).sum()),
        "seconds": best["forest"],
        "seconds_apart": best["apart"],
        "faster": best["apart"] / best["forest"],
    }


def _forest_kernel(layout: Layout, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if device.type != "cuda":
        return functools.partial(scaled_dot_product_attention, attn_mask=dense_mask(layout, device))
    from torch.nn.attention.flex_attention import flex_attention

    return functools.partial(torch.compile(flex_attention, dynamic=True), block_mask=block_mask(layout, device))


def loss(device: torch.device, *, tokens: int, hidden: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """Measure logprob and entropy of sampled tokens, from hidden states."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    random = functools.partial(torch.randn, device=device, generator=generator)
    states = (random((tokens, hidden)) / hidden**0.5).to(dtype).requires_grad_()
    head = random((vocabulary, hidden)).to(dtype).requires_grad_()
    which = torch.arange(tokens, device=device)
    target = torch.randint(0, vocabulary, (tokens,), device=device, generator=generator)
    temperature = torch.ones(tokens, device=device)

    def chunked(processing: Processing | None = None) -> Tensor:
        logprobs, _ = token_logprobs(states, head, which, target, temperature, processing)
        return with_gradients(logprobs)

    def whole() -> Tensor:
        log_p = torch.log_softmax((states @ head.T).float(), dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)  # its value is a gauge in both
        return with_gradients(log_p.gather(1, target[:, None])[:, 0] + 0 * entropy)

    def with_gradients(logprobs: Tensor) -> Tensor:
        gradient, _ = torch.autograd.grad(logprobs.sum(), (states, head))
        return gradient

    _check("gradient of the loss", chunked(), whole())
    processed = {
        name: functools.partial(chunked, of)
        for name, of in processings(target.cpu().numpy(), vocabulary, device).items()
    }
    best = seconds_of({"chunked": chunked, "whole": whole} | processed, rounds)
    memory = [peak_bytes(run) for run in (chunked, whole)]
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "seconds": best["chunked"],
        "seconds_whole": best["whole"],
        "faster": best["whole"] / best["chunked"],
        **{f"slower_{name}": best[name] / best["chunked"] for name in processed},
        "peak_bytes": memory[0],
        "peak_bytes_whole": memory[1],
    }


def supports(vocabulary: int, rounds: int) -> dict[str, Any]:
    """Measure what the supports of a turn cost the proxy, by the number of ids that could be sampled at each token."""
    rng = np.random.default_rng(0)
    figures: dict[str, Any] = {"vocabulary": vocabulary, "tokens": TURN_TOKENS}
    for size in SUPPORT_SIZES:
        ids = [np.unique(rng.integers(0, vocabulary, size)).astype(np.int32) for _ in range(TURN_TOKENS)]
        texts = [to_text(each) for each in ids]
        best = dict.fromkeys(("read", "pack"), float("inf"))
        for _ in range(rounds):
            started = time.perf_counter()
            found = [from_text(text) for text in texts]
            read_at = time.perf_counter()
            packed = pack(found)
            best["read"] = min(best["read"], read_at - started)
            best["pack"] = min(best["pack"], time.perf_counter() - read_at)
        if any(not np.array_equal(one, other) for one, other in zip(unpack(packed), ids, strict=True)):
            raise SystemExit("the stored support has other ids")
        figures |= {
            f"reply_bytes_{size}_ids": sum(map(len, texts)),
            f"stored_bytes_{size}_ids": len(packed),
            **{f"{name}_microseconds_{size}_ids": round(1e6 * seconds) for name, seconds in best.items()},
        }
    return figures


def processings(sampled: np.ndarray, vocabulary: int, device: torch.device) -> dict[str, Processing]:
    """Return what is applied to the logits of a reply, sampled after a prompt of its length, by kind."""
    rng = np.random.default_rng(0)
    prompt, places = rng.integers(0, vocabulary, len(sampled)), np.arange(len(sampled))
    support = np.sort(np.concatenate([rng.integers(0, vocabulary, (len(sampled), 19)), sampled[:, None]], 1))
    words = rng.integers(-(2**31), 2**31, (16, -(-vocabulary // 32)), np.int32)
    kinds = {
        "penalties": TurnProcessors(repetition=1.1, frequency=0.2, presence=0.1),
        "support": TurnProcessors(support=(support.ravel(), np.arange(len(sampled) + 1) * 20)),
        "grammar": TurnProcessors(grammar=GrammarMasks(words=words, index=places % len(words))),
    }
    return {
        name: RowProcessors(
            turns=[SampledTurn(processors=of, prompt=prompt, sampled=sampled)], turn=np.zeros_like(places), place=places
        ).placed(torch.from_numpy(places), lambda tensor: tensor.to(device))
        for name, of in kinds.items()
    }


def _with_gradient(inputs: Tensor, *outputs: Tensor) -> Tensor:
    """Return the gradient of the outputs' sum."""
    (gradient,) = torch.autograd.grad(sum(output.float().sum() for output in outputs), inputs)
    return gradient


def _check(what: str, found: Tensor, expected: Tensor) -> None:
    gap = float((found - expected).detach().abs().max() / expected.detach().abs().max())
    if not gap <= TOLERANCE[found.dtype]:
        raise SystemExit(f"{what}: the two ways differ by {gap:.2g} of the largest value")


def measure(device: str, *, is_small: bool, rounds: int, vocabulary: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the figures of attention, loss and supports."""
    place = torch.device(device)
    if is_small:
        return {
            "attention": attention(place, count=4, prompt=192, own=64, rounds=rounds),
            "loss": loss(place, tokens=128, hidden=64, vocabulary=vocabulary or 8192, rounds=rounds),
            "supports": supports(vocabulary or 151_936, rounds),
        }
    return {
        "attention": attention(place, count=8, prompt=2048, own=768, rounds=rounds),
        "loss": loss(place, tokens=4096, hidden=1024, vocabulary=vocabulary or 151_936, rounds=rounds),
        "supports": supports(vocabulary or 151_936, rounds),
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true", help="the sizes for a GPU, also on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, help="ids of loss and supports")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    is_small = given.device == "cpu" and not given.full
    found = measure(given.device, is_small=is_small, rounds=given.rounds, vocabulary=given.vocabulary)
    for name, figures in found.items():
        faster = f" {figures['faster']:.2f} times as fast as the dense form  " if "faster" in figures else ""
        print(f"{name}:{faster} {json.dumps(figures)}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
