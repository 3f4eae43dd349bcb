"""What the benchmarks share: their command line, steps that take turns, and where the numbers go."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser with --fast and --output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--output", type=Path, help="write the numbers there as JSON")
    return parser


def write(result: dict[str, Any], output: Path | None) -> str:
    """The numbers as JSON text, and in `output` if there is one."""
    text = json.dumps(result, indent=2)
    if output:
        output.write_text(text + "\n")
    return text


def peak(arguments: list[str]) -> float:
    """Peak resident memory of `acclimate ..`, in megabytes."""
    command = ["/usr/bin/time", "-v", sys.executable, "-m", "acclimate", *arguments, "--quiet"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def take_turns(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Milliseconds of each step (median), and the median over rounds of its ratio to the first; a round takes one of each, so that
    whatever else the machine does is spread over all. The first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:
                times[name].append(1000 * (time.perf_counter() - start))
    reference = next(iter(times.values()))
    found = {
        "ms": {name: statistics.median(values) for name, values in times.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(values, reference, strict=True))
            for name, values in times.items()
        },
    }
    print(f"  {found}", file=sys.stderr)
    return found


def measure_parts(
    description: str | None, parts: Mapping[str, Callable[[bool], Any]], facts: Mapping[str, Any]
) -> None:
    """The command line of a benchmark in parts, each called with whether --fast was given: all, or --part alone beside what --output has."""
    parser = command_line(description)
    parser.add_argument("--part", choices=parts, help="measure this part alone; the others stay as --output has them")
    options = parser.parse_args()
    known = options.part and options.output and options.output.exists()
    result: dict[str, Any] = json.loads(options.output.read_text()) if known else {}
    for name, part in parts.items():
        if options.part in (None, name):
            print(name, file=sys.stderr)
            result[name] = part(options.fast)
    print(write(result | dict(facts), options.output))
