"""Numbers as people read them: 0.720, 1.2 GB, 2 m 31 s, 134.5 M."""

from __future__ import annotations

import math
from typing import Any

NOTHING = "–"


def number(value: Any) -> str:
    """Three decimals near one, fewer above a hundred, two significant digits near zero; integers with separators."""
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return _minus(f"{value:,}")
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else _minus("∞" if value > 0 else "-∞")
    size = abs(value)
    if size >= 1e7 or 0 < size < 0.0005:
        return _minus(f"{value:.2g}")
    return _minus(f"{value:,.{3 if size < 100 else 1 if size < 1000 else 0}f}")


def signed(value: float | None) -> str:
    """`number` with its sign always shown."""
    return f"+{number(value)}" if value is not None and value > 0 else number(value)


def interval(entry: dict[str, Any] | None) -> str:
    """The low and high of an interval dict: "0.671 to 0.769"; nothing when there is none."""
    if not entry or entry.get("low") is None or entry.get("high") is None:
        return ""
    return f"{number(entry['low'])} to {number(entry['high'])}"


def p_value(value: float | None) -> str:
    """Three decimals, "< 0.001" below."""
    if value is None:
        return NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def size(n_bytes: float | None) -> str:
    """Bytes in decimal units: 980 B, 1.8 MB, 1.2 GB."""
    return NOTHING if n_bytes is None else _scaled(n_bytes, ["B", "kB", "MB", "GB", "TB"])


def count(n: float | None) -> str:
    """A count with separators up to a million, then in M, G (10^9) or T: 460,800, 134.5 M."""
    if n is None:
        return NOTHING
    return f"{int(n):,}" if n < 1e6 else _scaled(n, ["", "k", "M", "G", "T"])


def duration(seconds: float | None) -> str:
    """Seconds as 12 ms, 3.1 s, 2 m 31 s or 1 h 04 m."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def percent(share: float) -> str:
    """A share as a percentage with three significant digits."""
    return f"{100 * share:.3g}%"


def _scaled(value: float, units: list[str]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    text = f"{value:.{1 if power else 0}f}".removesuffix(".0")
    return f"{text} {units[power]}".strip()


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text
