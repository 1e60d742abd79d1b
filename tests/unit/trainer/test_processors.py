"""The engine's processors on the trainer's logits: values and gradients, against a formula in float64 and autograd."""

import dataclasses

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from support.engine_sampling import logprobs_and_entropy, processed_logits
from support.experience_factory import claimed, experience
from support.tiny_models import VOCABULARY, config_of, load_model, make_model

import trainer.features.supports.turns as sampling_module
from trainer.batch.batch import build, pack, trained_turns
from trainer.batch.chain import chain_of
from trainer.batch.logprobs import LOGITS_IN_CHUNK, token_logprobs
from trainer.batch.selection import SelectionRule, left_out, why_untrainable
from trainer.features import FEATURES, Settings
from trainer.features.gap import with_ratio
from trainer.features.supports.grammars import GrammarMasks, Grammars, NotReplayed, grammar_of
from trainer.features.supports.processors import RowProcessors, SampledTurn, TurnProcessors
from trainer.features.supports.turns import Vocabulary, bad_words, processors
from trainer.forward import ForwardChecker
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from turnwise.features.supports import SUPPORT as IDS
from turnwise.features.verify.records import Verification
from turnwise.store.turns import TurnView
from turnwise.tokenizer import load_tokenizer
from turnwise.types import PolicyVersion, Turn

SIZE = 11
"""Ids of the vocabulary of the tests without a model."""
PROMPT, SAMPLED = [3, 1, 3, 7], [2, 5, 2, 3, 5, 5]
WORDS = {"no": [5], " no": [4], "two five": [2, 5], " two five": [9, 9, 9]}
"""The tokens of some texts."""
ENDS = [0, 8]
SUPPORT = [[2, 3], [5, 9], [0, 2, 4, 9], [1, 2, 3], [4, 5, 10], [5, 6]]

KINDS = {
    "temperature": {"temperature": 0.6},
    "allowed": {"allowed_token_ids": [5, 2, 3, 9]},
    "bad_words": {"bad_words": ["two five"]},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [6]},
    "bias": {"logit_bias": {"5": 2.5, "9": -200.0}},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.4},
    "grammar": {"response_format": {"type": "json_object"}},
    "top": {"top_p": 0.9, "top_k": 4, "min_p": 0.01},
}
MIXTURES = {
    "penalties": KINDS["repetition"] | KINDS["frequency"] | KINDS["presence"] | KINDS["temperature"],
    "bias_then_repetition": KINDS["bias"] | KINDS["repetition"] | {"temperature": 1.7},
    "masks": KINDS["min_tokens"] | KINDS["bad_words"] | KINDS["top"],
    "all": {name: value for kind, of in KINDS.items() for name, value in of.items() if kind != "allowed"},
}


def mask_of(ids):
    return sum(1 << token for token in ids)


class Words:
    """A vocabulary of a few texts, with a grammar that allows the ids of `SUPPORT`."""

    end_tokens = ENDS

    @property
    def grammars(self):
        return self

    @staticmethod
    def masks(*_):
        words = np.array([[mask_of(ids)] for ids in SUPPORT] + [[-1]], np.int32)
        return GrammarMasks(words=words, index=np.arange(len(SUPPORT)))

    @property
    def tokenizer(self):
        return self

    @staticmethod
    def encode(text, **_):
        return WORDS[text]


def support_of(sampling):
    return [np.array(ids) for ids in SUPPORT] if "top_p" in sampling else None


def expected_logits(logits, sampling):
    """Return the formula's logits of all of `SAMPLED`."""
    words = [[2, 5]] if "bad_words" in sampling else []
    ends = [*ENDS, *sampling.get("stop_token_ids", [])]
    rows = []
    for place, of_token in enumerate(logits):
        support = SUPPORT[place] if {"top_p", "response_format"} & sampling.keys() else None
        args = PROMPT, SAMPLED[:place], sampling
        rows.append(processed_logits(of_token, *args, support=support, bad_words=words, ends=ends))
    return torch.stack(rows)


