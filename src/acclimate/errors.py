"""The errors a user can meet. Each message says what was wrong, where, and what to do about it.

Raise them where bad input enters the program, once; inside, plain code. The command line turns them into one
line on stderr and the exit code of the class; anything else that escapes is a bug (exit code 1, with traceback).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AcclimateError(Exception):
    """Base of all errors meant for a person. `exit_code` is what the command line exits with."""

    exit_code = 1


class InputError(AcclimateError):
    """What the user gave (recipe, data, model, option) cannot be used as it stands."""

    exit_code = 2


class MissingError(AcclimateError):
    """The environment lacks something: a package, a device, disk space, a permission."""

    exit_code = 3


def missing_extra(package: str, extra: str, purpose: str) -> MissingError:
    """The error for an optional dependency that is not installed; names the exact pip command."""
    return MissingError(
        f"{purpose} needs the package '{package}', which is not installed. Install it with: pip install 'acclimate[{extra}]'"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest of `known`, or an empty string when nothing is close."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
