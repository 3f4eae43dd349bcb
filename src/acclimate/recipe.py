"""What a run is: a validated description of model, data, task, method and training, the same from YAML, flags and Python.

Every field has a default, so that `Recipe()` is the demonstration: the embedded model on the bundled sample. A recipe
says what should happen and nothing about where it happens: `batch_size` is the global batch of one optimiser step, however
many processes share it.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from acclimate import methods
from acclimate.errors import InputError

TaskName = Literal["sft", "classify", "choice", "dpo"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False)


class TrainSettings(_Strict):
    """How the training loop runs. Names and meanings follow transformers' TrainingArguments, except as noted."""

    epochs: float = Field(1.0, gt=0, description="passes over the training rows, unless max_steps is given")
    max_steps: int | None = Field(None, gt=0, description="optimiser steps; overrides epochs")
    max_tokens: int | None = Field(None, gt=0, description="stop after about this many input tokens (a budget)")
    max_seconds: float | None = Field(None, gt=0, description="stop after this much training time (a budget)")
    batch_size: int = Field(16, gt=0, description="global rows per optimiser step, over all processes")
    micro_batch_size: int | None = Field(
        None, gt=0, description="rows per process and forward pass; null: batch_size / processes"
    )
    lr: float | None = Field(None, gt=0, description="peak learning rate; null: the method's own")
    lr_schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "linear", description="how the learning rate goes on after the warm-up"
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps with a rising learning rate")
    weight_decay: float = Field(0.0, ge=0, description="pulls weights towards zero; biases and norms are exempt")
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    group_by_length: bool = Field(False, description="batch rows of like length together: less padding")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="auto: bf16 on a GPU that has it")
    activation_checkpointing: bool = Field(False, description="less memory, about a fifth more time")
    compile: bool = Field(False, description="torch.compile the model")
    log_every: int = Field(1, gt=0, description="steps between lines of metrics.jsonl")
    eval_every: int | None = Field(None, gt=0, description="steps between evaluations of the loss during training")
    save_every: int | None = Field(None, gt=0, description="steps between checkpoints; null: ten a run")
    keep_checkpoints: int = Field(2, gt=0, description="how many of the last checkpoints stay")
    report_to: list[str] = Field([], description="trackers that transformers knows, e.g. [tensorboard]")


class Recipe(_Strict):
    """One run of `acclimate tune`.

    >>> Recipe(model="smollm2", data="clinc150", train={"max_steps": 10}).train.max_steps
    10
    >>> Recipe(adaptor="lora")
    Traceback (most recent call last):
        ...
    acclimate.errors.InputError: unknown key 'adaptor'. Did you mean 'adapter'?

    Raises
    ------
    InputError
        Unknown key, wrong type or impossible combination; the message names the key.
    """

    model: str = Field("smollm2", description="embedded name, directory, GGUF file or hub id")
    data: str = Field("clinc150", description="bundled name, JSONL/CSV/Parquet file or hub id[[:configuration]:split]")
    eval_data: str | None = Field(None, description="held-out data; null: the sample's own, or a tenth of the rows")
    task: TaskName | None = Field(None, description="null: the bundled sample's task")

    columns: dict[str, str] = Field({}, description="our column name: the name in your file")
    template: str | None = Field(None, description="choice: the prompt, with {column} placeholders")
    labels: list[str] | dict[str, str] | None = Field(
        None, description="label names, or label: the words that stand for it"
    )
    max_train_samples: int | None = Field(None, gt=0, description="a random subset of the training rows")
    max_eval_samples: int | None = Field(None, gt=0, description="a random subset of the evaluation rows")
    max_length: int | None = Field(
        None, gt=8, description="tokens per example; null: the model's context, at most 1,024"
    )
    skip_bad: bool = Field(False, description="drop unreadable rows and count them, instead of stopping")

    adapter: str = Field("lora", description="where the change lives; `acclimate methods --stage adapter`")
    adapter_args: dict[str, Any] = Field({}, description="arguments of the adapter's PEFT configuration, e.g. r")
    init: str = Field("default", description="how the adapter starts; `acclimate methods --stage init`")
    init_args: dict[str, Any] = Field({}, description="arguments of the start")
    optimizer: str = Field("adamw", description="`acclimate methods --stage optimizer`")
    optimizer_args: dict[str, Any] = Field({}, description="arguments of the optimiser, e.g. betas")

    length_normalise: bool = Field(False, description="choice: divide each choice's log-probability by its tokens")
    dpo_beta: float = Field(0.1, gt=0, description="dpo: strength of the pull towards the reference model")
    train: TrainSettings = Field(default_factory=TrainSettings)  # type: ignore[arg-type]
    device: str = Field("auto", description="auto, cpu, cuda or mps")
    seed: int = Field(0, ge=0, description="of the adapter's start and of the order of the rows")
    data_seed: int = Field(0, ge=0, description="of which rows are sampled and held out")
    trust_remote_code: bool = Field(False, description="run code that a hub repository ships; off unless you say so")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_explain(error)) from None

    @model_validator(mode="after")
    def _methods_exist(self) -> Recipe:
        for stage in ("adapter", "init", "optimizer"):
            methods.check_ready(getattr(self, stage), stage)
        if self.adapter == "full" and self.init != "default":
            raise InputError(f"init '{self.init}' starts an adapter, but adapter is 'full' (all weights are trained)")
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
        """Read a recipe file; `overrides` are dotted keys, e.g. `{"train.lr": 1e-3}`, that win over the file."""
        return cls(**nest(overrides or {}, into=read_yaml(path)))

    def replace(self, **changes: Any) -> Recipe:
        """A copy with dotted or plain keys changed, validated again: `recipe.replace(**{"train.lr": 1e-3})`."""
        # what was left open stays open: a bundled sample may still fill it
        return Recipe(**nest(changes, into=self.model_dump(exclude_unset=True)))

    def to_yaml(self) -> str:
        content = self.model_dump()
        # PyYAML writes a bare U+0085 and reads it back as a space
        return yaml.safe_dump(content, sort_keys=False, allow_unicode="\\x85" not in repr(content))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, or an InputError that says where it is broken."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no recipe at '{path}'. Give the path of a YAML file, or use flags alone") from None
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not UTF-8 text (byte {error.start})") from None
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"cannot read recipe '{path}': {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"recipe '{path}' must be a mapping of keys to values, not a {type(content).__name__}")
    for group in (content, *(inner for inner in content.values() if isinstance(inner, dict))):
        for key in group:
            if not isinstance(key, str):
                raise InputError(f"recipe '{path}': the key {key!r} is not text. If it is a name, put it in quotes")
    return content


