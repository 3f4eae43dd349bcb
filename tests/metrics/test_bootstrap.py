import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from acclimate import metrics
from acclimate.errors import InputError
from acclimate.metrics import (
    Difference,
    bootstrap_interval,
    holm,
    in_words,
    paired_difference,
    summarise,
    verdict,
)
from acclimate.metrics.bootstrap import _seed_weights


def sample_predictions(n, c, seed=0, strength=2.0):
    rng = np.random.default_rng(seed)
    z, labels = rng.normal(size=(n, c)), rng.integers(c, size=n)
    z[np.arange(n), labels] += strength
    e = np.exp(z)
    return e / e.sum(axis=1, keepdims=True), labels


def test_interval_of_the_mean_agrees_with_scipy_and_with_theory():
    x = np.random.default_rng(1).normal(size=300)
    ours = bootstrap_interval(np.mean, x, n_resamples=4000)
    peer = stats.bootstrap((x,), np.mean, n_resamples=4000, method="percentile", rng=0).confidence_interval
    error = x.std() / np.sqrt(len(x))
    # Monte Carlo error of a 2.5% quantile from 4000 resamples is 0.04 standard errors; three of it for each side.
    assert ours.low == pytest.approx(peer.low, abs=0.17 * error)
    assert ours.high == pytest.approx(peer.high, abs=0.17 * error)
    assert ours.high - ours.low == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert ours.value == x.mean()


def test_rows_are_resampled_jointly():
    x = np.random.default_rng(0).normal(size=(50, 2))
    interval = bootstrap_interval(lambda a, b: float(np.mean(a[:, 0] - b)), x, x[:, 0], n_resamples=50)
    assert (interval.value, interval.low, interval.high) == (0, 0, 0)


@pytest.mark.parametrize("n", [1, 2, 20])
def test_equal_rows_give_an_interval_of_no_width_without_warnings(n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interval = bootstrap_interval(np.mean, np.full(n, 0.25), n_resamples=100)
        summary = summarise(np.full((n, 2), 0.5), np.zeros(n, dtype=int), n_resamples=100)
        difference = paired_difference(np.full(n, 0.25), np.full(n, 0.25), n_resamples=100)
    assert (interval.value, interval.low, interval.high, interval.n) == (0.25, 0.25, 0.25, n)
    assert all(np.isfinite([e["value"], e["low"], e["high"]]).all() for e in summary.values())
    assert summary["nll"]["low"] == pytest.approx(np.log(2))
    assert (difference.value, difference.low, difference.high, difference.p_value) == (0, 0, 0, 1)


@given(st.integers(1, 60), st.integers(2, 6), st.integers(0, 1000))
def test_summary_values_are_those_of_the_plain_functions(n, c, seed):
    probs, labels = sample_predictions(n, c, seed)
    summary = summarise(probs, labels, n_resamples=20, seed=seed)
    for name in ("accuracy", "macro_f1", "nll", "ece", "adaptive_ece", "brier"):
        assert summary[name]["value"] == pytest.approx(getattr(metrics, name)(probs, labels), abs=1e-12), name
    assert summary["perplexity"]["value"] == pytest.approx(np.exp(summary["nll"]["value"]))
    assert summary.keys() == metrics.HIGHER_IS_BETTER.keys()


def test_summary_intervals_are_those_of_the_slow_bootstrap():
    probs, labels = sample_predictions(300, 4)
    summary = summarise(probs, labels, n_resamples=2000)
    for name in ("accuracy", "macro_f1", "nll", "ece", "adaptive_ece", "brier"):
        slow = bootstrap_interval(getattr(metrics, name), probs, labels, n_resamples=400, seed=1)
        fast = summary[name]
        width = slow.high - slow.low
        # A 2.5% quantile of 400 resamples is good to about 4% of the width; the bias shift moves both ends, not the width.
        assert fast["high"] - fast["low"] == pytest.approx(width, rel=0.2), name
        assert fast["low"] <= fast["value"] <= fast["high"], name
        if name in ("accuracy", "nll", "brier"):
            assert fast["low"] == pytest.approx(slow.low, abs=0.12 * width), name


def test_summary_of_two_thousand_rows_and_150_classes_takes_under_three_seconds():
    probs, labels = sample_predictions(2000, 150)
    start = time.perf_counter()
    summarise(probs, labels)
    assert time.perf_counter() - start < 3


def test_same_seed_same_interval_in_any_block_size(monkeypatch):
    probs, labels = sample_predictions(100, 3)
    whole = summarise(probs, labels, n_resamples=50)
    monkeypatch.setattr("acclimate.metrics.bootstrap.BLOCK", 700)
    assert summarise(probs, labels, n_resamples=50) == {
        name: pytest.approx(entry, rel=1e-12) for name, entry in whole.items()
    }


def test_difference_of_one_seed_is_the_paired_bootstrap_of_the_mean():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.3, 1, size=200), rng.normal(0, 1, size=200)
    d = paired_difference(a, b)
    error = (a - b).std() / np.sqrt(200)
    assert d.value == pytest.approx((a - b).mean(), rel=1e-12)
    assert d.high - d.low == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert (d.n_examples, d.n_seeds, d.level) == (200, 1, 0.95)
    assert d.p_value == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.02)


