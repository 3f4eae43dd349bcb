import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, f1_score, log_loss

from acclimate.errors import InputError
from acclimate.metrics import (
    Measured,
    TemperatureScaler,
    accuracy,
    adaptive_ece,
    brier,
    ece,
    macro_f1,
    nll,
    nll_of_logits,
    reliability_table,
    uncertainty_parts,
)


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@st.composite
def predictions(draw, max_rows=40, max_classes=7):
    """Random (probs, labels), from nearly one-hot to nearly uniform."""
    n, c = draw(st.integers(1, max_rows)), draw(st.integers(2, max_classes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    probs = softmax(rng.normal(size=(n, c)) * draw(st.sampled_from([0.01, 1.0, 5.0, 40.0])))
    return probs, rng.integers(c, size=n)


def test_closed_forms_on_two_rows():
    probs, labels = np.array([[0.8, 0.2], [0.6, 0.4]]), np.array([0, 1])
    assert accuracy(probs, labels) == 0.5
    assert nll(probs, labels) == pytest.approx(-(np.log(0.8) + np.log(0.4)) / 2, rel=1e-15)
    assert brier(probs, labels) == pytest.approx((2 * 0.2**2 + 2 * 0.6**2) / 2, rel=1e-15)
    # One row to a bin: |1 - 0.8| / 2 + |0 - 0.6| / 2.
    assert ece(probs, labels) == pytest.approx(0.4, rel=1e-14)
    # One bin for both: |0.5 - 0.7|.
    assert ece(probs, labels, n_bins=1) == pytest.approx(0.2, rel=1e-14)
    assert adaptive_ece(probs, labels, n_bins=1) == pytest.approx(0.2, rel=1e-14)
    # F1 of class 0: P = 1/2, R = 1 -> 2/3; of class 1: 0.
    assert macro_f1(probs, labels) == pytest.approx(1 / 3, rel=1e-15)


def test_probability_zero_on_the_label_is_floored():
    assert nll(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(-np.log(1e-12))


def test_bins_are_open_on_the_left_and_closed_on_the_right():
    # 0.6 = 3/5 belongs to the third of five bins; a little more belongs to the fourth.
    probs = np.array([[0.6, 0.4], [0.6 + 1e-9, 0.4 - 1e-9], [1.0, 0.0]])
    counts = [row["count"] for row in reliability_table(probs, [0, 0, 0], n_bins=5)]
    assert counts == [0, 0, 1, 1, 1]


def test_every_edge_of_fifteen_bins_falls_in_the_bin_it_closes():
    for k in range(8, 16):
        probs = np.array([[k / 15, 1 - k / 15]])
        table = reliability_table(probs, [0])
        assert [row["count"] for row in table].index(1) == k - 1


def test_adaptive_ece_bins_hold_equal_counts():
    confidence = np.array([0.9, 0.6, 0.7, 0.8])
    probs = np.stack([confidence, 1 - confidence], axis=1)
    labels = np.array([0, 0, 1, 1])
    # In order of confidence: 0.6 right, 0.7 wrong | 0.8 wrong, 0.9 right: gaps 0.4 - 0.7 and -0.8 + 0.1.
    assert adaptive_ece(probs, labels, n_bins=2) == pytest.approx((0.3 + 0.7) / 4, rel=1e-14)


@given(predictions())
def test_ranges_and_the_table_behind_ece(case):
    probs, labels = case
    assert 0 <= brier(probs, labels) <= 2
    assert 0 <= adaptive_ece(probs, labels) <= 1
    table = reliability_table(probs, labels)
    assert sum(row["count"] for row in table) == len(labels)
    from_table = sum(r["count"] * abs(r["accuracy"] - r["confidence"]) for r in table if r["count"]) / len(labels)
    assert ece(probs, labels) == pytest.approx(from_table, abs=1e-12)
    assert all((row["accuracy"] is None) == (row["count"] == 0) for row in table)


@given(predictions())
def test_agrees_with_scikit_learn(case):
    probs, labels = case
    classes = np.arange(probs.shape[1])
    assert accuracy(probs, labels) == accuracy_score(labels, probs.argmax(axis=1))
    assert macro_f1(probs, labels) == pytest.approx(
        f1_score(labels, probs.argmax(axis=1), average="macro", zero_division=0), abs=1e-12
    )
    if probs[np.arange(len(labels)), labels].min() > 1e-12:
        assert nll(probs, labels) == pytest.approx(log_loss(labels, probs, labels=classes), rel=1e-9, abs=1e-12)
    if probs.shape[1] == 2:
        # For two classes our sum over classes counts the same squared distance twice.
        assert brier(probs, labels) == pytest.approx(2 * brier_score_loss(labels, probs[:, 1], pos_label=1), abs=1e-12)


@given(st.integers(1, 50), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_perfect_and_uniform_predictions(n, c, seed):
    labels = np.random.default_rng(seed).integers(c, size=n)
    perfect, uniform = np.eye(c)[labels], np.full((n, c), 1 / c)
    assert (ece(perfect, labels), adaptive_ece(perfect, labels), brier(perfect, labels)) == (0, 0, 0)
    assert (nll(perfect, labels), accuracy(perfect, labels), macro_f1(perfect, labels)) == (0, 1, 1)
    assert nll(uniform, labels) == pytest.approx(np.log(c), rel=1e-12)
    assert brier(uniform, labels) == pytest.approx(1 - 1 / c, rel=1e-12)


@given(predictions())
@settings(max_examples=50)
def test_temperature_never_raises_nll_on_its_fit_data_nor_changes_predictions(case):
    probs, labels = case
    log_probs = np.log(np.maximum(probs, 1e-12))
    scaled = TemperatureScaler().fit(log_probs, labels).transform(log_probs)
    assert nll(scaled, labels) <= nll(softmax(log_probs), labels) + 1e-12
    assert accuracy(scaled, labels) >= accuracy(probs, labels) - 1e-12 or np.unique(log_probs).size < log_probs.size


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temperature_recovers_the_one_the_labels_were_drawn_with(temperature):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(20_000, 5)) * 3
    labels = (softmax(z / temperature).cumsum(axis=1) > rng.random((len(z), 1))).argmax(axis=1)
    # Standard error of ln T here is below 0.02.
    assert TemperatureScaler().fit(z, labels).temperature_ == pytest.approx(temperature, rel=0.05)


def test_temperature_scaler_needs_fit():
    with pytest.raises(InputError, match="not fitted"):
        TemperatureScaler().transform(np.zeros((1, 2)))


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        ([0.5, 0.5], [0], r"shape \(2,\)"),
        (np.empty((0, 2)), [], r"shape \(0, 2\)"),
        ([[0.5, 0.5]], [0, 1], r"shape \(2,\)"),
        ([[0.5, 0.5]], [2], "2 classes"),
        ([[0.5, 0.5]], [-1], "range from -1"),
        ([[0.5, 0.5]], [0.0], "float64"),
        ([[np.nan, 0.5]], [0], "not finite in row 0"),
        ([[3.0, -2.0]], [0], "range from -2 to 3"),
        ([[0.5, 0.5], [0.5, 0.3]], [0, 0], "0.8 in row 1"),
    ],
)
def test_bad_input_is_named(probs, labels, message):
    for metric in (accuracy, macro_f1, nll, brier, ece, adaptive_ece, reliability_table):
        with pytest.raises(InputError, match=message):
            metric(probs, labels)


def test_number_of_bins_is_checked():
    with pytest.raises(InputError, match="n_bins is 0"):
        ece([[1.0, 0.0]], [0], n_bins=0)


@settings(max_examples=40, deadline=None)
@given(predictions(max_rows=200))
def test_agrees_with_torchmetrics(case):
    """Its bins are closed on the left and ours on the right, so the two are one metric but for confidences on an edge."""
    import torch
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs, labels = case
    edges = probs.max(axis=1) * 15
    assume((np.abs(edges - np.round(edges)) > 1e-4).all())
    expected = multiclass_calibration_error(
        torch.tensor(probs), torch.tensor(labels), num_classes=probs.shape[1], n_bins=15, norm="l1"
    )
    assert ece(probs, labels) == pytest.approx(float(expected), abs=1e-6)


def test_confidence_that_equals_the_hit_rate_has_no_calibration_error():
    probs = np.tile([0.7, 0.3], (10, 1))
    labels = np.array([0] * 7 + [1] * 3)
    assert ece(probs, labels) == pytest.approx(0, abs=1e-12)
    assert brier(probs, labels) == pytest.approx(0.7 * 2 * 0.3**2 + 0.3 * 2 * 0.7**2, rel=1e-12)


@pytest.mark.parametrize(
    ("probs", "labels", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0, 1], {"ece": 0.0, "nll": 0.0, "brier": 0.0}),
        ([[0.5, 0.5], [0.5, 0.5]], [0, 1], {"ece": 0.0, "nll": np.log(2), "brier": 0.5}),
        ([[0.9, 0.1]], [1], {"ece": 0.9, "nll": -np.log(0.1), "brier": 2 * 0.81}),
        ([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], [2, 1], {"ece": 0.35, "nll": -np.log(0.4) / 2, "brier": 0.22}),
    ],
)
def test_four_examples_by_hand(probs, labels, expected):
    for name, value in expected.items():
        found = {"ece": ece, "nll": nll, "brier": brier}[name](np.array(probs), np.array(labels))
        assert found == pytest.approx(value, abs=1e-12), name


