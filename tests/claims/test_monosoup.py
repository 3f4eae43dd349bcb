"""The MonoSoup claim runs end to end at its smallest size, and its sentences are what they say. Its verdict at that size means nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from acclimate import data
from acclimate.claims import monosoup as claim
from acclimate.claims import zero_shot
from acclimate.claims.monosoup import ALPHAS, CLAIM, SIZES, garble, names
from acclimate_claims import bench_fast


@pytest.mark.embedded
def test_fast_bench_measures_every_system(tmp_path: Path) -> None:
    evidence = bench_fast("monosoup", tmp_path)
    assert len(evidence["reasons"]) == len(CLAIM.bars)
    rows = {(row["system"], row["metric"]): row for row in evidence["rows"]}
    several = {"fine-tuned", "monosoup", "lines", "strong directions only", *(f"wise-ft {a:g}" for a in ALPHAS)}
    counts = dict.fromkeys(several, 2) | dict.fromkeys(("base", "model stock of two", "uniform soup", "greedy soup"), 1)
    for metric in ("ood_accuracy", "id_accuracy", "unseen_intents", "banking77", "garbled", "mean_of_id_and_ood"):
        assert {system: len(row["values"]) for (system, name), row in rows.items() if name == metric} == counts
    for system, count in counts.items():
        parts = [rows[system, name]["mean"] for name in ("unseen_intents", "banking77", "garbled")]
        assert rows[system, "ood_accuracy"]["mean"] == pytest.approx(sum(parts) / 3, rel=1e-4), count
    soup = rows["uniform soup", "ood_accuracy"]["mean"]
    singles = rows["fine-tuned", "ood_accuracy"]["values"]
    edited = rows["monosoup", "ood_accuracy"]["values"]
    beyond = [after - before - 0.5 * (soup - before) for after, before in zip(edited, singles, strict=True)]
    assert rows["monosoup", "ood_gain_beyond_half_of_soup"]["values"] == pytest.approx(beyond, abs=1e-5)


def test_nothing_of_the_unseen_intents_is_trained_on() -> None:
    size = SIZES["default"]
    inside, outside = names(claim.ID, size), names(claim.OOD, size)
    assert len(inside) == len(outside) == 75
    assert not set(inside) & set(outside)
    banking = {row["intent"] for row in data.read_table("banking77", split="test").rows}
    assert len(banking) == 77


def test_a_tenth_of_the_letters_is_garbled() -> None:
    text = "what is my balance in checking " * 200
    found = garble(text, random.Random(0))
    assert found == garble(text, random.Random(0))
    letters = sum(letter.isalpha() for letter in text)
    # one third of a tenth each is dropped and doubled, so that the length stays; the words between the spaces do not
    assert abs(len(found) - len(text)) < 0.02 * letters
    whole = sum(a == b for a, b in zip(found.split(" "), text.split(" "), strict=True))
    kept = sum(0.9 ** len(word) for word in text.split(" "))
    assert whole == pytest.approx(kept, rel=0.1)


@pytest.mark.embedded
def test_embeddings_do_not_depend_on_the_batch() -> None:
    texts = ["hello", "what is my balance in the checking account that i share with my mother", "freeze my card"]
    ids = zero_shot.tokens(texts)
    model = zero_shot.fresh()
    together = zero_shot.embed_all(model, ids)
    for row, one in zip(together, ids, strict=True):
        torch.testing.assert_close(zero_shot.embed_all(model, [one])[0], row, rtol=0, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3))
    # a class's head is the embedding of its name
    torch.testing.assert_close(
        zero_shot.heads(("freeze_my_card",))[0], zero_shot.embed_all(model, zero_shot.tokens(["freeze my card"]))[0]
    )


def test_what_is_cached_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path))
    made = []

    def make(place: Path) -> None:
        made.append(place)
        (place / "file").write_text(str(len(made)))

    first = zero_shot.cached("test", {"seed": 1}, make)
    assert zero_shot.cached("test", {"seed": 1}, make) == first
    other = zero_shot.cached("test", {"seed": 2}, make)
    assert [(path / "file").read_text() for path in (first, other)] == ["1", "2"]
    assert len(made) == 2

    def fails(place: Path) -> None:
        (place / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zero_shot.cached("test", {"seed": 3}, fails)
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {first.name, other.name}
