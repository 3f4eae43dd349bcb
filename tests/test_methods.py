"""The methods table: complete, consistent, importable, open to third parties, and cheap to import."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from acclimate import methods
from acclimate.errors import InputError, MissingError
from acclimate.methods import Method

# One for each specification, in the specifications' order.
PAPERS = [
    "saber", "bayesian-lora", "io-adam", "circumerge", "linking", "neural-hss", "shift-aware-whitening", "ntk-selector",
    "neural-lds", "rank-learner", "monosoup", "projq", "flowdup", "ia-sft", "safe-transfer", "multiview",
    "spectral-embedding", "lsr1", "bcp", "lozo-plus", "pft", "in-context", "fisher-init", "psahs", "edco", "patchcode",
    "uds", "muon", "cft", "surge", "safe-residual", "gr-lora", "difficulty", "a-tpt", "lie-bracket", "pooling", "frameft",
    "cfo",
]  # fmt: skip
PASSED_ON = {
    "adapter": {"lora", "full", "dora", "rslora", "vera", "fourierft", "ia3"},
    "init": {
        "default",
        "pissa",
        "olora",
        "orthogonal",
        "principal",
    },  # the last is a second use of shift-aware whitening
    "optimizer": {"adamw", "sgd", "adafactor"},
}
STAGES = {
    "adapter", "init", "optimizer", "select", "order", "merge", "compress", "continual", "federated", "shift", "estimator",
    "science", "control", "geometry",
}  # fmt: skip
BUILT_IN = methods._BUILT_IN


def test_the_38_methods_are_all_there_in_order() -> None:
    assert len(PAPERS) == 38
    assert [method.name for method in BUILT_IN if method.paper] == PAPERS


def test_the_rest_is_what_torch_and_peft_pass_on() -> None:
    for stage, names in PASSED_ON.items():
        assert {m.name for m in BUILT_IN if not m.paper and m.stage == stage} == names
    assert all(m.status == "ready" and m.extra is None for m in BUILT_IN if not m.paper)


@pytest.mark.parametrize("method", BUILT_IN, ids=lambda m: m.name)
def test_a_row_is_complete(method: Method) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", method.name)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", alias) for alias in method.aliases)
    assert method.stage in STAGES
    assert method.status in ("ready", "planned")
    assert len(method.job) > 20
    assert not method.job.endswith(".")
    assert method.option
    assert method.module is None or re.fullmatch(r"[a-z_0-9.]+:\w+", method.module)
    if method.paper:
        assert method.module is not None
        assert method.module.startswith("acclimate.")
        assert re.fullmatch(r"[a-z0-9_]+", method.claim or "")


def test_a_name_or_alias_means_one_method_of_a_stage() -> None:
    counts = Counter((name, m.stage) for m in BUILT_IN for name in (m.name, *m.aliases))
    assert [key for key, count in counts.items() if count > 1] == []


def test_the_extras_are_those_of_the_design() -> None:
    assert {m.extra for m in BUILT_IN} == {None, "materials", "eeg", "graphs", "rl", "federated", "vision"}


@pytest.mark.parametrize("method", [m for m in BUILT_IN if m.status == "ready"], ids=lambda m: m.name)
def test_every_ready_row_imports_and_takes_its_defaults(method: Method) -> None:
    found = methods.require(method.name, method.stage)
    if method.module is None:
        assert method.name == "full"
        assert found is None
        return
    assert found.__name__ == method.module.split(":")[1]
    if method.defaults:
        config = found(**method.defaults)
        assert {name: getattr(config, name) for name in method.defaults} == method.defaults


@pytest.mark.parametrize("method", [m for m in BUILT_IN if m.status == "planned"], ids=lambda m: m.name)
def test_every_planned_row_says_so(method: Method) -> None:
    for use in (methods.check_ready, methods.require):
        with pytest.raises(InputError, match=f"^The {method.stage} '{method.name}' is planned, not built yet; ready "):
            use(method.name, method.stage)


def test_messages_name_what_is_ready() -> None:
    with pytest.raises(InputError) as caught:
        methods.require("cft", "shift")
    assert str(caught.value) == "The shift 'cft' is planned, not built yet; ready shift methods: none yet."
    with pytest.raises(InputError) as caught:
        methods.find("adamv", "optimizer")
    assert str(caught.value) == (
        "Unknown optimizer 'adamv'. Did you mean 'adamw'? The ready optimizers: "
        f"{', '.join(sorted(row.name for row in methods.all_methods() if (row.stage, row.status) == ('optimizer', 'ready')))}."
    )
    with pytest.raises(InputError, match="ready order methods: none yet"):
        methods.require("lie-bracket", "order")


def test_find_understands_underscores_case_and_aliases() -> None:
    assert methods.find("Bayesian_LoRA").name == "bayesian-lora"
    assert methods.find("fisher", "init").name == "fisher-init"
    assert methods.find("muon_mismatch").claim == "muon_mismatch"


def test_find_looks_at_the_stage() -> None:
    assert methods.find("lora", "adapter").stage == "adapter"
    with pytest.raises(InputError, match=r"^Unknown optimizer 'lora'\."):
        methods.find("lora", "optimizer")


def test_importing_the_table_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import acclimate.methods;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["acclimate"]


def install(folder, monkeypatch, entry_points: str, source: str) -> None:
    """Put a distribution named `demo` with one module `demo_methods` on sys.path, as pip would."""
    info = folder / "demo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[acclimate.methods]\n{entry_points}\n")
    (folder / "demo_methods.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "demo_methods", raising=False)


ROW = "Method(name={name!r}, job='does something for you', stage={stage!r}, module={module!r}, option='-', status='ready'{rest})"
IMPORTS = "from acclimate.methods import Method\n"


def test_a_third_party_adds_one_row_or_several(tmp_path, monkeypatch) -> None:
    source = IMPORTS + "ONE = " + ROW.format(name="one", stage="adapter", module="fractions:Fraction", rest="")
    source += (
        "\nMORE = ["
        + ",".join(ROW.format(name=n, stage="merge", module="math:tau", rest="") for n in ("two", "three"))
        + "]"
    )
    install(tmp_path, monkeypatch, "one = demo_methods:ONE\nmore = demo_methods:MORE", source)
    assert {m.name for m in methods.all_methods()} - {m.name for m in BUILT_IN} == {"one", "two", "three"}
    from fractions import Fraction

    assert methods.require("one", "adapter") is Fraction
    with pytest.raises(
        InputError, match="ready adapters: bayesian-lora, dora, fourierft, frameft, full, ia3, lora, one, rslora, vera"
    ):
        methods.find("nothing-like-it", "adapter")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import a_package_that_is_not_there", "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("ROW = 3", "TypeError: 'int' object is not iterable"),
        ("ROW = ['lora']", "TypeError: expected an acclimate.methods.Method, got str"),
        (
            IMPORTS + "ROW = " + ROW.format(name="Bad Name", stage="adapter", module="math:tau", rest=""),
            "not kebab-case",
        ),
    ],
)
def test_a_broken_entry_point_becomes_a_broken_row(tmp_path, monkeypatch, source, reason) -> None:
    install(tmp_path, monkeypatch, "sour = demo_methods:ROW", source)
    rows = methods.all_methods()
    assert rows[: len(BUILT_IN)] == BUILT_IN
    (row,) = rows[len(BUILT_IN) :]
    assert (row.name, row.status) == ("sour", "broken")
    assert reason in row.job
    assert "demo_methods:ROW" in row.job
    with pytest.raises(MissingError, match="cannot be used: does not load: demo_methods:ROW"):
        methods.require("sour", row.stage)


def test_the_built_in_row_wins_a_clash(tmp_path, monkeypatch) -> None:
    row = ROW.format(name="lora", stage="adapter", module="math:tau", rest="")
    other = ROW.format(name="lora", stage="merge", module="math:tau", rest="")
    install(tmp_path, monkeypatch, "lora = demo_methods:ROWS", f"{IMPORTS}ROWS = [{row}, {other}]")
    assert methods.find("lora", "adapter").module == "peft:LoraConfig"
    clash, accepted = methods.all_methods()[len(BUILT_IN) :]
    assert (clash.status, clash.stage) == ("broken", "adapter")
    assert "there is already a method 'lora' of stage 'adapter'" in clash.job
    assert (accepted.status, accepted.stage) == ("ready", "merge")


def test_finding_a_built_in_method_loads_no_plugin(tmp_path, monkeypatch) -> None:
    install(tmp_path, monkeypatch, "sour = demo_methods:ROW", "raise SystemExit('loaded')")
    assert methods.find("lora", "adapter").name == "lora"
    assert "demo_methods" not in sys.modules


def test_a_missing_extra_names_the_command(tmp_path, monkeypatch) -> None:
    row = ROW.format(name="far", stage="science", module="demo_methods_far:X", rest=", extra='materials'")
    install(tmp_path, monkeypatch, "far = demo_methods:ROW", f"{IMPORTS}ROW = {row}")
    (tmp_path / "demo_methods_far.py").write_text("import a_package_that_is_not_there")
    with pytest.raises(MissingError) as caught:
        methods.require("far", "science")
    assert str(caught.value) == (
        "The science 'far' needs the package 'a_package_that_is_not_there', which is not installed. "
        "Install it with: pip install 'acclimate[materials]'"
    )


def test_a_missing_package_without_an_extra_is_a_bug_and_stays_one(tmp_path, monkeypatch) -> None:
    row = ROW.format(name="far", stage="science", module="a_package_that_is_not_there:X", rest="")
    install(tmp_path, monkeypatch, "far = demo_methods:ROW", f"{IMPORTS}ROW = {row}")
    with pytest.raises(ModuleNotFoundError):
        methods.require("far", "science")
