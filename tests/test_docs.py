"""What the README and docs/ show must work: commands parse, code compiles or runs, links lead somewhere, pages are complete."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import acclimate
from acclimate.recipe import Recipe, nest, parse_assignments

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNS = "<!-- runs -->"  # stands before a Python block that is executed here
# chat is a section of the page about predict
PAGE_OF_VERB = {"chat": "predict"}


@dataclass
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks() -> Iterator[Block]:
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").split("\n")
        start = None
        for number, line in enumerate(lines):
            if not line.lstrip().startswith("```"):
                continue
            if start is None:
                start = number
                continue
            head = lines[start].strip()[3:]
            found = re.fullmatch(r'(\w*)(?: title="(.+)")?', head)
            assert found, f"{page.name}:{start + 1}: a fence that is not understood: {head!r}"
            text = "\n".join(lines[start + 1 : number]) + "\n"
            yield Block(
                page, start + 1, found[1], found[2] or "", text, runs=start > 0 and lines[start - 1].strip() == RUNS
            )
            start = None
        assert start is None, f"{page.name}: a code block is not closed"


BLOCKS = list(_blocks())


def _of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def _ids(items: list[Any]) -> list[str]:
    return [str(item) for item in items]


# --- commands ---


def _commands() -> list[tuple[str, list[str]]]:
    """(place, arguments) of every acclimate command, also behind a pipe or `accelerate launch ... -m`."""
    found = []
    for block in _of("bash"):
        for offset, line in enumerate(block.text.split("\n"), 1):
            for part in line.split("|"):
                words = shlex.split(part.split(" > ")[0], comments=True)
                if words[:2] == ["accelerate", "launch"] and "-m" in words:
                    words = words[words.index("-m") + 1 :]
                if words and words[0].rpartition("/")[2] == "acclimate":
                    found.append((f"{block.page.relative_to(ROOT)}:{block.line + offset}", words[1:]))
    return found


COMMANDS = _commands()


@pytest.fixture(scope="module")
def command_line() -> Any:
    names = (
        "tune",
        "evaluate",
        "predict",
        "chat",
        "compare",
        "export",
        "merge",
        "soup",
        "compress",
        "quantize",
        "methods",
        "bench",
        "models",
        "doctor",
    )
    app = typer.Typer()
    for name in names:
        importlib.import_module(f"acclimate.cli.{name}").register(app)
    return typer.main.get_command(app)


def _parse(command: Any, name: str, arguments: list[str]) -> dict[str, Any]:
    """The parameters that the command would be called with; nothing is executed."""
    context = command.make_context(name, list(arguments))
    if not hasattr(command, "commands"):
        return context.params
    sub = command.commands[arguments[0]]
    return _parse(sub, arguments[0], arguments[1:])


@pytest.mark.parametrize(("place", "arguments"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_command_parses(command_line: Any, place: str, arguments: list[str]) -> None:
    from acclimate.comparison import parse_vary

    parameters = _parse(command_line, "acclimate", arguments)
    Recipe(**nest(parse_assignments(parameters.get("settings") or [])))
    if arguments[0] in ("tune", "compare"):
        Recipe(**{key: parameters[key] for key in ("task", "adapter", "init", "optimizer") if parameters.get(key)})
    for key, values in parse_vary(parameters.get("vary") or []).items():
        for value in values:
            Recipe(**nest({key: value}))


def test_every_verb_is_shown_and_has_a_page(command_line: Any) -> None:
    shown = {arguments[0] for _, arguments in COMMANDS}
    assert set(command_line.commands) == shown
    for verb in command_line.commands:
        page = ROOT / "docs" / f"{PAGE_OF_VERB.get(verb, verb)}.md"
        assert f"acclimate {verb}" in page.read_text(encoding="utf-8")
        assert f"`acclimate {verb}`](docs/{page.name}" in PAGES[0].read_text(encoding="utf-8")


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {match for page in PAGES for match in re.findall(r"make ([a-z][\w-]*)`", page.read_text(encoding="utf-8"))}
    named |= {word for block in _of("bash") for word in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE)}
    assert {"demo", "test"} <= named <= set(targets)


# --- code ---


@pytest.mark.parametrize("block", _of("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.fixture
def small(tiny_lm: Path, tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which the embedded names mean tiny random models."""
    from acclimate import models

    tiny = {"smollm2": str(tiny_lm), "minilm": str(tiny_encoder)}
    resolve = models.resolve
    monkeypatch.setattr(models, "resolve", lambda name, *rest: tiny.get(name) or resolve(name, *rest))
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUNNABLE = sorted({block.page for block in BLOCKS if block.runs})