@pytest.mark.parametrize("from_hidden", [True, False])
@pytest.mark.parametrize("sampling", [*KINDS.values(), *MIXTURES.values()], ids=[*KINDS, *MIXTURES])
def test_values_and_gradients_equal_autograd_of_the_formula_in_float64(monkeypatch, sampling, from_hidden):
    """Two predictors a chunk; beside the processed turn a plain token that shares its first predictor.

    Every token's logprob and entropy is pulled. A token that bad words rule out is not pulled: its logprob is -inf.
    """
    monkeypatch.setitem(LOGITS_IN_CHUNK, "cpu", 2 * SIZE)
    torch.manual_seed(0)
    found = processors(sampling, np.array(PROMPT), np.array(SAMPLED), support_of(sampling), Words())
    turns = [SampledTurn(processors=found or TurnProcessors(), prompt=np.array(PROMPT), sampled=np.array(SAMPLED))]
    # The distinct predictors, in order: the plain one, and those of the turn; the turn's tokens come out of order.
    order = [4, 0, 5, 2, 1, 3]
    turn = np.array([0, 0, 0, -1, 0, 0, 0])
    place = np.array([*order[:3], 0, *order[3:]])
    which = torch.from_numpy(np.where(turn < 0, 0, place + 1))
    target = torch.from_numpy(np.where(turn < 0, 6, np.array(SAMPLED)[place]))
    temperature = torch.tensor([1.0, *[sampling.get("temperature", 1.0)] * 6])
    processing = RowProcessors(turns=turns, turn=turn, place=place).placed(which, lambda tensor: tensor)
    hidden, weight = torch.randn(6, 5) * 2, torch.randn(SIZE, 5)
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    rows = torch.tensor([0, 0, 1, 2, 3, 4, 5])  # the plain token and the first one have one hidden state
    args = which, target, temperature, processing
    if from_hidden:
        logprobs, entropy = token_logprobs(inputs[0][rows], inputs[1], *args)
    else:
        logprobs, entropy = token_logprobs(inputs[0][rows] @ inputs[1].T, None, *args)

    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = exact[0] @ exact[1].T
    plain = logprobs_and_entropy(logits[0])
    of_turn = [logprobs_and_entropy(one) for one in expected_logits(logits, sampling)]
    pairs = [plain if t < 0 else of_turn[p] for t, p in zip(turn, place, strict=True)]
    expected = torch.stack([log_p[id_] for (log_p, _), id_ in zip(pairs, target, strict=True)])
    expected_entropy = torch.stack([one for _, one in pairs])
    possible = torch.isfinite(expected)
    assert (logprobs[~possible] < -1e20).all()
    assert possible.sum() == (6 if "bad_words" in sampling else 7)
    pull, push = torch.randn(7), torch.randn(7)
    (pull[possible] @ logprobs[possible] + push @ entropy).backward()
    (pull[possible].double() @ expected[possible] + push.double() @ expected_entropy).backward()
    torch.testing.assert_close(logprobs[possible].double(), expected[possible], atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=0)
    for ours, theirs in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-5)


def support_at(chain, turn, ids):
    """Return the support of a chain of which these ids, one list a token, are that of one turn."""
    found = [None] * len(chain.tokens)
    for place, of_token in zip(np.flatnonzero(chain.turn_index == turn), ids, strict=True):
        found[place] = None if of_token is None else np.array(of_token)
    return found


