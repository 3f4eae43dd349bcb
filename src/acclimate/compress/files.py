"""From a model's name to a folder with the smaller model, measured before and after, taken up again after a kill.

While it is made, the result lies in a hidden directory beside its place, with the finished blocks. The same command goes on from them; with
other settings they are thrown away. The result is renamed to its place when all of it is there.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import acclimate
from acclimate import data, models
from acclimate.compress.blocks import choose_layers, fingerprint
from acclimate.compress.low_rank_linear import LowRankLinear, low_rank_layers
from acclimate.compress.offload import (
    DISK,
    compute_device,
    in_memory,
    on_disk,
    put_on_disk,
    reading_aside,
    weights_once,
)
from acclimate.compress.quantizer import to_dense, unmark
from acclimate.compress.text import perplexity, windows
from acclimate.compress.whitening import check_settings, compress_low_rank, saves, uniform_rank
from acclimate.errors import InputError
from acclimate.report import write_report
from acclimate.runs import read_json, remove, storage_errors, write_json, write_text
from acclimate.show import Silent
from acclimate.unfinished import Unfinished, check_place

DEFAULT_TEXT = "wikitext2"
SETTINGS = ("refresh", "beta", "allocation", "solver", "clip_norm")
FILE_SIZE = "500MB"  # of a file of weights: each is put together in memory
HELD_OUT = 0.1  # of the user's calibration text, to measure on


def compress_model(
    model: str,
    out: str | Path,
    *,
    ratio: float = 0.2,
    calibration: str | None = None,
    evaluation: str | None = None,
    sequences: int = 16,
    seqlen: int = 512,
    seed: int = 0,
    dense: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    show: Silent | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compress the model named `model` and write it to the directory `out`; returns what compression.json there holds.

    Parameters
    ----------
    calibration
        Text: a .txt file, or rows with a column `text`; None: a part of WikiText-2, which is bundled.
    evaluation
        Text to measure perplexity on; None: the last tenth of `calibration`, which is then left out there, or WikiText-2's test text.
    sequences, seqlen
        Windows of tokens at random places (`seed`) to calibrate on; as many, from the start on, to measure on.
    dense
        Write ordinary layers: every engine loads them, at the original's size.
    options
        Those of `compress_low_rank`.

    Raises InputError for what cannot be used, MissingError for a full disk.
    """
    show, where = show or Silent(), Path(out)

    def check(loaded: Any) -> None:
        check_settings(ratio, **{key: options[key] for key in SETTINGS if key in options})
        choose_layers(loaded, options.get("targets", "all-linear"), options.get("exclude", ("lm_head",)))

    with TemporaryDirectory(prefix="acclimate-") as folder:
        work = prepare(
            model,
            where,
            check,
            calibration,
            evaluation,
            sequences,
            seqlen,
            seed,
            overwrite,
            trust_remote_code,
            show,
            folder,
        )
        job = work.job({"model": model, "ratio": ratio, "seqlen": seqlen, "dense": dense, "options": options})
        return _compressed(work, where, job, ratio, dense, options, show)


def _compressed(
    work: Work, where: Path, job: dict[str, Any], ratio: float, dense: bool, options: dict[str, Any], show: Silent
) -> dict[str, Any]:
    with storage_errors(where), Unfinished(where, job) as unfinished:
        try:
            document = _measured(work, unfinished.path, ratio, options, show)
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from error
        document |= {**work.facts, "dense": dense}
        show.say("writing")
        result = work.model
        if dense:
            _densify(result, unfinished.path / "dense")
        with models.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a file's worth of weights must fit in memory
            result.save_pretrained(unfinished.path, max_shard_size=FILE_SIZE)
        finish(unfinished, where, work, document, "compression.json", _readme)
    return document


# --- what `quantize_model` shares ---


