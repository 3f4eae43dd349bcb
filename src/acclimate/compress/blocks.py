"""Work through a model block by block, replacing its linear layers, with the inputs that each layer will really see.

Methods that replace a layer by something smaller need statistics of its inputs. Those change once the layers below have been replaced.
Here the hidden states of all calibration sequences are kept for two streams, x of the original model and x^ of the model as far as it
has been replaced, and for each block in turn

1. the original block takes x one block on; which of its linear layers get the very same tensor (q, k and v; gate and up) is traced;
2. for each such group, in the order of execution, the block as it is by now runs on x^ up to the group, and the moments of its inputs
   are summed up: C = E[x^ x^^T] and, if asked for, M = E[x x^^T]. The method replaces the layers, one by one;
3. the finished block takes x^ one block on.

`refresh="block"` takes step 2 once for all groups of a block; `refresh="none"` takes C from the original model and leaves x^ out, but for
one batch that tells how large the errors are. What a method has to bring is `BlockMethod`.

Scale: the states (two streams, and with M the inputs of one block) are in memory up to `max_ram` bytes, beyond it in memory-mapped
files; the weights of one block at a time are on `device`. One process; calibration sequences are not sharded.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from accelerate.utils import align_module_device
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from acclimate.compress.offload import on_disk, put_on_disk
from acclimate.compress.streams import Batch, Stream, block_root, evaluating
from acclimate.linalg import from_triangle, gram_triangle
from acclimate.prefix import ReachedError
from acclimate.runs import replacing, write_json
from acclimate.show import Silent, Terminal

Refresh = Literal["group", "block", "none"]

CHUNK = 4096  # rows in one matrix product
SAMPLE = 1024  # rows on which a layer's errors are measured


@dataclass
class Group:
    """Layers that share their input, and the moments of that input over the positions that are not padding.

    `root` is R (n, n), upper triangular, with R^T R = tokens C. It stands in for C where there are fewer tokens than inputs.
    """

    names: list[str]
    tokens: int
    gram: Tensor | None  # C (n, n), float64
    root: Tensor | None
    cross: Tensor | None  # M (n, n), float64


class BlockMethod(Protocol):
    """What is done to the layers of a group."""

    def prepare(self, group: Group) -> Any:
        """What the layers of the group share, handed to `replace`."""

    def replace(
        self, name: str, linear: nn.Linear, group: Group, prepared: Any
    ) -> tuple[nn.Module | None, dict[str, Any]]:
        """The module to put in the layer's place (None: it stays) and what to report of it, as plain JSON values.

        torch.linalg.LinAlgError and FloatingPointError leave the layer as it is, and say why in the report.
        """

    def rebuild(self, linear: nn.Linear, state: Mapping[str, Tensor]) -> nn.Module:
        """The replacement of `linear` with this state dict, saved by an earlier process."""


@dataclass
class Streamed:
    """What was done: a row a layer, a row a block, why layers were left as they are, and the layers that were there before."""

    layers: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    originals: dict[str, nn.Module] = field(default_factory=dict)


class InputMoments:
    """Sums of x^ x^^T and x x^^T over rows: products in the rows' precision (at least float32), sums in float64."""

    def __init__(self, size: int, root: bool, cross: bool, clip_norm: float | None) -> None:
        self.tokens = 0
        self.gram = None if root else torch.zeros(size, size, dtype=torch.float64)
        self.root = torch.zeros(0, size, dtype=torch.float64) if root else None
        self.cross = torch.zeros(size, size, dtype=torch.float64) if cross else None
        self.clip_norm = clip_norm

    def add(self, current: Tensor, original: Tensor | None = None) -> None:
        """Add rows (T, n) of x^, and of x where M is wanted. Rows of one batch that the two streams route apart leave M out for good."""
        current = _at_least_float(current)
        self.tokens += len(current)
        original = None if original is None else _at_least_float(original).to(current.device)
        if original is None or original.shape != current.shape:
            self.cross = None
        if self.clip_norm is not None and len(current):
            norms = current.norm(dim=1)
            limit = torch.quantile(norms, self.clip_norm)
            factor = (limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)[:, None]
            current = current * factor
            original = original * factor if self.cross is not None and original is not None else None
        for start in range(0, len(current), CHUNK):
            part = current[start : start + CHUNK]
            if self.gram is not None:
                self.gram += gram_triangle(part).double().cpu()
            else:
                assert self.root is not None
                self.root = torch.linalg.qr(torch.cat([self.root, part.double().cpu()]), mode="r").R
            if self.cross is not None:
                assert original is not None
                self.cross += (original[start : start + CHUNK].T @ part).double().cpu()

    def group(self, names: Sequence[str]) -> Group:
        count = max(1, self.tokens)
        return Group(
            list(names),
            self.tokens,
            None if self.gram is None else from_triangle(self.gram) / count,
            self.root,
            None if self.cross is None else self.cross / count,
        )


