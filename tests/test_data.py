"""Every reader gives the same rows, and what cannot be read is named by its place."""

from __future__ import annotations

import csv
import gzip
import importlib.resources
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import data
from acclimate.data import BUNDLED, Table, read_table
from acclimate.errors import InputError

# what breaks naive readers: quotes, delimiters, line separators inside a field, characters of every width
AWKWARD = [
    {"text": "plain", "label": "a"},
    {"text": 'a "quoted", comma\tand tab', "label": "b"},
    {"text": "two\nlines", "label": "a"},
    {"text": "separators \u2028 \u2029 \x85 \x0b \x0c inside", "label": "é"},
    {"text": "日本語 😀 naïve", "label": "b"},
    {"text": " spaces kept ", "label": "0"},
]


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_array(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def as_delimited(delimiter: str) -> Callable[[list[dict[str, Any]]], bytes]:
    def write(rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()

    return write


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


WRITERS = {
    "jsonl": as_jsonl,
    "ndjson": as_jsonl,
    "json": as_array,
    "csv": as_delimited(","),
    "tsv": as_delimited("\t"),
    "parquet": as_parquet,
}


def file(where: Path, name: str, content: bytes | str) -> Path:
    path = where / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(source: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_table(str(source), **options)
    return str(caught.value)


# --- what can be read ---


@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str, gzipped: bool) -> None:
    content = WRITERS[ending](AWKWARD)
    name = f"rows.{ending}"
    if gzipped:
        name, content = f"{name}.gz", gzip.compress(content)
    table = read_table(str(file(tmp_path, name, content)))
    assert table.rows == AWKWARD
    assert table.columns == ["text", "label"]
    assert (table.source, table.skipped) == (name, 0)


def test_endings_are_read_whatever_their_case(tmp_path: Path) -> None:
    assert read_table(str(file(tmp_path, "ROWS.CSV", as_delimited(",")(AWKWARD)))).rows == AWKWARD


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert read_table(str(file(tmp_path, "rows.json", as_jsonl(AWKWARD)))).rows == AWKWARD


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv"])
def test_byte_order_mark_and_windows_line_ends(tmp_path: Path, ending: str) -> None:
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]
    content = WRITERS[ending](rows).replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    assert read_table(str(file(tmp_path, f"rows.{ending}", b"\xef\xbb\xbf" + content))).rows == rows


def test_blank_lines_are_not_rows(tmp_path: Path) -> None:
    content = b'\n{"a": 1}\n\n   \n{"a": 2}\n\n'
    assert read_table(str(file(tmp_path, "rows.jsonl", content))).rows == [{"a": 1}, {"a": 2}]


def test_a_csv_field_may_be_long(tmp_path: Path) -> None:
    rows = [{"text": "word " * 100_000, "label": "a"}]
    assert read_table(str(file(tmp_path, "rows.csv", as_delimited(",")(rows)))).rows == rows


values = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"text": values, "label": values}), min_size=1, max_size=5))
def test_any_text_survives_jsonl_and_csv(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    where = tmp_path_factory.mktemp("any")
    assert read_table(str(file(where, "rows.jsonl", as_jsonl(rows)))).rows == rows
    assert read_table(str(file(where, "rows.csv", as_delimited(",")(rows)))).rows == rows


# --- what cannot ---


def test_one_broken_line_in_ten_thousand(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {i}", "label": "a"}) for i in range(10_000)]
    lines[6_420] = '{"text": "row", "label": '
    path = file(tmp_path, "rows.jsonl", "\n".join(lines))
    message = refused(path)
    assert f"'{path}' line 6421 is not JSON" in message
    assert "--skip-bad" in message
    table = read_table(str(path), skip_bad=True)
    assert (len(table.rows), table.skipped) == (9_999, 1)
    assert {"text": "row 6420", "label": "a"} not in table.rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n[1, 2]\n', "line 2 is a JSON list, not an object of columns"),
        ("rows.jsonl", '{"a": 1}\n"text"\n', "line 2 is a JSON str"),
        ("rows.json", '[{"a": 1}, 5]', "item 2 is a JSON int"),
        ("rows.csv", "a,b\n1,2\n3\n", "line 3 has 1 fields, the header has 2"),
        ("rows.csv", "a,b\n1,2\n1,2,3,4\n", "line 3 has 4 fields, the header has 2"),
        ("rows.tsv", "a\tb\n1,2\n1\t2\n", "line 2 has 1 fields, the header has 2"),
        ("rows.csv", 'a,b\n"two\nlines",2\n3\n', "line 4 has 1 fields"),
        ("rows.jsonl", '{"a": "cut \\ud83d"}\n{"a": "whole \\ud83d\\ude00"}\n', "line 1 has half a character (\\ud83d"),
    ],
)
def test_bad_rows_are_named_or_counted(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = file(tmp_path, name, content)
    assert f"'{path}' {message}" in refused(path)
    table = read_table(str(path), skip_bad=True)
    assert (len(table.rows), table.skipped) == (1, 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_files_show_what_a_row_is(tmp_path: Path, name: str, content: str) -> None:
    path = file(tmp_path, name, content)
    assert refused(path).startswith(f"no rows in '{path}'. An example of one JSONL row: {{")


def test_files_without_rows(tmp_path: Path) -> None:
    assert "no rows in" in refused(file(tmp_path, "rows.csv", "text,label\n"))
    assert "no rows in" in refused(file(tmp_path, "rows.json", "[]"))
    path = file(tmp_path, "rows.jsonl", "not json\nnor this\n")
    assert f"no rows in '{path}' (2 unreadable rows were skipped)" in refused(path, skip_bad=True)


def test_not_utf8_names_byte_and_line(tmp_path: Path) -> None:
    path = file(tmp_path, "rows.csv", b"text,label\nplain,a\ncaf\xe9,b\n")
    message = refused(path)
    assert f"'{path}' is not UTF-8: byte 0xe9 in line 3" in message
    assert "iconv" in message
    assert "line 3" in refused(file(tmp_path, "rows.csv.gz", gzip.compress(path.read_bytes())))


# Without the time that gzip writes into its header: the bytes are part of the tests' names, which all workers must agree on.
GZIPPED = gzip.compress(b'{"a": 1}\n' * 50, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", '[{"a": 1},', "is not JSON"),
        ("rows.jsonl.gz", b"plain text", "is not a whole gzip file"),
        ("rows.jsonl.gz", GZIPPED[:-9], "is not a whole gzip file"),
        ("rows.jsonl.gz", GZIPPED[:15] + b"xxxxxx", "is not a whole gzip file"),
        ("rows.parquet", b"not parquet", "as Parquet"),
        ("rows.parquet", b"", "as Parquet"),
        ("rows.xlsx", b"PK", "cannot tell the format of"),
        ("rows", b"a,b", "cannot tell the format of"),
        ("rows.csv", "text,label,text\n1,2,3\n", "has the column 'text' twice"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes | str, message: str) -> None:
    path = file(tmp_path, name, content)
    found = refused(path, skip_bad=True)
    assert message in found
    assert str(path) in found


def test_unknown_endings_list_the_known_ones(tmp_path: Path) -> None:
    found = refused(file(tmp_path, "rows.xlsx", b"PK"))
    assert all(f".{ending}" in found for ending in WRITERS)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert f"'{tmp_path}' is a directory; give a file" in refused(tmp_path)
    assert "no data file at 'rows.csv'" in refused("rows.csv")
    assert "no data file at './rows'" in refused("./rows")
    assert str(Path.cwd()) in refused("rows.csv")


def test_an_unknown_name_is_looked_for_everywhere_and_guessed() -> None:
    message = refused("clinc15")
    assert "neither a file, nor a bundled sample" in message
    assert "Did you mean 'clinc150'?" in message


# --- the bundled samples ---


@pytest.mark.parametrize(
    ("name", "rows", "intents"),
    [("clinc150:train", 15_000, 150), ("clinc150:validation", 3_000, 150), ("clinc150:test", 4_500, 150), ("clinc150-oos:test", 1_200, 1)],
)  # fmt: skip
def test_the_bundled_sample_is_whole(name: str, rows: int, intents: int) -> None:
    table = read_table(name)
    assert len(table.rows) == rows
    assert len({row["intent"] for row in table.rows}) == intents
    assert all(row["text"].strip() for row in table.rows)


def test_the_sample_has_ten_balanced_domains_with_their_words() -> None:
    counts = Counter(row["domain"] for row in read_table("clinc150").rows)
    assert set(counts.values()) == {1_500}
    assert counts.keys() == BUNDLED["clinc150"].recipe["labels"].keys()


def test_the_samples_splits_do_not_overlap() -> None:
    train, test = read_table("clinc150"), read_table("clinc150", split="test")
    shared = data.overlap(train, test, ["text", "intent"])
    assert shared / len(test.rows) < 0.01


def test_sentiment3_is_balanced_and_its_splits_are_apart() -> None:
    tables = {split: read_table("sentiment3", split=split) for split in ("train", "test")}
    assert {split: len(table.rows) for split, table in tables.items()} == {"train": 2_000, "test": 1_000}
    cells = Counter((row["source"], row["label"]) for table in tables.values() for row in table.rows)
    assert cells == {(s, label): 500 for s in ("amazon", "imdb", "yelp") for label in ("negative", "positive")}
    # the source itself holds a few sentences twice
    assert data.overlap(tables["train"], tables["test"], ["text", "label"]) <= 12


def test_gsm8k_answers_end_in_their_number() -> None:
    for split, count in (("train", 3_000), ("test", 800)):
        rows = read_table("gsm8k", split=split).rows
        assert len(rows) == count
        assert all(row["question"].strip() and "\n#### " in row["answer"] for row in rows)


@pytest.mark.parametrize(
    ("folder", "licence", "author"),
    [
        ("clinc150", "CC BY 3.0", "Larson"),
        ("sentiment3", "CC BY 4.0", "Kotzias"),
        ("gsm8k", "MIT", "Cobbe"),
        ("wikitext2", "CC BY-SA 3.0", "Merity"),
    ],
)
def test_a_sample_ships_its_licence_and_stays_small(folder: str, licence: str, author: str) -> None:
    where = importlib.resources.files("acclimate") / "samples" / folder
    notice = (where / "LICENSE.md").read_text(encoding="utf-8")
    assert licence in notice
    assert author in notice
    assert sum(len(item.read_bytes()) for item in where.iterdir()) < 1_000_000


def test_an_unknown_split_lists_those_there() -> None:
    assert "has no split 'dev'. It has: train, validation, test" in refused("clinc150:dev")


# --- columns and ids ---

TABLE = Table([{"id": "a", "body": "one", "kind": "x"}, {"id": "b", "body": "two", "kind": "y"}], "rows.csv")


def test_rename_gives_our_names_to_their_columns() -> None:
    renamed = data.rename_columns(TABLE, {"text": "body", "label": "kind"})
    assert renamed.rows[0] == {"id": "a", "text": "one", "label": "x"}
    assert TABLE.rows[0] == {"id": "a", "body": "one", "kind": "x"}


def test_a_renamed_column_replaces_one_that_has_our_name_already() -> None:
    table = Table([{"label": "old", "intent": "new"}], "rows")
    assert data.rename_columns(table, {"label": "intent"}).rows == [{"label": "new"}]
    swapped = data.rename_columns(table, {"label": "intent", "intent": "label"})
    assert swapped.rows == [{"intent": "old", "label": "new"}]


def test_a_missing_column_lists_those_there_and_the_remedy() -> None:
    with pytest.raises(InputError) as caught:
        data.require_columns(TABLE, ["text"], "classify")
    assert str(caught.value) == (
        "'rows.csv' has no column 'text' (needed by task 'classify'). Columns found: id, body, kind. "
        "Map your names with --set columns.text=YOUR_COLUMN"
    )
    with pytest.raises(InputError, match=r"no column 'bodi'.*Did you mean 'body'.*columns\.text="):
        data.rename_columns(TABLE, {"text": "bodi"})


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_row_without_its_column_is_named_or_counted(nothing: Any) -> None:
    table = Table([{"text": "one"}, {"text": nothing}, {}], "rows.csv", skipped=4)
    with pytest.raises(InputError, match=r"row 2 of 'rows.csv' has nothing in column 'text'.*--skip-bad"):
        data.require_columns(table, ["text"], "classify")
    kept = data.require_columns(table, ["text"], "classify", skip_bad=True)
    assert (kept.rows, kept.skipped) == ([{"text": "one"}], 6)


def test_zero_and_false_are_values() -> None:
    table = Table([{"label": 0}, {"label": False}], "rows")
    assert data.require_columns(table, ["label"], "classify").rows == table.rows


def test_duplicate_ids_are_an_error() -> None:
    table = Table([{"id": "a"}, {"id": "b"}, {"id": "a"}, {"id": 7}, {"id": "7"}, {"id": "a"}], "rows.csv")
    with pytest.raises(InputError, match=r"'rows.csv' has 2 duplicate ids, e.g. 'a' 3 times"):
        data.with_ids(table)


def test_rows_without_ids_are_numbered() -> None:
    assert [row["id"] for row in data.with_ids(Table([{"x": 1}, {"x": 2, "id": None}], "rows")).rows] == ["0", "1"]
    assert [row["id"] for row in data.with_ids(Table([{"id": 5}, {"id": "b"}], "rows")).rows] == ["5", "b"]


# --- sampling ---


def numbered(count: int) -> Table:
    return Table([{"n": i} for i in range(count)], "rows", skipped=3)


def numbers(table: Table) -> list[int]:
    return [row["n"] for row in table.rows]


@given(count=st.integers(1, 60), size=st.none() | st.integers(1, 80), seed=st.integers(0, 1000))
def test_a_sample_is_a_subset_that_the_seed_decides(count: int, size: int | None, seed: int) -> None:
    table = numbered(count)
    chosen = numbers(data.sample(table, size, seed))
    assert chosen == numbers(data.sample(table, size, seed))
    assert len(set(chosen)) == len(chosen) == min(count, size or count)
    if size is None or size >= count:
        assert chosen == numbers(table)


def test_another_seed_is_another_sample_and_every_row_has_its_chance() -> None:
    counts = Counter(n for seed in range(400) for n in numbers(data.sample(numbered(10), 3, seed)))
    # each row is drawn with probability .3: 120 of 400 times, standard deviation 9.2
    assert len(counts) == 10
    assert all(abs(count - 120) < 46 for count in counts.values())


@given(count=st.integers(2, 300), seed=st.integers(0, 1000))
def test_hold_out_splits_every_row_to_one_side(count: int, seed: int) -> None:
    table = numbered(count)
    train, held = data.hold_out(table, seed)
    assert sorted(numbers(train) + numbers(held)) == numbers(table)
    assert len(held.rows) == max(1, round(count / 10))
    assert (train.skipped, held.skipped) == (3, 0)
    assert numbers(data.hold_out(table, seed)[1]) == numbers(held)


def test_hold_out_is_a_thousand_rows_at_most() -> None:
    assert len(data.hold_out(numbered(20_000), 0)[1].rows) == 1_000


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(InputError, match="1 row: too few to train and evaluate"):
        data.hold_out(numbered(1), 0)


def test_overlap_counts_evaluation_rows_by_content() -> None:
    train = Table([{"id": "1", "text": "a", "label": "x"}, {"id": "2", "text": "b", "label": "y"}], "train")
    evaluation = Table(
        [
            {"id": "9", "text": "a", "label": "x"},  # the same but for its id
            {"id": "8", "text": "a", "label": "x"},  # and once more
            {"id": "1", "text": "c", "label": "x"},
            {"id": "2", "text": "b", "label": "x"},  # the same text with another label
        ],
        "eval",
    )
    assert data.overlap(train, evaluation, ["text", "label"]) == 2
    assert data.overlap(train, evaluation, ["text"]) == 3
    nested = Table([{"messages": [{"role": "user", "content": "a"}]}], "chat")
    assert data.overlap(nested, nested, ["messages"]) == 1