def chains(**changes):
    """Return two chains that share their first turn's prompt: one of two turns, and another that branches off there."""
    first = list(range(1, 9))
    tokens = [*first, 9, 10, 9, 20, 21, 11, 9, 12, 30]
    mask = [False] * 8 + [True] * 3 + [False] * 2 + [True] * 4
    index = [-1] * 8 + [0] * 3 + [-1] * 2 + [1] * 4
    one = experience(session_id="a", turns=2, tokens=tokens, loss_mask=mask, **changes)
    one.turn_index[:] = index
    other = experience(session_id="b", tokens=[*first, 9, 10, 3, 2], loss_mask=[False] * 8 + [True] * 4)
    return one, other


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_token_of_packed_rows_with_shared_prefixes_knows_its_own_history(model, attention):
    """One turn is penalised, one truncated, one plain; the first two tokens of two of them are the same."""
    samplings = [
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "temperature": 0.7},
        {"logit_bias": {"12": 3}, "frequency_penalty": 1.0, "top_k": 5},
    ]
    support = [[11, 12, 3], [9, 1], None, [30, 2, 12]]
    one, other = chains(sampling=samplings)
    one = claimed(dataclasses.replace(one, parts={IDS: support_at(one, 1, support)}))
    batch = build([one, other, one], [np.ones(2), np.ones(1), np.ones(2)], policy_version=0)
    assert [len(tokens) for tokens in batch.tokens_of] == [3 + 3, 4, 6]
    assert with_ratio(batch).all()
    policy = Policy(Settings(model=str(model), attention=attention), FEATURES.terms)
    policy.load(0)
    reference = load_model(model)
    expected = []
    for e, p, target in zip(batch.table.experience, batch.table.place, batch.table.target, strict=True):
        chain = batch.experiences[e]
        tokens = chain.tokens.tolist()
        with torch.no_grad():
            logits = reference(torch.tensor([tokens[:p]])).logits[0, -1].double()
        turn = chain.turn_index[p]
        start = int(np.argmax(chain.turn_index == turn))
        sampling = chain.info["sampling"][turn]
        ids = support[p - start] if sampling.get("top_k") else None
        expected.append(
            processed_logits(logits, tokens[:start], tokens[start:p], sampling, support=ids).log_softmax(-1)[target]
        )
    for row_tokens in (64, 20, 1):
        agent = PolicyAgent(policy, Settings(model=str(model), row_tokens=row_tokens))
        found = agent.logprobs_of(batch, range(3))
        np.testing.assert_allclose(found, np.array(expected), atol=2e-5)
    policy.why_alone = "each chain a sequence of its own"
    rows = pack(batch, [0, 1, 2], None)
    assert all(len(np.unique(batch.table.experience[row.token])) == 1 for row in rows)
    agent = PolicyAgent(policy, Settings(model=str(model)))
    np.testing.assert_allclose(agent.logprobs_of(batch, range(3)), np.array(expected), atol=2e-5)


def test_plain_turns_are_not_processed():
    one, other = chains(sampling=[{"temperature": 0.5, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0}] * 2)
    batch = build([one, other], [np.ones(2), np.ones(1)], policy_version=0)
    (row,) = pack(batch, [0, 1], 64)
    policy = Policy(Settings(), FEATURES.terms)
    assert policy.on_logits(batch, row) is None
    assert one.without_ratio == [None, None]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20, "repetition_penalty": 1.1}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": 0, "repetition_penalty": 1.1}, "greedy"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_p": "0.9"}, "top_p"),
        ({"temperature": []}, "temperature"),
        ({"min_tokens": "2"}, "min_tokens"),
        ({"response_format": "text"}, "response_format"),
    ],
)
def test_a_turn_whose_distribution_cannot_be_computed_carries_no_loss(sampling, reason):
    """Without a stored support, or without a tokenizer."""
    one = experience(sampling=[sampling])
    assert why_untrainable(one) == [reason]
    assert why_untrainable(one, needs_behaviour=False) == [None]
    assert trained_turns(build([one], [np.ones(1)], policy_version=0)) == set()


def test_without_a_tokenizer_what_is_asked_in_text_cannot_be_applied(tmp_path):
    one = experience(sampling=[{"min_tokens": 1}, {"repetition_penalty": 2.0}], turns=2)
    assert why_untrainable(claimed(one, Vocabulary(str(tmp_path)))) == ["min_tokens", None]


def test_bad_words_are_ruled_out_at_the_start_of_a_text_and_after_a_space_that_makes_no_more_tokens():
    texts = {"a": [1], " a": [2], "b": [3], " b": [4, 3], "c": [5], " c": [5], "d": [], " d": [6]}
    found = bad_words(["a", " b", "c", "d"], lambda text, **_: texts[text])
    assert found == [[1], [2], [3], [5]]


