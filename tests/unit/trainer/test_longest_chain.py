"""The memory that `turnwise doctor` says a chain takes, beside what torch allocates for it."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import EXPERTS, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.batch.batch import Row
from trainer.batch.forest import side_by_side
from trainer.features import Settings
from trainer.features.memory import LOSS_BYTES, SavingAgent, bytes_of_token, longest_chain
from trainer.model.model import Policy

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4, "max_position_embeddings": 4096}


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that exist, and the most that did."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, _types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for each in tree_leaves(made):
            if (
                isinstance(each, torch.Tensor)
                and (key := (storage := each.untyped_storage())._cdata) not in self._sizes
            ):
                self._sizes[key] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, key)
        self.most = max(self.most, sum(self._sizes.values()))
        return made


def most_allocated(agent: SavingAgent, num_tokens: int) -> int:
    layout, (places,) = side_by_side([np.arange(num_tokens, dtype=np.int32) % agent.policy.config.vocab_size])
    row = Row(layout=layout, predictor=places, token=places)
    with Allocated() as allocated:
        inputs = agent.policy.inputs(row, torch.ones(num_tokens), torch.zeros(num_tokens))
        logprobs, entropy, _ = agent.policy.outputs(inputs)
        (logprobs.sum() + entropy.sum()).backward()
    return allocated.most


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Llama", {"intermediate_size": 192}),
        ("Llama", {"intermediate_size": 512, "num_hidden_layers": 12}),
        ("Qwen3", {"intermediate_size": 192}),
        ("Gemma", {"intermediate_size": 256}),
        ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 64, "intermediate_size": 128}),
    ],
)
def test_a_token_takes_at_most_what_is_said_of_it_and_not_much_less(tmp_path, family, more):
    model = str(make_model(tmp_path / "model", family, **SIZES | more))
    settings = Settings(model=model, gradient_checkpointing=True)
    agent = SavingAgent(Policy(settings), settings)
    agent.load(0)
    for parameter in agent.parameters():
        parameter.grad = torch.zeros_like(parameter)
    of_token = (most_allocated(agent, 1024) - most_allocated(agent, 512)) / 512
    assert 0.6 < of_token / bytes_of_token(agent.policy.config) <= 1


def test_the_longest_chain_grows_with_memory_up_to_the_models_positions_and_an_adapter_leaves_more(tmp_path):
    model = str(make_model(tmp_path / "model", "Llama", **SIZES))
    whole, adapter = Settings(model=model), Settings(model=model, kind="lora", lora_rank=1)
    assert longest_chain(whole, LOSS_BYTES) == 0
    assert longest_chain(whole, 2 * LOSS_BYTES) == SIZES["max_position_embeddings"]
    scarce = LOSS_BYTES + 5_000_000
    assert 0 < longest_chain(whole, scarce) < longest_chain(adapter, scarce) < SIZES["max_position_embeddings"]
