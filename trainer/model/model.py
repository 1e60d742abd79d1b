"""The trained model: any Hugging Face causal LM, whole or through a LoRA adapter.

The model is only ever asked for one thing, the logprob and entropy of given tokens in a packed row, and the output
layer runs for the tokens that predict a trained one alone. Legend: N tokens of a row, m trained tokens of it,
U distinct predictors, V vocabulary, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from trainer.batch.batch import Batch, Row
from trainer.batch.chain import Chain
from trainer.batch.logits import RowLogits
from trainer.batch.logprobs import OutputLayer, token_logprobs
from trainer.model.adapters import Adapter
from trainer.model.inputs import RowInputs, row_inputs
from trainer.model.loading import (
    base_of,
    carried,
    check_names,
    choose_attention,
    copy_tokenizer,
    has_liger,
    load_model,
    register_flex_attention,
    tied_names,
    use_liger,
)
from trainer.model.terms import Around, Term
from trainer.model.traits import check_repeatable, measured_alone, why_alone
from trainer.settings import TrainerSettings
from trainer.world import World
from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyKind

log = logging.getLogger(__name__)

STRETCHED_ROPE = ("linear", "dynamic", "yarn")
"""Rotary embeddings whose factor may come on top of `max_position_embeddings`."""


class Whole:
    """A model that one process holds."""

    is_whole = True

    def world(self) -> World:
        return World()

    def load(self, policy: Policy, seed: int, *, with_weights: bool) -> nn.Module:  # noqa: ARG002  for subclasses
        """Return the policy's base model on its device, with the weights of a fresh adapter by the seed."""
        return policy.tuned(load_model(policy.settings, policy.attention).to(policy.device))

    def sync_gradients(self, policy: Policy, *, is_last: bool) -> None:
        """Prepare the backward pass of a row, and say whether it is the last one of a step."""

    def settle(self, model: nn.Module) -> None:
        """Divide what a forward pass without a backward one left whole."""

    def shards(self, model: nn.Module, *, trained_only: bool) -> dict[str, Any]:
        """Return what this process holds of the weights, by name, on its device."""
        left_out = {name for name, value in model.named_parameters() if trained_only and not value.requires_grad}
        return {name: value for name, value in model.state_dict().items() if name not in left_out}

    def load_shards(self, model: nn.Module, shards: dict[str, Any], *, is_whole: bool) -> None:
        model.load_state_dict(shards, strict=is_whole)

    def load_weights(self, policy: Policy, read: Callable[[], nn.Module]) -> None:
        """Load the weights of a model that is read, in one process alone."""
        self.load_shards(policy.model, read().state_dict(), is_whole=True)


