"""From a model's name to a folder with the quantised model and its adapter: `files.py` for `quantize_projq`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import acclimate
from acclimate.compress.blocks import choose_layers
from acclimate.compress.files import finish, measured_before, measured_perplexity, prepare
from acclimate.compress.gptq import Grid
from acclimate.compress.projq import check_layers, quantize_projq
from acclimate.compress.quantized_formats import ADAPTER, Format, check_format, save_quantized
from acclimate.errors import InputError
from acclimate.runs import remove, storage_errors
from acclimate.show import Silent
from acclimate.unfinished import Unfinished


def quantize_model(
    model: str,
    out: str | Path,
    *,
    bits: int = 3,
    group_size: int = 64,
    rank: int | None = None,
    format: Format = "acclimate",
    calibration: str | None = None,
    evaluation: str | None = None,
    sequences: int = 16,
    seqlen: int = 512,
    seed: int = 0,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    show: Silent | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Quantise the model named `model` and write it to the directory `out`; returns what quantization.json there holds.

    Parameters
    ----------
    bits, group_size, rank, options
        As in `quantize_projq`.
    format
        As in `save_quantized`.
    calibration, evaluation, sequences, seqlen, seed
        As in `compress_model`.

    Raises InputError for what cannot be used, MissingError for a full disk.
    """
    show, where = show or Silent(), Path(out)

    def check(loaded: Any) -> None:
        check_format(format, bits)
        layers, _ = choose_layers(loaded, *_names(options))
        check_layers(layers, Grid(bits, group_size), rank, **_settings(options))

    work = prepare(
        model, where, check, calibration, evaluation, sequences, seqlen, seed, overwrite, trust_remote_code, show
    )
    settings = {"bits": bits, "group_size": group_size, "rank": rank, **options}
    with (
        storage_errors(where),
        Unfinished(where, work.job({"model": model, "seqlen": seqlen, **settings})) as unfinished,
    ):
        try:
            before = measured_before(work, unfinished.path, show)
            result, report = quantize_projq(
                work.model, work.ids, checkpoint_dir=unfinished.path / "blocks", progress=show, **settings
            )
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from error
        with result.disable_adapter():
            alone = measured_perplexity(result, work.held, show, "of the quantised weights alone")
        document = {
            **report.to_dict(),
            **before,
            "perplexity_quantised": alone,
            "perplexity_after": measured_perplexity(result, work.held, show, "with the adapter"),
            **work.facts,
            "format": format,
        }
        show.say("writing")
        _write(result, unfinished.path, format)
        finish(unfinished, where, work, document, "quantization.json", _readme)
    return document


def plan(model: Any, bits: int, group_size: int, rank: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """What would be done: the layers, the adapter's rank, bits per weight and the sizes."""
    layers, kept = choose_layers(model, *_names(options))
    grid = Grid(bits, group_size)
    layers, full, rank, adapter_rank = check_layers(layers, grid, rank, **_settings(options))
    size = next(model.parameters()).element_size()
    before = sum(p.numel() for p in model.parameters()) * size
    weights = sum(layer.weight.numel() for layer in layers.values())
    stored = sum(grid.stored_bits(*layer.weight.shape) for layer in layers.values())
    adapter = sum(16 * adapter_rank * sum(layer.weight.shape) for layer in layers.values())
    return {
        "layers": [{"name": name, "shape": list(layer.weight.shape)} for name, layer in layers.items()],
        "kept": {**kept, **full},
        "rank": adapter_rank,
        "bits_per_weight": {"without_adapter": stored / weights, "total": (stored + adapter) / weights},
        "bytes_before": before,
        "bytes_after": before - weights * size + (stored + adapter) // 8,
    }


def _names(options: dict[str, Any]) -> tuple[str | Sequence[str], Sequence[str]]:
    return options.get("targets", "all-linear"), options.get("exclude", ("lm_head",))


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    known = ("comp_rank", "iterations", "kappa", "stream", "method")
    return {key: value for key, value in options.items() if key in known}


def _write(result: Any, directory: Path, format: Format) -> None:
    """The model's files beside what lies in `directory` already."""
    whole = save_quantized(result, directory / "model", format)
    for file in whole.iterdir():
        remove(directory / file.name)  # of a process that was killed here
        os.replace(file, directory / file.name)
    whole.rmdir()


def _readme(document: dict[str, Any]) -> str:
    how = {
        "acclimate": "import acclimate.compress  # lets transformers read the packed layers\n",
        "gptq": "# needs the package gptqmodel\n",
        "compressed-tensors": "# needs the package compressed-tensors\n",
        "dense": "",
    }[document["format"]]
    bits = document["bits_per_weight"]
    return f"""# Quantised model

Made from `{document["model"]}` by acclimate {acclimate.__version__} (`acclimate quantize`), with {document["tokens"]:,} tokens of
{document["calibration"]}: weights of {document["settings"]["bits"]} bits, and in `{ADAPTER}` a LoRA of rank {document["settings"]["comp_rank"]} that belongs to them.

```python
{how}from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this folder")
model = PeftModel.from_pretrained(model, "this folder/{ADAPTER}")
```

| | bits a weight | perplexity on {document["eval_tokens"]:,} tokens of {document["evaluation"]} |
|---|---|---|
| original | | {document["perplexity_before"]:.2f} |
| quantised, without the adapter | {bits["total"] - bits["adapter"]:.2f} | {document["perplexity_quantised"]:.2f} |
| quantised, with the adapter | {bits["total"]:.2f} | {document["perplexity_after"]:.2f} |

quantization.json has the errors of each layer, report.html shows them.
"""