def linear_layers(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """(the linear layers inside the model's blocks by name, those that cannot be replaced with the reason).

    Raises TypeError where weights are quantised already, ValueError where the model has no single list of blocks or no layer there.
    """
    root, count = block_root(model)
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found, kept = {}, {}
    for name, module in model.named_modules():
        if not name.startswith(f"{root}.") or not isinstance(module, nn.Linear):
            continue
        weight = module._parameters.get("weight")  # layers with packed weights have none
        if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
            raise TypeError(f"'{name}' is quantised already; load the model in 16 or 32 bits to compress it")
        if owners[id(weight)] > 1:
            kept[name] = "its weight is tied to another layer's"
        else:
            found[name] = module
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.Linear in its {count} blocks ('{root}'), so there is nothing to compress"
        )
    return found, kept


def choose_layers(
    model: nn.Module, targets: str | Sequence[str], exclude: Sequence[str]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """(layers to replace by name, those among them that cannot be with the reason). Raises ValueError where none is left."""
    found, kept = linear_layers(model)

    def named(name: str, words: Sequence[str]) -> bool:
        return any(name == word or name.endswith(f".{word}") for word in words)

    wanted = [targets] if isinstance(targets, str) else list(targets)
    chosen = {
        name: layer
        for name, layer in found.items()
        if (wanted == ["all-linear"] or named(name, wanted)) and not named(name, exclude)
    }
    if not chosen:
        kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in found}))
        raise ValueError(
            f"targets {wanted} without {list(exclude)} leave no layer. Linear layers in the blocks: {kinds}"
        )
    return chosen, {name: why for name, why in kept.items() if wanted == ["all-linear"] or named(name, wanted)}


def progress_bar() -> Silent:
    """A bar on stderr."""
    from rich.console import Console

    return Terminal(Console(stderr=True))


def stream_blocks(
    model: Any,
    batches: Sequence[Batch],
    method: BlockMethod,
    targets: Mapping[str, nn.Linear],
    *,
    refresh: Refresh = "group",
    cross: bool = False,
    keep_root: bool = False,
    clip_norm: float | None = None,
    call: Callable[[Any, Any], Any] | None = None,
    device: str | torch.device | None = None,
    max_ram: float = 8e9,
    checkpoint_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    show: Silent | None = None,
) -> Streamed:
    """Replace the layers `targets` of `model` in place, as the module docstring tells.

    Parameters
    ----------
    batches
        Inputs of the model. Positions where a mask `attention_mask` (B, T) is zero do not count.
    cross
        Also sum up M = E[x x^^T].
    keep_root
        Keep R instead of C for all groups; it is kept anyway where there are fewer tokens than inputs.
    clip_norm
        Rows longer than this quantile of their batch are shortened to it before they are summed up.
    call
        (model, batch) -> anything: how to run the model, up to its last block; None: `model(**batch)`.
    device
        Where blocks are computed; None: where they are.
    checkpoint_dir
        Every finished block is written there; a later call with the same model, batches and `settings` goes on from there.

    Raises
    ------
    ValueError
        Inputs that are not finite numbers (layer and sequence are named); blocks that need more than the states below them; a
        `checkpoint_dir` of something else. The model is as it was before then, and after any other exception.
    """
    with evaluating(model):
        stream = Stream(model, batches, call, device, max_ram)
        try:
            work = _Work(model, stream, method, targets, refresh, cross, keep_root, clip_norm, show or Silent())
            if checkpoint_dir is not None:
                job = {**(settings or {}), "refresh": refresh, "cross": cross, "clip_norm": clip_norm}
                work.keep_in(Path(checkpoint_dir), fingerprint(model, batches, job))
            return work.run()
        finally:
            stream.close()


