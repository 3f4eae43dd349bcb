"""Predictions averaged over draws of the weights, and what they say about uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acclimate.adapters.bayesian_lora.tuner import tuner_of
from acclimate.metrics import uncertainty_parts
from acclimate.scoring import accepts

FloatArray = NDArray[np.float64]


def predict_proba(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    n_samples: int | None = 8,
    choice_ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """p(y|x), (N, C): the mean over `n_samples` draws of the softmax of the logits.

    Parameters
    ----------
    batch
        The model's inputs, N rows. A language model answers with the token after each row's last real one.
    n_samples
        Draws of the weights; None: the posterior mean, in one pass.
    choice_ids
        (C,) token ids that the softmax is restricted to; None: all of the vocabulary, or the classes of a classifier.
    generator
        Source of the draws; the same state gives the same predictions. None: torch's global generator.

    Raises ValueError for `n_samples` below 1, and TypeError when the model has no Bayesian-LoRA.
    """
    return sampled_probs(model, batch, n_samples, choice_ids, generator).mean(0)


@torch.no_grad()
def sampled_probs(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    n_samples: int | None = 8,
    choice_ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The probabilities of each draw, (S, N, C); S = 1 for `n_samples` None. Arguments as for `predict_proba`."""
    tuner = tuner_of(model)
    training = model.training
    model.eval()
    try:
        with nullcontext() if n_samples is None else tuner.posterior_samples(n_samples, generator):
            logits = _last_logits(model, batch)
    finally:
        model.train(training)
    if choice_ids is not None:
        logits = logits[:, choice_ids.to(logits.device)]
    return torch.softmax(logits.float(), -1).unflatten(0, (n_samples or 1, -1))


def _last_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    keep, options = None, {}
    if mask is not None and mask.ndim == 2 and accepts(model, "logits_to_keep"):
        last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
        keep = last.unique()  # logits at these positions only: the vocabulary is by far the largest dimension
        options = {"logits_to_keep": keep}
    logits = model(**batch, **options).logits
    if logits.ndim == 2:
        return logits
    if keep is None:
        return logits[:, -1]
    place = torch.searchsorted(keep, last).repeat(len(logits) // len(last))
    return logits[torch.arange(len(logits), device=logits.device), place]


def choice_token_ids(tokenizer: Any, choices: Sequence[str]) -> Tensor:
    """Token ids (C,) of answers that are one token each, as they follow a prompt (" positive", with the space).

    Raises ValueError, listing the pieces, for an answer of several tokens.
    """
    ids = []
    for choice in choices:
        pieces = tokenizer(choice, add_special_tokens=False)["input_ids"]
        if len(pieces) != 1:
            shown = ", ".join(repr(tokenizer.decode([piece])) for piece in pieces)
            raise ValueError(
                f"the choice {choice!r} is {len(pieces)} tokens ({shown}), but must be one. Choose other words"
            )
        ids.append(pieces[0])
    return torch.tensor(ids)


class PosteriorPredictor:
    """scikit-learn's way to ask a Bayesian-LoRA: texts in, classes, probabilities and uncertainty out.

    Parameters
    ----------
    model, tokenizer
        A PEFT model with a Bayesian-LoRA: a language model, or a sequence classifier.
    choices
        Answers of one token each, as they follow a text (" negative", " positive"); None for a classifier with its own classes.
    n_samples
        Draws of the weights; None: the posterior mean.
    seed
        Of the draws: the same texts always get the same answer.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        choices: Sequence[str] | None = None,
        n_samples: int | None = 8,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, not {n_samples}")
        self.model = model
        self.tokenizer = tokenizer
        self.choices = choices
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.seed = seed
        self._ids = None if choices is None else choice_token_ids(tokenizer, choices)

    @property
    def classes_(self) -> list[str]:
        if self.choices is not None:
            return [choice.strip() for choice in self.choices]
        names: Any = self.model.config
        return [names.id2label[index] for index in range(names.num_labels)]

    def sampled_proba(self, texts: Sequence[str]) -> FloatArray:
        """Probabilities of each draw, (S, N, C)."""
        device = next(self.model.parameters()).device
        parts = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(list(texts[start : start + self.batch_size]), return_tensors="pt", padding=True)
            batch = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
            generator = torch.Generator().manual_seed(self.seed)
            parts.append(sampled_probs(self.model, batch, self.n_samples, self._ids, generator).cpu().double())
        return torch.cat(parts, 1).numpy()

    def predict_proba(self, texts: Sequence[str]) -> FloatArray:
        """(N, C), the mean over the draws."""
        return self.sampled_proba(texts).mean(0)

    def predict(self, texts: Sequence[str]) -> list[str]:
        """The most probable class of each text."""
        return [self.classes_[index] for index in self.predict_proba(texts).argmax(1)]

    def score(self, texts: Sequence[str], labels: Sequence[str]) -> float:
        """Accuracy."""
        return float(np.mean([found == label for found, label in zip(self.predict(texts), labels, strict=True)]))

    def uncertainty(self, texts: Sequence[str]) -> dict[str, FloatArray]:
        """`total`, `aleatoric` and `epistemic` (N,) in nats, as `acclimate.metrics.uncertainty_parts` defines them."""
        return uncertainty_parts(self.sampled_proba(texts))
