"""Tiny random models with a real tokenizer, so that unit tests take milliseconds and need no network."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# pytest-xdist runs one process a core; more threads each would only fight over them
os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = ("red", "green", "blue")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def colour_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Sentences that name a thing; the label is the thing's colour: learnable by any model in a few steps."""
    things = {"red": ["apple", "brick", "rose"], "green": ["leaf", "frog", "grass"], "blue": ["sky", "sea", "jeans"]}
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        label = WORDS[number % 3]
        rows.append({"text": f"case {number} of {seed}: the {rng.choice(things[label])}", "label": label})
    return rows


def task_rows(task: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The colour rows as a task wants them: for dpo, the wrong answer is the next colour."""
    wrong = dict(zip(WORDS, (*WORDS[1:], WORDS[0]), strict=True))
    if task == "sft":
        return [{"id": f"r{i}", "prompt": row["text"], "completion": f" {row['label']}"} for i, row in enumerate(rows)]
    if task == "dpo":
        return [
            {"prompt": row["text"], "chosen": f" {row['label']}", "rejected": f" {wrong[row['label']]}"} for row in rows
        ]
    return rows


@contextmanager
def signal_at(step: int, number: int = signal.SIGTERM) -> Iterator[None]:
    """Inside, a training run of this process sends itself a signal at the end of a step."""
    from acclimate import training

    end = training._Watch.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), number)
        end(self, args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Watch, "on_step_end", on_step_end)
        yield


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _tokenizer(where: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # the label words are repeated so that each is one token, as words are in a real vocabulary
    corpus = [row["text"] + " " + row["label"] for row in colour_rows(300)] + [f"a {w} b {w} c {w}" for w in WORDS] * 50
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=256
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(where)


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a two-layer Llama with random weights (about 60,000 parameters)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("tiny_lm")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(where)
    _tokenizer(where)
    return where


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a two-layer BERT with random weights."""
    import torch
    from transformers import BertConfig, BertModel

    where = tmp_path_factory.mktemp("tiny_encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=400, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(where)
    _tokenizer(where)
    return where


@pytest.fixture(scope="session")
def colour_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(train, test) files of the colour task, as JSONL."""
    where = tmp_path_factory.mktemp("colours")
    return write_jsonl(where / "train.jsonl", colour_rows(48)), write_jsonl(
        where / "test.jsonl", colour_rows(30, seed=1)
    )