def restore(model: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Put layers back in their places."""
    for name, module in originals.items():
        model.set_submodule(name, module)


class _Work:
    """One pass over the blocks."""

    def __init__(
        self,
        model: Any,
        stream: Stream,
        method: BlockMethod,
        targets: Mapping[str, nn.Linear],
        refresh: Refresh,
        cross: bool,
        keep_root: bool,
        clip_norm: float | None,
        show: Silent,
    ) -> None:
        self.model, self.stream, self.method, self.targets = model, stream, method, dict(targets)
        self.refresh, self.keep_root, self.clip_norm = refresh, keep_root, clip_norm
        self.cross = cross and refresh != "none"
        self.show = show
        self.tokens = stream.tokens
        self.result = Streamed()
        self.changed = False
        self.directory: Path | None = None

    def keep_in(self, directory: Path, job: dict[str, Any]) -> None:
        """Write finished blocks there, and go on from those that are there already."""
        _claim_directory(directory, job)
        self.directory = directory

    def run(self) -> Streamed:
        self.show.start("compressing blocks", len(self.stream.blocks))
        try:
            for index in range(len(self.stream.blocks)):
                begun = time.perf_counter()
                with self.stream.loaded(index):
                    if not self._resume(index):
                        self._block(index, begun)
                self._put_away(index)
                self.show.advance(1)
        except BaseException:
            restore(self.model, self.result.originals)
            raise
        finally:
            self.show.stop()
        return self.result

    def _block(self, index: int, begun: float) -> None:
        own = [name for name in self.targets if name.startswith(f"{self.stream.root}.{index}.")]
        groups, moments, sample = self._trace(index, own)
        if self.refresh == "block":
            moments = self._collect(index, groups, stop=False)
        layers: list[dict[str, Any]] = []
        for names in groups:
            found = self._collect(index, [names], stop=True)[names] if self.refresh == "group" else moments[names]
            layers += self._replace(index, found.group(names))
        self.stream.inputs.close()
        now = {row["name"]: row for row in layers}
        block = self._advance(index, groups, sample, now)
        block["seconds"] = time.perf_counter() - begun
        self.result.layers += layers
        self.result.blocks.append(block)
        self._save(index, layers, block)

    def _trace(
        self, index: int, own: Sequence[str]
    ) -> tuple[list[tuple[str, ...]], dict[tuple[str, ...], InputMoments], dict[tuple[str, ...], Tensor]]:
        """Take the original stream through the block; find the groups and keep what is needed of their inputs."""
        stream = self.stream
        group_of: dict[str, tuple[str, ...]] = {}
        bad: dict[str, str] = {}
        moments: dict[tuple[str, ...], InputMoments] = {}
        sample: dict[tuple[str, ...], Tensor] = {}
        for batch in range(len(stream.batches)):
            calls: list[tuple[str, Tensor]] = []

            def note(name: str, x: Tensor, calls: list[tuple[str, Tensor]] = calls) -> None:
                calls.append((name, x))

            with self._hooks(own, note):
                after = stream.run(index, batch, stream.original.get(batch))
            shared: dict[Any, list[str]] = {}
            for name, x in calls:
                if any(name in names for names in shared.values()):
                    bad[name] = "it runs more than once in a pass"
                shared.setdefault((x.data_ptr(), x.shape, x.stride()), []).append(name)
            of_key = {(x.data_ptr(), x.shape, x.stride()): x for _, x in calls}
            for key, listed in shared.items():
                names = tuple(dict.fromkeys(listed))
                for name in names:
                    if group_of.setdefault(name, names) != names:
                        bad[name] = "it shares its input with other layers from batch to batch"
                rows = stream.rows(of_key[key], batch, names[0])
                if self.cross:
                    stream.inputs.put((names, batch), rows)
                if self.refresh == "none":
                    moments.setdefault(names, self._moments(rows.shape[1])).add(rows)
                if batch == 0:
                    sample[names] = rows[:SAMPLE].clone()
            stream.original.put(batch, after)  # not before: a layer's input may be these states themselves
        for name in own:
            if name not in group_of:
                bad[name] = "no calibration token reaches it"
        self.result.kept |= bad
        usable = [names for names in dict.fromkeys(group_of.values()) if not any(name in bad for name in names)]
        return usable, moments, sample

    def _moments(self, size: int) -> InputMoments:
        return InputMoments(size, self.keep_root or self.tokens < size, self.cross, self.clip_norm)

    def _collect(
        self, index: int, groups: Sequence[tuple[str, ...]], stop: bool
    ) -> dict[tuple[str, ...], InputMoments]:
        """Moments of groups' inputs in the block as it is by now."""
        stream = self.stream
        found: dict[tuple[str, ...], InputMoments] = {}
        first = {names[0]: names for names in groups}
        for batch in range(len(stream.batches)):

            def note(name: str, x: Tensor, batch: int = batch) -> None:
                names = first[name]
                rows = stream.rows(x, batch, name)
                original = stream.inputs.tensors.get((names, batch)) if self.cross else None
                found.setdefault(names, self._moments(rows.shape[1])).add(rows, original)
                if stop:
                    raise ReachedError

            with self._hooks(list(first), note):
                try:
                    stream.run(index, batch, stream.current.get(batch))
                except ReachedError:
                    continue
        for names in groups:  # an expert that tokens reach in the original model only
            found.setdefault(names, self._moments(self.targets[names[0]].in_features))
        return found

    def _replace(self, index: int, group: Group) -> list[dict[str, Any]]:
        if not group.tokens:
            self.result.kept |= dict.fromkeys(group.names, "no calibration token reaches it")
            return []
        rows = []
        prepared: Any = None
        for place, name in enumerate(group.names):
            linear = self.targets[name]
            try:
                if place == 0:
                    prepared = self.method.prepare(group)
                module, facts = self.method.replace(name, linear, group, prepared)
            except (torch.linalg.LinAlgError, FloatingPointError) as error:
                reason = f"numerical failure: {error}"
                if prepared is None:  # what all of them need
                    self.result.kept |= dict.fromkeys(group.names, reason)
                    return []
                self.result.kept[name] = reason
                continue
            row = {"name": name, "block": index, "shape": [linear.out_features, linear.in_features], **facts}
            rows.append({**row, "tokens": group.tokens, "inherited": None, "error": None})
            if module is not None:
                self._put(name, module.to(linear.weight.device))
        return rows

    def _put(self, name: str, module: nn.Module) -> None:
        self.result.originals[name] = self.targets[name]
        self.model.set_submodule(name, module)
        module.eval()
        self.changed = True

    def _advance(
        self,
        index: int,
        groups: Sequence[tuple[str, ...]],
        sample: Mapping[tuple[str, ...], Tensor],
        rows: Mapping[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """Take the other stream through the finished block, and tell how far it is from the original one."""
        stream = self.stream
        ratio, count, square, norm = 0.0, 0, 0.0, 0.0
        seen: dict[str, Tensor] = {}
        first = {names[0]: names for names in groups if self.changed}
        for batch in range(len(stream.batches) if self.refresh != "none" else 1):

            def note(name: str, x: Tensor, batch: int = batch) -> None:
                if batch == 0:
                    seen[name] = stream.rows(x, 0, name)[:SAMPLE].clone()

            reference = stream.original.get(batch)
            if self.changed:
                with self._hooks(list(first), note):
                    stream.current.put(batch, stream.run(index, batch, stream.current.get(batch)))
            else:
                stream.current.put(batch, reference)
            x, y = (
                stream.rows(s, batch, f"{stream.root}.{index}").float() for s in (reference, stream.current.get(batch))
            )
            gap, size = (x - y).norm(dim=1), x.norm(dim=1)
            ratio += float((gap / size.clamp_min(1e-30)).sum(dtype=torch.float64))
            count += len(x)
            square += float(gap.square().sum(dtype=torch.float64))
            norm += float(size.square().sum(dtype=torch.float64))
        for name, current in seen.items():
            for member in first[name]:
                if member in rows and sample[first[name]].shape == current.shape:
                    rows[member] |= self._layer_errors(member, sample[first[name]], current)
        return {
            "block": index,
            "error": ratio / max(1, count),
            "error_frobenius": (square / norm) ** 0.5 if norm else 0.0,
        }

    def _layer_errors(self, name: str, original: Tensor, current: Tensor) -> dict[str, float]:
        """Relative to ||W x||: what comes from the inputs, ||W (x - x^)||, and all of it, ||W x - W^ x^||."""
        before = self.targets[name]
        wanted = before(original)
        plain = wanted if before.bias is None else wanted - before.bias
        size = float(plain.norm()) or 1.0
        after: Any = self.model.get_submodule(name)
        return {
            "inherited": float((wanted - before(current)).norm()) / size,
            "error": float((wanted - after(current)).norm()) / size,
        }

    @contextmanager
    def _hooks(self, names: Sequence[str], note: Callable[[str, Tensor], None]) -> Iterator[None]:
        handles = []
        for name in names:

            def hook(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                note(name, args[0])

            handles.append(self.model.get_submodule(name).register_forward_pre_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # --- finished blocks on disk ---

    def _file(self, index: int) -> Path:
        assert self.directory is not None
        return self.directory / f"block-{index:04d}.safetensors"

    def _save(self, index: int, layers: list[dict[str, Any]], block: dict[str, Any]) -> None:
        if self.directory is None:
            return
        start = f"{self.stream.root}.{index}."
        tensors = {
            f"{name}|{key}": value.detach().cpu().contiguous()
            for name in self.result.originals
            if name.startswith(start)
            for key, value in self.model.get_submodule(name).state_dict().items()
        }
        facts = {
            "layers": layers,
            "block": block,
            "kept": {n: w for n, w in self.result.kept.items() if n.startswith(start)},
        }
        with replacing(self._file(index)) as temporary:
            save_file(tensors, temporary, metadata={"facts": json.dumps(facts)})

    def _put_away(self, index: int) -> None:
        """Where the model lies on disk, let what has replaced its layers lie there too."""
        if self.directory is None or not on_disk(self.model):
            return
        for name in self.result.originals:
            if name.startswith(f"{self.stream.root}.{index}."):
                put_on_disk(self.model.get_submodule(name), self._file(index), f"{name}|")

    def _resume(self, index: int) -> bool:
        """Take both streams through a block that an earlier process finished."""
        if self.directory is None or not self._file(index).exists():
            return False
        stream = self.stream
        states: dict[str, dict[str, Tensor]] = {}
        with safe_open(self._file(index), framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                name, _, part = key.rpartition("|")
                states.setdefault(name, {})[part] = file.get_tensor(key)
        for batch in range(len(stream.batches)):
            stream.original.put(batch, stream.run(index, batch, stream.original.get(batch)))
        for name, state in states.items():
            linear = self.targets[name]
            self._put(name, self.method.rebuild(linear, state).to(linear.weight.device))
        for batch in range(len(stream.batches) if self.refresh != "none" else 1):
            stream.current.put(
                batch,
                stream.run(index, batch, stream.current.get(batch)) if self.changed else stream.original.get(batch),
            )
        self.result.layers += facts["layers"]
        self.result.blocks.append(facts["block"])
        self.result.kept |= facts["kept"]
        return True


def fingerprint(model: nn.Module, batches: Sequence[Batch], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for interrupted work to go on: settings, and hashes of weights (by their sums) and of calibration inputs."""
    weights = hashlib.sha256()
    for name, module in model.named_modules():
        with align_module_device(module):  # weights on disk are read, a module at a time
            for key, parameter in module.named_parameters(recurse=False):
                value = sum(float(part.double().sum()) for part in parameter.detach().flatten().split(CHUNK * SAMPLE))
                weights.update(f"{name}.{key} {tuple(parameter.shape)} {value!r}\n".encode())
    inputs = hashlib.sha256()
    for batch in batches:
        for key in sorted(batch):
            if isinstance(batch[key], Tensor):
                inputs.update(f"{key} {tuple(batch[key].shape)}".encode())
                inputs.update(batch[key].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return {"settings": plain, "weights": weights.hexdigest(), "inputs": inputs.hexdigest()}


def _claim_directory(directory: Path, job: dict[str, Any]) -> None:
    file = directory / "job.json"
    if file.exists():
        if json.loads(file.read_text(encoding="utf-8")) != job:
            raise ValueError(
                f"'{directory}' holds finished blocks of another model, calibration or settings. Give another checkpoint_dir, or "
                "delete it"
            )
        return
    write_json(file, job)


def _at_least_float(x: Tensor) -> Tensor:
    return x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