def test_nll_among_choices_and_over_the_vocabulary_are_different_metrics():
    """The same logits: sure between the two answers, unsure among a thousand words."""
    logits = np.zeros((4, 1000))
    logits[:, 7] = 4.0
    labels = np.full(4, 7)
    among = nll_of_logits(logits, labels, choices=[3, 7])
    whole = nll_of_logits(logits, labels)
    assert among.value == pytest.approx(np.log(1 + np.exp(-4)), rel=1e-12)
    assert whole.value == pytest.approx(np.log(999 * np.exp(-4) + 1), rel=1e-12)
    assert whole.value > 100 * among.value
    with pytest.raises(InputError, match="cannot be compared: 'mean NLL in nats over all 1000 classes'"):
        _ = whole - among
    other = nll_of_logits(logits + np.eye(1000)[7], labels, choices=[3, 7])
    assert other - among == pytest.approx(np.log(1 + np.exp(-5)) - np.log(1 + np.exp(-4)), rel=1e-9)
    with pytest.raises(InputError, match="alone"):
        _ = among - nll_of_logits(logits, labels, choices=[4, 7])
    with pytest.raises(InputError, match="label 7 is not among the choices"):
        nll_of_logits(logits, labels, choices=[3, 4])
    assert Measured(2.0, "x") - Measured(0.5, "x") == 1.5


