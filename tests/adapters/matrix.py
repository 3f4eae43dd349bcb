"""Rows and columns of the adapter test matrix: a new adapter is one more `Adapter` in ADAPTERS, nothing else.

Importable by name, since the two-process test starts fresh interpreters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from acclimate.adapters import BayesianLoraConfig, FrameFTConfig

BATCH, LENGTH, VOCABULARY, CLASSES = 4, 7, 60, 3


@dataclass(frozen=True)
class Architecture:
    """A tiny random model, its inputs, and the names of the projections that adapters target."""

    build: Callable[[], nn.Module]
    targets: tuple[str, str]
    head: str | None  # a module that can be trained whole, for modules_to_save
    pattern: str  # the module list that layers_to_transform counts

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().eval()


def _llama(tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


ARCHITECTURES = {
    "llama": Architecture(_llama, ("q_proj", "v_proj"), "lm_head", "layers"),
    "bert": Architecture(_bert, ("query", "value"), "classifier", "layer"),
    "t5": Architecture(_t5, ("q", "v"), None, "block"),
    "vit": Architecture(_vit, ("q_proj", "v_proj"), "classifier", "layers"),
}


@dataclass(frozen=True)
class Adapter:
    """How to make one, and what it promises. `config` takes the PEFT arguments that a test adds."""

    config: Callable[..., PeftConfig]
    prefix: str  # of its parameters' names
    identity_at_start: bool = True
    mixed_batch: bool = False  # one batch, an adapter per row
    merges_quantised: bool = False  # into 8- and 4-bit weights, by quantising them again
    settings: dict[str, Any] = field(default_factory=dict)

    def attach(
        self, architecture: Architecture, model: nn.Module | None = None, *, trained: bool = False, **extra: Any
    ) -> PeftModel:
        """The architecture with this adapter; `trained` moves every adapter weight away from its start."""
        extra.setdefault("target_modules", list(architecture.targets))
        peft_model = get_peft_model(model if model is not None else architecture.model(), self.config(**extra)).eval()
        if trained:
            disturb(peft_model, seed=1)
        return peft_model


ADAPTERS = {
    # deterministic, as PEFT's promises are: the noise has its own tests
    "bayesian-lora": Adapter(
        lambda **extra: BayesianLoraConfig(r=4, lora_alpha=8, train="mean", **extra),
        "blora_",
    ),
    "lora": Adapter(
        lambda **extra: LoraConfig(r=4, lora_alpha=8, **extra), "lora_", mixed_batch=True, merges_quantised=True
    ),
    "frameft": Adapter(lambda **extra: FrameFTConfig(n_coefficients=100, **extra), "frameft_", mixed_batch=True),
}


def quantised(model: nn.Module, bits: int) -> nn.Module:
    """The model with its linear layers, but the head, in bitsandbytes' 8 or 4 bits, as transformers loads it."""
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or "lm_head" in name:
            continue
        size, bias = (layer.in_features, layer.out_features), layer.bias is not None
        if bits == 4:
            new: Any = bnb.nn.Linear4bit(*size, bias=bias, compute_dtype=torch.float32, quant_type="nf4")
            new.support_avx512bf16_for_cpu = False  # its fast path for inference needs widths of 64
            new.weight = bnb.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, quant_type="nf4")
        else:
            new = bnb.nn.Linear8bitLt(*size, bias=bias, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(layer.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
        if bias:
            new.bias = layer.bias
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model.eval()


def disturb(model: nn.Module, seed: int, only: str = "") -> None:
    """Add noise to the trainable weights whose name contains `only`, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and only in name:
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.add_(noise.to(parameter))


def inputs(name: str, rows: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=generator)
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    return {"input_ids": ids}


def labels(name: str, rows: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if name in ("bert", "vit"):
        return torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randint(2, VOCABULARY, (rows, 4 if name == "t5" else LENGTH), generator=generator)


def logits(model: nn.Module, name: str, **extra: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs(name), **extra).logits


def loss(model: nn.Module, name: str, rows: slice = slice(None)) -> Tensor:
    """Mean cross-entropy of the chosen rows."""
    batch = {key: value[rows] for key, value in inputs(name).items()}
    found = model(**batch).logits.float()
    return nn.functional.cross_entropy(found.flatten(0, -2), labels(name)[rows].flatten())


def one_step(rank: int, world: int, adapter: str, output: str) -> None:
    """One SGD step of this rank's share of the batch under DDP; rank 0 saves the adapter's weights."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    # they meet at a file: a port that was free a moment ago may be somebody else's now
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=rank, world_size=world)
    row, architecture = ADAPTERS[adapter], ARCHITECTURES["llama"]
    model = row.attach(architecture, trained=True)
    parallel = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    trained = [p for p in model.parameters() if p.requires_grad]
    share = BATCH // world
    loss(parallel, "llama", slice(rank * share, (rank + 1) * share)).backward()
    torch.optim.SGD(trained, lr=0.5).step()
    if rank == 0:
        save_file({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}, output)
    leave()


def leave() -> None:
    """End a worker once all have come this far, without destructors: gloo's joins its thread while it holds the interpreter's lock,
    which that thread may want for the last gradient it reduced; then neither moves again."""
    import torch.distributed as dist

    dist.barrier()
    os._exit(0)