def nest(flat: Mapping[str, Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
    """Put dotted keys into nested mappings; a mapping already there is extended, anything else replaced.

    >>> nest({"train.lr": 0.1}, into={"train": {"epochs": 2}})
    {'train': {'epochs': 2, 'lr': 0.1}}
    """
    result = dict(into or {})
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        inner = result.get(head)
        if rest:
            if isinstance(inner, BaseModel):
                inner = inner.model_dump()
            if inner is not None and not isinstance(inner, Mapping):
                raise InputError(f"cannot set '{key}': '{head}' is not a group of keys")
            result[head] = nest({rest: value}, into=dict(inner or {}))
        else:
            result[head] = value
    return result


def parse_assignments(pairs: Sequence[str]) -> dict[str, Any]:
    """`["train.lr=1e-3", "adapter_args.r=4"]` as `--set` gives them; values are read as YAML.

    >>> parse_assignments(["train.lr=1e-3", "labels=[spam, ham]"])
    {'train.lr': 0.001, 'labels': ['spam', 'ham']}
    """
    result = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise InputError(f"--set takes key=value, not '{pair}'")
        result[key] = _value(key, text)
    return result


def _value(key: str, text: str) -> Any:
    field = Recipe.model_fields.get(key)
    is_text = key.startswith("columns.") or (field is not None and field.annotation in (str, str | None))
    if not text or (is_text and text != "null" and text[0] not in "'\""):
        return text  # as typed: a template is full of what YAML takes for its own signs
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--set {key}={text} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if value == text:  # YAML 1.1 reads 1e-3 (no dot) as text; people mean the number
        with contextlib.suppress(ValueError):
            return float(text) if math.isfinite(float(text)) else text
    return value


def _explain(error: ValidationError) -> str:
    places = {name: name for name in Recipe.model_fields} | {
        name: f"train.{name}" for name in TrainSettings.model_fields
    }
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            group, _, name = path.rpartition(".")
            here = [known for known, place in places.items() if place.rpartition(".")[0] == group]
            # the right name in the wrong group, then a misspelt one of this group, then of any
            pools = ([name] if name in places else [], here, places)
            close = [match for pool in pools for match in difflib.get_close_matches(name, pool, n=1)]
            hint = (
                f"Did you mean '{places[close[0]]}'?" if close else f"Known keys: {', '.join(places[k] for k in here)}"
            )
            lines.append(f"unknown key '{path}'. {hint}")
        else:
            lines.append(f"recipe key '{path}': {item['msg'].lower()}, but got {item['input']!r}")
    return "\n".join(lines)
