"""Reading rows: files, hub data sets and the bundled samples, with errors that name the place.

A row is a plain dictionary. What the columns mean is the task's affair (`acclimate.tasks`); here they are read, renamed,
checked for what is missing, and sampled.
"""

from __future__ import annotations

import csv
import gzip
import importlib.resources
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from acclimate.errors import InputError, did_you_mean

Row = dict[str, Any]

FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")

_DOMAIN_WORDS = {
    "banking": "bank",
    "credit_cards": "credit",
    "kitchen_and_dining": "food",
    "home": "home",
    "auto_and_commute": "car",
    "travel": "travel",
    "utility": "tools",
    "work": "work",
    "small_talk": "chat",
    "meta": "settings",
}


@dataclass(frozen=True)
class Bundled:
    """A sample inside the package: its folder, its files by split, and the recipe fields that fit it."""

    folder: str
    files: Mapping[str, str]
    recipe: Mapping[str, Any]


BUNDLED = {
    "clinc150": Bundled(
        "clinc150",
        {"train": "train", "validation": "val", "test": "test"},
        {
            "task": "choice",
            "columns": {"label": "domain"},
            "template": "Request: {text}\nTopic:",
            "labels": _DOMAIN_WORDS,
            "max_train_samples": 960,
            "max_eval_samples": 500,
        },
    ),
    "clinc150-intent": Bundled(
        "clinc150",
        {"train": "train", "validation": "val", "test": "test"},
        {
            "task": "choice",
            "columns": {"label": "intent"},
            "template": "Request: {text}\nIntent:",
            "max_train_samples": 3000,
            "max_eval_samples": 500,
        },
    ),
    "clinc150-oos": Bundled("clinc150", {"test": "oos"}, {"task": "choice", "columns": {"label": "intent"}}),
    "banking77": Bundled(
        "banking77",
        {"test": "test"},
        {"task": "choice", "columns": {"label": "intent"}, "template": "Request: {text}\nIntent:"},
    ),
    "sentiment3": Bundled(
        "sentiment3",
        {"train": "train", "test": "test"},
        {
            "task": "choice",
            "template": "Review: {text}\nSentiment:",
            "max_train_samples": 480,
            "max_eval_samples": 500,
        },
    ),
    "gsm8k": Bundled(
        "gsm8k",
        {"train": "train", "test": "test"},
        {
            "task": "sft",
            "columns": {"prompt": "question", "completion": "answer"},
            "max_train_samples": 256,
            "max_eval_samples": 100,
        },
    ),
    "wikitext2": Bundled("wikitext2", {"validation": "valid", "test": "test"}, {}),
}


@dataclass
class Table:
    """Rows as read, with where they came from and what was left out."""

    rows: list[Row]
    source: str
    skipped: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows[:100] for key in row))


def read_table(source: str, *, split: str = "train", skip_bad: bool = False) -> Table:
    """Rows of a bundled sample (`clinc150`), a file (.jsonl, .json, .csv, .tsv, .parquet, each also .gz) or a hub data set.

    Parameters
    ----------
    source
        Bundled name, path, or hub id. Bundled names and hub ids may end in `:split`, hub ids also in `:configuration:split`.
    split
        Which split of a bundled sample or hub data set, when the source does not say.
    skip_bad
        Leave out rows that cannot be read, and count them in `Table.skipped`.

    Raises
    ------
    InputError
        Missing or empty file, broken line (with its number), not UTF-8, unknown name.
    """
    name, _, named_split = source.partition(":")
    if name in BUNDLED:
        split = named_split or split
        files = BUNDLED[name].files
        if split not in files:
            raise InputError(f"the sample '{name}' has no split '{split}'. It has: {', '.join(files)}")
        resource = (
            importlib.resources.files("acclimate") / "samples" / BUNDLED[name].folder / f"{files[split]}.jsonl.gz"
        )
        return Table(
            list(_jsonl(_text(resource.read_bytes(), name, gzipped=True), name, _Skips(False))), f"{name}:{split}"
        )
    path = Path(source)
    if path.exists():
        table = _read_file(path, skip_bad)
    elif path.suffix or source.startswith((".", "/", "~")):
        raise InputError(f"no data file at '{source}' (looked in {Path.cwd()})")
    else:
        configuration, _, hub_split = named_split.rpartition(":")
        table = _read_hub(name, configuration or None, hub_split or split)
    if not table.rows:
        bad = f" ({table.skipped} unreadable rows were skipped)" if table.skipped else ""
        raise InputError(
            f'no rows in \'{source}\'{bad}. An example of one JSONL row: {{"text": "...", "label": "..."}}'
        )
    return table