def test_base_row_is_reused_for_every_seed():
    rng = np.random.default_rng(0)
    a, base = rng.random((3, 80)), rng.random(80)
    assert paired_difference(a, base) == paired_difference(a, np.tile(base, (3, 1)))
    reverse, forward = paired_difference(base, a), paired_difference(a, base)
    assert reverse.value == pytest.approx(-forward.value)
    assert reverse.low == pytest.approx(-forward.high)
    assert forward.n_seeds == 3


def test_seeds_that_disagree_widen_the_interval_by_the_unbiased_variance():
    # No chance in the examples at all: seed means are -0.3, 0 and 0.3, with sample variance 0.09.
    a = np.repeat([[-0.3], [0.0], [0.3]], 50, axis=1)
    rng = np.random.default_rng(0)
    means = (_seed_weights(3, 20_000, rng) @ a[:, 0]) / 3
    assert means.var() == pytest.approx(0.09 / 3, rel=0.03)
    assert verdict(paired_difference(a + 0.1, np.zeros(50))) == "no clear difference"
    assert verdict(paired_difference(a[1] + 0.1, np.zeros(50))) == "better"


def test_unequal_seed_counts_are_resampled_independently():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.5, 1, size=(4, 100)), rng.normal(0, 1, size=(2, 100))
    d = paired_difference(a, b)
    assert d.value == pytest.approx(a.mean() - b.mean())
    assert d.low < d.value < d.high
    assert d.n_seeds == 2


@pytest.mark.parametrize("seeds", [1, 3])
def test_interval_covers_the_true_difference(seeds):
    covered = 0
    for simulation in range(200):
        rng = np.random.default_rng(simulation)
        hard = rng.normal(size=60)
        a = 0.3 + hard + rng.normal(size=(seeds, 60)) + (seeds > 1) * rng.normal(size=(seeds, 1)) * 0.03
        d = paired_difference(a, hard + rng.normal(size=(seeds, 60)), n_resamples=300, seed=simulation)
        covered += d.low <= 0.3 <= d.high
    assert covered / 200 >= 0.90


@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 1000))
def test_difference_is_consistent(n_seeds, n, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(2, size=(n_seeds, n)), rng.integers(2, size=n)
    d = paired_difference(a, b, n_resamples=100)
    assert d.low <= d.high
    assert 0.01 <= d.p_value <= 1
    assert paired_difference(a, a, n_resamples=100).p_value == 1
    assert paired_difference(a, b, n_resamples=100) == d


def test_p_value_has_the_floors_of_resampling_and_of_the_sign_test():
    assert paired_difference(np.ones(100), np.zeros(100), n_resamples=200).p_value == 1 / 200
    assert paired_difference(np.ones(4), np.zeros(4)).p_value == 2**-3


def test_verdict_needs_enough_examples_and_knows_the_direction():
    assert verdict(paired_difference(np.ones(5), np.zeros(5))) == "no clear difference"
    assert verdict(paired_difference(np.ones(6), np.zeros(6))) == "better"
    assert verdict(paired_difference(np.ones(6), np.zeros(6)), higher_is_better=False) == "worse"
    assert verdict(paired_difference(np.zeros(6), np.ones(6)), higher_is_better=False) == "better"


@pytest.mark.parametrize(
    ("difference", "higher", "sentence"),
    [
        (
            Difference(0.452, 0.41, 0.49, 0.0002, 400, 3),
            True,
            "lora is better than base in accuracy by 0.452 (95% interval 0.410 to 0.490, 400 examples, 3 seeds).",
        ),
        (
            Difference(-0.1, -0.2, -0.05, 0.0002, 400, 1),
            True,
            "lora is worse than base in accuracy by 0.100 (95% interval 0.050 to 0.200, 400 examples, 1 seed).",
        ),
        (
            Difference(-0.1, -0.2, -0.05, 0.0002, 400, 1),
            False,
            "lora is better than base in accuracy, lower by 0.100 (95% interval 0.050 to 0.200, 400 examples, 1 seed).",
        ),
        (
            Difference(0.003, -0.012, 0.018, 0.7, 400, 3),
            True,
            "lora and base cannot be told apart in accuracy "
            "(difference 0.003, 95% interval -0.012 to 0.018, 400 examples, 3 seeds).",
        ),
    ],
)
def test_in_words(difference, higher, sentence):
    assert in_words("lora", "base", "accuracy", difference, higher) == sentence


def test_holm_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; made monotone: 0.02, 0.03, 0.06, 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1]
    assert holm([]) == []
    with pytest.raises(InputError, match="between 0 and 1"):
        holm([1.5])


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.zeros(3), np.zeros(4), "3 examples and b of 4"),
        (np.zeros((2, 2, 2)), np.zeros(2), r"\(2, 2, 2\)"),
        (np.zeros(0), np.zeros(0), "not empty"),
        ([[1.0, np.nan]], np.zeros(2), "seed 0, example 1"),
    ],
)
def test_bad_scores_are_named(a, b, message):
    with pytest.raises(InputError, match=message):
        paired_difference(a, b)


def test_bad_arrays_are_named():
    with pytest.raises(InputError, match=r"lengths \[2, 3\]"):
        bootstrap_interval(np.mean, np.zeros(2), np.zeros(3))
    with pytest.raises(InputError, match="level"):
        bootstrap_interval(np.mean, np.zeros(2), level=1.0)


def test_importing_metrics_imports_neither_torch_nor_sklearn():
    code = "import sys, acclimate.metrics; print([m for m in ('torch', 'sklearn', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
