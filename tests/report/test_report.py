import json
import os
import re
from html.parser import HTMLParser

import pytest

from acclimate.errors import InputError
from acclimate.report import render, write_report
from acclimate.report.examples import instructive

VOID = {"meta", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects ids, references and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "srcset", "data"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def words(page_text):
    return re.sub(r"\s+", " ", " ".join(Page(page_text).text))


@pytest.mark.parametrize("kind", ["run_directory", "comparison_directory"])
def test_page_is_self_contained_escaped_and_the_same_twice(kind, request):
    directory = request.getfixturevalue(kind)
    text = write_report(directory).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;$5&#34; &amp; $6 in 日本語" in text
    # Nothing outside the page: references are ids of the page or relative paths of runs; xmlns is a name, not an address.
    assert all(reference.startswith(("#", "./cells/")) for reference in page.references)
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= set(page.ids)
    assert '<meta name="viewport"' in text
    assert page.tags.count("svg") == text.count('<svg role="img" aria-label="')
    assert write_report(directory).read_bytes() == text.encode()
    assert sorted(path.name for path in directory.iterdir() if "tmp" in path.name) == []


def test_a_run_shows_its_numbers_in_order(run_directory):
    text = words(render(run_directory))
    evaluation = json.loads((run_directory / "evaluation.json").read_text())
    before, after = (evaluation[key]["metrics"]["accuracy"] for key in ("before", "after"))
    difference = evaluation["differences"]["accuracy"]
    for shown in (
        f"{before['value']:.3f}",
        f"{after['low']:.3f} to {after['high']:.3f}",
        f"+{difference['value']:.3f}",
        difference["words"],
        "SmolLM2-135M with lora (optimiser adamw) trained on 960 rows for 120 steps; scored on 400 rows",
        "One seed: the interval covers chance in the examples",
        "30 November 2025, 10:02 UTC",
        "460,800",
        "134.5 M",
        "0.343%",
        "1.2 GB",
        "1.8 MB",
        "2 m 31 s",
        "0123abc, with uncommitted changes",
        "torch 2.13.0 · transformers 5.24.1",
        "4 evaluation rows are also in the training data.",
        evaluation["after"]["definition"],
    ):
        assert shown in text, shown
    worst = sorted(evaluation["after"]["per_class"], key=lambda row: (row["accuracy"], row["class"]))[:15]
    places = [text.index(f"{row['class']} {row['n']} ") for row in worst]
    assert places == sorted(places)
    headings = ["Scores", "Training loss", "Does it know", "Weakest classes", "Examples", "Cost", "Data", "Where it comes from", "recipe.yaml, as it was run"]  # fmt: skip
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)


def test_every_optional_file_may_be_missing(run_directory):
    sentences = {
        "metrics.jsonl": "There is no metrics.jsonl here, so there is no loss curve.",
        "predictions_before.jsonl": "There is no predictions_before.jsonl here, so what changed cannot be shown.",
        "predictions.jsonl": "There is no predictions.jsonl here, so no examples can be shown.",
        "recipe.yaml": "There is no recipe.yaml here.",
        "evaluation.json": "There is no evaluation.json here, so there are no scores.",
    }
    for name, sentence in sentences.items():
        assert sentence not in words(render(run_directory))
        (run_directory / name).unlink()
        assert sentence in words(render(run_directory))