@dataclass
class _Skips:
    """Decides what happens at a bad row: raise, or count and go on."""

    allowed: bool
    count: int = 0

    def bad(self, message: str) -> None:
        if not self.allowed:
            raise InputError(f"{message}. Fix it, or leave such rows out with --skip-bad")
        self.count += 1


def _read_file(path: Path, skip_bad: bool) -> Table:
    if path.is_dir():
        raise InputError(f"'{path}' is a directory; give a file, e.g. {path / 'train.jsonl'}")
    gzipped = path.suffix.lower() == ".gz"
    kind = (path.with_suffix("") if gzipped else path).suffix.lower()
    if kind not in FILE_ENDINGS:
        raise InputError(f"cannot tell the format of '{path}'. Known endings: {', '.join(FILE_ENDINGS)} (also .gz)")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None
    skips = _Skips(skip_bad)
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(pyarrow.BufferReader(_unpacked(raw, str(path), gzipped)))
            rows = table.to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise InputError(f"cannot read '{path}' as Parquet: {error}") from None
    else:
        text = _text(raw, str(path), gzipped)
        if kind in (".csv", ".tsv"):
            rows = list(_delimited(text, str(path), "," if kind == ".csv" else "\t", skips))
        elif kind == ".json" and text.lstrip().startswith("["):
            rows = list(_json_array(text, str(path), skips))
        else:
            rows = list(_jsonl(text, str(path), skips))
    return Table(rows, path.name, skips.count)


TEXT_ENDINGS = (".txt", ".md")


def read_text(source: str, *, split: str = "train") -> str:
    """Plain text: a .txt or .md file (also .gz) as it is, or the column `text` of what `read_table` takes, a blank line between rows.

    Raises InputError as `read_table` does, and where there is no text.
    """
    path = Path(source)
    kind = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    if kind in TEXT_ENDINGS and path.is_file():
        text = _text(path.read_bytes(), source, gzipped=path.suffix.lower() == ".gz")
    else:
        table = require_columns(read_table(source, split=split), ["text"], "plain text")
        text = "\n\n".join(str(row["text"]) for row in table.rows)
    if not text.strip():
        raise InputError(f"there is no text in '{source}'")
    return text


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file that are not blank."""
    try:
        text = _text(path.read_bytes(), str(path), gzipped=False)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _unpacked(raw: bytes, name: str, gzipped: bool) -> bytes:
    try:
        return gzip.decompress(raw) if gzipped else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"'{name}' is not a whole gzip file: {error}") from None


def _text(raw: bytes, name: str, gzipped: bool) -> str:
    raw = _unpacked(raw, name, gzipped)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(
            f"'{name}' is not UTF-8: byte {raw[error.start]:#x} in line {line}. Convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None


def _jsonl(text: str, name: str, skips: _Skips) -> Iterator[Row]:
    # not splitlines(): U+2028 and friends are legal inside JSON strings
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            skips.bad(f"'{name}' line {number} is not JSON: {error}")
            continue
        if _is_row(row, f"'{name}' line {number}", "\\u" in line, skips):
            yield row


def _json_array(text: str, name: str, skips: _Skips) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise InputError(f"'{name}' is not JSON: {error}") from None
    for number, row in enumerate(rows, 1):
        if _is_row(row, f"'{name}' item {number}", "\\u" in text, skips):
            yield row


def _is_row(row: Any, where: str, escapes: bool, skips: _Skips) -> bool:
    if not isinstance(row, dict):
        skips.bad(f"{where} is a JSON {type(row).__name__}, not an object of columns")
        return False
    if escapes:  # JSON can spell half of a character, as texts cut in the middle of an emoji do; no tokenizer takes it
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            skips.bad(f"{where} has half a character (\\u{ord(error.object[error.start]):x} without its other half)")
            return False
    return True


def _delimited(text: str, name: str, delimiter: str, skips: _Skips) -> Iterator[Row]:
    if not text.strip():
        return
    # the limit that the csv module sets to a field is smaller than a long document
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    header = reader.fieldnames or []
    if len(set(header)) < len(header):
        twice = next(column for column in header if header.count(column) > 1)
        raise InputError(f"the header of '{name}' has the column '{twice}' twice; give each its own name")
    for row in reader:
        if None in row or None in row.values():
            found = sum(len(v) if k is None else 1 for k, v in row.items() if v is not None)
            skips.bad(f"'{name}' line {reader.line_num} has {found} fields, the header has {len(header)}")
            continue
        yield dict(row)


def _read_hub(name: str, configuration: str | None, split: str) -> Table:
    import datasets

    try:
        return Table(datasets.load_dataset(name, configuration, split=split).to_list(), f"{name}:{split}")
    except Exception as error:
        raise InputError(
            f"'{name}' is neither a file, nor a bundled sample ({', '.join(BUNDLED)}), nor a hub data set that can be "
            f"loaded.{did_you_mean(name, BUNDLED)} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from None


def rename_columns(table: Table, columns: Mapping[str, str]) -> Table:
    """Give the user's columns our names (`{"label": "domain"}`: our `label` is their `domain`); the others stay."""
    for ours, theirs in columns.items():
        if theirs not in table.columns:
            raise missing_column(table, theirs, f"columns: {{{ours}: {theirs}}}", ours)
    taken = {theirs: ours for ours, theirs in columns.items()}
    rows = [{taken.get(k, k): v for k, v in row.items() if k in taken or k not in columns} for row in table.rows]
    return replace(table, rows=rows)


