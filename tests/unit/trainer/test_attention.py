"""The forest's attention mask, in the forms that kernels accept, over real architectures."""

import numpy as np
import pytest
import torch
import transformers
from support.forests import VOCABULARY, grown_forest
from support.tiny_models import FAMILIES, SIZES, make_model
from torch.nn.attention.flex_attention import flex_attention

from trainer.batch.batch import Row
from trainer.batch.forest import BLOCK, block_mask, dense_mask
from trainer.features import Settings
from trainer.model.model import Policy

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_the_blocks_cover_every_visible_pair_and_full_blocks_contain_only_visible_pairs(seed):
    """Against the dense mask, cut into blocks: each visible pair is covered, each invisible one is checked by token."""
    layout = grown_forest(seed)[0].lay_out()
    length = len(layout.tokens)
    num_blocks = -(-length // BLOCK)
    assert num_blocks >= 4
    dense = np.zeros((num_blocks * BLOCK,) * 2, bool)
    dense[:length, :length] = dense_mask(layout, CPU).numpy()
    cut = dense.reshape(num_blocks, BLOCK, num_blocks, BLOCK)
    mask = block_mask(layout, CPU)
    for query in range(num_blocks):
        partial = set(mask.kv_indices[0, 0, query, : mask.kv_num_blocks[0, 0, query]].tolist())
        whole = set(mask.full_kv_indices[0, 0, query, : mask.full_kv_num_blocks[0, 0, query]].tolist())
        rows = min(BLOCK, length - query * BLOCK)
        assert {key for key in range(num_blocks) if cut[query, :, key].any()} == partial | whole
        assert all(cut[query, :rows, key].all() for key in whole)
        assert not partial & whole


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_the_block_mask_equals_sdpa_with_the_dense_one():
    """Forward, on a CPU; FlexAttention's backward needs a GPU."""
    layout = grown_forest(0)[0].lay_out()
    query, key, value = torch.randn(3, 1, 2, len(layout.tokens), 16, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(layout, CPU)[None, None]
    )
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=block_mask(layout, CPU)), expected)


def test_flex_attention_gets_queries_keys_and_values_of_one_dtype_and_no_kernel_for_decoding(tmp_path, monkeypatch):
    """Qwen3 norms queries and keys, which gives float32 under autocast. The kernel, which is a GPU's, is replaced."""
    make_model(tmp_path, vocab_size=VOCABULARY)
    policy = Policy(Settings(model=str(tmp_path), device="cpu", dtype="bfloat16", attention="flex_attention"))
    found = []

    def kernel(query, key, value, *, kernel_options, **_options):
        assert kernel_options == {"FORCE_USE_FLEX_ATTENTION": True}
        found.append((query.dtype, key.dtype, value.dtype))
        return torch.zeros_like(query)

    monkeypatch.setattr(transformers.integrations.flex_attention, "compile_friendly_flex_attention", kernel)
    monkeypatch.setattr(transformers.masking_utils, "create_block_mask", lambda **_: None)  # it would be compiled
    policy.load(0)
    found.clear()
    forest, sequences = grown_forest(1, num_sequences=5, length=12)
    places = forest.places(sequences[0])
    row = Row(layout=forest.lay_out(), predictor=places[:-1], token=np.arange(len(places) - 1))
    targets = torch.from_numpy(sequences[0][1:].astype(np.int64))
    policy.logprobs(policy.inputs(row, torch.ones(len(targets)), targets))
    assert found == [(torch.bfloat16,) * 3] * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_row_gives_each_sequence_the_same_logprobs_as_a_row_of_its_own(tmp_path, name):
    make_model(tmp_path, name, vocab_size=VOCABULARY, **FAMILIES[name])
    policy = Policy(Settings(model=str(tmp_path), device="cpu"))
    policy.load(0)
    assert policy.shares_rows
    forest, sequences = grown_forest(1, num_sequences=5, length=12)
    layout = forest.lay_out()
    assert not layout.is_one_sequence
    for tokens in sequences:
        places = forest.places(tokens)
        row = Row(layout=layout, predictor=places[:-1], token=np.arange(len(tokens) - 1))
        targets = torch.from_numpy(tokens[1:].astype(np.int64))
        with torch.no_grad():
            packed, _ = policy.logprobs(policy.inputs(row, torch.ones(len(targets)), targets))
            alone = policy.next_logprobs(tokens.tolist())[:-1].gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)