def test_a_run_that_has_only_started_or_failed_says_so(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "stage": "load"}))
    assert "still running, in the stage “load”" in words(render(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"status": "failed", "stage": "train", "error": "disk <full>"}))
    assert "This run failed in the stage “train”. disk <full>" in words(render(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert "ending at 2.500 at step 1" in render(tmp_path)


def test_without_a_score_before_no_help_is_claimed(run_directory):
    evaluation = json.loads((run_directory / "evaluation.json").read_text())
    (run_directory / "evaluation.json").write_text(json.dumps({**evaluation, "before": None, "differences": {}}))
    text = words(render(run_directory))
    assert "this page cannot say whether training helped" in text
    assert "Difference" not in text


def test_a_bare_evaluation_shows_its_score_only(run_directory):
    evaluation = json.loads((run_directory / "evaluation.json").read_text())
    (run_directory / "evaluation.json").write_text(json.dumps({**evaluation, "before": None, "differences": {}}))
    for name in ("run.json", "metrics.jsonl", "recipe.yaml", "predictions_before.jsonl"):
        (run_directory / name).unlink()
    text = words(render(run_directory))
    assert "acclimate evaluation" in text
    assert "Scored on 400 rows of the task “choice”." in text
    assert "Wrong, most confident first" in text
    for absent in ("Training loss", "Recipe", "Where it comes from", "cannot say whether training helped"):
        assert absent not in text


def test_free_text_and_preferences(tmp_path):
    score = {"value": 3.2, "low": 3.0, "high": 3.4, "level": 0.95, "n": 2}
    entry = {"metrics": {"nll": score, "perplexity": {**score, "value": 24.5}}, "reliability": None, "classes": None,
             "per_class": None, "definition": "d", "seconds": 1.0, "truncated": 0, "n": 2}  # fmt: skip
    change = {"value": -0.5, "low": -0.7, "high": -0.2, "p_value": 0.01, "n_examples": 2, "n_seeds": 1, "verdict": "better", "words": "Lower by 0.5."}  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"status": "done", "method": {"task": "sft"}}))
    (tmp_path / "evaluation.json").write_text(
        json.dumps({"task": "sft", "before": entry, "after": entry, "differences": {"nll": change}})
    )
    rows = [{"id": i, "text": f"prompt {i}", "label": f"answer {i}", "nll": float(i), "tokens": 3} for i in range(3)]
    (tmp_path / "predictions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    earlier = [{**row, "nll": 1.0} for row in rows]
    (tmp_path / "predictions_before.jsonl").write_text("\n".join(map(json.dumps, earlier)))
    text = words(render(tmp_path))
    # Perplexity comes first in the headline, but only NLL was compared.
    assert "NLL (nats) before 3.200" in text
    assert "Lower by 0.5." in text
    assert "Improved most 1 of 1 prompt 0 label answer 0" in text
    assert "Worsened most 1 of 1 prompt 2" in text
    assert "Does it know" not in text

    pairs = [
        {"id": i, "prompt": f"question {i}", "margin": m, "correct": m > 0} for i, m in enumerate([-2.0, 0.5, -0.1])
    ]
    groups = instructive(pairs, [])
    assert [group["title"] for group in groups] == ["Wrong, most confident first", "Right, least confident first"]
    assert [row["text"] for row in groups[0]["rows"]] == ["question 0", "question 2"]
    assert groups[0]["rows"][0]["after"]["scores"] == [("margin", -2.0)]


def test_examples_are_those_that_changed_and_the_surest_mistakes():
    def rows(correct, confidence=None):
        return [
            {"id": i, "text": str(i), "label": "x", "prediction": "y", "correct": c, "confidence": (confidence or [0.5] * 99)[i]}
            for i, c in enumerate(correct)
        ]  # fmt: skip

    before = rows([False] * 10 + [True] + [False] * 20)
    after = rows([True] * 10 + [False] + [False] * 20, [i / 100 for i in range(31)])
    fixed, broken, still = instructive(after, before)
    assert (fixed["title"], fixed["total"]) == ("Wrong before, right now", 10)
    assert (broken["title"], broken["total"], [row["text"] for row in broken["rows"]]) == (
        "Right before, wrong now",
        1,
        ["10"],
    )
    assert (still["title"], still["total"]) == ("Still wrong, most confident first", 20)
    assert [row["text"] for row in still["rows"]] == ["30", "29", "28", "27", "26"]
    assert len(fixed["rows"]) + len(broken["rows"]) + len(still["rows"]) == 12
    assert instructive(rows([True]), rows([True])) == []


def test_a_comparison_shows_its_conclusion_first_and_links_its_runs(comparison_directory):
    compare = json.loads((comparison_directory / "compare.json").read_text())
    html = render(comparison_directory)
    text = words(html)
    assert text.index(compare["conclusion"][0]) < text.index("Leaderboard")
    assert "5 methods, 3 seeds each, an equal budget of 120 steps, scored on the same 400 rows." in text
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    names = re.findall(r'<th scope="row" class="wrap">([^<]*)', table)
    values = {s["name"]: s["metrics"].get("accuracy", {}).get("value") for s in [compare["base"], *compare["cells"]]}
    best_first = sorted((v, name) for name, v in values.items() if v is not None)[::-1]
    assert [name.split("&")[0] for name in names] == [name.split("<")[0] for _, name in best_first]
    assert all(f"{value:.3f}" in text for value, _ in best_first)
    assert "adapter=broken has no score. rank is 0 <b>" in text
    assert 'href="./cells/0%20%230/report.html"' in html
    assert all(d["words"] in text for d in compare["differences"])
    for axis in ("trainable parameters", "time per step", "peak memory"):
        assert f'aria-label="Accuracy against {axis}: ' in html


def test_a_path_of_a_run_cannot_become_a_script(comparison_directory):
    path = comparison_directory / "compare.json"
    compare = json.loads(path.read_text())
    compare["cells"][0]["runs"][0]["path"] = "javascript:alert(1)"
    path.write_text(json.dumps(compare))
    assert 'href="./javascript%3Aalert%281%29/report.html"' in render(comparison_directory)


def test_lower_is_better_sorts_the_other_way(comparison_directory):
    path = comparison_directory / "compare.json"
    compare = json.loads(path.read_text())
    path.write_text(json.dumps({**compare, "metric": "nll", "higher_is_better": False}))
    html = render(comparison_directory)
    names = re.findall(r'<th scope="row" class="wrap">([^<&]*)', html)
    values = {s["name"]: s["metrics"]["nll"]["value"] for s in [compare["base"], *compare["cells"]] if s["metrics"]}
    assert names[0] == min(values, key=values.get)


def test_an_empty_comparison_renders(tmp_path):
    (tmp_path / "compare.json").write_text(
        json.dumps({"task": "choice", "metric": "accuracy", "cells": [], "base": None})
    )
    text = words(render(tmp_path))
    assert "No system has been scored yet." in text
    assert "compare.json lists no runs." in text


def test_a_directory_that_holds_nothing_or_nonsense_is_named(tmp_path):
    with pytest.raises(
        InputError,
        match=re.escape(
            f"{tmp_path} has no compare.json, run.json, evaluation.json, scores.json, compression.json or quantization.json"
        ),
    ):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json is not valid JSON"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(InputError, match="holds list"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl line 1"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_failed_write_leaves_the_old_page(run_directory, monkeypatch):
    old = write_report(run_directory).read_bytes()
    (run_directory / "recipe.yaml").write_text("something: else\n")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(run_directory)
    assert (run_directory / "report.html").read_bytes() == old
    assert not list(run_directory.glob(".report*"))


def test_what_an_optimiser_says_is_shown_and_escaped(run_directory):
    document = {
        "title": "Muon: <b>how far</b>",
        "notes": ["Weights moved & turned."],
        "tables": [{"title": "Routing", "columns": ["group", "matrices", "share"], "rows": [["attention", 12, 0.25], ["<i>head</i>", "1", 0.5]]}],
        "plots": [
            {"title": "Distance", "x": "step", "y": "cosine distance", "log": True, "series": {"attention": [[1, 1e-4], [2, 1e-3]], "mlp": [[1, 1e-5]]}},
            {"title": "Nothing measured", "x": "step", "y": "y", "series": {"a": [[1, None]]}},
        ],
    }  # fmt: skip
    plain = render(run_directory)
    assert "Routing" not in plain
    (run_directory / "optimizer.json").write_text(json.dumps(document))
    page = render(run_directory)
    text = words(page)
    assert "Muon: <b>how far</b>" in text
    assert "<b>how far" not in page
    for shown in ("Weights moved & turned.", "Routing", "attention", "12", "0.25", "<i>head</i>", "Distance"):
        assert shown in text
    assert "Nothing measured" not in text
    assert "cosine distance against step of attention, mlp" in page
    assert render(run_directory) == page
