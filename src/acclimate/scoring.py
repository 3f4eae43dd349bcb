"""Log-probabilities of continuations by a causal LM, with everything shared computed once.

Scoring C choices after one prompt naively costs C forward passes over the prompt. Here the choices of a prompt are merged
into a prefix tree and laid behind the prompt in ONE sequence; the attention mask lets every tree node see the prompt, its own
ancestors and itself. The prompt's keys and values, and those of shared choice prefixes, are computed once; logits are computed
only at the tree's nodes (a choice's last token needs none). A single-token choice costs no extra token at all.

    prompt: "Request: pay my bill\\nIntent:"     choices: " pay bill", " pay rent", " weather"
    sequence: [prompt] [ pay]                    edges: root->" pay", " pay"->" bill", " pay"->" rent", root->" weather"

log p(choice) is the sum over its edges. The result is differentiable, so the same code trains (`acclimate.tasks.choice`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

Tokens = Sequence[int]

# Logits at the scored positions are the largest tensor of a batch; this keeps them near 200 MB in fp32.
MAX_LOGITS = 50_000_000


@dataclass(frozen=True)
class Item:
    """One prompt and the continuations to score after it, as token ids; every continuation has at least one token."""

    prompt: Tokens
    choices: Sequence[Tokens]


@dataclass(frozen=True)
class _Tree:
    """Prefix tree of the choices. Node 0 is the prompt's last token; nodes 1.. are the inner tokens."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    edges: list[tuple[int, int, int]]  # (choice, node before the token, token)


def _tree(choices: Sequence[Tokens]) -> _Tree:
    children: dict[tuple[int, int], int] = {}
    tokens, parents, depths, edges = [-1], [-1], [0], []
    for index, choice in enumerate(choices):
        node = 0
        for position, token in enumerate(choice):
            edges.append((index, node, token))
            if position == len(choice) - 1:
                break
            if (node, token) not in children:
                children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
            node = children[node, token]
    return _Tree(tokens[1:], parents[1:], depths[1:], edges)