def test_a_token_that_could_not_be_sampled_has_a_logprob_that_no_gap_check_passes(model):
    one = experience(tokens=[1, 2, 3], sampling=[{"top_k": 2}])
    one = claimed(dataclasses.replace(one, parts={IDS: support_at(one, 0, [[2, 5], [4, 7]])}))
    batch = build([one], [np.ones(1)], policy_version=0)
    policy = Policy(Settings(model=str(model)), FEATURES.terms)
    policy.load(0)
    found = PolicyAgent(policy, Settings(model=str(model))).logprobs_of(batch, [0])
    assert found[0] > -50
    assert found[1] < -1e20
    assert VOCABULARY > 7


@pytest.mark.parametrize("algorithm", [{"name": "sft"}, {"name": "dpo"}], ids=lambda one: one["name"])
@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        ({"top_k": 1}, [[2], [3], [4]]),
        ({"top_p": 0.01, "temperature": 0.01}, [[2], None, [4]]),
        ({"min_p": 1.0, "logit_bias": {"3": 1.5}, "repetition_penalty": 1.3}, [[2], [3], [4]]),
        ({"allowed_token_ids": [2, 3, 4], "temperature": 0.7}, None),
    ],
)
def test_a_loss_without_ratios_trains_the_models_own_distribution(model, algorithm, sampling, support):
    """One id that is left has the logprob 0 under any weights, and so no gradient.

    Nothing is compared with the engine's logprobs, which are those of another distribution.
    """
    one = experience(tokens=[1, 2, 3, 4], loss_mask=[False, True, True, True], sampling=[sampling])
    parts = {} if support is None else {IDS: support_at(one, 0, support)}
    settings = Settings(model=str(model), algorithm=algorithm)
    policy = Policy(settings, FEATURES.terms)
    policy.load(0)
    chain = chain_of(dataclasses.replace(one, parts=parts))
    for term in policy.terms:
        chain = term.of_chain(chain)
    batch = build([chain], [np.ones(1)], policy_version=0, needs_behaviour=False)
    with torch.no_grad():
        log_p = load_model(model)(torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    expected = [float(log_p[place, token]) for place, token in enumerate([2, 3, 4])]
    np.testing.assert_allclose(PolicyAgent(policy, settings).logprobs_of(batch, [0]), expected, atol=2e-5)
    assert not with_ratio(batch).any()


def test_a_loss_without_ratios_is_still_compared_with_the_engine_where_nothing_shaped_the_sampling():
    plain, scaled = (experience(sampling=[sampling]) for sampling in ({"temperature": 1.0}, {"temperature": 0.5}))
    batch = build([plain, scaled], [np.ones(1)] * 2, policy_version=0, needs_behaviour=False)
    assert with_ratio(batch).tolist() == [True, True, False, False]


def test_a_support_with_ids_that_the_model_has_not_is_unknown(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    one = experience(sampling=[{"top_k": 2}])
    one = claimed(dataclasses.replace(one, parts={IDS: support_at(one, 0, [[2, 7], [4, 8]])}))
    assert claimed(one, Vocabulary(str(tmp_path))).is_known[one.loss_mask].tolist() == [True, False]


def test_a_support_makes_up_for_masks_that_cannot_be_computed():
    """Token by token: one without a support is left out, and counted where its turn is trained."""
    one = experience(sampling=[{"tool_choice": "required", "top_k": 2}])
    one = claimed(dataclasses.replace(one, parts={IDS: support_at(one, 0, [[2, 5], None])}))
    assert why_untrainable(one) == [None]
    batch = build([one], [np.ones(1)], policy_version=0)
    assert batch.table.target.tolist() == [2]
    assert len(build([one], [np.ones(1)], policy_version=0, needs_behaviour=False).table) == 2
    found = left_out([one], {}, {"s-0"}, SelectionRule(), needs_behaviour=True)
    assert found == ({}, {"unknown_support": 1})
    unknown = claimed(dataclasses.replace(one, parts={IDS: support_at(one, 0, [None, None])}))
    assert why_untrainable(unknown) == ["top_k"]


LETTERS = ["<end>", "<think>", "</think>", *"abcdefgh"]
"""The tokens of the model of the tests of grammars."""
END, START_THINK, END_THINK = 0, 1, 2
A, B, C, D = 3, 4, 5, 6


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Grammars:
    """The grammars of a model whose tokens are letters."""
    directory = tmp_path_factory.mktemp("letters")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({text: index for index, text in enumerate(LETTERS)}, []))
    backend.add_special_tokens(LETTERS[:1])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.save_pretrained(directory)
    config_of("Qwen3", vocab_size=len(LETTERS)).save_pretrained(directory)
    return Grammars(str(directory))


def allowed(found, num_tokens):
    """Return the ids that stood free at each token; None where all did."""
    every = len(found.words) - 1
    bits = np.unpackbits(found.words.view(np.uint8), axis=1, bitorder="little")
    return [None if mask == every else {*np.flatnonzero(bits[mask]).tolist()} for mask in found.index[:num_tokens]]


def test_a_grammar_is_walked_over_the_sampled_tokens(letters):
    asked = {"structured_outputs": {"regex": "[ab]+c"}}
    found = letters.masks(asked, [D], [A, B, C, END, D], {END})
    assert allowed(found, 5) == [{A, B}, {A, B, C}, {A, B, C}, {END}, None]
    assert len(found.words) == 4
    cut = letters.masks(asked, [D], [A, B], {END})
    assert allowed(cut, 2) == [{A, B}, {A, B, C}]


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": ["ab", "cd"]}},
        {"structured_outputs": {"grammar": 'root ::= "a" "b" | "cd"'}},
        {"structured_outputs": {"grammar": 'start: "ab" | "cd"'}},
        {"structured_outputs": {"regex": "ab|cd", "json": None}, "response_format": {"type": "text"}},
    ],
    ids=["choice", "ebnf", "lark", "regex"],
)
def test_each_kind_of_grammar_is_walked(letters, asked):
    found = letters.masks(asked, [], [C, D, END], {END})
    assert allowed(found, 3) == [{A, C}, {D}, {END}]