@dataclass
class Work:
    """A loaded model, windows of text to calibrate on and to measure on, and what to say of them."""

    model: Any
    tokenizer: Any
    ids: torch.Tensor
    held: torch.Tensor
    facts: dict[str, Any]

    def job(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What must be equal for unfinished work to be of use."""
        inputs = [{"input_ids": self.ids}, {"input_ids": self.held}]
        return {"acclimate": acclimate.__version__, **fingerprint(self.model, inputs, settings)}


def prepare(
    model: str,
    where: Path,
    check: Callable[[Any], None],
    calibration: str | None,
    evaluation: str | None,
    sequences: int,
    seqlen: int,
    seed: int,
    overwrite: bool,
    trust_remote_code: bool,
    show: Silent,
    folder: str | None = None,
) -> Work:
    """Load what is needed and refuse what cannot be used; `check` raises ValueError or TypeError for settings that do not fit the model.

    `folder` is that of `load`.
    """
    check_place(where, [Path(model)], overwrite)
    try:  # now, and not only after the perplexity of the model as it is
        loaded, tokenizer = load(model, trust_remote_code, show, folder)
        check(loaded)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error
    text, held_out = texts(calibration, evaluation)
    ids = windows(tokenizer, text, sequences, seqlen, seed)
    held = windows(tokenizer, held_out, sequences, seqlen)
    rest = f"{DEFAULT_TEXT}:test" if calibration is None else f"the last tenth of {calibration}"
    facts = {
        "model": model, "calibration": calibration or DEFAULT_TEXT, "evaluation": evaluation or rest,
        "tokens": ids.numel(), "eval_tokens": held.numel(), "seed": seed,
    }  # fmt: skip
    return Work(loaded, tokenizer, ids, held, facts)


def measured_before(work: Work, directory: Path, show: Silent) -> dict[str, Any]:
    """Perplexity and size of the model as it is, kept in `directory` for a call that goes on."""
    file = directory / "before.json"
    if file.exists():
        known: dict[str, Any] = read_json(file)
        return known
    before = {
        "perplexity_before": measured_perplexity(work.model, work.held, show, "before"),
        "bytes_before": sum(p.numel() * p.element_size() for p in weights_once(work.model)),
    }
    write_json(file, before)
    return before


def finish(
    unfinished: Unfinished,
    where: Path,
    work: Work,
    document: dict[str, Any],
    name: str,
    readme: Callable[[dict[str, Any]], str],
) -> None:
    """Add tokenizer, facts and report to the model that lies there, and move it to its place."""
    with models.quiet():
        work.tokenizer.save_pretrained(unfinished.path)
    leftovers = [unfinished.path / name for name in ("blocks", "dense", "before.json")]
    document["bytes_after"] = sum(
        file.stat().st_size for pattern in ("*", "adapter/*") for file in unfinished.path.glob(f"{pattern}.safetensors")
    )
    write_json(unfinished.path / name, document)
    write_text(unfinished.path / "README.md", readme(document))
    write_report(unfinished.path)
    for leftover in leftovers:
        remove(leftover)
    unfinished.finish(where)


def load(model: str, trust_remote_code: bool, show: Silent, folder: str | None = None) -> tuple[Any, Any]:
    """The model and its tokenizer. Given a folder, the model's weights stay on disk (GGUF files are read into memory all the same):
    in their own files, or in `folder` where transformers has to convert them."""
    show.say(f"loading {model}")
    disk: dict[str, Any] = {}
    if folder is not None and not models.resolve(model, show.say).endswith(".gguf"):
        disk = {"device_map": DISK, "offload_folder": folder}
    loaded, tokenizer = models.load_model(model, trust_remote_code=trust_remote_code, say=show.say, **disk)
    return loaded.eval(), tokenizer


def texts(calibration: str | None, evaluation: str | None) -> tuple[str, str]:
    """The text to calibrate on and the text to measure on, which do not overlap where one is a part of the other."""
    text = data.read_text(calibration or DEFAULT_TEXT, split="validation" if calibration is None else "train")
    if evaluation is not None:
        return text, data.read_text(evaluation, split="test")
    if calibration is None:
        return text, data.read_text(DEFAULT_TEXT, split="test")
    cut = math.ceil(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def plan(model: Any, ratio: float, targets: Sequence[str] | str, exclude: Sequence[str]) -> dict[str, Any]:
    """What would be done with uniform ranks: the layers with their ranks, and the sizes."""
    layers, kept = choose_layers(model, targets, exclude)
    rows: list[dict[str, Any]] = []
    for name, layer in layers.items():
        m, n = layer.weight.shape
        rank = uniform_rank(m, n, ratio)
        rows.append({"name": name, "shape": [m, n], "rank": rank if saves((m, n), rank) else None})
    size = next(model.parameters()).element_size()
    removed = sum(m * n - row["rank"] * (m + n) for row in rows if row["rank"] is not None for m, n in [row["shape"]])
    before = sum(p.numel() for p in weights_once(model))
    return {
        "layers": rows,
        "kept": kept,
        "parameters_before": before,
        "parameters_after": before - removed,
        "bytes_before": before * size,
        "bytes_after": (before - removed) * size,
    }


def _measured(work: Work, directory: Path, ratio: float, options: dict[str, Any], show: Silent) -> dict[str, Any]:
    """Compress the model in place, with perplexity and latency before and after."""
    before = measured_before(work, directory, show)
    before["latency_before"] = latency(work.model, work.held[:1])
    report = compress_low_rank(
        work.model, work.ids, ratio, checkpoint_dir=directory / "blocks", progress=show, **options
    )
    return {
        **report.to_dict(),
        **before,
        "perplexity_after": measured_perplexity(work.model, work.held, show, "after"),
        "latency_after": latency(work.model, work.held[:1]),
        "latency_tokens": work.held.shape[1],
    }


def measured_perplexity(model: Any, held: Any, show: Silent, when: str) -> float:
    show.start(f"perplexity {when}", len(held))
    try:
        return perplexity(model, held, advance=show.advance)
    finally:
        show.stop()


def _densify(model: Any, directory: Path) -> None:
    """Put ordinary layers in the places of the low-rank ones; where the model lies on disk, so do they, in `directory`."""
    if not on_disk(model):
        to_dense(model, LowRankLinear)
    else:
        directory.mkdir(exist_ok=True)
        for name, layer in low_rank_layers(model).items():
            with in_memory(layer):
                dense = layer.to_dense()
            file = directory / f"{name}.safetensors"
            save_file({key: value.contiguous() for key, value in dense.state_dict().items()}, file)
            put_on_disk(dense, file, "")
            model.set_submodule(name, dense)
    unmark(model)


@torch.no_grad()
def latency(model: Any, ids: torch.Tensor, rounds: int = 5) -> float:
    """Median seconds of one forward pass over `ids` (1, T), without the time that reading weights from disk takes."""
    ids = ids.to(compute_device(model))
    seconds = []
    for turn in range(rounds + 1):
        begun = time.perf_counter()
        with reading_aside(model) as clock:
            model(input_ids=ids).logits.sum().item()
            spent = time.perf_counter() - begun - clock.seconds
        if turn:  # the first pass pays for what is set up once
            seconds.append(spent)
    return statistics.median(seconds)


def _readme(document: dict[str, Any]) -> str:
    how = (
        "The layers are ordinary (their low-rank products), so every engine loads them."
        if document["dense"]
        else "Load it after `import acclimate.compress`:\n\n```python\nimport acclimate.compress\n"
        'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("this folder")\n```'
    )
    return f"""# Compressed model

Made from `{document["model"]}` by acclimate {acclimate.__version__} (`acclimate compress`), with {document["tokens"]:,} tokens of
{document["calibration"]}. {how}

| | before | after |
|---|---|---|
| parameters | {document["parameters_before"]:,} | {document["parameters_after"]:,} |
| perplexity on {document["eval_tokens"]:,} tokens of {document["evaluation"]} | {document["perplexity_before"]:.2f} | {document["perplexity_after"]:.2f} |

compression.json has the rank and the errors of each layer, report.html shows them.
"""