@pytest.mark.parametrize("page", RUNNABLE, ids=[page.name for page in RUNNABLE])
def test_marked_python_runs(page: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The marked blocks of a page, one after the other, as a reader would type them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        if block.page == page and block.runs:
            exec(compile(block.text, str(block), "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", _of("yaml"), ids=str)
def test_yaml_is_a_recipe(block: Block) -> None:
    if "--8<--" in block.text:  # a file, looked at below
        (name,) = re.findall(r'--8<-- "(.+)"', block.text)
        assert (ROOT / "docs" / name).exists()
    else:
        recipe = Recipe(**yaml.safe_load(block.text))
        assert recipe.model_fields_set


@pytest.mark.parametrize("block", [b for b in _of("csv", "json") if b.title], ids=str)
def test_data_shown_can_be_read(block: Block, small: Path, tiny_lm: Path) -> None:
    """Every data file shown fits the task of its section."""
    from transformers import AutoTokenizer

    from acclimate.prepare import load_tables
    from acclimate.tasks import get_task

    (small / block.title).write_text(block.text, encoding="utf-8")
    stem = Path(block.title).stem
    task = {"tickets": "choice", "quiz": "choice", "chats": "sft", "completions": "sft", "pairs": "dpo"}[stem]
    recipe = Recipe(data=block.title, eval_data=block.title, task=task)
    table, _ = load_tables(recipe)
    job = get_task(task)
    recipe = job.complete(recipe, table)
    examples = job.examples(table, recipe, AutoTokenizer.from_pretrained(tiny_lm))
    assert len(examples.items) == len(table.rows) == len(block.text.strip().split("\n")) - (block.language == "csv")


@pytest.mark.embedded
@pytest.mark.parametrize("name", ["recipe", "comparison", "pipeline", "use", "models"])
def test_doctests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what the examples write goes there
    result = doctest.testmod(importlib.import_module(f"acclimate.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


# --- configuration files ---


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_the_configuration(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    config = load_config_from_file(str(path))
    wanted = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type.value == wanted["distributed_type"]
    assert config.num_processes == wanted["num_processes"]
    assert config.fsdp_config == wanted.get("fsdp_config", {})
    assert f"configs/{path.name}" in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_fsdp_configuration_has_known_keys() -> None:
    """Accelerate hands them on as FSDP_... variables, and forgets the ones it does not know without a word."""
    from accelerate.utils import launch

    known = set(re.findall(r"fsdp_\w+", inspect.getsource(launch)))
    config = yaml.safe_load((ROOT / "docs" / "configs" / "fsdp2.yaml").read_text(encoding="utf-8"))
    assert {key for key in config["fsdp_config"] if key not in known} == set()


# --- pages ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}; there are {anchors}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"([\w/-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `?(\w+)`?$", text, re.MULTILINE)
    # AcclimateError's section describes its two children as well
    assert {name for name in acclimate.__all__ if name not in headings} == {"InputError", "MissingError"}
    assert all(f"`{name}`" in text for name in acclimate.__all__ if name not in headings)


def test_signatures_are_those_of_the_code() -> None:
    """The parameters and defaults in the hand-written signatures are the real ones; `...` stands for a longer default."""
    shown = [
        node
        for block in _of("python")
        if block.page.name == "python.md"
        for node in ast.parse(block.text).body
        if isinstance(node, ast.FunctionDef)
    ]
    functions = {name for name in acclimate.__all__ if inspect.isfunction(getattr(acclimate, name))}
    assert {node.name for node in shown} == functions | {"compare"}
    for node in shown:
        module = importlib.import_module(f"acclimate.{acclimate._WHERE[node.name]}")
        real = inspect.signature(getattr(module, node.name)).parameters
        named, keywords = node.args.args, node.args.kwonlyargs
        rest = [node.args.kwarg] if node.args.kwarg else []
        assert [argument.arg for argument in [*named, *keywords, *rest]] == list(real), node.name
        required = [None] * (len(named) - len(node.args.defaults))
        written = [*required, *node.args.defaults, *node.args.kw_defaults]
        for argument, default in zip([*named, *keywords], written, strict=True):
            expected = real[argument.arg].default
            if default is None:
                assert expected is inspect.Parameter.empty, argument.arg
            elif not (isinstance(default, ast.Constant) and default.value is ...):
                assert ast.literal_eval(default) == expected, argument.arg


def _hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_complete() -> None:
    from acclimate.methods import all_methods
    from acclimate.recipe import TrainSettings

    hooks = _hooks()
    methods = hooks.on_page_markdown((ROOT / "docs" / "methods.md").read_text(encoding="utf-8"))
    for method in all_methods():
        assert f"| `{method.name}` | {method.job} |" in methods
    recipe = hooks.on_page_markdown((ROOT / "docs" / "recipe.md").read_text(encoding="utf-8"))
    keys = [name for name in Recipe.model_fields if name != "train"]
    keys += [f"train.{name}" for name in TrainSettings.model_fields]
    assert [key for key in keys if f"\n| `{key}` |" not in recipe] == []
    assert "| `train.epochs` | number, above 0 | `1.0` |" in recipe
    assert "| `train.max_steps` | integer or null, above 0 | `null` |" in recipe


def test_every_error_shown_is_one_of_the_source() -> None:
    """The fragments of docs/errors.md stand in the source word for word."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "acclimate").rglob("*.py"))
    # messages are written over several lines of source: "... a "  "b ..." is one text
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    fragments = [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row)]
    assert len(fragments) > 30
    assert [fragment for fragment in fragments if fragment not in source] == []


# --- examples ---


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One step on a tiny model. The cells of a comparison run in this process, since starting others takes seconds."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40

    def cell(place: Path, recipe: Recipe, before: Path | None, *rest: Any) -> None:
        acclimate.tune(recipe, directory=place, before=before)

    module = importlib.import_module("acclimate.comparison")
    monkeypatch.setattr(module, "_run_cell", cell)
    # importing the submodule puts it where the function of the same name belongs
    monkeypatch.setattr(acclimate, "compare", module.compare)
    monkeypatch.setattr(sys, "argv", [path.name, "--steps", "1"])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    reports = list((small / "runs").rglob("report.html"))
    assert reports
