"""How a verdict is computed, what evidence keeps, and the page that is generated from it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from acclimate import methods
from acclimate.claims import table
from acclimate.claims.base import Bar, Budget, Claim, Evidence, Row, load_claim, verdict
from acclimate.errors import InputError


def rows(metric: str = "accuracy", **systems: list[float]) -> list[Row]:
    return [Row.from_values(name, metric, values, range(len(values))) for name, values in systems.items()]


def single(mean: float, low: float | None = None, high: float | None = None, system: str = "ours") -> Row:
    return Row(system, "accuracy", [0], [mean], mean, low, high)


# Rows.


def test_a_row_has_students_interval() -> None:
    row = Row.from_values("lora", "accuracy", [0.7, 0.8, 0.75], [3, 4, 5], parameters=10)
    low, high = stats.t.interval(0.95, 2, loc=0.75, scale=stats.sem([0.7, 0.8, 0.75]))
    assert row.mean == pytest.approx(0.75)
    assert (row.low, row.high) == (pytest.approx(low), pytest.approx(high))
    assert (row.seeds, row.parameters) == ([3, 4, 5], 10)


def test_one_value_has_no_interval() -> None:
    row = Row.from_values("lora", "accuracy", [0.7], [0])
    assert (row.mean, row.low, row.high) == (0.7, None, None)


@pytest.mark.parametrize(("values", "seeds"), [([], []), ([1.0], [0, 1]), ([1.0, 2.0], [0, 0])])
def test_a_row_needs_one_value_a_seed(values, seeds) -> None:
    with pytest.raises(ValueError, match="one each is needed"):
        Row.from_values("lora", "accuracy", values, seeds)


# Bars: by value, where there is no interval.

HIGHER = Bar("accuracy", "ours", "lora", limit=-0.01)


@pytest.mark.parametrize(
    ("ours", "status"), [(0.95, "met"), (0.90, "met"), (0.89, "met"), (0.8899, "missed"), (0.0, "missed")]
)
def test_not_more_than_a_point_below(ours, status) -> None:
    assert HIGHER.check(rows(ours=[ours], lora=[0.90])).status == status


@pytest.mark.parametrize(("ours", "status"), [(0.08, "met"), (0.05, "met"), (0.081, "missed"), (0.2, "missed")])
def test_at_most_0_8_times(ours, status) -> None:
    bar = Bar("ece", "ours", "lora", better="lower", kind="ratio", limit=0.8)
    assert bar.check(rows("ece", ours=[ours], lora=[0.1])).status == status


@pytest.mark.parametrize(("speed", "status"), [(300.0, "met"), (299.0, "missed")])
def test_at_least_three_times_as_fast(speed, status) -> None:
    bar = Bar("tokens_per_second", "ours", "fourierft", kind="ratio", limit=3)
    assert bar.check(rows("tokens_per_second", ours=[speed], fourierft=[100.0])).status == status


@pytest.mark.parametrize(("error", "status"), [(0.01, "met"), (0.02, "missed")])
def test_a_value_on_its_own(error, status) -> None:
    assert Bar("error", "ours", better="lower", limit=0.01).check(rows("error", ours=[error])).status == status


def test_costs_are_columns_of_the_rows() -> None:
    measured = [
        Row.from_values("ours", "accuracy", [0.9, 0.8], [0, 1], parameters=6000, seconds=2.0, adapter_bytes=24_000),
        Row.from_values("lora", "accuracy", [0.9, 0.8], [0, 1], parameters=73_728, seconds=2.0, adapter_bytes=295_000),
    ]
    tenth = Bar("parameters", "ours", "lora", better="lower", kind="ratio", limit=0.1)
    assert tenth.check(measured).status == "met"
    assert tenth.check(measured).sentence == "parameters, ours / lora <= 0.1: 0.08138 (6000 against 7.373e+04)"
    assert Bar("seconds", "ours", "lora", better="lower", kind="ratio").check(measured).status == "met"
    twentieth = Bar("adapter_bytes", "ours", "lora", better="lower", kind="ratio", limit=0.05)
    assert twentieth.check(measured).status == "missed"


def test_a_tie_at_the_limit_is_met_whatever_floating_point_says() -> None:
    assert 0.89 - 0.90 < -0.01
    assert HIGHER.check(rows(ours=[0.89], lora=[0.90])).status == "met"
    bar = Bar("parameters", "ours", "lora", better="lower", kind="ratio", limit=0.1)
    costs = [Row("ours", "a", [0], [1], 1, parameters=46_080), Row("lora", "a", [0], [1], 1, parameters=460_800)]
    assert bar.check(costs).status == "met"


# Bars: with intervals.


def test_paired_seeds_use_the_interval_of_the_differences() -> None:
    ours, lora = [0.90, 0.70, 0.80], [0.89, 0.685, 0.80]  # the seeds vary far more than the difference
    low, high = stats.ttest_rel(ours, lora).confidence_interval(0.95)
    for limit, status in [
        (low - 1e-6, "met"),
        (low + 1e-6, "unclear"),
        (high - 1e-6, "unclear"),
        (high + 1e-6, "missed"),
    ]:
        assert Bar("accuracy", "ours", "lora", limit=limit).check(rows(ours=ours, lora=lora)).status == status
    sentence = Bar("accuracy", "ours", "lora").check(rows(ours=ours, lora=lora)).sentence
    assert sentence == f"accuracy, ours - lora >= 0: 0.008333 [{low:.4g}, {high:.4g}] (0.8 against 0.7917)"


def test_pairing_goes_by_seed_not_by_position() -> None:
    ours = Row.from_values("ours", "accuracy", [0.9, 0.5, 0.7], [0, 1, 2])
    lora = Row.from_values("lora", "accuracy", [0.69, 0.49, 0.89], [2, 1, 0])
    assert Bar("accuracy", "ours", "lora", limit=0.0099).check([ours, lora]).status == "met"


def test_a_paired_ratio_is_fiellers_test() -> None:
    ours, lora = [0.06, 0.09, 0.075, 0.07], [0.1, 0.13, 0.12, 0.11]
    for limit in (0.4, 0.55, 0.62, 0.64, 0.66, 0.7, 0.9):
        test = stats.ttest_1samp([a - limit * b for a, b in zip(ours, lora, strict=True)], 0.0)
        expected = "unclear" if test.pvalue > 0.05 else ("met" if test.statistic < 0 else "missed")
        bar = Bar("ece", "ours", "lora", better="lower", kind="ratio", limit=limit)
        assert bar.check(rows("ece", ours=ours, lora=lora)).status == expected


def test_a_ratio_is_shown_as_the_ratio_of_the_means() -> None:
    bar = Bar("ece", "ours", "lora", better="lower", kind="ratio", limit=0.8)
    sentence = bar.check(rows("ece", ours=[0.06, 0.08], lora=[0.1, 0.1])).sentence
    half = stats.t.ppf(0.975, 1) * stats.sem([0.06, 0.08]) / 0.1
    assert sentence == f"ece, ours / lora <= 0.8: 0.7 [{0.7 - half:.4g}, {0.7 + half:.4g}] (0.07 against 0.1)"


def test_different_seeds_add_in_quadrature() -> None:
    ours = Row.from_values("ours", "accuracy", [0.9, 0.92], [0, 1])
    lora = Row.from_values("lora", "accuracy", [0.8, 0.84], [2, 3])
    half = math.hypot(*(stats.t.ppf(0.975, 1) * stats.sem(row.values) for row in (ours, lora)))
    for limit, status in [(0.09 - half - 1e-6, "met"), (0.09 - half + 1e-6, "unclear"), (0.09 + half + 1e-6, "missed")]:
        assert Bar("accuracy", "ours", "lora", limit=limit).check([ours, lora]).status == status


def test_single_values_bring_the_intervals_of_their_rows() -> None:
    lora = single(0.80, 0.77, 0.83, system="lora")
    assert Bar("accuracy", "ours", "lora").check([single(0.86, 0.82, 0.90), lora]).status == "met"
    assert Bar("accuracy", "ours", "lora").check([single(0.84, 0.80, 0.88), lora]).status == "unclear"
    assert Bar("accuracy", "ours", limit=0.83).check([single(0.86, 0.82, 0.90)]).status == "unclear"


def test_what_was_not_measured_is_unclear() -> None:
    result = HIGHER.check(rows(ours=[0.9]))
    assert result.status == "unclear"
    assert result.sentence == "accuracy, ours - lora >= -0.01: not measured, there is no accuracy of lora"
    cost = Bar("parameters", "ours", better="lower", limit=3).check(rows(ours=[0.9]))
    assert cost.status == "unclear"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_system_misses_and_a_diverged_peer_proves_nothing(value) -> None:
    assert HIGHER.check(rows(ours=[value, 0.9], lora=[0.5, 0.5])).status == "missed"
    assert HIGHER.check(rows(ours=[0.9, 0.9], lora=[value, 0.5])).status == "unclear"


def test_a_ratio_to_zero_still_has_a_side_and_to_a_negative_has_none() -> None:
    bar = Bar("ece", "ours", "lora", better="lower", kind="ratio", limit=0.8)
    assert bar.check(rows("ece", ours=[0.0], lora=[0.0])).status == "met"
    result = bar.check(rows("ece", ours=[0.1], lora=[0.0]))
    assert (result.status, result.sentence) == ("missed", "ece, ours / lora <= 0.8: (0.1 against 0)")
    with pytest.raises(ValueError, match="has no meaning; use a difference"):
        bar.check(rows("ece", ours=[0.1], lora=[-1.0]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"better": "bigger", "than": "b"},
        {"kind": "quotient", "than": "b"},
        {"limit": None},
        {"kind": "ratio", "limit": 2.0},
        {"kind": "ratio", "than": "b", "limit": -1.0},
    ],
)
def test_a_bar_without_meaning_is_refused(arguments) -> None:
    with pytest.raises(ValueError, match=r"higher|limit"):
        Bar("accuracy", "a", **arguments)


def test_the_limit_defaults_to_no_difference() -> None:
    assert Bar("accuracy", "a", "b").limit == 0
    assert Bar("accuracy", "a", "b", kind="ratio").limit == 1


SCORE = st.floats(0.001, 100).map(lambda x: round(x, 6))
SCORES = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        *(st.lists(SCORE, min_size=n, max_size=n) for _ in range(2)), st.lists(st.floats(0, 50), min_size=n, max_size=n)
    )
)


@given(SCORES, st.sampled_from(["difference", "ratio"]), st.sampled_from(["higher", "lower"]), st.floats(0.01, 10))
def test_getting_better_never_turns_met_into_missed(scores, kind, better, limit) -> None:
    ours, lora, gains = scores
    bar = Bar("accuracy", "ours", "lora", better=better, kind=kind, limit=limit)
    sign = 1 if better == "higher" else -1
    before = bar.check(rows(ours=ours, lora=lora)).status
    after = bar.check(rows(ours=[a + sign * g for a, g in zip(ours, gains, strict=True)], lora=lora)).status
    assert (before, after) != ("met", "missed")


@given(SCORES, st.sampled_from(["higher", "lower"]), st.floats(-5, 5), st.floats(0, 50))
def test_an_equal_gain_for_every_seed_is_monotone(scores, better, limit, gain) -> None:
    ours, lora, _ = scores
    bar = Bar("accuracy", "ours", "lora", better=better, limit=limit)
    order = ["missed", "unclear", "met"]
    sign = 1 if better == "higher" else -1
    before = order.index(bar.check(rows(ours=ours, lora=lora)).status)
    after = order.index(bar.check(rows(ours=[a + sign * gain for a in ours], lora=lora)).status)
    assert after >= before or gain < 1e-9


@given(SCORES, st.sampled_from(["difference", "ratio"]), st.floats(0.01, 10))
def test_higher_and_lower_are_opposites(scores, kind, limit) -> None:
    ours, lora, _ = scores
    both = [
        Bar("accuracy", "ours", "lora", better=better, kind=kind, limit=limit).check(rows(ours=ours, lora=lora)).status
        for better in ("higher", "lower")
    ]
    assume(both != ["met", "met"])  # a tie at the limit
    assert both in (["met", "missed"], ["missed", "met"], ["unclear", "unclear"])


# The verdict.


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["met"], "holds"),
        (["met", "met"], "holds"),
        (["met", "unclear"], "inconclusive"),
        (["unclear"], "inconclusive"),
        ([], "inconclusive"),
        (["met", "missed"], "does-not-hold"),
        (["unclear", "missed"], "does-not-hold"),
    ],
)
def test_verdict(statuses, expected) -> None:
    assert verdict(statuses) == expected


# A claim from end to end.


class Toy(Claim):
    name = "toy"
    method = "toy-scale"
    statement = "The toy is as accurate as LoRA | with a tenth of its parameters."
    bars: ClassVar = [HIGHER, Bar("parameters", "ours", "lora", better="lower", kind="ratio", limit=0.1)]

    def measure(self, budget: Budget, report: Callable[[str], None]) -> list[Row]:
        report(f"budget {budget}")
        n = 3 if budget == "full" else 2
        ours = Row.from_values(
            "ours", "accuracy", [0.91, 0.92, 0.915][:n], range(n), parameters=64, seconds=1.5, adapter_bytes=2048
        )
        lora = Row.from_values("lora", "accuracy", [0.90, 0.91, 0.905][:n], range(n), parameters=640, seconds=2.5)
        return [
            ours,
            lora,
            Row.from_values("ours", "nll", [math.nan], [0]),
            Row.from_values("lora", "nll", [1 / 3], [0]),
        ]


def test_run_measures_and_judges() -> None:
    lines: list[str] = []
    evidence = Toy().run("fast", lines.append)
    assert lines == ["budget fast"]
    assert evidence.verdict == "holds"
    assert evidence.reasons == [
        "met: accuracy, ours - lora >= -0.01: 0.01 (0.915 against 0.905)",
        "met: parameters, ours / lora <= 0.1: 0.1 (64 against 640)",
    ]
    assert (evidence.budget, evidence.command) == ("fast", "acclimate bench toy --fast")
    assert Toy().run().command == "acclimate bench toy"
    assert len(Toy().run("full").rows[0].seeds) == 3
    assert 0 <= evidence.duration_seconds < 10
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", evidence.created)
    assert evidence.environment["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert evidence.environment["hardware"]["cores"] >= 1


def test_an_unknown_budget_is_the_users_error() -> None:
    with pytest.raises(InputError, match="unknown budget 'quick': choose one of fast, default, full"):
        Toy().run("quick")  # type: ignore[arg-type]


def test_evidence_names_neither_host_nor_path() -> None:
    import getpass
    import os
    import socket

    text = Toy().run().to_json()
    for secret in (socket.gethostname(), os.getcwd(), os.path.expanduser("~")):
        assert secret not in text
    assert f'"{getpass.getuser()}"' not in text


def test_json_round_trip() -> None:
    evidence = Toy().run()
    text = evidence.to_json()
    again = Evidence.from_json(text)
    assert again.to_json() == text
    assert (again.rows[0].values, again.rows[0].parameters, again.rows[0].seeds) == ([0.91, 0.92], 64, [0, 1])
    assert again.rows[0].low == pytest.approx(evidence.rows[0].low, abs=1e-6)
    assert math.isnan(again.rows[2].mean)
    content = json.loads(text)
    assert list(content) == sorted(content)
    assert content["rows"][3]["mean"] == 0.333333
    assert content["rows"][2]["values"] == [None]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rows": [{"system": "a"}]}'])
def test_what_is_no_evidence_is_the_users_error(text) -> None:
    with pytest.raises(InputError, match="this is no evidence of a claim"):
        Evidence.from_json(text)


def test_save_writes_json_and_plot(tmp_path) -> None:
    evidence = Toy().run()
    path = evidence.save(tmp_path / "evidence")
    assert path == tmp_path / "evidence" / "toy.json"
    assert path.read_text() == evidence.to_json()
    picture = (tmp_path / "evidence" / "toy.svg").read_text()
    assert "<svg" in picture
    assert "accuracy" in picture
    assert sorted(file.name for file in path.parent.iterdir()) == ["toy.json", "toy.svg"]


# Finding claims.


def test_load_claim(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    extra = methods.Method(
        "demo", "does a thing", "adapter", None, "-", status="ready", claim="demo_package.claim", aliases=("dmo",)
    )
    (tmp_path / "demo_package").mkdir()
    (tmp_path / "demo_package" / "claim.py").write_text("CLAIM = 'the claim'")
    monkeypatch.setattr(methods, "all_methods", lambda: (*methods._BUILT_IN, extra))
    assert load_claim("demo") == "the claim"
    assert load_claim("DMO") == "the claim"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lorra", r"^There is no claim 'lorra'\. Did you mean 'lora'\? The ready claims: .*lora"),
        ("pissa", r"^There is no claim 'pissa'\."),
        ("saber", r"^The claim 'saber' is planned, not built yet; ready claims: .*lora"),
        ("atpt", r"^The claim 'a-tpt' is planned, not built yet; ready claims: .*lora"),
    ],
)
def test_load_claim_errors(name, message) -> None:
    with pytest.raises(InputError, match=message):
        load_claim(name)


# The page.


@pytest.fixture
def evidence_dir(tmp_path):
    directory = tmp_path / "evidence"
    Toy().run().save(directory)
    return directory


def test_the_page_has_a_row_and_a_section_a_claim(evidence_dir) -> None:
    page = table.claims_table(evidence_dir)
    (summary,) = [line for line in page.splitlines() if line.startswith("| [toy](#toy)")]
    cells = re.split(r" (?<!\\)\| ", summary.strip("| "))
    assert len(cells) == 8
    assert cells[1] == "The toy is as accurate as LoRA \\| with a tenth of its parameters."
    assert cells[2] == "holds"
    assert cells[3] == "accuracy: ours 0.915 ± 0.064, lora 0.905 ± 0.064"
    assert cells[4] == "2"
    assert "## toy\n" in page
    assert "- met: parameters, ours / lora <= 0.1: 0.1 (64 against 640)" in page
    assert "| ours | accuracy | 0.915 | 0.851 to 0.979 | 1.5 s | – | 64 | 2 kB |" in page
    assert "| ours | nll | not a number |" in page
    assert "![toy](evidence/toy.svg)" in page


def test_the_page_says_so_when_a_claim_does_not_hold_or_was_only_tried(evidence_dir) -> None:
    content = json.loads((evidence_dir / "toy.json").read_text())
    (evidence_dir / "toy.json").write_text(json.dumps({**content, "verdict": "does-not-hold", "budget": "fast"}))
    assert "| **does not hold here** (`--fast`) |" in table.claims_table(evidence_dir)


def test_no_evidence(tmp_path) -> None:
    assert "There is no evidence yet." in table.claims_table(tmp_path)


def test_a_broken_file_is_named(evidence_dir, capsys) -> None:
    (evidence_dir / "sour.json").write_text("{")
    assert table.main(["--write", str(evidence_dir.parent / "claims.md"), "--evidence", str(evidence_dir)]) == 2
    assert "sour.json: this is no evidence of a claim" in capsys.readouterr().err


def test_write_then_check(evidence_dir, capsys) -> None:
    page = evidence_dir.parent / "docs" / "claims.md"
    arguments = ["--write", str(page), "--evidence", str(evidence_dir)]
    assert table.main([*arguments, "--check"]) == 1
    assert "claims.md is out of date: run `make claims-table`" in capsys.readouterr().err
    assert not page.exists()
    assert table.main(arguments) == 0
    assert page.read_text() == table.claims_table(evidence_dir)
    picture = page.parent / "evidence" / "toy.svg"
    assert picture.read_text() == (evidence_dir / "toy.svg").read_text()
    assert table.main([*arguments, "--check"]) == 0
    picture.write_text("<svg/>")
    assert table.main([*arguments, "--check"]) == 1
    assert table.main(arguments) == 0
    assert table.main([*arguments, "--check"]) == 0
