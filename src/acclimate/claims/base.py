"""What a claim is, and how code decides whether it holds.

A `Claim` measures rows (one a system and metric, with a value per seed) and states its headline as `Bar`s:

    FrameFT's accuracy >= LoRA's - 1 point      Bar("accuracy", "frameft", "lora", limit=-0.01)
    ECE <= 0.8x LoRA's                          Bar("ece", "bayesian-lora", "lora", better="lower", kind="ratio", limit=0.8)
    trainables <= 1/10 of LoRA's                Bar("parameters", "frameft", "lora", better="lower", kind="ratio", limit=0.1)
    speed >= 3x                                 Bar("tokens_per_second", "frameft", "fourierft", kind="ratio", limit=3)
    informed rule errs <= .01                   Bar("error", "informed", better="lower", limit=0.01)

A bar is met or missed when the whole 95 % interval of what it compares lies on one side of its limit, and unclear when
the interval straddles it. The claim holds when every bar is met, does not hold when one is missed, and is inconclusive
otherwise.

The interval. With the same seeds on both sides, e_i = system_i - r * than_i is one number a seed (r = 1 for a
difference, r = limit for a ratio) and mean(e) has Student's t interval; for a ratio this is Fieller's test, which needs
no division by a noisy number. Without common seeds the two sides' half-widths are added in quadrature. A side with one
value brings the interval of its row, if it has one; without any interval the values decide.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import multiprocessing
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from scipy.special import stdtrit

from acclimate import methods, runs
from acclimate.errors import InputError, did_you_mean

Budget = Literal["fast", "default", "full"]
Status = Literal["met", "missed", "unclear"]
Verdict = Literal["holds", "does-not-hold", "inconclusive"]

# Metrics that a bar finds in the columns of a row instead of among the measured metrics.
_COSTS = ("seconds", "peak_memory_bytes", "parameters", "adapter_bytes")
_SIGNIFICANT_DIGITS = 6


def in_a_process_of_its_own(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` of a module returns in a fresh interpreter, so that its peak of memory is its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@dataclass(frozen=True)
class Row:
    """What one system scored on one metric: a value per seed, their mean and 95 % interval, and what it cost.

    `low` and `high` are None when there is no interval (one seed, or a number that does not vary). `seconds` is the
    time of one seed's run, `parameters` the number trained, `adapter_bytes` the saved file.
    """

    system: str
    metric: str
    seeds: list[int]
    values: list[float]
    mean: float
    low: float | None = None
    high: float | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    parameters: int | None = None
    adapter_bytes: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_values(cls, system: str, metric: str, values: Sequence[float], seeds: Sequence[int], **costs: Any) -> Row:
        """The row of one value per seed: mean, and Student's t interval when there are two values or more."""
        if not values or len(values) != len(seeds) or len(set(seeds)) != len(seeds):
            raise ValueError(
                f"'{system}', {metric}: {len(values)} values for the seeds {list(seeds)}; one each is needed"
            )
        mean, half = statistics.fmean(values), _t_half_width(values)
        low, high = (mean - half, mean + half) if len(values) > 1 and math.isfinite(mean) else (None, None)
        return cls(system, metric, list(seeds), list(values), mean, low, high, **costs)


@dataclass(frozen=True)
class BarResult:
    """A bar compared with the rows: its status and one sentence with the numbers."""

    status: Status
    sentence: str


