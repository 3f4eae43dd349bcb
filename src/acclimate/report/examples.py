"""Which predictions are worth a reader's time: what changed, and what is still wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def instructive(after: Sequence[Row], before: Sequence[Row], limit: int = 12) -> list[dict[str, Any]]:
    """Up to `limit` rows in groups {title, total, rows}; each row is {text, label, before, after}.

    Rows of the two files belong together by "id". Where rows say whether they are "correct": those that went from wrong
    to right, from right to wrong, and those still wrong, the most confident first. Otherwise (free text) those whose
    negative log likelihood fell most and rose most. Without `before`: what is wrong, and what was least sure.
    """
    earlier = {row["id"]: row for row in before if "id" in row}
    pairs = [(row, earlier.get(row.get("id"))) for row in after]
    groups: list[tuple[str, list[tuple[Row, Row | None]]]]
    if any(row.get("correct") is not None for row in after):
        right = [pair for pair in pairs if pair[0].get("correct")]
        wrong = [pair for pair in pairs if not pair[0].get("correct")]
        if earlier:
            groups = [
                (
                    "Wrong before, right now",
                    _sorted([p for p in right if p[1] and not p[1].get("correct")], _confidence),
                ),
                ("Right before, wrong now", _sorted([p for p in wrong if p[1] and p[1].get("correct")], _confidence)),
                (
                    "Still wrong, most confident first",
                    _sorted([p for p in wrong if p[1] and not p[1].get("correct")], _confidence),
                ),
            ]
        else:
            groups = [
                ("Wrong, most confident first", _sorted(wrong, _confidence)),
                ("Right, least confident first", _sorted(right, lambda p: -_confidence(p))),
            ]
    elif earlier:
        changed = [(_fall(pair), pair) for pair in pairs if pair[1]]
        groups = [
            ("Improved most", [p for fall, p in sorted(changed, key=lambda item: -item[0]) if fall > 0]),
            ("Worsened most", [p for fall, p in sorted(changed, key=lambda item: item[0]) if fall < 0]),
        ]
    else:
        groups = [("Least likely", _sorted(pairs, lambda p: p[0].get("nll") or 0.0))]
    shares = _shares([len(rows) for _, rows in groups], limit)
    return [
        {"title": title, "total": len(rows), "rows": [_shown(*pair) for pair in rows[:share]]}
        for (title, rows), share in zip(groups, shares, strict=True)
        if rows
    ]


def _sorted(
    pairs: list[tuple[Row, Row | None]], key: Callable[[tuple[Row, Row | None]], float]
) -> list[tuple[Row, Row | None]]:
    return sorted(pairs, key=key, reverse=True)


def _confidence(pair: tuple[Row, Row | None]) -> float:
    """Of the prediction now; for preference pairs, how far apart the two answers are."""
    row = pair[0]
    return float(row["confidence"]) if row.get("confidence") is not None else abs(row.get("margin") or 0.0)


def _fall(pair: tuple[Row, Row | None]) -> float:
    now, then = pair
    return ((then or {}).get("nll") or 0.0) - (now.get("nll") or 0.0)


def _shares(sizes: list[int], limit: int) -> list[int]:
    """Divide `limit` evenly over groups, giving what a small group leaves to the others."""
    shares = [0] * len(sizes)
    while sum(shares) < min(limit, sum(sizes)):
        for i, available in enumerate(sizes):
            if shares[i] < available and sum(shares) < limit:
                shares[i] += 1
    return shares


def _shown(now: Row, then: Row | None) -> dict[str, Any]:
    text = now.get("text", now.get("prompt", ""))
    return {
        "text": _cut(str(text), 360),
        "label": None if now.get("label") is None else _cut(str(now["label"]), 240),
        "before": _said(then) if then else None,
        "after": _said(now),
    }


def _said(row: Row) -> dict[str, Any]:
    prediction = row.get("prediction")
    return {
        "prediction": None if prediction is None else _cut(str(prediction), 240),
        "correct": row.get("correct"),
        "scores": [(name, row[name]) for name in ("confidence", "margin", "nll") if row.get(name) is not None][:1],
    }


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length].rstrip() + " …"