def missing_column(table: Table, column: str, why: str, ours: str | None = None) -> InputError:
    """The error for a column that is not there; `ours` is the name that acclimate knows it by, if not the same."""
    hint = did_you_mean(column, table.columns)
    return InputError(
        f"'{table.source}' has no column '{column}' ({why}). Columns found: {', '.join(map(str, table.columns))}.{hint} "
        f"Map your names with --set columns.{ours or column}=YOUR_COLUMN"
    )


def require_columns(table: Table, names: Iterable[str], task: str, skip_bad: bool = False) -> Table:
    """Check that every row has these columns, filled; rows without are an error or, with `skip_bad`, left out."""
    names = list(names)
    for name in names:
        if name not in table.columns:
            raise missing_column(table, name, f"needed by task '{task}'")
    skips = _Skips(skip_bad)
    kept = []
    for number, row in enumerate(table.rows, 1):
        empty = [name for name in names if row.get(name) is None or row.get(name) == ""]
        if empty:
            skips.bad(f"row {number} of '{table.source}' has nothing in column '{empty[0]}'")
        else:
            kept.append(row)
    return replace(table, rows=kept, skipped=table.skipped + skips.count)


def with_ids(table: Table) -> Table:
    """Give every row a string `id`: its own where the file has one, else its number. Duplicate ids are an error."""

    def name(row: Row, number: int) -> str:
        return str(number if row.get("id") in (None, "") else row["id"])

    rows = [{**row, "id": name(row, number)} for number, row in enumerate(table.rows)]
    counts = Counter(row["id"] for row in rows)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise InputError(
            f"'{table.source}' has {len(repeated)} duplicate ids, e.g. '{repeated[0]}' {counts[repeated[0]]} times. Predictions "
            "are matched by id: make them unique, or rename the column"
        )
    return replace(table, rows=rows)


def sample(table: Table, size: int | None, seed: int) -> Table:
    """A random subset without replacement, in random order; the whole table when `size` is None or larger."""
    if size is None or size >= len(table.rows):
        return table
    chosen = np.random.default_rng(seed).permutation(len(table.rows))[:size]
    return replace(table, rows=[table.rows[i] for i in chosen])


def hold_out(table: Table, seed: int, share: float = 0.1) -> tuple[Table, Table]:
    """Split off a random tenth for evaluation (at least one row, at most 1,000), when the user gave none."""
    count = min(max(1, round(len(table.rows) * share)), 1000)
    if len(table.rows) < 2:
        raise InputError(
            f"'{table.source}' has {len(table.rows)} row: too few to train and evaluate. Give more, or --eval-data"
        )
    order = np.random.default_rng(seed).permutation(len(table.rows))
    held, kept = sorted(order[:count]), sorted(order[count:])
    return (
        replace(table, rows=[table.rows[i] for i in kept]),
        replace(table, rows=[table.rows[i] for i in held], source=f"{table.source} (held-out tenth)", skipped=0),
    )


def overlap(train: Table, evaluation: Table, keys: Iterable[str]) -> int:
    """How many evaluation rows also stand in training, comparing the given columns."""
    keys = list(keys)

    def content(row: Row) -> str:
        return json.dumps([row.get(key) for key in keys], sort_keys=True, default=str)

    seen = {content(row) for row in train.rows}
    return sum(content(row) in seen for row in evaluation.rows)