@dataclass(frozen=True)
class Bar:
    """One comparison a claim must pass.

    `metric` of `system` is compared with that of `than` (or stands alone, when `than` is None): by `kind`, the
    difference system - than, or the ratio system / than, must be at least `limit` (`better="higher"`) or at most
    `limit` (`better="lower"`). `limit` is 0 for a difference and 1 for a ratio unless given. `metric` may also be a
    cost of the rows: seconds, peak_memory_bytes, parameters or adapter_bytes.
    """

    metric: str
    system: str
    than: str | None = None
    better: Literal["higher", "lower"] = "higher"
    kind: Literal["difference", "ratio"] = "difference"
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower") or self.kind not in ("difference", "ratio"):
            raise ValueError(
                f"better is 'higher' or 'lower', kind 'difference' or 'ratio'; got {self.better!r}, {self.kind!r}"
            )
        if self.than is None and (self.kind == "ratio" or self.limit is None):
            raise ValueError("a bar without `than` compares a value with its limit: give limit, and leave kind alone")
        if self.limit is None:
            object.__setattr__(self, "limit", 1.0 if self.kind == "ratio" else 0.0)
        if self.kind == "ratio" and not self.limit > 0:  # type: ignore[operator]
            raise ValueError(f"the limit of a ratio must be positive, got {self.limit}")

    def check(self, rows: Sequence[Row]) -> BarResult:
        """Met, missed or unclear, from the rows. A system that was not measured leaves the bar unclear.

        Raises ValueError for a ratio to a negative number, which has no meaning here.
        """
        system = _side(rows, self.system, self.metric)
        than = _side(rows, self.than, self.metric) if self.than is not None else None
        for name, side in ((self.system, system), (self.than, than)):
            if name is not None and side is None:
                return BarResult("unclear", f"{self}: not measured, there is no {self.metric} of {name}")
        assert system is not None
        assert self.limit is not None
        if not math.isfinite(system.mean):
            return BarResult("missed", f"{self}: {self.system} is not a finite number")
        if than is None:
            return self._judge(system.mean - self.limit, system.half, abs(self.limit), shown=(self.limit, 1.0))
        if not math.isfinite(than.mean):
            return BarResult("unclear", f"{self}: {self.than} is not a finite number")
        against = f" ({system.mean:.4g} against {than.mean:.4g})"
        size = abs(system.mean) + abs(than.mean)
        if self.kind == "difference":
            gap, half = _contrast(system, than, 1.0)
            return self._judge(gap - self.limit, half, size, shown=(self.limit, 1.0), note=against)
        if than.mean < 0:
            raise ValueError(f"{self}: a ratio to {than.mean:g} has no meaning; use a difference")
        excess, half = _contrast(system, than, self.limit)
        # system/than - limit = excess/than: the interval shown is on the side of the limit that the excess's is of 0.
        shown = (self.limit, 1 / than.mean) if than.mean > 0 else None
        return self._judge(excess, half, size, shown=shown, note=against)

    def _judge(
        self, excess: float, half: float, size: float, shown: tuple[float, float] | None, note: str = ""
    ) -> BarResult:
        """The result for `excess` +- `half` over the limit; `shown` is the origin and unit of the number in the sentence."""
        gain = excess if self.better == "higher" else -excess
        tolerance = 1e-12 * size  # 0.89 is not more than a point below 0.90, whatever floating point says
        status: Status = "unclear"
        if gain - half >= -tolerance:
            status = "met"
        elif gain + half < -tolerance:
            status = "missed"
        number = ""
        if shown is not None:
            origin, unit = shown
            low, middle, high = (f"{origin + unit * value:.4g}" for value in (excess - half, excess, excess + half))
            number = f" {middle}" if half == 0 else f" {middle} [{low}, {high}]"
        return BarResult(status, f"{self}:{number}{note}")

    def __str__(self) -> str:
        sign = ">=" if self.better == "higher" else "<="
        what = self.metric.replace("_", " ")
        if self.than is None:
            return f"{what} of {self.system} {sign} {self.limit:g}"
        operator = "/" if self.kind == "ratio" else "-"
        return f"{what}, {self.system} {operator} {self.than} {sign} {self.limit:g}"


@dataclass(frozen=True)
class Evidence:
    """What a claim's experiment found: the rows, the verdict with its reasons, and where and when it was measured."""

    name: str
    method: str
    statement: str
    rows: list[Row]
    verdict: Verdict
    reasons: list[str]
    budget: Budget
    environment: dict[str, Any]
    duration_seconds: float
    created: str
    command: str

    def to_json(self) -> str:
        """JSON with sorted keys and six significant digits; NaN and infinity become null."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Evidence:
        """Read what `to_json` wrote; null in a row's values or mean is read as NaN. Raises InputError for other text."""
        try:
            content = json.loads(text)
            rows = [
                Row(**{**row, "values": [_nan(v) for v in row["values"]], "mean": _nan(row["mean"])})
                for row in content["rows"]
            ]
            return cls(**{**content, "rows": rows})
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"this is no evidence of a claim: {type(error).__name__}: {error}") from None

    def plot(self) -> str:
        """An SVG file of the systems on the metric of the first row."""
        from acclimate.report.plots import evidence_plot, standalone

        metric = self.rows[0].metric
        rows = [(row.system, row.mean, row.low, row.high) for row in self.rows if row.metric == metric]
        return standalone(evidence_plot(rows, metric.replace("_", " ")))

    def save(self, directory: str | Path) -> Path:
        """Write NAME.json and NAME.svg in `directory`, each in one step; returns the path of the JSON."""
        path = Path(directory) / f"{self.name}.json"
        runs.write_text(path.with_suffix(".svg"), self.plot())
        runs.write_text(path, self.to_json())
        return path