@pytest.mark.parametrize(
    ("prompt", "sampled", "expected"),
    [
        ([A], [START_THINK, D, END_THINK, A, END], [None, None, None, {A}, {END}]),
        ([START_THINK], [D, END_THINK, A, END], [None, None, {A}, {END}]),
        ([START_THINK], [D, D], [None, None]),
        ([START_THINK, END_THINK], [A, END], [{A}, {END}]),
    ],
    ids=["sampled", "opened_by_the_prompt", "cut_off", "closed_by_the_prompt"],
)
def test_thinking_before_the_grammar_is_free(letters, prompt, sampled, expected):
    found = letters.masks({"structured_outputs": {"regex": "a"}}, prompt, sampled, {END})
    assert allowed(found, len(sampled)) == expected


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"regex": "b+"}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"structured_outputs": {"regex": "a("}},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"multipleOf": 2}}}}},
    ],
    ids=["refuses_a_token", "tags", "options", "broken", "tag_format", "other_library"],
)
def test_a_grammar_that_is_not_known_to_be_the_engines_is_not_replayed(letters, asked):
    with pytest.raises(NotReplayed):
        letters.masks(asked, [], [A, END], {END})


@pytest.mark.parametrize("others", [{"grammar_backend": "guidance"}, {"tool_choice": "required"}])
def test_beside_a_support_no_grammar_is_walked_that_is_not_the_engines(letters, others):
    """The engine left `b` free, which this regex does not."""
    asked = {"structured_outputs": {"regex": "ac?"}, "top_k": 2} | others
    support, vocabulary = [np.array([A]), np.array([END, B])], Vocabulary(letters._model)
    assert processors(asked, np.array([D]), np.array([A, END]), support, vocabulary).grammar is None
    own = {**asked, **dict.fromkeys(others)}
    assert processors(own, np.array([D]), np.array([A, END]), support, vocabulary).grammar is not None


def test_a_forced_tool_is_walked_as_the_schema_that_is_stored_with_the_turn():
    asked = {"tool_choice": "required", "tool_grammar": {"type": "null"}, "structured_outputs": {"regex": "a"}}
    assert grammar_of(asked) == ("json", '{"type": "null"}')
    assert processors(asked | {"tool_grammar": True}, np.array([D]), np.array([A]), None, None) == "tool_grammar"


