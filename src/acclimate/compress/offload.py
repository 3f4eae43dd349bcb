"""Weights that lie on disk until they are used, so that a model is worked on in the memory of one block.

transformers and accelerate load a model that way (`device_map={"": "disk"}`): a hook on every module with weights reads them before the
module runs and drops them afterwards. Here whole blocks are read once for as long as they are worked on, and what has taken the place of
a layer is put on disk beside the rest. For a model in memory nothing here does anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook, remove_hook_from_module
from accelerate.utils import OffloadedWeightsLoader, named_module_tensors, set_module_tensor_to_device
from torch import nn

DISK = {"": "disk"}  # device_map of a model that is loaded this way


def on_disk(module: nn.Module) -> bool:
    """Whether some of the module's weights lie on disk."""
    return any(_hook(part) for part in module.modules())


def compute_device(module: nn.Module) -> torch.device:
    """Where a module computes, wherever its weights lie."""
    hook = next((found for part in module.modules() if (found := _hook(part))), None)
    return next(module.parameters()).device if hook is None else torch.device(hook.execution_device)


@contextmanager
def in_memory(module: nn.Module, device: str | torch.device | None = None) -> Iterator[None]:
    """All weights of a module in memory (on `device`; None: where it computes); afterwards they are on disk again."""
    device = device or compute_device(module)
    hooks = {part: hook for part in module.modules() if (hook := _hook(part))}
    try:
        for part, hook in hooks.items():
            remove_hook_from_module(part)
            for name, tensor in list(named_module_tensors(part, include_buffers=False, recurse=False)):
                # a hook that was put back here before reads the weights itself when it goes
                value = hook.weights_map[name] if tensor.is_meta else None
                set_module_tensor_to_device(part, name, device, value=value)
        yield
    finally:
        for part, hook in hooks.items():
            add_hook_to_module(part, hook)  # which drops the weights


def put_on_disk(module: nn.Module, file: Path, prefix: str) -> None:
    """Drop the weights of a module, which are in the safetensors file under `prefix` + their names."""
    index = {
        name: {
            "safetensors_file": str(file),
            "weight_name": prefix + name,
            "dtype": str(value.dtype).removeprefix("torch."),
        }
        for name, value in module.named_parameters()
    }
    weights: Any = OffloadedWeightsLoader(index=index)
    attach_align_device_hook(module, execution_device=compute_device(module), offload=True, weights_map=weights)


@dataclass
class Clock:
    seconds: float = 0.0


@contextmanager
def reading_aside(model: nn.Module) -> Iterator[Clock]:
    """Counts, of passes through the model, the seconds in which weights are read from disk and dropped."""
    clock = Clock()

    def timed(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = call(module, *args, **kwargs)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.sum()  # a memory-mapped weight is not read before it is used
        clock.seconds += time.perf_counter() - begun
        return result

    hooks: list[Any] = [hook for part in model.modules() if (hook := _hook(part))]
    for hook in hooks:
        hook.pre_forward, hook.post_forward = partial(timed, hook.pre_forward), partial(timed, hook.post_forward)
    try:
        yield clock
    finally:
        for hook in hooks:
            del hook.pre_forward, hook.post_forward


def weights_once(model: nn.Module) -> Iterator[nn.Parameter]:
    """The model's parameters; tied ones once, though on disk they are two."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return (parameter for name, parameter in model.named_parameters() if name not in tied)


def _hook(module: nn.Module) -> AlignDevicesHook | None:
    hook = getattr(module, "_hf_hook", None)
    return hook if isinstance(hook, AlignDevicesHook) and hook.offload else None