class Claim(ABC):
    """A method's headline as an experiment. A subclass says what is claimed and how to measure it.

    `name` is what `acclimate bench` and the evidence file call it, `method` the row of the methods table, `statement`
    the claim in plain words, `bars` what must be true of the rows for it to hold.
    """

    name: ClassVar[str]
    method: ClassVar[str]
    statement: ClassVar[str]
    bars: ClassVar[Sequence[Bar]]

    @abstractmethod
    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        """Run the experiment: under a minute for "fast", the specification's for "default", scaled up for "full".

        `report` shows a line to whoever is waiting.
        """

    def run(self, budget: Budget = "default", progress: Callable[[str], None] | None = None) -> Evidence:
        """Measure, compare with the bars, and return the evidence. Raises InputError for an unknown budget."""
        if budget not in get_args(Budget):
            raise InputError(f"unknown budget '{budget}': choose one of {', '.join(get_args(Budget))}")
        start = time.perf_counter()
        rows = self.measure(budget, progress or (lambda line: None))
        duration = time.perf_counter() - start
        if not rows:
            raise RuntimeError(f"the claim '{self.name}' measured nothing")
        results = [bar.check(rows) for bar in self.bars]
        environment = runs.provenance()
        return Evidence(
            name=self.name,
            method=self.method,
            statement=self.statement,
            rows=rows,
            verdict=verdict([result.status for result in results]),
            reasons=[f"{result.status}: {result.sentence}" for result in results],
            budget=budget,
            created=environment.pop("created"),
            environment=environment,
            duration_seconds=duration,
            command=f"acclimate bench {self.name}" + ("" if budget == "default" else f" --{budget}"),
        )


def verdict(statuses: Sequence[Status]) -> Verdict:
    """All bars met: holds. One missed: does-not-hold. Otherwise (also without any bar): inconclusive."""
    if "missed" in statuses:
        return "does-not-hold"
    return "holds" if statuses and all(status == "met" for status in statuses) else "inconclusive"


def load_claim(name: str) -> Claim:
    """The claim called `name` (a method's name, or one of its aliases), with its module imported.

    Raises InputError for an unknown name, a method without a claim, and a claim that is planned.
    """
    rows = [method for method in methods.all_methods() if method.claim]
    wanted = name.lower().replace("_", "-")
    method = next((row for row in rows if wanted in (row.name, *row.aliases)), None)
    available = ", ".join(sorted(row.name for row in rows if row.status == "ready")) or "none yet"
    if method is None:
        hint = did_you_mean(wanted, [row.name for row in rows])
        raise InputError(f"There is no claim '{name}'.{hint} The ready claims: {available}.")
    if method.status != "ready":
        raise InputError(f"The claim '{method.name}' is planned, not built yet; ready claims: {available}.")
    # A third party's claim lives in its own package and says so with a dotted path.
    module = str(method.claim) if "." in str(method.claim) else f"acclimate.claims.{method.claim}"
    claim: Claim = importlib.import_module(module).CLAIM
    return claim


@dataclass(frozen=True)
class _Side:
    """One side of a bar: its mean, its values by seed (empty for a cost), and the half-width of its own interval."""

    mean: float
    by_seed: dict[int, float]
    half: float


def _side(rows: Sequence[Row], system: str, metric: str) -> _Side | None:
    own = [row for row in rows if row.system == system]
    if metric in _COSTS:
        costs = [getattr(row, metric) for row in own if getattr(row, metric) is not None]
        return _Side(float(costs[0]), {}, 0.0) if costs else None
    row = next((row for row in own if row.metric == metric), None)
    if row is None:
        return None
    half = _t_half_width(row.values)
    if len(row.values) == 1 and row.low is not None and row.high is not None:
        half = max(row.high - row.mean, row.mean - row.low)
    return _Side(row.mean, dict(zip(row.seeds, row.values, strict=True)), half)


def _contrast(system: _Side, than: _Side, factor: float) -> tuple[float, float]:
    """Estimate and half-width of the 95 % interval of system - factor * than."""
    estimate = system.mean - factor * than.mean
    if len(system.by_seed) > 1 and system.by_seed.keys() == than.by_seed.keys():
        return estimate, _t_half_width([value - factor * than.by_seed[seed] for seed, value in system.by_seed.items()])
    return estimate, math.hypot(system.half, factor * than.half)


def _t_half_width(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 0.0
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, float):
        return float(f"{content:.{_SIGNIFICANT_DIGITS}g}") if math.isfinite(content) else None
    return content


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
