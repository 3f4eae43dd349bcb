"""The pages in a real browser: nothing sticks out sideways, light is light and dark is dark, plots follow the theme."""

import json
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

from acclimate.report import write_report

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=3000",
]
PROBE = """<script>
addEventListener("load", () => parent.postMessage(JSON.stringify({
  inner: innerWidth,
  scroll: document.documentElement.scrollWidth,
  body: document.body.scrollWidth - document.body.clientWidth,
  tables: [...document.querySelectorAll(".scroll")].map(e => e.scrollWidth - e.clientWidth),
  outside: [...document.querySelectorAll("body *")].filter(
    e => !e.closest(".scroll, pre, svg") && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80)),
  svg: [...document.querySelectorAll("svg")].map(e => e.getBoundingClientRect().width),
  label: getComputedStyle(document.querySelector("svg text")).fill,
  requests: performance.getEntriesByType("resource").length,
}), "*"));
</script>"""
# Headless Chromium has no window narrower than 500, so the page is looked at through a frame.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<script>addEventListener("message", e => document.documentElement.dataset.probe = e.data)</script>
<iframe src="probe.html" width="{width}" height="{height}"></iframe>"""

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(360, 800), (1280, 900)])
@pytest.mark.parametrize("kind", ["run_directory", "comparison_directory"])
def test_page_fits_and_follows_the_theme(kind, width, height, scheme, request, tmp_path):
    directory = request.getfixturevalue(kind)
    page = write_report(directory).read_text(encoding="utf-8")
    (directory / "probe.html").write_text(page.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    frame, picture = directory / "frame.html", directory / "picture.png"
    frame.write_text(FRAME.format(width=width, height=height), encoding="utf-8")

    def chromium(*arguments):
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        command = [
            CHROMIUM,
            *FLAGS,
            *dark,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},{height}",
        ]
        return subprocess.run(
            [*command, *arguments, frame.as_uri()], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    found = re.search(r'data-probe="([^"]*)"', chromium("--dump-dom"))
    assert found, "the page did not report its size"
    probe = json.loads(found[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert probe["inner"] == width
    assert probe["scroll"] <= width
    assert probe["body"] == 0
    assert probe["outside"] == []
    assert max(probe["svg"]) <= width - 32
    # On a phone the wide table scrolls inside its own container.
    assert width > 360 or max(probe["tables"]) > 0
    assert probe["requests"] == 0
    assert probe["label"] == ("rgb(28, 28, 26)" if scheme == "light" else "rgb(230, 228, 223)")

    chromium(f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[:height, :width, :3]
    paper, ink = np.median(pixels, axis=(0, 1)), pixels.min() if scheme == "light" else pixels.max()
    assert (paper.min() > 0.9, paper.max() < 0.15) == (scheme == "light", scheme == "dark")
    assert abs(ink - np.median(paper)) > 0.7
