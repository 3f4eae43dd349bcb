"""The command line: one module a verb. It parses, calls and prints; the work is elsewhere."""

from __future__ import annotations

import sys

from acclimate.cli.common import run_app


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a bug, 2 the user's input, 3 the environment lacks something, 130 interrupted."""
    sys.exit(run_app(sys.argv[1:]))
