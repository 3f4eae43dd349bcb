"""A recipe says the same from YAML, flags and Python, and a wrong one says which key is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import methods
from acclimate.errors import InputError
from acclimate.prepare import with_sample_defaults
from acclimate.recipe import Recipe, TrainSettings, nest, parse_assignments, read_yaml


def refused(**values: Any) -> str:
    with pytest.raises(InputError) as caught:
        Recipe(**values)
    return str(caught.value)


# --- unknown keys and wrong values ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adaptor": "lora"}, "unknown key 'adaptor'. Did you mean 'adapter'?"),
        ({"optimiser": "sgd"}, "unknown key 'optimiser'. Did you mean 'optimizer'?"),
        ({"train": {"bach_size": 4}}, "unknown key 'train.bach_size'. Did you mean 'train.batch_size'?"),
        ({"lr": 1e-3}, "unknown key 'lr'. Did you mean 'train.lr'?"),
        ({"epochs": 2}, "unknown key 'epochs'. Did you mean 'train.epochs'?"),
        ({"max_steps": 2}, "unknown key 'max_steps'. Did you mean 'train.max_steps'?"),
        ({"weight_decy": 0.1}, "unknown key 'weight_decy'. Did you mean 'train.weight_decay'?"),
        ({"train": {"seed": 3}}, "unknown key 'train.seed'. Did you mean 'seed'?"),
    ],
)
def test_unknown_keys_name_the_likely_one(values: dict[str, Any], message: str) -> None:
    assert refused(**values) == message


@pytest.mark.parametrize("name", TrainSettings.model_fields)
def test_a_training_key_at_the_top_is_sent_to_its_place(name: str) -> None:
    assert refused(**{name: 1}) == f"unknown key '{name}'. Did you mean 'train.{name}'?"


def test_unknown_key_like_nothing_lists_the_known_ones() -> None:
    message = refused(zzz=1)
    assert message.startswith("unknown key 'zzz'. Known keys: model, data, ")
    assert "train.lr" in refused(train={"qqqq": 1})


def test_every_wrong_key_is_named_at_once() -> None:
    message = refused(adaptor="lora", seed=-1, train={"batch_size": 0})
    assert len(message.splitlines()) == 3
    assert "'seed'" in message
    assert "'train.batch_size'" in message


@pytest.mark.parametrize(
    ("values", "key", "given_value"),
    [
        ({"seed": "many"}, "seed", "'many'"),
        ({"task": "translate"}, "task", "'translate'"),
        ({"train": {"batch_size": 2.5}}, "train.batch_size", "2.5"),
        ({"train": {"lr": -1}}, "train.lr", "-1"),
        ({"train": {"lr": float("inf")}}, "train.lr", "inf"),
        ({"train": {"epochs": float("nan")}}, "train.epochs", "nan"),
        ({"train": {"lr_schedule": "cosin"}}, "train.lr_schedule", "'cosin'"),
        ({"train": 5}, "train", "5"),
        ({"columns": ["label"]}, "columns", "['label']"),
        ({"model": None}, "model", "None"),
        ({"max_length": 4}, "max_length", "4"),
    ],
)
def test_wrong_values_name_key_and_value(values: dict[str, Any], key: str, given_value: str) -> None:
    message = refused(**values)
    assert message.startswith(f"recipe key '{key}': ")
    assert message.endswith(f"but got {given_value}")


def test_a_wrong_word_lists_the_right_ones() -> None:
    assert "'sft', 'classify', 'choice' or 'dpo'" in refused(task="translate")


def test_planned_and_unknown_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = methods.Method("later", job="", stage="optimizer", module="nowhere:Later", option="--optimizer later")
    monkeypatch.setattr(methods, "_BUILT_IN", (*methods._BUILT_IN, planned))
    assert "planned, not built yet" in refused(optimizer="later")
    assert "ready optimizers: adafactor, adamw" in refused(optimizer="later")
    assert "Unknown adapter 'lroa'. Did you mean 'lora'?" in refused(adapter="lroa")
    assert "Unknown optimizer 'adamww'. Did you mean 'adamw'?" in refused(optimizer="adamww")
    assert "Unknown init 'pisa'. Did you mean 'pissa'?" in refused(init="pisa")


def test_full_fine_tuning_has_no_adapter_to_initialise() -> None:
    assert "init 'pissa'" in refused(adapter="full", init="pissa")
    assert Recipe(adapter="full").adapter == "full"


# --- YAML ---


def recipe_file(where: Path, text: str | bytes) -> Path:
    path = where / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapter: [lora", "cannot read recipe"),
        ("- lora\n- full\n", "must be a mapping of keys to values, not a list"),
        ("just words", "must be a mapping of keys to values, not a str"),
        ("adapter: lora\n1: two\n", "key 1 is not text"),
        ("train:\n  lr: 1e-3\n  5: 6\n", "key 5 is not text"),
        (b"model: caf\xe9\n", "is not UTF-8 text (byte 10)"),
        (b"model: a\x00b\n", "cannot read recipe"),
    ],
)
def test_broken_recipe_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = recipe_file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        Recipe.from_yaml(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_broken_yaml_says_where(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 3"):
        read_yaml(recipe_file(tmp_path, "model: a\ntask: choice\ndata: 'open\n"))


def test_no_recipe_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no recipe at .*missing\.yaml"):
        Recipe.from_yaml(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="cannot read recipe"):
        Recipe.from_yaml(tmp_path)


def test_an_empty_file_is_the_default_recipe(tmp_path: Path) -> None:
    assert Recipe.from_yaml(recipe_file(tmp_path, "# nothing set\n")) == Recipe()


def test_overrides_win_over_the_file_key_by_key(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "model: a\ntrain: {epochs: 3, lr: 0.01}\nadapter_args: {r: 4}\n")
    recipe = Recipe.from_yaml(path, {"train.lr": 1e-4, "adapter_args.lora_alpha": 8, "model": "b"})
    assert (recipe.model, recipe.train.epochs, recipe.train.lr) == ("b", 3, 1e-4)
    assert recipe.adapter_args == {"r": 4, "lora_alpha": 8}


plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
train_settings = st.builds(
    dict,
    epochs=st.floats(0.001, 1e6),
    max_steps=st.none() | st.integers(1, 10**9),
    lr=st.none() | st.floats(1e-12, 1e3),
    lr_schedule=st.sampled_from(["linear", "cosine", "constant"]),
    warmup=st.floats(0, 0.99),
    report_to=st.lists(plain_text, max_size=2),
)
recipes = st.builds(
    Recipe,
    model=plain_text,
    data=plain_text,
    eval_data=st.none() | plain_text,
    task=st.sampled_from([None, "sft", "classify", "choice", "dpo"]),
    columns=st.dictionaries(plain_text, plain_text, max_size=3),
    template=st.none() | plain_text,
    labels=st.none()
    | st.lists(plain_text, max_size=3)
    | st.dictionaries(plain_text, plain_text, min_size=1, max_size=3),
    adapter_args=st.dictionaries(plain_text, st.none() | st.booleans() | st.integers() | plain_text, max_size=3),
    seed=st.integers(0, 2**31),
    skip_bad=st.booleans(),
    train=train_settings,
)


@settings(max_examples=100, deadline=None)
@given(recipes)
def test_yaml_round_trip(recipe: Recipe) -> None:
    assert Recipe(**yaml.safe_load(recipe.to_yaml())) == recipe


def test_a_round_trip_through_a_file(tmp_path: Path) -> None:
    recipe = Recipe(template="prix : {text} €\n→", labels={"ja": "yes", "no": "off"}, train={"lr": 1e-05})
    assert Recipe.from_yaml(recipe_file(tmp_path, recipe.to_yaml())) == recipe


# --- changing ---


def test_replace_changes_only_what_it_names_and_validates() -> None:
    recipe = Recipe(model="a", train={"epochs": 3})
    changed = recipe.replace(**{"train.lr": 1e-3, "seed": 5})
    assert (changed.model, changed.train.epochs, changed.train.lr, changed.seed) == ("a", 3, 1e-3, 5)
    assert recipe.seed == 0
    with pytest.raises(InputError, match=r"train\.lr"):
        recipe.replace(**{"train.lr": 0})
    with pytest.raises(InputError, match=r"cannot set 'model\.size': 'model' is not a group of keys"):
        recipe.replace(**{"model.size": 3})


def test_the_samples_own_settings_fill_what_the_user_left_open() -> None:
    filled = with_sample_defaults(Recipe().replace(seed=3))
    assert filled.task == "choice"
    assert filled.columns == {"label": "domain"}
    assert filled.eval_data == "clinc150:test"
    assert filled.seed == 3
    # what the user did set stays, also when set to its default and when changed later
    mine = with_sample_defaults(Recipe(max_train_samples=None, template="{text}?").replace(**{"train.lr": 1e-4}))
    assert mine.max_train_samples is None
    assert mine.template == "{text}?"
    assert mine.max_eval_samples == 500
    assert with_sample_defaults(Recipe(task=None)).task == "choice"


def test_own_data_need_a_task() -> None:
    with pytest.raises(InputError, match="task"):
        with_sample_defaults(Recipe(data="rows.jsonl"))


@given(
    st.dictionaries(
        st.lists(st.sampled_from("abc"), min_size=2, max_size=2).map(".".join), st.integers(), min_size=1, max_size=6
    )
)
def test_nest_puts_every_dotted_key_in_its_place(flat: dict[str, int]) -> None:
    nested = nest(flat)
    assert {f"{a}.{b}": v for a, inner in nested.items() for b, v in inner.items()} == flat


def test_nest_leaves_its_input_alone() -> None:
    into = {"train": {"epochs": 2}}
    assert nest({"train.lr": 0.1}, into=into) == {"train": {"epochs": 2, "lr": 0.1}}
    assert into == {"train": {"epochs": 2}}


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("k=1e-3", 1e-3),
        ("k=1E5", 1e5),
        ("k=3", 3),
        ("k=true", True),
        ("k=null", None),
        ("k=", ""),
        ("k=a=b", "a=b"),
        ("k=[spam, ham]", ["spam", "ham"]),
        ("k={a: 1}", {"a": 1}),
        ("k='1e-3'", "1e-3"),
        ("k=nan", "nan"),
        ("k=infinity", "infinity"),
    ],
)
def test_assignments_are_read_as_yaml(pair: str, value: Any) -> None:
    assert parse_assignments([pair]) == {"k": value}


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("template=Request: {text}", "Request: {text}"),
        ("template={text} is", "{text} is"),
        ('template="{text}\\nTopic:"', "{text}\nTopic:"),
        ("template=null", None),
        ("data=2024", "2024"),
        ("columns.label=yes", "yes"),
    ],
)
def test_text_keys_are_taken_as_typed(pair: str, value: Any) -> None:
    assignments = parse_assignments([pair])
    assert list(assignments.values()) == [value]
    Recipe(**nest(assignments))


@pytest.mark.parametrize("pair", ["train.lr", "=3", " =3"])
def test_assignments_need_key_and_value(pair: str) -> None:
    with pytest.raises(InputError, match="--set takes key=value"):
        parse_assignments([pair])


def test_an_assignment_that_is_no_yaml_says_so() -> None:
    with pytest.raises(InputError, match=r"--set labels=\[spam cannot be read as YAML: while parsing a flow sequence"):
        parse_assignments(["labels=[spam"])


def test_the_last_assignment_wins() -> None:
    assert parse_assignments(["a=1", "a=2"]) == {"a": 2}
