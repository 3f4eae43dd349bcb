import re
import warnings
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from scipy.stats import binomtest

from acclimate.report import plots

SVG = "{http://www.w3.org/2000/svg}"
TABLE = [
    {"lower": 0.0, "upper": 0.5, "count": 0, "confidence": None, "accuracy": None},
    {"lower": 0.5, "upper": 1.0, "count": 10, "confidence": 0.8, "accuracy": 0.6},
]
POINTS = [{"name": f"system {i}", "x": 10.0**i, "value": 0.5 + i / 20, "low": 0.4, "high": 0.8} for i in range(1, 5)]
EXAMPLES = {
    "loss_curve": lambda: plots.loss_curve([{"step": i, "loss": 2.0 / i} for i in range(1, 50)] + [{"step": 9, "eval_loss": 1}]),
    "loss_curves": lambda: plots.loss_curves({"a": [[[1, 2.0], [2, 1.0]], [[1, 1.8], [2, 0.9]]], "b": [[[1, 2.0], [2, 1.5]]]}),
    "reliability": lambda: plots.reliability(TABLE, "after"),
    "quality_against": lambda: plots.quality_against(POINTS, "peak memory", "accuracy", base=0.3, unit="bytes"),
    "evidence_plot": lambda: plots.evidence_plot([("lora", 0.72, 0.67, 0.77), ("base", 0.27, None, None)], "accuracy"),
    "bars": lambda: plots.bars([("load", 3.2), ("train", 151.0)], "time", unit="seconds"),
}  # fmt: skip


def texts(svg):
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_plot_is_one_transparent_deterministic_svg_in_the_colour_of_the_page(name):
    svg = EXAMPLES[name]()
    root = ElementTree.fromstring(svg)
    assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
    assert root.get("aria-label")
    assert root.get("width") is None
    colours = set(re.findall(r"#[0-9a-f]{6}\b", svg)) - {"#000000"}
    assert colours <= set(plots.COLOURS)
    assert plots.INK not in svg
    assert "currentColor" in svg
    assert "#ffffff" not in svg
    assert "<metadata" not in svg
    assert "<style" not in svg
    with matplotlib.rc_context({"figure.facecolor": "red", "font.size": 30}):
        assert EXAMPLES[name]() == svg


def test_text_that_has_no_colour_of_its_own_is_drawn_in_ink():
    # SVG text is black where nothing says otherwise, which would vanish on a dark page.
    for make in EXAMPLES.values():
        for element in ElementTree.fromstring(make()).iter(f"{SVG}text"):
            assert "currentColor" in element.get("style", "") + element.get("fill", ""), ElementTree.tostring(element)


def test_axes_have_names_and_units():
    assert {"step", "loss (nats)", "training (running mean)", "held out"} <= set(texts(EXAMPLES["loss_curve"]()))
    assert {"step", "training loss (nats)", "a", "b"} <= set(texts(EXAMPLES["loss_curves"]()))
    assert {"accuracy", "confidence (highest probability)", "rows", "after"} <= set(texts(EXAMPLES["reliability"]()))
    assert {"peak memory", "accuracy", "base", "system 1", "100 B", "1 kB"} <= set(texts(EXAMPLES["quality_against"]()))
    assert {"accuracy", "lora", "0.720", "base", "0.270"} <= set(texts(EXAMPLES["evidence_plot"]()))
    assert {"time", "load", "3.2 s", "2 m 31 s"} <= set(texts(EXAMPLES["bars"]()))


def test_x_is_logarithmic_only_beyond_a_factor_of_ten():
    def ticks(largest):
        points = [{"name": "a", "x": 1000, "value": 0.5}, {"name": "b", "x": largest, "value": 0.6}]
        return texts(plots.quality_against(points, "trainable parameters", "accuracy"))

    assert {"1,000", "10,000", "100,000"} <= set(ticks(100_000))
    assert "10,000" not in ticks(9_000)


def test_names_of_close_points_do_not_cover_one_another():
    points = [{"name": f"adapter {i}", "x": 100 + i, "value": 0.5 + i / 1000} for i in range(5)]
    svg = plots.quality_against(points, "trainable parameters", "accuracy")
    boxes = []
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if not (element.text or "").startswith("adapter"):
            continue
        x, y = (float(v) for v in re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform")).groups()) if "translate" in (element.get("transform") or "") else (float(element.get("x")), float(element.get("y")))  # fmt: skip
        width = 5.2 * len(element.text)
        anchor = re.search(r"text-anchor: (\w+)", element.get("style"))
        start = x - {"start": 0, "middle": width / 2, "end": width}[anchor[1] if anchor else "start"]
        boxes.append((start, start + width, y))
    assert len(boxes) == 5
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert abs(a[2] - b[2]) > 9 or a[1] < b[0] or b[1] < a[0], boxes


def test_names_are_text_and_never_markup_or_mathematics():
    name = '<b>$x_1$</b> & "q" 日本'
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = plots.evidence_plot([(name, 0.5, 0.4, 0.6)], "accuracy")
    assert ElementTree.fromstring(svg).get("aria-label") == f"accuracy: {name} 0.500"
    assert name in " ".join(texts(svg))


def test_two_figures_share_no_id():
    first, second = (plots.reliability(TABLE, title) for title in ("before", "after"))
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_wilson_interval_agrees_with_scipy():
    low, high = plots._wilson(np.array([0.6, 0.0, 1.0]), np.array([10.0, 7.0, 3.0]))
    for k, n, a, b in zip([6, 0, 3], [10, 7, 3], low, high, strict=True):
        peer = binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert (a, b) == (pytest.approx(peer.low, abs=1e-6), pytest.approx(peer.high, abs=1e-6))


def test_running_mean_and_thinning():
    values = np.arange(200.0)
    mean = plots._running_mean(values)  # over ten
    assert mean[:3] == pytest.approx([0, 0.5, 1])
    assert mean[-1] == pytest.approx(np.mean(values[-10:]))
    curve = np.stack([np.arange(5001.0)] * 2, axis=1)
    thin = plots._thin(curve)
    assert len(thin) <= 1001
    assert thin[-1, 0] == 5000
    assert np.diff(thin[:, 0]).max() <= 6


def test_values_that_are_not_finite_are_left_out():
    assert plots.loss_curve([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": None}]) is None
    assert plots.loss_curves({"a": [[]], "b": []}) is None
    assert plots.quality_against([{"name": "a", "x": None, "value": 1.0}], "x", "y") is None


def test_seeds_that_share_no_step_still_draw():
    assert plots.loss_curves({"a": [[[1, 2.0]], [[2, 1.0]]]}) is not None


def test_standalone_is_a_valid_file_with_a_colour_for_each_theme():
    text = plots.standalone(EXAMPLES["evidence_plot"]())
    root = ElementTree.fromstring(text.encode())
    assert root.tag == f"{SVG}svg"
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text


def test_colours_reach_a_contrast_of_three_on_both_pages():
    def luminance(colour):
        channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for colour in plots.COLOURS:
        for page in ("#fdfdfb", "#141516"):
            bright, dark = sorted([luminance(colour), luminance(page)], reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 3, (colour, page)