def pack(items: Sequence[Item], pad_id: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Lay a batch of items out for one forward pass.

    Returns
    -------
    dict
        `input_ids`, `position_ids` (B, T); `attention_mask`: (B, T), or (B, 1, T, T) additive where choices branch;
        `logits_to_keep`: trailing positions that are scored; and per edge (E,): `edge_row`, `edge_node` (position among
        those kept), `edge_token`, `edge_choice` (index among all choices of the batch); `choice_row` (C,): the item of
        each choice. Prompts are padded on the left so that the scored positions line up at the end.
    """
    trees = [_tree(item.choices) for item in items]
    prompt_length = max(len(item.prompt) for item in items)
    width = max(len(tree.tokens) for tree in trees)
    total = prompt_length + width
    branching = any(tree.parents != list(range(len(tree.parents))) for tree in trees)

    input_ids = torch.full((len(items), total), pad_id)
    positions = torch.zeros((len(items), total), dtype=torch.long)
    real = torch.zeros((len(items), total), dtype=torch.bool)
    visible = torch.zeros((len(items), total, total), dtype=torch.bool) if branching else None
    edges: list[tuple[int, int, int, int]] = []
    choice_row: list[int] = []
    for row, (item, tree) in enumerate(zip(items, trees, strict=True)):
        start, count = prompt_length - len(item.prompt), len(tree.tokens)
        end = prompt_length + count
        input_ids[row, start:prompt_length] = torch.as_tensor(item.prompt)
        input_ids[row, prompt_length:end] = torch.as_tensor(tree.tokens, dtype=torch.long)
        positions[row, start:prompt_length] = torch.arange(len(item.prompt))
        positions[row, prompt_length:end] = torch.as_tensor(tree.depths, dtype=torch.long) + len(item.prompt) - 1
        real[row, start:end] = True
        edges += [(row, node, token, len(choice_row) + choice) for choice, node, token in tree.edges]
        choice_row += [row] * len(item.choices)
        if visible is not None:
            visible[row, start:prompt_length, start:prompt_length] = torch.ones(
                len(item.prompt), len(item.prompt), dtype=torch.bool
            ).tril()
            visible[row, prompt_length:end, start:prompt_length] = True
            for node, parent in enumerate(tree.parents):  # parents come first, so their row is already complete
                if parent > 0:
                    visible[row, prompt_length + node, prompt_length:] = visible[
                        row, prompt_length + parent - 1, prompt_length:
                    ]
                visible[row, prompt_length + node, prompt_length + node] = True
    mask = real.long()
    if visible is not None:
        visible |= torch.eye(total, dtype=torch.bool)  # a padding row that sees nothing would become nan
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None]
    edge = torch.as_tensor(edges).T
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": positions,
        "logits_to_keep": width + 1,
        "edge_row": edge[0],
        "edge_node": edge[1],
        "edge_token": edge[2],
        "edge_choice": edge[3],
        "choice_row": torch.as_tensor(choice_row),
    }


MODEL_KEYS = ("input_ids", "attention_mask", "position_ids")


def scored_logits(model: torch.nn.Module, packed: dict[str, Any]) -> Tensor:
    """Logits (B, kept, V) at the scored positions only; models without `logits_to_keep` compute all and are cut."""
    inputs = {key: packed[key] for key in MODEL_KEYS}
    keep = packed["logits_to_keep"]
    if accepts(model, "logits_to_keep"):
        return model(**inputs, logits_to_keep=keep, use_cache=False).logits[:, -keep:]
    if not accepts(model, "position_ids"):
        del inputs["position_ids"]
    return model(**inputs, use_cache=False).logits[:, -keep:]


def accepts(model: torch.nn.Module, argument: str) -> bool:
    """Whether the model itself (under PEFT, DDP and compile wrappers) takes this forward argument."""
    inner: Any = model
    while inner is not None:
        model = inner
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None and isinstance(model, PeftModel):
            inner = model.get_base_model()
    return argument in inspect.signature(model.forward).parameters


def edge_logprobs(logits: Tensor, packed: dict[str, Any]) -> Tensor:
    """Log-probability (E,) of each edge's token at its node, in fp32."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1)
    row, node, token = packed["edge_row"], packed["edge_node"], packed["edge_token"]
    return logits[row, node, token] - normaliser[row, node]


def choice_logprobs(edges: Tensor, packed: dict[str, Any], *, length_normalise: bool = False) -> Tensor:
    """Sum (or mean) of the edge log-probabilities of each choice, (C,)."""
    count = len(packed["choice_row"])
    total = torch.zeros(count, dtype=edges.dtype, device=edges.device).index_add(0, packed["edge_choice"], edges)
    if length_normalise:
        total = total / torch.bincount(packed["edge_choice"], minlength=count)
    return total


@dataclass(frozen=True)
class Score:
    """What one choice got: per token, log-probability; with `details` also the top probability and squared norm of p."""

    logprobs: np.ndarray  # (tokens,) float64
    correct: np.ndarray | None = None  # (tokens,) bool: the token is the most probable one
    confidence: np.ndarray | None = None  # (tokens,) probability of the most probable token
    squared: np.ndarray | None = None  # (tokens,) sum over the vocabulary of p^2

    @property
    def total(self) -> float:
        return float(self.logprobs.sum())


@torch.no_grad()
def score(
    model: torch.nn.Module,
    items: Sequence[Item],
    pad_id: int,
    *,
    batch_tokens: int = 2048,
    details: bool = False,
    advance: Any = lambda count: None,
) -> list[list[Score]]:
    """Score every choice of every item. Order of the result is the order of the items.

    Parameters
    ----------
    model
        Causal LM, plain or under PEFT; used in evaluation mode, its mode is restored.
    batch_tokens
        Tokens (with padding) per forward pass.
    details
        Also return what token-level accuracy, calibration and Brier score need.
    advance
        Called with the number of items finished, for a progress bar.
    """
    (scores,) = score_copies(model, items, pad_id, 1, batch_tokens=batch_tokens, details=details, advance=advance)
    return scores


@torch.no_grad()
def score_copies(
    model: torch.nn.Module,
    items: Sequence[Item],
    pad_id: int,
    copies: int,
    *,
    batch_tokens: int = 2048,
    details: bool = False,
    advance: Any = lambda count: None,
) -> list[list[list[Score]]]:
    """`score` of a model that answers a batch `copies` times over, one block of rows a copy: the scores of each copy.

    So does an adapter that draws its weights, under several draws at once.
    """
    training = model.training
    model.eval()
    parameter = next(model.parameters())
    vocabulary = int(getattr(model.config, "vocab_size", 50_000))
    results: list[list[list[Score]]] = [[[] for _ in items] for _ in range(copies)]
    try:
        for batch in _batches(items, max(1, batch_tokens // copies), vocabulary * copies):
            packed = pack([items[i] for i in batch], pad_id, parameter.dtype)
            packed = {k: v.to(parameter.device) if isinstance(v, Tensor) else v for k, v in packed.items()}
            for copy, logits in enumerate(scored_logits(model, packed).chunk(copies)):
                for index, scores in zip(batch, _collect(logits, packed, details), strict=True):
                    results[copy][index] = scores
            advance(len(batch))
    finally:
        model.train(training)
    return results


def _batches(items: Sequence[Item], batch_tokens: int, vocabulary: int) -> Iterator[list[int]]:
    """Indices in batches of items of like length, longest first, so that running out of memory shows at once."""
    inner = [len(_tree(item.choices).tokens) for item in items]
    order = sorted(range(len(items)), key=lambda i: -(len(items[i].prompt) + inner[i]))
    batch: list[int] = []
    for index in order:
        prompt = max(len(items[i].prompt) for i in [*batch, index])
        width = max(inner[i] for i in [*batch, index])
        rows = len(batch) + 1
        if batch and (rows * (prompt + width) > batch_tokens or rows * (width + 1) * vocabulary > MAX_LOGITS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _collect(logits: Tensor, packed: dict[str, Any], details: bool) -> list[list[Score]]:
    edges = edge_logprobs(logits, packed).double().cpu().numpy()
    choice = packed["edge_choice"].cpu().numpy()
    columns: list[np.ndarray] = []
    if details:
        probabilities = torch.softmax(logits.float(), dim=-1)[packed["edge_row"], packed["edge_node"]]
        confidence, best = probabilities.max(dim=-1)
        columns = [
            (best == packed["edge_token"]).cpu().numpy(),
            confidence.double().cpu().numpy(),
            probabilities.square().sum(dim=-1).double().cpu().numpy(),
        ]
    starts = np.searchsorted(choice, np.arange(len(packed["choice_row"]) + 1))  # edges come sorted by choice
    scores: list[list[Score]] = [[] for _ in range(len(packed["input_ids"]))]
    for index, row in enumerate(packed["choice_row"].tolist()):
        span = slice(starts[index], starts[index + 1])
        scores[row].append(Score(edges[span], *(column[span] for column in columns)))
    return scores