class Policy:
    """A causal LM that gives logprobs of packed rows.

    Torch binds an optimizer to the very tensors it updates, so the module lives here and `State` refers to it: the one
    place where an object of the trainer holds something that changes.
    """

    def __init__(self, settings: TrainerSettings, terms: Sequence[type[Term]] = ()) -> None:
        self.settings = settings
        self.terms = [term(settings) for term in terms]
        self.around: list[Around] = []
        self.compiled = False
        self.place = Whole()
        """Where `load` holds the weights."""
        self.device = torch.device("cpu")
        """Where `load` puts the model. It is resolved there, since `torchrun`'s processes get theirs as they join."""
        self.compute_dtype = torch.float32
        self.attention = "sdpa"
        self.adapter: Adapter | None = None
        """The adapter of the last `load`; None for whole weights, and for a sharded model."""
        self._fresh: tuple[int, Adapter] | None = None
        """The seed of the base model's load, and the adapter as it was then."""
        self.num_ids = 0
        """Token ids that the model gives logits of; of a padded vocabulary without the padding. `load` sets it."""
        self.why_alone: str | None = None
        """Why a row holds one chain; None where it may hold several, once `shares_rows` was asked."""
        self._is_measured = False

    def load(self, seed: int, *, with_weights: bool = True) -> None:
        """Load the base model, with a fresh adapter for LoRA, compiled and sharded as was asked for.

        Where the model is in memory already, it gets another fresh adapter, beside those of earlier calls. The seed
        is that of the adapter's first weights. Without `with_weights` a saved state replaces all weights, and a
        sharded model reads none here.

        Raises:
            BadCheckpoint: There is no such model.
        """
        if self._fresh is not None and self._fresh[0] == seed:
            self.adapter = self._fresh[1].copied()
            self.adapter.put()
            return
        torch.manual_seed(seed)
        self.device = resolve_device(self.settings.device)
        wanted = self.settings.dtype if self.settings.weights_dtype == "float32" else self.settings.weights_dtype
        is_coarse = wanted == "bfloat16" or (wanted == "auto" and self.device.type == "cuda")
        self.compute_dtype = torch.bfloat16 if is_coarse else torch.float32
        self.attention = choose_attention(self.settings, self.device)
        if self.attention == "flex_attention":
            register_flex_attention()
        self.model: nn.Module = self.place.load(self, seed, with_weights=with_weights)
        for layer in cast("Any", self.model).modules():
            if hasattr(layer, "compute_dtype"):  # of packed weights, which the checkpoint sets for other programs
                layer.compute_dtype = self.compute_dtype
        self.around = [around for term in self.terms if (around := term.around(self)) is not None]
        self.num_ids = int(self.config.vocab_size)
        self.head = self._own_head() if self.place.is_whole else None
        self._tied: set[str] = set()
        if self.settings.kind is PolicyKind.FULL:
            self._tied = tied_names(self.base)
            state = self.base.state_dict()
            empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in state.items()}
            check_names(self.published(empty), self.settings.model)
        self._num_weights = sum(parameter.numel() for parameter in self.model.parameters())
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.base.forward).parameters
        self._is_measured = False
        if self.place.is_whole or with_weights or self.settings.kind is PolicyKind.LORA:
            self._measure_rows()
        if self.settings.kind is PolicyKind.LORA and self.place.is_whole:
            self.adapter = Adapter.in_place(self.model)
            self._fresh = seed, self.adapter.copied()

    @property
    def shares_rows(self) -> bool:
        """Whether a row may hold several chains that share tokens, found out once, by all processes in step."""
        if not self._is_measured:
            self._measure_rows()
        return self.why_alone is None

    def _measure_rows(self) -> None:
        self._is_measured = True
        check_repeatable(self.plain_logprobs, self.settings.model, self.num_ids, self.compute_dtype)
        self.why_alone = why_alone(self.config)
        measured = None if self.why_alone else measured_alone(self.plain_logprobs, self.num_ids, self.compute_dtype)
        self.place.settle(self.model)
        if self.why_alone is not None:
            log.info("%r: a row holds one chain, because %s", self.settings.model, self.why_alone)
            return
        self.why_alone = measured
        if measured is not None:
            reason = "%r: a row holds one chain, because attention=%r does not keep chains apart: %s"
            log.warning(reason, self.settings.model, self.attention, measured)

    def plain_logprobs(self, row: Row, targets: Tensor) -> Tensor:
        with torch.no_grad():
            inputs = self.inputs(row, torch.ones(len(targets)), targets)
            return self.logprobs(inputs)[0].cpu()

    @property
    def config(self) -> Any:
        config = self.base.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def num_positions(self) -> int | None:
        """Tokens of the longest chain that the model has positions for, scaled as its configuration says; None: any."""
        config = self.config
        known: int | None = getattr(config, "max_position_embeddings", None)
        scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if not known or scaling.get("rope_type", scaling.get("type")) not in STRETCHED_ROPE:
            return known
        return max(known, int((scaling.get("original_max_position_embeddings") or known) * scaling.get("factor", 1)))

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def tuned(self, model: nn.Module) -> nn.Module:
        self.base = base_of(model)
        if has_liger(self.device):
            use_liger(self.base)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype is not torch.float32:
                parameter.grad_dtype = torch.float32  # rows are added up in it
        if self.compiled:
            for layer in self.layers(model):
                layer.compile(dynamic=True)
        return model

    @staticmethod
    def layers(model: nn.Module) -> list[nn.Module]:
        names = getattr(base_of(model), "_no_split_modules", None) or ()
        # One that is sharded is of a class of its own.
        return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]

    def operations(self, row: Row) -> float:
        """Return the floating point operations of a row's forward and backward pass; small terms are left out."""
        pairs = float((row.layout.positions + 1).sum())
        return 6.0 * self._num_weights * len(row.layout.tokens) + self._operations_of_pair() * pairs

    def _operations_of_pair(self) -> float:
        """Return what a token's attention to one of its ancestors costs."""
        config = self.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 12.0 * float(config.num_hidden_layers * config.num_attention_heads * int(width))

    def inputs(self, row: Row, temperature: Tensor, target: Tensor, processors: RowLogits | None = None) -> RowInputs:
        """Return a row's tensors on the device; may be called in a thread while another row is computed."""
        shares = self.why_alone is None
        inputs = row_inputs(row, temperature, target, processors, self.attention, self.device, shares=shares)
        for around in self.around:
            inputs = around.of_inputs(row, inputs)
        return inputs

    def with_parts(self, batch: Batch, row: Row) -> Row:
        """Return a packed row with the parts of the features' terms."""
        found = {term.name: term.of_row(batch, row) for term in self.terms}
        return dataclasses.replace(row, parts={name: part for name, part in found.items() if part is not None})

    def on_logits(self, batch: Batch, row: Row) -> RowLogits | None:
        """Return what changes the logits of the row's trained tokens beside a scale; None: nothing."""
        return next((found for term in self.terms if (found := term.on_logits(batch, row)) is not None), None)

    def why_unfit(self, chain: Chain) -> str | None:
        """Return why the model cannot compute a chain; None where it can."""
        highest, size = int(chain.tokens.max(initial=0)), self.num_ids
        if highest >= size:
            return f"other_model: token {highest} is not in the vocabulary of {size}: train the model that was served"
        positions = self.num_positions
        if positions is not None and len(chain.tokens) > positions:
            return (
                f"beyond_positions: a chain has {len(chain.tokens)} tokens, and the model {positions} positions: "
                f"train the model that was served, or set max_chain_tokens={positions}"
            )
        if missing := sorted(chain.needed_terms - {term.name for term in self.terms}):
            return f"without_feature: nothing of this trainer computes {missing[0]}, which the chain has"
        return next((why for around in self.around if (why := around.why_unfit(chain)) is not None), None)

    def logprobs(self, inputs: RowInputs) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of the row's trained tokens, both [m] in float32."""
        return self.outputs(inputs)[:2]

    def outputs(self, inputs: RowInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same with what they are computed from: hidden states [U, H], or logits [U, V]."""
        output, of = self.output(inputs), (inputs.which, inputs.target, inputs.temperature, inputs.processing)
        given, weight_VH = self.with_head(output)
        logprobs, entropy = token_logprobs(given, weight_VH, *of)
        return logprobs, entropy, output

    def with_head(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.head is None:
            return output, None
        return output.to(self.compute_dtype), self.head.weight.to(self.compute_dtype)

    def _own_head(self) -> OutputLayer | None:
        """Return the output layer to compute chunk by chunk; None where the model's own forward pass is needed."""
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)

        def logits() -> Tensor:
            found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
            self.num_ids = found.shape[-1]
            return found

        with torch.no_grad(), self.autocast():
            return OutputLayer.of(self.base, logits)

    def output(self, inputs: RowInputs) -> Tensor:
        """Return hidden states [U, H], or logits [U, V] of a model that is computed whole."""
        arguments: dict[str, Any] = {"input_ids": inputs.tokens, "position_ids": inputs.positions, "use_cache": False}
        if inputs.mask is not None:
            arguments["attention_mask"] = inputs.mask
        if self._keeps_logits:
            arguments["logits_to_keep"] = inputs.keep
        left_out = contextlib.nullcontext() if self.head is None else self.head.left_out()
        with left_out, self.autocast(), self._entered(inputs):
            output = self.model(**arguments).logits
        if not self._keeps_logits:
            output = output[:, inputs.keep]
        return cast("Tensor", output[0] if inputs.kept is None else output.flatten(0, 1)[inputs.kept])

    @contextlib.contextmanager
    def _entered(self, inputs: RowInputs | None) -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            for around in self.around:
                entered.enter_context(around.forward(inputs))
            yield

    def next_logprobs(self, tokens: list[int]) -> Tensor:
        """Return the float32 log-distribution after each token of a text, for the probe of a checkpoint. [T, V]."""
        with torch.no_grad(), self._entered(None):
            output = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False)
        return torch.log_softmax(output.logits[0].float(), dim=-1).cpu()

    def save(self, directory: Path, state: dict[str, Tensor]) -> None:
        """Write weights (or the adapter), configuration and tokenizer in the Hugging Face layout."""
        model = cast("Any", self.model)
        if self.settings.kind is PolicyKind.LORA:
            # By default peft adds the base model's embeddings to an adapter of the output head.
            model.save_pretrained(directory, state_dict=self._published(state), save_embedding_layers=False)
        else:
            weights = self.published(state)
            weights |= carried(self.base, weights, self.settings.model)
            model.save_pretrained(directory, state_dict=weights, save_original_format=False)
        copy_tokenizer(self.settings.model, directory)

    def published(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a whole model by their names in the checkpoint; `state` is of `trained_state`.

        Each expert, for example, has tensors of its own there.
        """
        from transformers.core_model_loading import revert_weight_conversion

        contiguous = {name: value.contiguous() for name, value in self._published(state).items()}
        return cast("dict[str, Tensor]", revert_weight_conversion(self.base, contiguous))

    def _published(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.compute_dtype) for name, value in state.items() if name not in self._tied}

    def trained_state(self) -> dict[str, Tensor]:
        """Return everything a checkpoint must hold: the whole weights, or the adapter's, on the CPU and not sharded.

        All processes call this in step; in all but the first one it is empty.
        """
        trained_only = self.settings.kind is PolicyKind.LORA
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
        state = cast("dict[str, Tensor]", get_model_state_dict(self.model, options=options))
        return {name: value.clone() for name, value in state.items()}

    def shards(self) -> dict[str, Any]:
        """Return what this process holds of the trained weights, by name, on its device."""
        return self.place.shards(self.model, trained_only=self.settings.kind is PolicyKind.LORA)

    def load_shards(self, shards: dict[str, Any]) -> None:
        if strange := sorted(shards.keys() ^ self.shards().keys()):
            raise BadCheckpoint(
                f"the trainer's state does not fit {self.settings.model!r}: {strange[0]!r} is of one alone"
            )
        self.place.load_shards(self.model, shards, is_whole=self.settings.kind is PolicyKind.FULL)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.compute_dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)


def resolve_device(name: str) -> torch.device:
    """Return the device: `auto` is CUDA where it is available, and CUDA without an index is this process's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
