"""Scoring a prefix tree in one forward pass equals scoring every string on its own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from acclimate.scoring import (
    MAX_LOGITS,
    Item,
    _batches,
    accepts,
    choice_logprobs,
    edge_logprobs,
    pack,
    score,
    scored_logits,
)
from acclimate.tasks.choice import choice_losses

VOCABULARY = 60
PAD = 0
TOLERANCE = 1e-4


def build(kind: str, attention: str = "sdpa") -> PreTrainedModel:
    # large initial weights, so that probabilities are far from uniform and a wrong mask shows
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "attn_implementation": attention, "initializer_range": 0.4}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        config: Any = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **common)
        return GPT2LMHeadModel(config).eval()
    if kind == "qwen2":
        config = Qwen2Config(
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, **sizes, **common
        )
        return Qwen2ForCausalLM(config).eval()
    config = LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **sizes, **common)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build("llama")


@torch.no_grad()
def alone(model: torch.nn.Module, prompt: list[int], choice: list[int]) -> np.ndarray:
    """Log-probability of each token of a choice, by one plain forward pass over prompt + choice."""
    logits = model(input_ids=torch.tensor([prompt + choice])).logits[0]
    table = torch.log_softmax(logits.double(), dim=-1)
    return np.array([table[len(prompt) + i - 1, token].item() for i, token in enumerate(choice)])


def assert_like_alone(model: torch.nn.Module, items: list[Item], **options: Any) -> None:
    scores = score(model, items, PAD, **options)
    assert [len(s) for s in scores] == [len(item.choices) for item in items]
    for item, found in zip(items, scores, strict=True):
        for choice, one in zip(item.choices, found, strict=True):
            expected = alone(model, list(item.prompt), list(choice))
            np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
            assert one.total == pytest.approx(expected.sum(), abs=TOLERANCE * len(choice))


CASES = {
    "branching, deep": [Item([5, 6, 7, 8], [[9, 10, 11], [9, 10, 12], [9, 13], [14, 15, 16]])],
    "a chain": [Item([5, 6, 7], [[8, 9, 10, 11]])],
    "single tokens": [Item([5, 6], [[7], [8], [9]])],
    "a choice that begins another": [Item([5, 6], [[7, 8], [7, 8, 9], [7]])],
    "the same choice twice": [Item([5, 6], [[7, 8], [7, 8], [9]])],
    "one token again and again": [Item([7, 7], [[7, 7, 7], [7, 7, 8], [7, 8, 7, 7]])],
    "the padding token inside": [Item([PAD, 5, PAD], [[PAD, 6], [PAD, PAD, 7]])],
    "prompts of every length": [Item(list(range(5, 5 + n)), [[40, 41], [40, 42, 43], [44]]) for n in (1, 2, 7, 20)],
    "trees of every width": [
        Item([5, 6, 7], [[8]]),
        Item([5, 6], [[8, 9, 10, 11, 12]]),
        Item([5, 6, 7, 8, 9], [[20 + i, 30 + i] for i in range(9)]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_equals_separate_forward_passes(kind: str, attention: str) -> None:
    model = build(kind, attention)
    assert model.config._attn_implementation == attention
    for items in CASES.values():
        assert_like_alone(model, items)


@pytest.mark.parametrize("name", CASES)
def test_equals_separate_forward_passes_case_by_case(name: str, llama: PreTrainedModel) -> None:
    assert_like_alone(llama, CASES[name])
    # an item's result does not depend on what shares its batch: padding, a foreign tree, a forced full mask
    assert_like_alone(llama, [*CASES[name], *CASES["branching, deep"], *CASES["prompts of every length"]])


tokens = st.integers(0, 6)  # few different tokens, so that choices share prefixes
items = st.builds(
    Item,
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
    st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(items, min_size=1, max_size=4))
def test_random_trees(llama: PreTrainedModel, batch: list[Item]) -> None:
    assert_like_alone(llama, batch)


@settings(max_examples=60, deadline=None)
@given(st.lists(items, min_size=1, max_size=4))
def test_shared_prefixes_are_laid_out_once(batch: list[Item]) -> None:
    packed = pack(batch, PAD)
    # a tree node is a distinct proper prefix of a choice
    nodes = [len({tuple(c[:i]) for c in item.choices for i in range(1, len(c))}) for item in batch]
    assert packed["logits_to_keep"] == max(nodes) + 1
    assert packed["input_ids"].shape == (len(batch), max(len(i.prompt) for i in batch) + max(nodes))
    assert len(packed["edge_token"]) == sum(len(c) for item in batch for c in item.choices)
    assert packed["choice_row"].tolist() == [row for row, item in enumerate(batch) for _ in item.choices]


@settings(max_examples=60, deadline=None)
@given(st.lists(items, min_size=1, max_size=12), st.integers(1, 60))
def test_batches_hold_every_item_once_and_keep_to_the_limit(batch: list[Item], limit: int) -> None:
    groups = list(_batches(batch, limit, VOCABULARY))
    assert sorted(i for group in groups for i in group) == list(range(len(batch)))
    for group in groups:
        packed = pack([batch[i] for i in group], PAD)
        assert len(group) == 1 or packed["input_ids"].numel() <= limit


def test_batches_limit_the_logits_in_memory() -> None:
    many = [Item([5], [[6, 7]])] * 100
    vocabulary = MAX_LOGITS // 20  # ten rows of two scored positions
    assert {len(group) for group in _batches(many, 10**9, vocabulary)} == {10}


def test_small_batches_change_nothing(llama: PreTrainedModel) -> None:
    mixed = [item for case in CASES.values() for item in case]
    small, large = (score(llama, mixed, PAD, batch_tokens=n) for n in (1, 100_000))
    for one, other in zip(small, large, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


def test_progress_counts_every_item_once(llama: PreTrainedModel) -> None:
    counts: list[int] = []
    score(llama, CASES["prompts of every length"] * 3, PAD, batch_tokens=30, advance=counts.append)
    assert sum(counts) == 12
    assert len(counts) > 1


def test_length_normalisation_divides_by_the_tokens(llama: PreTrainedModel) -> None:
    batch = [*CASES["branching, deep"], *CASES["a choice that begins another"]]
    packed = pack(batch, PAD)
    with torch.no_grad():
        edges = edge_logprobs(scored_logits(llama, packed), packed)
        plain, normalised = (choice_logprobs(edges, packed, length_normalise=flag) for flag in (False, True))
    expected = [alone(llama, list(item.prompt), list(c)) for item in batch for c in item.choices]
    np.testing.assert_allclose(plain, [e.sum() for e in expected], atol=TOLERANCE)
    np.testing.assert_allclose(normalised, [e.mean() for e in expected], atol=TOLERANCE)


@torch.no_grad()
def test_details_equal_a_dense_softmax(llama: PreTrainedModel) -> None:
    batch = [item for case in CASES.values() for item in case]
    for item, found in zip(batch, score(llama, batch, PAD, details=True), strict=True):
        for choice, one in zip(item.choices, found, strict=True):
            logits = llama(input_ids=torch.tensor([[*item.prompt, *choice]])).logits[0].double()
            p = torch.softmax(logits, dim=-1)[len(item.prompt) - 1 : -1].numpy()
            assert one.correct is not None
            assert one.confidence is not None
            assert one.squared is not None
            np.testing.assert_array_equal(one.correct, p.argmax(axis=1) == np.array(choice))
            np.testing.assert_allclose(one.confidence, p.max(axis=1), atol=1e-5)
            np.testing.assert_allclose(one.squared, (p**2).sum(axis=1), atol=1e-5)
            brier = one.squared - 2 * np.exp(one.logprobs) + 1
            np.testing.assert_allclose(brier, ((p - np.eye(VOCABULARY)[list(choice)]) ** 2).sum(axis=1), atol=1e-4)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def naive_logprob(model: torch.nn.Module, prompt: list[int], choice: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + choice])).logits[0]
    return torch.log_softmax(logits, dim=-1)[range(len(prompt) - 1, len(prompt) + len(choice) - 1), choice].sum()


@pytest.mark.parametrize("restricted", [True, False], ids=["over the choices", "of the answer"])
@pytest.mark.parametrize("normalise", [False, True])
def test_losses_and_gradients_equal_naive_autograd(llama: PreTrainedModel, restricted: bool, normalise: bool) -> None:
    batch = [
        Item([5, 6, 7], [[9, 10], [9, 11, 12], [13]]),
        Item([21], [[9, 10], [30]]),
        Item([5, 6, 7, 8, 9], [[40, 41, 42], [40, 41], [43], [44]]),
    ]
    answers = [1, 0, 0]
    if not restricted:
        batch, answers = [Item(i.prompt, [i.choices[a]]) for i, a in zip(batch, answers, strict=True)], [0, 0, 0]
    starts = np.cumsum([0, *(len(item.choices) for item in batch[:-1])])
    packed = pack(batch, PAD) | {
        "right_choice": torch.as_tensor(starts + np.array(answers)),
        "restricted": restricted,
        "length_normalise": normalise,
    }
    found = choice_losses(llama, packed)
    naive = []
    for item, answer in zip(batch, answers, strict=True):
        each = [naive_logprob(llama, list(item.prompt), list(c)) / (len(c) if normalise else 1) for c in item.choices]
        naive.append((torch.logsumexp(torch.stack(each), dim=0) if restricted else 0.0) - each[answer])
    expected = torch.stack(naive)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    one, other = gradients(llama, found.mean()), gradients(llama, expected.mean())
    assert one.keys() == other.keys()
    scale = max(float(g.abs().max()) for g in other.values())
    assert scale > 0.01
    for name in other:
        torch.testing.assert_close(one[name], other[name], atol=1e-5 * max(scale, 1.0), rtol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_scoring_is_deterministic_and_restores_the_mode(training: bool) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.5))
    model.train(training)
    batch = CASES["branching, deep"]
    first, second = (score(model, batch, PAD)[0][0].logprobs for _ in range(2))
    np.testing.assert_array_equal(first, second)  # dropout would make them differ
    assert model.training is training
    assert not any(p.grad is not None for p in model.parameters())


def test_the_mode_is_restored_after_an_error(llama: PreTrainedModel) -> None:
    llama.train()
    with pytest.raises(IndexError):
        score(llama, [Item([VOCABULARY + 1], [[5]])], PAD)
    assert llama.training
    llama.eval()


class _Bare(torch.nn.Module):
    """A causal model by cumulative sums that takes neither logits_to_keep nor position_ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.dim() == 4:
            visible = (attention_mask[:, 0] == 0).float()
        else:
            length = input_ids.shape[1]
            visible = torch.ones(length, length).tril()[None] * attention_mask[:, None, :]
        return SimpleNamespace(logits=self.head(torch.tanh(visible @ self.embedding(input_ids))))


def test_a_model_without_position_ids_and_logits_to_keep() -> None:
    model = _Bare()
    assert not accepts(model, "position_ids")
    assert not accepts(model, "logits_to_keep")
    for batch in CASES.values():
        assert_like_alone(model, batch)


def test_wrappers_are_seen_through(llama: PreTrainedModel) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    wrapped = torch.nn.Module()
    wrapped.module = model
    for candidate in (llama, model, wrapped):
        assert accepts(candidate, "logits_to_keep")
        assert not accepts(candidate, "no_such_argument")
    assert_like_alone(model.eval(), CASES["branching, deep"] + CASES["trees of every width"])


def test_only_scored_positions_get_logits(llama: PreTrainedModel) -> None:
    packed = pack([Item(list(range(5, 35)), [[36, 37], [38]])], PAD)
    with torch.no_grad():
        assert scored_logits(llama, packed).shape == (1, 2, VOCABULARY)


def test_probabilities_of_all_strings_of_a_length_sum_to_one(llama: PreTrainedModel) -> None:
    pairs = [[a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)]
    total = sum(math.exp(s.total) for s in score(llama, [Item([5, 6, 7], pairs)], PAD)[0])
    assert total == pytest.approx(1.0, abs=1e-4)
