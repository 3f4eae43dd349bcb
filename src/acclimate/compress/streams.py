"""The hidden states of calibration inputs between the blocks of a model, for the original and for the model as it is changed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from acclimate import prefix
from acclimate.compress.offload import compute_device, in_memory, on_disk
from acclimate.prefix import ReachedError, evaluation_mode

Batch = Mapping[str, Any]

TOLERANCE = 1e-4  # of the last hidden states, between the model and its blocks one after the other


class Spill:
    """Tensors by key: in memory up to `limit` bytes in all, beyond it in memory-mapped files."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.used = 0
        self.tensors: dict[Any, Tensor] = {}
        self.directory: Any = None

    def put(self, key: Any, value: Tensor) -> None:
        place = self.tensors.get(key)
        if place is None or place.shape != value.shape:
            place = self._place(value)
            self.tensors[key] = place
        place.copy_(value)

    def _place(self, value: Tensor) -> Tensor:
        size = value.numel() * value.element_size()
        if self.used + size <= self.limit:
            self.used += size
            return torch.empty(value.shape, dtype=value.dtype)
        if self.directory is None:
            self.directory = tempfile.TemporaryDirectory(prefix="acclimate-")
        file = Path(self.directory.name) / f"{len(list(Path(self.directory.name).iterdir()))}.bin"
        return torch.from_file(str(file), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)

    def get(self, key: Any) -> Tensor:
        return self.tensors[key]

    def close(self) -> None:
        self.tensors.clear()
        self.used = 0
        if self.directory is not None:
            self.directory.cleanup()
            self.directory = None


def block_root(model: Any) -> tuple[str, int]:
    """Name and length of the list of blocks."""
    try:
        parent, attribute = prefix.blocks(model)
    except (ValueError, AttributeError):
        raise ValueError(
            f"{type(model).__name__} has no single list of blocks, as decoders and encoders have (config.num_hidden_layers says how "
            "many); encoder-decoders and other architectures are not supported"
        ) from None
    name = next(name for name, module in model.named_modules() if module is getattr(parent, attribute))
    return name, len(getattr(parent, attribute))


class Stream:
    """The blocks of a model, what each is called with besides the states, and the states."""

    def __init__(
        self, model: Any, batches: Sequence[Batch], call: Any, device: str | torch.device | None, max_ram: float
    ) -> None:
        self.model = model
        self.root, count = block_root(model)
        self.blocks: list[Any] = [model.get_submodule(f"{self.root}.{index}") for index in range(count)]
        self.call = call or (lambda model, batch: model(**batch))
        self.batches = batches
        self.device = device
        self.arguments: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        self.masks: list[Tensor | None] = []
        self.sequences: list[int] = []  # number of the first of each batch
        self.original, self.current = Spill(max_ram / 3), Spill(max_ram / 3)
        self.inputs = Spill(max_ram / 3)
        self.home = compute_device(self.blocks[0])
        expected = self._last_states(batches[0])
        for index, batch in enumerate(batches):
            self._record(index, batch)
        self._check(expected)

    @property
    def tokens(self) -> int:
        return sum(
            self.original.get(b).shape[:-1].numel() if mask is None else int(mask.sum())
            for b, mask in enumerate(self.masks)
        )

    def _last_states(self, batch: Batch) -> Tensor:
        def first(module: nn.Module, args: Any, output: Any) -> None:
            self.extras = len(output) - 1 if isinstance(output, tuple | list) else None

        def last(module: nn.Module, args: Any, output: Any) -> None:
            raise ReachedError(_states(output))

        handles = [self.blocks[0].register_forward_hook(first), self.blocks[-1].register_forward_hook(last)]
        try:
            self.call(self.model, batch)
        except ReachedError as reached:
            value: Tensor = reached.value
            return value
        finally:
            for handle in handles:
                handle.remove()
        raise ValueError(f"{type(self.model).__name__} did not run its last block")

    def _record(self, index: int, batch: Batch) -> None:
        """Run the model with blocks that compute nothing, and note what each is called with."""
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        before = [vars(block).get("forward") for block in self.blocks]

        def noting(place: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                kwargs = dict(kwargs)
                states = args[0] if args else kwargs.pop("hidden_states")
                found.append((args[1:], kwargs))
                if place == 0:
                    self.original.put(index, states)
                    self.current.put(index, states)
                if place == len(self.blocks) - 1:
                    raise ReachedError
                return states if self.extras is None else (states, *[None] * self.extras)

            return forward

        try:
            for place, block in enumerate(self.blocks):
                block.forward = noting(place)
            self.call(self.model, batch)
        except ReachedError:
            pass
        finally:
            for block, forward in zip(self.blocks, before, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward
        self.arguments.append(found)
        states = self.original.get(index)
        mask = batch.get("attention_mask")
        fits = isinstance(mask, Tensor) and mask.shape == states.shape[:-1]
        self.masks.append(mask.bool().cpu() if fits and not mask.bool().all() else None)  # type: ignore[union-attr]
        self.sequences.append(0 if index == 0 else self.sequences[-1] + len(self.original.get(index - 1)))

    def _check(self, expected: Tensor) -> None:
        states = self.original.get(0)
        for index in range(len(self.blocks)):
            states = self.run(index, 0, states)
        gap = (states.to(expected) - expected).abs().max() / expected.abs().max()
        if gap > TOLERANCE:  # not a number is found later, with its place
            raise ValueError(
                f"the blocks of {type(self.model).__name__} need more than the hidden states below them (its last states differ by "
                f"{gap:.1g} of the largest when they run one after the other), so it cannot be compressed block by block"
            )

    @contextmanager
    def loaded(self, index: int) -> Iterator[None]:
        """The block in memory, on the device where it is computed."""
        if on_disk(self.blocks[index]):
            with in_memory(self.blocks[index], self.device):
                yield
            return
        if self.device is not None:
            self.blocks[index].to(self.device)
        try:
            yield
        finally:
            if self.device is not None:
                self.blocks[index].to(self.home)

    def run(self, index: int, batch: int, states: Tensor) -> Tensor:
        args, kwargs = self.arguments[batch][index]
        where = compute_device(self.blocks[index])
        args, kwargs = send_to_device((args, kwargs), where)
        return _states(self.blocks[index](states.to(where), *args, **kwargs))

    def rows(self, x: Tensor, batch: int, name: str) -> Tensor:
        """(tokens, n): a layer's inputs without those of padding. Raises ValueError where they are not finite."""
        if not x.isfinite().all():
            bad = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
            where = f"calibration sequence {self.sequences[batch] + bad}" if x.ndim == 3 else "the calibration data"
            raise ValueError(
                f"'{name}' gets values that are not finite numbers in {where}. Look at that text, or load the model in float32"
            )
        mask = self.masks[batch]
        if mask is not None and x.shape[:-1] == mask.shape:
            return x[mask.to(x.device)]
        flat = x.reshape(-1, x.shape[-1])
        return flat[mask.flatten().to(x.device)] if mask is not None and len(flat) == mask.numel() else flat

    def close(self) -> None:
        for spill in (self.original, self.current, self.inputs):
            spill.close()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients and without a key-value cache."""
    config = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    if cache is not None:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        with evaluation_mode(model), torch.no_grad():
            yield
    finally:
        if cache is not None:
            config.use_cache = cache  # type: ignore[union-attr]


def _states(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found
