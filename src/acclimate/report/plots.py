"""Plots as SVG text that can be put into a page.

Each function returns one `<svg>` element: transparent, its axes and text in `currentColor` so that it follows a light
or dark page, its series in colours that colour-blind readers can tell apart (after Okabe and Ito) and that reach a
contrast of 3 on white and on near-black. The same data gives the same bytes. Text stays text, so it can be selected
and searched. `standalone` makes a file of one.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from acclimate.report import numbers

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b86b96", "#a87600", "#7f7f7f")
DASHES = ("-", "--", ":")
# Stands for the colour of the page's text until the SVG is written; no series has it.
INK = "#010203"
WIDTH = 5.0  # inches: 360 units, so that text of 10 stays legible on a phone

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "acclimate",
    "text.parse_math": False,  # a "$" in somebody's data is a dollar
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
}


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A matplotlibrc of the user's must not change the bytes.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        # The page's font draws the text, so it does not matter which glyphs matplotlib's has.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def loss_curve(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Loss against step from the rows of metrics.jsonl: `loss` as it was logged (with a running mean where it is noisy)
    and `eval_loss` as points. None when no row has either."""
    train = _finite((row["step"], row["loss"]) for row in rows if "step" in row and "loss" in row)
    held_out = _finite((row["step"], row["eval_loss"]) for row in rows if "step" in row and "eval_loss" in row)
    if not len(train) and not len(held_out):
        return None
    with _style():
        figure, axes = _figure(3.1)
        noisy = len(train) > 30
        smooth = _thin(np.stack([train[:, 0], _running_mean(train[:, 1])], axis=1))
        train = _thin(train)
        if len(train):
            axes.plot(*train.T, color=COLOURS[0], alpha=0.35 if noisy else 1, linewidth=0.9 if noisy else 1.6,
                      marker="" if len(train) > 12 else "o", markersize=4, label="" if noisy else "training")  # fmt: skip
        if noisy:
            axes.plot(*smooth.T, color=COLOURS[0], label="training (running mean)")
        if len(held_out):
            axes.plot(*held_out.T, color=COLOURS[1], marker="s", markersize=4, label="held out")
        _label(axes, "step", "loss (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.legend(loc="outside upper right", ncols=2)
        last = (train if len(train) else held_out)[-1]
        return _svg(figure, f"Loss against step, ending at {numbers.number(float(last[1]))} at step {int(last[0])}")


def loss_curves(series: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> str | None:
    """Training loss of several systems: {name: one list of (step, loss) a seed}. Seeds are thin, their mean over the
    steps they share thick. None when there is nothing to draw."""
    curves = {name: [_thin(run) for run in map(_finite, runs) if len(run)] for name, runs in series.items()}
    curves = {name: runs for name, runs in curves.items() if runs}
    if not curves:
        return None
    with _style():
        figure, axes = _figure(3.1 + 0.17 * len(curves))
        for i, (name, runs) in enumerate(curves.items()):
            colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
            if len(runs) > 1:
                for run in runs:
                    axes.plot(*run.T, color=colour, alpha=0.25, linewidth=0.7)
            steps = sorted(set.intersection(*({float(step) for step in run[:, 0]} for run in runs)))
            mean = np.mean([[dict(map(tuple, run))[step] for step in steps] for run in runs], axis=0)
            axes.plot(steps, mean, color=colour, linestyle=dash, label=_short(name, 50))
        _label(axes, "step", "training loss (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.legend(loc="outside lower left", ncols=1 if max(map(len, curves)) > 24 else 2)
        return _svg(figure, f"Training loss against step of {', '.join(curves)}")


def lines(series: Mapping[str, Sequence[Sequence[float]]], x: str, y: str, log: bool = False) -> str | None:
    """A line for each name through its (x, y) points, `x` and `y` the labels of the axes; `log` scales y. None without a finite point."""
    curves = {name: _thin(points) for name, run in series.items() if len(points := _finite(run))}
    if not curves:
        return None
    with _style():
        figure, axes = _figure(2.6 + 0.17 * -(-len(curves) // 2))
        for i, (name, points) in enumerate(curves.items()):
            axes.plot(*points.T, marker="o" if len(points) <= 12 else "", markersize=3, color=COLOURS[i % len(COLOURS)],
                      linestyle=DASHES[i // len(COLOURS) % len(DASHES)], label=_short(name, 50))  # fmt: skip
        if log:
            axes.set_yscale("log")
        _label(axes, x, _wrapped(y))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.legend(loc="outside lower left", ncols=2)
        return _svg(figure, f"{y} against {x} of {', '.join(curves)}")


def reliability(table: Sequence[Mapping[str, Any]], title: str) -> str:
    """Reliability diagram of the rows of `metrics.reliability_table`: accuracy against confidence with 95% Wilson
    intervals of each bin, the diagonal of perfect calibration, and below it how many rows fall in each bin."""
    filled = [row for row in table if row["count"]]
    confidence, accuracy, n = (
        np.array([row[key] for row in filled], dtype=float) for key in ("confidence", "accuracy", "count")
    )
    low, high = _wilson(accuracy, n)
    with _style():
        figure = Figure(figsize=(WIDTH, 4.4))
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.6)
        axes.vlines(
            confidence,
            accuracy,
            confidence,
            color=COLOURS[1],
            linewidth=4,
            alpha=0.35,
            label="gap (its mean is the ECE)",
        )
        axes.errorbar(confidence, accuracy, yerr=[accuracy - low, high - accuracy], color=COLOURS[0], fmt="o", markersize=4.5,
                      elinewidth=0.9, label="accuracy, 95% interval")  # fmt: skip
        axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
        _label(axes, "", "accuracy")
        axes.set_title(_short(title, 44), loc="left", fontsize=10, fontweight="bold", color=INK)
        figure.legend(loc="outside lower left", ncols=2)
        below.bar([row["lower"] for row in table], [row["count"] for row in table],
                  width=[row["upper"] - row["lower"] for row in table], align="edge", color=COLOURS[0], alpha=0.75, linewidth=0)  # fmt: skip
        _label(below, "confidence (highest probability)", "rows")
        below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        below.grid(axis="x", visible=False)
        return _svg(figure, f"Reliability diagram, {title}: accuracy against confidence in {len(filled)} bins")


def quality_against(
    points: Sequence[Mapping[str, Any]], x_label: str, y_label: str, base: float | None = None, unit: str = ""
) -> str | None:
    """Quality against a cost: points {name, x, value, low, high}, drawn with their intervals and names; the x axis is
    logarithmic where x spans more than a factor of ten. `base` is drawn as a level line. `unit` is "bytes", "seconds",
    or "" for counts. None when no point has both coordinates."""
    known = [p for p in points if p.get("x") is not None and p.get("value") is not None and p["x"] > 0]
    if not known:
        return None
    x, y = (np.array([p[key] for p in known], dtype=float) for key in ("x", "value"))
    low, high = (
        np.array([p[key] if p.get(key) is not None else p["value"] for p in known], dtype=float)
        for key in ("low", "high")
    )
    with _style():
        figure, axes = _figure(3.3)
        for i in range(len(known)):
            axes.errorbar(x[i], y[i], yerr=[[max(0.0, y[i] - low[i])], [max(0.0, high[i] - y[i])]], fmt="os^Dv"[i % 5],
                          color=COLOURS[i % len(COLOURS)], markersize=6, elinewidth=1)  # fmt: skip
        if base is not None:
            axes.axhline(base, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
        form = {"bytes": numbers.size, "seconds": numbers.duration}.get(unit, numbers.count)
        if x.max() > 10 * x.min():
            axes.set_xscale("log")
            axes.set_xlim(x.min() / 2.2, x.max() * 2.2)
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            spread = max(x.max() - x.min(), 0.1 * x.max())
            axes.set_xlim(max(0, x.min() - 0.35 * spread), x.max() + 0.35 * spread)
            axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
        axes.margins(y=0.18)
        _label(axes, x_label, y_label)
        if base is not None:
            axes.annotate("base", (1, base), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points",
                          ha="right", fontsize=9)  # fmt: skip
        _name_points(figure, axes, x, y, low, high, [_short(str(p["name"]), 30) for p in known])
        return _svg(figure, f"{y_label} against {x_label}: " + ", ".join(str(p["name"]) for p in known))


def evidence_plot(rows: Sequence[tuple[str, float, float | None, float | None]], metric: str) -> str:
    """Horizontal dot plot of (system, mean, low, high), first row on top, the mean written at the right; `metric` is the
    axis label, with its unit. Give low and high as None where there is no interval."""
    names, means = [_wrapped(str(row[0])) for row in rows], np.array([row[1] for row in rows], dtype=float)
    low, high = (np.array([row[1] if row[i] is None else row[i] for row in rows], dtype=float) for i in (2, 3))
    with _style():
        lines = sum(1 + 0.45 * name.count("\n") for name in names)
        figure, axes = _figure(0.75 + 0.34 * lines)
        y = np.arange(len(rows))[::-1]
        axes.hlines(y, low, high, color=COLOURS[0], linewidth=1.6)
        axes.plot(means, y, "o", color=COLOURS[0], markersize=6)
        axes.set_yticks(y, names)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.06)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        for position, mean in zip(y, means, strict=True):
            axes.annotate(
                numbers.number(float(mean)),
                (1.02, position),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=9,
            )
        _label(axes, metric, "")
        listing = ", ".join(f"{row[0]} {numbers.number(float(row[1]))}" for row in rows)
        return _svg(figure, f"{metric}: {listing}")


def kept(systems: Sequence[Mapping[str, Any]]) -> str:
    """Horizontal bars of the mean share that each system keeps, first on top, with a dot for each set of rows: the `systems` of a
    merge's scores.json. The result's bar has another colour; a line marks 1."""
    shown = [system for system in systems if system["mean_kept"] is not None]
    parts = list(dict.fromkeys(part for system in shown for part in system["kept"]))
    with _style():
        figure, axes = _figure(0.8 + 0.3 * len(shown) + 0.17 * -(-len(parts) // 3))
        y = np.arange(len(shown))[::-1]
        colours = [COLOURS[1] if system["role"] == "result" else COLOURS[0] for system in shown]
        axes.barh(y, [system["mean_kept"] for system in shown], height=0.62, color=colours, alpha=0.35, linewidth=0)
        for number, part in enumerate(parts):
            points = [
                (system["kept"][part], position)
                for system, position in zip(shown, y, strict=True)
                if system["kept"].get(part) is not None
            ]
            axes.plot(*zip(*points, strict=True), "os^Dv"[number % 5], color=COLOURS[number % len(COLOURS)], markersize=4.5,
                      label=_short(part, 24))  # fmt: skip
        for system, position in zip(shown, y, strict=True):
            axes.annotate(
                numbers.number(system["mean_kept"]),
                (1.02, position),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=9,
            )
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.6)
        axes.set_yticks(y, [_wrapped(str(system["name"])) for system in shown])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        _label(axes, "share of the score that is kept", "")
        figure.legend(loc="outside lower left", ncols=3)
        listing = ", ".join(f"{system['name']} {numbers.number(system['mean_kept'])}" for system in shown)
        return _svg(figure, f"Share of the score that is kept, mean: {listing}")


def energy_of_start(layers: Sequence[Mapping[str, Any]]) -> str:
    """Share of the Fisher energy that the chosen directions hold, against the block, a line for each kind of layer: on the
    input side above, on the output side below. `layers` are those of a run's init.json."""
    return by_block(
        layers,
        {"share_inputs": "share of inputs", "share_outputs": "share of outputs"},
        f"Share of the Fisher energy in the chosen directions of {len(layers)} layers, against the block",
        share=True,
    )


def by_block(
    layers: Sequence[Mapping[str, Any]], panels: Mapping[str, str], description: str, share: bool = False
) -> str:
    """A panel for each of `panels` (key: axis label), one above the other, with the key's value of every layer against its block, a line
    for each kind of layer. `layers` have a `name` with the block's number in it; values may be None. `share`: axes from 0 to 1."""
    kinds: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, layer in enumerate(layers):
        block = re.search(r"\.(\d+)\.", layer["name"])
        kinds.setdefault(layer["name"].rsplit(".", 1)[-1], []).append((int(block[1]) if block else place, layer))
    with _style():
        figure = Figure(figsize=(WIDTH, 0.6 + 1.9 * len(panels) + 0.17 * (len(kinds) // 3)))
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (key, label) in zip(rows, panels.items(), strict=True):
            for i, (kind, found) in enumerate(kinds.items()):
                points = np.array([(n, row[key]) for n, row in found if row[key] is not None], dtype=float).reshape(
                    -1, 2
                )
                axes.plot(*points.T, marker="o", markersize=3, color=COLOURS[i % len(COLOURS)],
                          linestyle=DASHES[i // len(COLOURS) % len(DASHES)], label=_short(kind, 24))  # fmt: skip
            if share:
                axes.set_ylim(0, 1.04)
            else:
                axes.set_ylim(bottom=0)
            _label(axes, "block" if axes is rows[-1] else "", label)
        rows[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3)
        return _svg(figure, description)


def bars(rows: Sequence[tuple[str, float]], x_label: str, unit: str = "") -> str:
    """Horizontal bars of (name, value), first row on top, each value written at its end. `unit` as in `quality_against`."""
    values = [float(value) for _, value in rows]
    form = {"bytes": numbers.size, "seconds": numbers.duration}.get(unit, numbers.number)
    with _style():
        figure, axes = _figure(0.7 + 0.27 * len(rows))
        y = np.arange(len(rows))[::-1]
        axes.barh(y, values, height=0.62, color=COLOURS[0], linewidth=0)
        for position, value in zip(y, values, strict=True):
            axes.annotate(
                form(value), (value, position), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
            )
        axes.set_yticks(y, [_wrapped(str(name)) for name, _ in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.25 * max(max(values), 1e-9))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else form(value)))
        _label(axes, x_label, "")
        return _svg(figure, f"{x_label}: " + ", ".join(f"{name} {form(float(value))}" for name, value in rows))


def standalone(svg: str) -> str:
    """The SVG as a file of its own, dark on light or light on dark as the reader's system asks."""
    style = "<style>svg{color:#1c1c1a}@media(prefers-color-scheme:dark){svg{color:#e6e4df}}</style>"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace(">", f">{style}", 1) + "\n"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots()


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _svg(figure: Figure, description: str) -> str:
    """The figure as one <svg> element for a page, its ids unique to its content."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor").replace("'DejaVu Sans', sans-serif", "system-ui, sans-serif")
    # Several figures share a page: keep only the ids something refers to, and make them this figure's own.
    prefix = "p" + hashlib.sha256((description + svg).encode()).hexdigest()[:10]
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    label = html.escape(description)
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*" height="[^"]*" ',
        lambda m: f'<svg role="img" aria-label="{label}" style="stroke-linejoin: round" {m[1]}',
        svg,
        count=1,
    )


def _name_points(
    figure: Figure, axes: Axes, x: np.ndarray, y: np.ndarray, low: np.ndarray, high: np.ndarray, names: list[str]
) -> None:
    """Write each name beside its point, where it covers neither a point, an interval nor a name and stays inside."""
    figure.draw_without_rendering()
    # In units of 1/72 inch, in which text of 9 is about 5 wide a letter and 11 high.
    at, ends_low, ends_high = (
        axes.transData.transform(np.stack([x, end], axis=1)) * 72 / figure.dpi for end in (y, low, high)
    )
    frame = axes.get_window_extent()
    left, right, bottom, top = (edge * 72 / figure.dpi for edge in (frame.x0, frame.x1, frame.y0, frame.y1))
    taken: list[tuple[float, ...]] = [(px - 4, py - 4, px + 4, py + 4) for px, py in at]
    taken += [(a[0] - 2, a[1], b[0] + 2, b[1]) for a, b in zip(ends_low, ends_high, strict=True)]
    for (px, py), name, point in zip(at, names, zip(x, y, strict=True), strict=True):
        width = 5.2 * len(name)
        candidates = [
            (dx, dy, align)
            for dy in (0, 11, -11, 22, -22, 33, -33)
            for dx, align in ((7, "left"), (-7, "right"), (0, "center"))
            if dy or align != "center"
        ]

        def box(
            dx: float, dy: float, align: str, px: float = px, py: float = py, width: float = width
        ) -> tuple[float, ...]:
            start = px + dx - {"left": 0, "right": width, "center": width / 2}[align]
            return start, py + dy - 5.5, start + width, py + dy + 5.5

        def cost(candidate: tuple[float, float, str], box: Any = box) -> float:
            b = box(*candidate)
            overlap = sum(
                max(0, min(b[2], t[2]) - max(b[0], t[0])) * max(0, min(b[3], t[3]) - max(b[1], t[1])) for t in taken
            )
            outside = max(0, left - b[0]) + max(0, b[2] - right) + max(0, bottom - b[1]) + max(0, b[3] - top)
            return overlap + 20 * outside + abs(candidate[1])

        dx, dy, align = min(candidates, key=cost)
        taken.append(box(dx, dy, align))
        # A name that had to move away is tied to its point.
        edge = {"left": 0.0, "right": 1.0, "center": 0.5}[align]
        leader = {
            "arrowstyle": "-",
            "color": INK,
            "linewidth": 0.5,
            "alpha": 0.6,
            "relpos": (edge, 0.5),
            "shrinkA": 0,
            "shrinkB": 4,
        }
        axes.annotate(name, point, xytext=(dx, dy), textcoords="offset points", ha=align, va="center", fontsize=9,
                      arrowprops=leader if abs(dy) > 11 else None)  # fmt: skip


def _finite(pairs: Any) -> np.ndarray:
    """(step, loss) pairs as an array (n, 2) in order of step, without the pairs that are not finite."""
    array = np.array([(a, b) for a, b in pairs if b is not None], dtype=float).reshape(-1, 2)
    array = array[np.isfinite(array).all(axis=1)]
    return array[np.argsort(array[:, 0], kind="stable")]


def _thin(curve: np.ndarray, most: int = 1000) -> np.ndarray:
    """Every k-th point of a long curve and its last, so that the page stays small."""
    step = -(-len(curve) // most) or 1
    return curve if step == 1 else np.concatenate([curve[:-1:step], curve[-1:]])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of up to a twentieth of the curve before each point."""
    width = max(5, len(values) // 20)
    total = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - width)
    return (total[stop] - total[start]) / (stop - start)


def _wilson(share: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of a proportion (Wilson, "Probable inference", 1927)."""
    z = 1.959964
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return np.minimum(centre - half, share), np.maximum(centre + half, share)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(_short(text, 66), 22, break_on_hyphens=False)) or " "