def test_a_grammar_that_allows_nothing_but_an_end_is_stronger_than_min_tokens(letters):
    vocabulary = Vocabulary(letters._model)
    asked = {"structured_outputs": {"regex": "ab?"}, "min_tokens": 5}
    found = processors(asked, np.array([D]), np.array([A, B, END]), None, vocabulary)
    places, ids = found.forbidden
    assert list(zip(places.tolist(), ids.tolist(), strict=True)) == [(0, END), (1, END)]


def test_masks_that_allow_nothing_but_some_ids_are_found_in_every_word_of_32_ids():
    """Masks of 64 ids; one of the asked ids, 64, is not theirs."""
    words = [[1 << 8, 1 << 3], [1 << 8, 0], [0, -(1 << 31)], [1 << 8 | 1 << 9, 1 << 3], [-1, -1]]
    found = GrammarMasks(words=np.array(words, np.int32), index=np.array([3, 0, 1, 0, 2, 4]))
    assert found.allows_nothing_but({8, 35, 64}).tolist() == [False, True, True, True, False, False]
    assert found.allows_nothing_but({8, 63}).tolist() == [False, False, True, False, True, False]


def test_masks_that_contradict_one_another_leave_a_finite_gradient_and_no_logprob_that_a_gap_check_passes():
    found = TurnProcessors(allowed=np.array([2]), support=(np.array([3]), np.array([0, 1])))
    turn = SampledTurn(processors=found, prompt=np.array([1]), sampled=np.array([3]))
    row = RowProcessors(turns=[turn], turn=np.array([0]), place=np.array([0]))
    logits, which = torch.randn(1, 5, requires_grad=True), torch.tensor([0])
    processing = row.placed(which, lambda tensor: tensor)
    logprobs, entropy = token_logprobs(logits, None, which, torch.tensor([3]), torch.ones(1), processing)
    (logprobs.exp() + entropy).sum().backward()
    assert logprobs.item() < -1e20
    assert entropy.item() == 0
    assert (logits.grad == 0).all()


def test_a_forward_check_loads_the_tokenizer_of_a_version_once(letters, tmp_path, monkeypatch):
    """Two turns, whose `min_tokens` need the ids that end a reply."""
    directory = make_model(tmp_path / "v0", vocab_size=len(LETTERS))
    letters._tokenizer.save_pretrained(directory)
    loaded: list[str] = []
    monkeypatch.setattr(sampling_module, "load_tokenizer", lambda path: loaded.append(path) or load_tokenizer(path))
    turn = Turn(
        turn_id="t",
        session_id="s",
        chain_id="c",
        sampling={"min_tokens": 1},
        prompt_length=1,
        token_ids=np.array([A], np.int32),
        logprobs=np.array([-1.0], np.float32),
    )
    view = TurnView(turn=turn, messages=[], tools=None, prompt_token_ids=np.array([D], np.int32), rewards=())
    checker = ForwardChecker({0: PolicyVersion(version=0, path=str(directory))}, tolerance=100.0)
    report = Verification()
    for place in ("first", "second"):
        checker.check(view, place, report)
    assert report.checked["turns with logprobs recomputed"] == 2
    assert loaded == [str(directory)]


def test_a_token_that_its_sampling_excludes_is_a_mismatch_of_a_forward_pass(tmp_path):
    """Its logprob is −inf, which is no sign of a mask that nobody knows."""
    directory = make_model(tmp_path / "model")
    turn = Turn(
        turn_id="t",
        session_id="s",
        chain_id="c",
        sampling={"allowed_token_ids": [D]},
        prompt_length=1,
        token_ids=np.array([D, A], np.int32),
        logprobs=np.array([0.0, -1.0], np.float32),
    )
    view = TurnView(turn=turn, messages=[], tools=None, prompt_token_ids=np.array([D], np.int32), rewards=())
    checker, report = (
        ForwardChecker({0: PolicyVersion(version=0, path=str(directory))}, tolerance=100.0),
        Verification(),
    )
    checker.check(view, "turn", report)
    assert report.checked["logprobs"] == 2
    assert [each.place for each in report.mismatches] == ["turn logprobs[1]"]
