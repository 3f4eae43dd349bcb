"""How sure: bootstrap intervals of one system's scores, and of the difference between two.

Everything here resamples with a fixed seed, so the same scores give the same interval. Intervals are percentile
intervals (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).

A comparison has two sources of chance: which examples were scored, and which seeds were trained. `paired_difference`
resamples both (Owen, "The pigeonhole bootstrap", 2007), which errs on the side of too wide an interval. With ONE seed it can only resample examples: the interval then
says how sure the result is for these two trained models, and nothing about what another training run would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from acclimate.errors import InputError
from acclimate.metrics.calibration import bin_ids, check, row_brier, row_nll

FloatArray = NDArray[np.float64]

# Entries of a block of resampling counts: 4e6 float64 are 32 MB.
BLOCK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A score and the interval it lies in: `level` confidence, from `n` examples."""

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """Mean score of a minus mean score of b, its interval, and the two-sided bootstrap p-value of "no difference".

    `n_seeds` is the number of trained seeds behind the comparison; with 1 the interval covers chance in the examples
    only, not in training.
    """

    value: float
    low: float
    high: float
    p_value: float
    n_examples: int
    n_seeds: int
    level: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bootstrap_interval(
    statistic: Callable[..., float], *arrays: ArrayLike, n_resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile interval of `statistic(*arrays)`, rows (first axis) of all arrays resampled together.

    Args:
        statistic: takes arrays shaped like `arrays` and returns a number; called `n_resamples` + 1 times.
        arrays: one or more arrays with the same number of rows N >= 1.
        n_resamples: number of bootstrap samples.
        level: confidence of the interval.
        seed: of the resampling.

    Raises:
        InputError: no arrays, no rows, or arrays of different length.
    """
    data = [np.asarray(array) for array in arrays]
    lengths = [len(array) if array.ndim else 0 for array in data]
    if not data or min(lengths) < 1 or len(set(lengths)) > 1:
        raise InputError(
            f"bootstrap_interval needs arrays with the same number of rows, at least one; got lengths {lengths}."
        )
    _check_resampling(n_resamples, level)
    n, rng = lengths[0], np.random.default_rng(seed)
    samples = np.empty(n_resamples)
    for r in range(n_resamples):
        rows = rng.integers(n, size=n)
        samples[r] = statistic(*(array[rows] for array in data))
    return _interval(float(statistic(*data)), samples, n, level)


def summarise(probs: ArrayLike, labels: ArrayLike, n_resamples: int = 1000, seed: int = 0) -> dict[str, dict[str, Any]]:
    """All metrics of `calibration` with 95% intervals, as {metric: Interval.to_dict()}.

    `probs` (N, C), `labels` (N,). Metrics: accuracy, macro_f1, nll, perplexity, ece, adaptive_ece, brier; the ECEs use
    15 bins. Resampling adds noise inside every bin and class, which biases the resampled ECEs up and macro F1 down; the
    resamples of these three are shifted by their bootstrap bias so that the interval sits around the value it belongs to.
    Raises InputError as `calibration.check` does.
    """
    from scipy.sparse import csr_array

    p, y = check(probs, labels)
    _check_resampling(n_resamples, 0.95)
    # Rows in order of confidence: any resample that is listed by row number is then sorted, which adaptive ECE needs.
    order = np.argsort(p.max(axis=1), kind="stable")
    p, y = p[order], y[order]
    n, n_bins = len(y), 15
    confidence, prediction = p.max(axis=1), p.argmax(axis=1)
    correct = (prediction == y).astype(np.float64)
    gap = correct - confidence
    rows = np.arange(n)
    linear = np.stack([correct, row_nll(p, y), row_brier(p, y)], axis=1)
    gap_by_bin = csr_array((gap, (rows, bin_ids(confidence, n_bins))), shape=(n, n_bins))
    classes, both = np.unique(np.concatenate([y, prediction]), return_inverse=True)
    as_label, as_prediction = (
        csr_array((np.ones(n), (rows, ids)), shape=(n, len(classes))) for ids in (both[:n], both[n:])
    )
    hits = as_label.multiply(correct[:, None]).tocsr()
    bounds = np.concatenate([[0], np.cumsum([len(part) for part in np.array_split(rows, n_bins)])])

    def statistics(counts: FloatArray) -> dict[str, FloatArray]:
        """The metrics of each resample; counts (R, N) says how often each row was drawn, N in all."""
        means = counts @ linear / n
        drawn = np.repeat(np.tile(rows, len(counts)), counts.astype(np.int64).ravel()).reshape(-1, n)
        running = np.pad(np.cumsum(gap[drawn], axis=1), ((0, 0), (1, 0)))
        # 2 TP / (2 TP + FP + FN): the denominator is (times it is the label) + (times it is predicted).
        occurrences = counts @ as_label + counts @ as_prediction
        f1 = np.divide(2 * (counts @ hits), occurrences, out=np.zeros_like(occurrences), where=occurrences > 0)
        return {
            "accuracy": means[:, 0],
            "macro_f1": f1.sum(axis=1) / (occurrences > 0).sum(axis=1),
            "nll": means[:, 1],
            "perplexity": np.exp(means[:, 1]),
            "ece": np.abs(counts @ gap_by_bin).sum(axis=1) / n,
            "adaptive_ece": np.abs(np.diff(running[:, bounds], axis=1)).sum(axis=1) / n,
            "brier": means[:, 2],
        }

    values = {name: float(column[0]) for name, column in statistics(np.ones((1, n))).items()}
    blocks = [statistics(counts) for counts in _resampling_counts(n, n_resamples, np.random.default_rng(seed))]
    summary = {}
    for name, value in values.items():
        samples = np.concatenate([block[name] for block in blocks])
        if name in ("ece", "adaptive_ece", "macro_f1"):
            samples = np.clip(samples - (samples.mean() - value), 0, 1)
        summary[name] = _interval(value, samples, n, 0.95).to_dict()
    return summary


def paired_difference(
    a: ArrayLike, b: ArrayLike, n_resamples: int = 5000, level: float = 0.95, seed: int = 0
) -> Difference:
    """Mean of `a` minus mean of `b`, with a hierarchical bootstrap over examples and seeds.

    Args:
        a, b: scores (n_seeds, n_examples), or (n_examples,) for one seed, of the SAME examples in the same order. With
            equal numbers of seeds, seed i of `a` is paired with seed i of `b`. One seed against several (an untouched
            base against trained models) is paired with each of them. Any other pair of counts is resampled independently.
        n_resamples: number of bootstrap samples.
        level: confidence of the interval.
        seed: of the resampling.

    With S seeds the resampling weights of seeds are spread by sqrt(S / (S-1)) (Rao and Wu, "Resampling inference with
    complex survey data", 1988), without which three seeds would show two thirds of their variance. A handful of seeds
    still gives a rough idea only. With ONE seed the interval says nothing about seed-to-seed variation: it holds for
    these two trained models, not for their recipes.

    The p-value is 2 min(P(d <= 0), P(d >= 0)) over resamples d, at least 1/n_resamples and at least 2^(1-n_examples),
    the least a sign test on so many examples could give.

    Raises:
        InputError: different numbers of examples, none at all, more than two dimensions, or non-finite scores.
    """
    scores_a, scores_b = _check_scores(a, "a"), _check_scores(b, "b")
    n = scores_a.shape[1]
    if scores_b.shape[1] != n:
        raise InputError(
            f"a has scores of {n} examples and b of {scores_b.shape[1]}: both must score the same examples."
        )
    _check_resampling(n_resamples, level)
    seeds_a, seeds_b = len(scores_a), len(scores_b)
    rng = np.random.default_rng(seed)
    paired = seeds_a == seeds_b or 1 in (seeds_a, seeds_b)
    # Subtracting first makes equal scores differ by exactly zero in every resample.
    parts = [scores_a - scores_b] if paired else [scores_a, -scores_b]
    weights = [_seed_weights(len(part), n_resamples, rng) for part in parts]
    samples, start = np.empty(n_resamples), 0
    for counts in _resampling_counts(n, n_resamples, rng):
        stop = start + len(counts)
        samples[start:stop] = sum(
            np.einsum("rs,rs->r", weight[start:stop], counts @ part.T) / part.size
            for part, weight in zip(parts, weights, strict=True)
        )
        start = stop
    tail = 2 * min(float(np.mean(samples <= 0)), float(np.mean(samples >= 0)))
    low, high = _percentiles(samples, level)
    return Difference(
        value=float(sum(part.mean() for part in parts)),
        low=low,
        high=high,
        p_value=min(1.0, max(tail, 1 / n_resamples, _least_p_value(n))),
        n_examples=n,
        n_seeds=max(seeds_a, seeds_b) if paired else min(seeds_a, seeds_b),
        level=level,
    )


def verdict(difference: Difference, higher_is_better: bool = True) -> str:
    """ "better", "worse" (a against b) or "no clear difference".

    Clear means that the interval excludes zero and that there are enough examples for any test to tell: six at level
    0.95, since five equal signs have p = 0.0625.
    """
    excludes_zero = difference.low > 0 or difference.high < 0
    if not excludes_zero or _least_p_value(difference.n_examples) > 1 - difference.level:
        return "no clear difference"
    return "better" if (difference.low > 0) == higher_is_better else "worse"


def in_words(name_a: str, name_b: str, metric: str, difference: Difference, higher_is_better: bool = True) -> str:
    """One plain sentence, such as "lora is better than base in accuracy by 0.452 (95% interval 0.410 to 0.490, 400
    examples, 3 seeds)."."""
    d, judgement = difference, verdict(difference, higher_is_better)
    counts = f"{_count(d.n_examples, 'example')}, {_count(d.n_seeds, 'seed')}"
    level = f"{100 * d.level:.3g}% interval"
    if judgement == "no clear difference":
        return (
            f"{name_a} and {name_b} cannot be told apart in {metric} "
            f"(difference {_number(d.value)}, {level} {_number(d.low)} to {_number(d.high)}, {counts})."
        )
    size, low, high = (d.value, d.low, d.high) if d.low > 0 else (-d.value, -d.high, -d.low)
    by = "by" if higher_is_better else ("lower by" if judgement == "better" else "higher by")
    comma = "" if higher_is_better else ","
    return (
        f"{name_a} is {judgement} than {name_b} in {metric}{comma} {by} {_number(size)} "
        f"({level} {_number(low)} to {_number(high)}, {counts})."
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for testing all of them at once (Holm, "A simple sequentially rejective multiple test
    procedure", 1979), in the order given. The i-th smallest of m becomes max over j <= i of (m - j + 1) p_(j), at most 1."""
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise InputError(f"holm needs a list of p-values between 0 and 1, got {p_values!r}.")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return [float(value) for value in adjusted]


def _check_resampling(n_resamples: int, level: float) -> None:
    if n_resamples < 1 or not 0 < level < 1:
        raise InputError(f"n_resamples must be at least 1 and level between 0 and 1; got {n_resamples} and {level}.")


def _check_scores(scores: ArrayLike, name: str) -> FloatArray:
    array = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if array.ndim != 2 or array.size == 0:
        raise InputError(f"{name} has shape {np.shape(scores)}, expected (seeds, examples) or (examples,), not empty.")
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise InputError(f"{name} is not finite at seed {row}, example {column}.")
    return array


def _resampling_counts(n: int, n_resamples: int, rng: np.random.Generator) -> Iterator[FloatArray]:
    """Blocks (R, n) of how often each of n rows is drawn in each resample; the R of all blocks sum to n_resamples."""
    size = max(1, BLOCK // n)
    for start in range(0, n_resamples, size):
        r = min(size, n_resamples - start)
        flat = rng.integers(n, size=(r, n)) + n * np.arange(r)[:, None]
        yield np.bincount(flat.ravel(), minlength=r * n).reshape(r, n).astype(np.float64)


def _seed_weights(n_seeds: int, n_resamples: int, rng: np.random.Generator) -> FloatArray:
    """Weights (n_resamples, n_seeds) with mean 1: multinomial counts, spread to the unbiased variance."""
    if n_seeds == 1:
        return np.ones((n_resamples, 1))
    counts = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=n_resamples)
    return 1 + (counts - 1) * np.sqrt(n_seeds / (n_seeds - 1))


def _percentiles(samples: FloatArray, level: float) -> tuple[float, float]:
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _interval(value: float, samples: FloatArray, n: int, level: float) -> Interval:
    low, high = _percentiles(samples, level)
    return Interval(value=value, low=low, high=high, n=n, level=level)


def _least_p_value(n_examples: int) -> float:
    return 2.0 ** (1 - n_examples)


def _number(value: float) -> str:
    return f"{value:.2g}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