@settings(max_examples=40, deadline=None)
@given(predictions(), st.integers(1, 5), st.integers(0, 1000))
def test_uncertainty_adds_up_and_is_mutual_information(case, draws, seed):
    probs, _ = case
    rng = np.random.default_rng(seed)
    samples = softmax((np.log(probs + 1e-9) + rng.normal(size=(draws, *probs.shape))).reshape(-1, probs.shape[1]))
    samples = samples.reshape(draws, *probs.shape)
    parts = uncertainty_parts(samples)
    np.testing.assert_allclose(parts["total"], parts["aleatoric"] + parts["epistemic"], atol=1e-9)
    # I(y; w) = mean_s KL(p_s | mean)
    mean = samples.mean(axis=0)
    kl = np.where(samples > 0, samples * np.log(np.maximum(samples, 1e-300) / mean), 0).sum(axis=-1).mean(axis=0)
    np.testing.assert_allclose(parts["epistemic"], kl, atol=1e-9)
    assert (parts["epistemic"] >= 0).all()
    if draws == 1:
        np.testing.assert_allclose(parts["epistemic"], 0, atol=1e-12)


def test_samples_that_agree_are_aleatoric_and_that_contradict_are_epistemic():
    agree = uncertainty_parts(np.full((4, 1, 2), 0.5))
    assert (agree["aleatoric"][0], agree["epistemic"][0]) == (pytest.approx(np.log(2)), 0)
    contradict = uncertainty_parts([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert (contradict["aleatoric"][0], contradict["epistemic"][0]) == (0, pytest.approx(np.log(2)))
    with pytest.raises(InputError, match="samples has shape"):
        uncertainty_parts(np.ones((2, 2)))
