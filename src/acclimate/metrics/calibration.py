"""Quality and calibration of class probabilities.

Every function takes `probs` (N, C), rows summing to one, and `labels` (N,), integers in 0..C-1, and returns a float.

    accuracy   mean of 1[argmax_c p_i[c] = y_i]
    NLL        -(1/N) sum_i ln max(p_i[y_i], 1e-12), in nats
    Brier      (1/N) sum_i sum_c (p_i[c] - 1[y_i = c])^2, between 0 and 2
    ECE        sum_k |B_k|/N |acc(B_k) - conf(B_k)|, B_k = {i : (k-1)/K < max_c p_i[c] <= k/K}, K = 15

Sources: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017 (ECE, reliability diagram, temperature);
Nguyen and O'Connor, "Posterior calibration and exploratory analysis for NLP models", EMNLP 2015 (equal-count bins);
Brier, "Verification of forecasts expressed in terms of probability", 1950.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr

from acclimate.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PROBABILITY_FLOOR = 1e-12

DEFINITION = (
    "Accuracy is the share of rows whose most probable class is the label; macro F1 is the unweighted mean of F1 over the "
    "classes that occur; NLL is the mean of -ln max(p[label], 1e-12) in nats and perplexity its exponential; Brier is the "
    "mean over rows of the summed squared distance between probabilities and the one-hot label (0 to 2); ECE sums, over 15 "
    "equal-width bins of the highest probability, open on the left and closed on the right, the share of rows times "
    "|accuracy - mean confidence|; adaptive ECE does the same over 15 bins of equal count."
)

HIGHER_IS_BETTER = {
    "accuracy": True,
    "macro_f1": True,
    "nll": False,
    "perplexity": False,
    "ece": False,
    "adaptive_ece": False,
    "brier": False,
}


def check_labels(labels: ArrayLike, n: int, n_classes: int) -> IntArray:
    """`labels` as int64 (N,), or an InputError naming the shape, type or value that is wrong."""
    array = np.asarray(labels)
    if array.shape != (n,):
        raise InputError(f"labels has shape {array.shape}, expected ({n},): one label a row.")
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"labels has type {array.dtype}, expected integers 0 to {n_classes - 1}.")
    if array.min() < 0 or array.max() >= n_classes:
        raise InputError(
            f"labels range from {array.min()} to {array.max()}, but there are {n_classes} classes (0 to {n_classes - 1})."
        )
    return array.astype(np.int64)


def check_scores(scores: ArrayLike, name: str) -> FloatArray:
    """`scores` as finite float64 (N, C) with N and C at least one, or an InputError that calls it `name`."""
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 2 or array.size == 0:
        raise InputError(f"{name} has shape {array.shape}, expected (rows, classes) with at least one of each.")
    if not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array).all(axis=1)))
        raise InputError(f"{name} is not finite in row {row}: {array[row]}.")
    return array


def check(probs: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, IntArray]:
    """(probs (N, C) float64, labels (N,) int64), validated.

    Row sums may be off by 0.01, the rounding of a bfloat16 softmax. Raises InputError.
    """
    p = check_scores(probs, "probs")
    if p.min() < 0 or p.max() > 1.01:
        raise InputError(
            f"probs range from {p.min():.4g} to {p.max():.4g}, expected 0 to 1. Logits? Apply a softmax first."
        )
    sums = p.sum(axis=1)
    row = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[row] - 1) > 0.01:
        raise InputError(f"probs sums to {sums[row]:.4g} in row {row}, expected 1.")
    return p, check_labels(labels, *p.shape)


def check_bins(n_bins: int) -> int:
    """`n_bins`, or an InputError when it is below one."""
    if n_bins < 1:
        raise InputError(f"n_bins is {n_bins}, expected at least 1.")
    return n_bins


def bin_ids(confidence: FloatArray, n_bins: int) -> IntArray:
    """For each confidence the k (from zero) with k/K < confidence <= (k+1)/K; zero itself goes to the first bin. (N,)"""
    edges = np.arange(n_bins + 1) / n_bins
    return np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, n_bins - 1)


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    """Share of rows whose most probable class (the first one in a tie) is the label."""
    p, y = check(probs, labels)
    return float(np.mean(p.argmax(axis=1) == y))


def macro_f1(probs: ArrayLike, labels: ArrayLike) -> float:
    """Unweighted mean of F1 over the classes that occur among labels or predictions (scikit-learn's `average="macro"`)."""
    from sklearn.metrics import f1_score

    p, y = check(probs, labels)
    return float(f1_score(y, p.argmax(axis=1), average="macro", zero_division=0))


def nll(probs: ArrayLike, labels: ArrayLike) -> float:
    """Mean negative log likelihood in nats, probabilities floored at 1e-12."""
    p, y = check(probs, labels)
    return float(row_nll(p, y).mean())


def row_nll(probs: FloatArray, labels: IntArray) -> FloatArray:
    """-ln max(p_i[y_i], 1e-12) of each row. (N,)"""
    return -np.log(np.maximum(probs[np.arange(len(labels)), labels], PROBABILITY_FLOOR))


def brier(probs: ArrayLike, labels: ArrayLike) -> float:
    """Mean squared distance between the probabilities and the one-hot label, summed over classes: 0 to 2."""
    p, y = check(probs, labels)
    return float(row_brier(p, y).mean())


def row_brier(probs: FloatArray, labels: IntArray) -> FloatArray:
    """sum_c (p_i[c] - 1[y_i = c])^2 of each row. (N,)"""
    of_label = probs[np.arange(len(labels)), labels]
    # One-hot algebra would give |p|^2 - 2 p[y] + 1, which loses the last digits near zero.
    return np.square(probs).sum(axis=1) - of_label**2 + (1 - of_label) ** 2


def ece(probs: ArrayLike, labels: ArrayLike, n_bins: int = 15) -> float:
    """Expected calibration error over `n_bins` equal-width bins of the highest probability; empty bins count nothing."""
    p, y = check(probs, labels)
    return ece_of(p.max(axis=1), p.argmax(axis=1) == y, n_bins)


def ece_of(confidence: FloatArray, correct: NDArray[np.bool_], n_bins: int = 15) -> float:
    """ECE from the confidence in each prediction (N,) and whether it was right (N,)."""
    gap = correct - confidence
    return float(np.abs(np.bincount(bin_ids(confidence, check_bins(n_bins)), weights=gap)).sum() / len(gap))


def adaptive_ece(probs: ArrayLike, labels: ArrayLike, n_bins: int = 15) -> float:
    """Expected calibration error over `n_bins` bins of equal count, cut by `np.array_split` from the rows in order of
    confidence (rows of equal confidence stay in their given order)."""
    p, y = check(probs, labels)
    return adaptive_ece_of(p.max(axis=1), p.argmax(axis=1) == y, n_bins)


def adaptive_ece_of(confidence: FloatArray, correct: NDArray[np.bool_], n_bins: int = 15) -> float:
    """Adaptive ECE from the confidence in each prediction (N,) and whether it was right (N,)."""
    gap = (correct - confidence)[np.argsort(confidence, kind="stable")]
    bins = np.array_split(gap, check_bins(n_bins))
    return float(sum(abs(part.sum()) for part in bins) / len(gap))


def reliability_table(probs: ArrayLike, labels: ArrayLike, n_bins: int = 15) -> list[dict[str, Any]]:
    """The bins behind `ece`, ready for JSON: {lower, upper, count, confidence, accuracy}; the last two None where empty."""
    p, y = check(probs, labels)
    return reliability_bins(p.max(axis=1), p.argmax(axis=1) == y, n_bins)


def reliability_bins(confidence: FloatArray, correct: NDArray[np.bool_], n_bins: int = 15) -> list[dict[str, Any]]:
    """The same from the confidence in each prediction (N,) and whether it was right (N,), where no class table exists."""
    ids = bin_ids(confidence, check_bins(n_bins))
    rows = []
    for k in range(n_bins):
        inside = ids == k
        count = int(inside.sum())
        rows.append(
            {
                "lower": k / n_bins,
                "upper": (k + 1) / n_bins,
                "count": count,
                "confidence": float(confidence[inside].mean()) if count else None,
                "accuracy": float(correct[inside].mean()) if count else None,
            }
        )
    return rows


@dataclass(frozen=True)
class Measured:
    """A number together with what it is. Two of them can only be subtracted when they are the same thing."""

    value: float
    definition: str

    def __sub__(self, other: Measured) -> float:
        """This value minus the other. Raises InputError when their definitions differ."""
        if self.definition != other.definition:
            raise InputError(
                f"these two numbers measure different things and cannot be compared: '{self.definition}' against "
                f"'{other.definition}'. Measure both in the same way"
            )
        return self.value - other.value


def nll_of_logits(logits: ArrayLike, labels: ArrayLike, choices: Sequence[int] | None = None) -> Measured:
    """NLL of the softmax of logits (N, V), with labels in 0..V-1; `choices` restricts the softmax to these columns.

    The same model has a far lower NLL among a few choices than over a whole vocabulary, so the two must never stand beside
    each other as if they were one metric: the result says which it is. Raises InputError for a label that is not a choice.
    """
    z = check_scores(logits, "logits")
    y = check_labels(labels, *z.shape)
    if choices is None:
        return Measured(float(row_nll(_softmax(z), y).mean()), f"mean NLL in nats over all {z.shape[1]} classes")
    place = {column: index for index, column in enumerate(choices)}
    if missing := set(y.tolist()) - set(place):
        raise InputError(f"label {min(missing)} is not among the choices {list(choices)}")
    restricted = _softmax(z[:, list(choices)])
    value = float(row_nll(restricted, np.array([place[label] for label in y.tolist()])).mean())
    return Measured(value, f"mean NLL in nats among the classes {', '.join(map(str, choices))} alone")


def uncertainty_parts(samples: ArrayLike) -> dict[str, FloatArray]:
    """How unsure an average of S predictions is, and why; samples (S, N, C) are probabilities. Each part is (N,), in nats.

    total      H(mean_s p_s)      entropy of the averaged prediction
    aleatoric  mean_s H(p_s)      what every sample is unsure of by itself
    epistemic  total - aleatoric  mutual information of answer and weights: what the samples disagree on, at least 0
    """
    p = np.asarray(samples, dtype=np.float64)
    if p.ndim != 3 or p.size == 0:
        raise InputError(f"samples has shape {p.shape}, expected (samples, rows, classes).")
    total = entr(p.mean(axis=0)).sum(axis=-1)
    aleatoric = entr(p).sum(axis=-1).mean(axis=0)
    return {"total": total, "aleatoric": aleatoric, "epistemic": np.maximum(total - aleatoric, 0)}


class TemperatureScaler:
    """Divide log-probabilities by one temperature T chosen to minimise NLL (Guo et al. 2017, section 4.2).

    Predictions never change, only how confident they are: T > 1 softens an over-confident model. T is searched between
    0.01 and 100; T = 1 is kept unless the search finds something better, so NLL on the fitted rows never rises.

    Attributes:
        temperature_: the fitted T (float).
    """

    temperature_: float

    def fit(self, log_probs: ArrayLike, labels: ArrayLike) -> TemperatureScaler:
        """Find T on held-out rows: log_probs (N, C), finite, normalised or not; labels (N,). Raises InputError."""
        from scipy.optimize import minimize_scalar

        z = check_scores(log_probs, "log_probs")
        y = check_labels(labels, *z.shape)

        def loss(log_temperature: float) -> float:
            return float(row_nll(_softmax(z / np.exp(log_temperature)), y).mean())

        found = minimize_scalar(loss, bounds=(-np.log(100), np.log(100)), method="bounded", options={"xatol": 1e-7})
        self.temperature_ = float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0
        return self

    def transform(self, log_probs: ArrayLike) -> FloatArray:
        """softmax(log_probs / T): probabilities (N, C). Raises InputError before `fit`."""
        if not hasattr(self, "temperature_"):
            raise InputError("TemperatureScaler is not fitted. Call fit(log_probs, labels) on held-out rows first.")
        return _softmax(check_scores(log_probs, "log_probs") / self.temperature_)


def _softmax(z: FloatArray) -> FloatArray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)
