"""THE table: one row a method. The command line, the docs and the tests read it; nothing else lists methods.

A row says what a method does for you, where it plugs in (`stage`), how a person selects it (`option`), and where its
code is (`module`). Rows are `ready`, `planned` (specified, not built yet) or `broken` (a third party's entry point
that does not load; the reason is in `job`). Third parties add rows through the entry-point group `acclimate.methods`:
each entry point loads to a `Method` or to an iterable of them.

Only the standard library is imported here, so that listing the table costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from acclimate.errors import InputError, MissingError, did_you_mean, missing_extra

ENTRY_POINT_GROUP = "acclimate.methods"

# What the methods of a stage are called in messages; a stage that is not here is "<stage> methods".
_PLURALS = {"adapter": "adapters", "init": "initialisations", "optimizer": "optimizers", "estimator": "estimators"}
_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Method:
    """One row of the table.

    `module` is `"package.module:attribute"`, or None when the method is the absence of one (full fine-tuning).
    `defaults` are fixed arguments for what `module` names (`{"use_dora": True}` for a `LoraConfig`). `claim` is the
    module under `acclimate.claims` that measures the method (a third party gives a full dotted path). `aliases` are
    other names a person may type. `paper` is empty for what acclimate only passes on from torch and PEFT.
    """

    name: str
    job: str
    stage: str
    module: str | None
    option: str
    status: str = "planned"
    paper: str = ""
    extra: str | None = None
    claim: str | None = None
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


# The usual start for LoRA and its kin: rank 8 on every linear layer but the head.
_LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}

_BUILT_IN: tuple[Method, ...] = (
    # What torch and PEFT already have, under the same options, so that every comparison has its peers.
    Method(
        name="lora",
        job="trains a low-rank correction beside each frozen weight; the usual choice",
        stage="adapter",
        module="peft:LoraConfig",
        option="--adapter lora",
        status="ready",
        claim="lora",
        defaults=_LORA,
    ),
    Method(
        name="full",
        job="trains every weight of the model, with no adapter",
        stage="adapter",
        module=None,
        option="--adapter full",
        status="ready",
    ),
    Method(
        name="dora",
        job="LoRA that learns the length and the direction of each weight column separately",
        stage="adapter",
        module="peft:LoraConfig",
        option="--adapter dora",
        status="ready",
        defaults={**_LORA, "use_dora": True},
    ),
    Method(
        name="rslora",
        job="LoRA scaled by alpha over the root of the rank, so that high ranks keep learning",
        stage="adapter",
        module="peft:LoraConfig",
        option="--adapter rslora",
        status="ready",
        defaults={**_LORA, "use_rslora": True},
    ),
    Method(
        name="vera",
        job="trains two small vectors a layer around shared frozen random matrices",
        stage="adapter",
        module="peft:VeraConfig",
        option="--adapter vera",
        status="ready",
        defaults={"target_modules": "all-linear"},
    ),
    Method(
        name="fourierft",
        job="trains a few Fourier coefficients of each weight's change",
        stage="adapter",
        module="peft:FourierFTConfig",
        option="--adapter fourierft",
        status="ready",
        defaults={"target_modules": "all-linear"},
    ),
    Method(
        name="ia3",
        job="trains one scale for each key, value and feed-forward activation; very few numbers",
        stage="adapter",
        module="peft:IA3Config",
        option="--adapter ia3",
        status="ready",
    ),
    Method(
        name="default",
        job="starts LoRA with a random A and a zero B, so that training begins at the base model",
        stage="init",
        module="peft:LoraConfig",
        option="--init default",
        status="ready",
        defaults={"init_lora_weights": True},
    ),
    Method(
        name="pissa",
        job="starts LoRA at the largest singular directions of the weight",
        stage="init",
        module="peft:LoraConfig",
        option="--init pissa",
        status="ready",
        defaults={"init_lora_weights": "pissa"},
    ),
    Method(
        name="olora",
        job="starts LoRA at orthonormal factors from a QR decomposition of the weight",
        stage="init",
        module="peft:LoraConfig",
        option="--init olora",
        status="ready",
        defaults={"init_lora_weights": "olora"},
    ),
    Method(
        name="orthogonal",
        job="starts LoRA with random orthogonal factors whose product is zero",
        stage="init",
        module="peft:LoraConfig",
        option="--init orthogonal",
        status="ready",
        defaults={"init_lora_weights": "orthogonal"},
    ),
    Method(
        name="adamw",
        job="Adam with decoupled weight decay; the usual choice",
        stage="optimizer",
        module="torch.optim:AdamW",
        option="--optimizer adamw",
        status="ready",
    ),
    Method(
        name="sgd",
        job="plain stochastic gradient descent",
        stage="optimizer",
        module="torch.optim:SGD",
        option="--optimizer sgd",
        status="ready",
    ),
    Method(
        name="adafactor",
        job="Adam-like steps with a factored second moment, for little optimiser memory",
        stage="optimizer",
        module="torch.optim:Adafactor",
        option="--optimizer adafactor",
        status="ready",
    ),
    # The 38 methods.
    Method(
        name="saber",
        job="learns tasks one after another with prompts, and lets later tasks improve earlier ones without replay",
        stage="continual",
        module="acclimate.continual.saber:SaberLearner",
        option="acclimate continual saber",
        paper="Turning Back Without Forgetting: Selective Backward Refinement for Parameter-Efficient Continual Learning",
        claim="saber",
    ),
    Method(
        name="bayesian-lora",
        job="fine-tunes with a LoRA whose predictions know how sure they are",
        stage="adapter",
        module="acclimate.adapters.bayesian_lora:BayesianLoraConfig",
        option="--adapter bayesian-lora",
        status="ready",
        paper="Bayesian-LoRA: Probabilistic Low-Rank Adaptation of Large Language Models",
        claim="bayesian_lora",
        defaults=_LORA,
    ),
    Method(
        name="io-adam",
        job="AdamW whose second moment is a few numbers per input and output instead of one per weight, to save memory",
        stage="optimizer",
        module="acclimate.optim.io_adam:IOAdamFactory",
        option="--optimizer io-adam",
        status="ready",
        paper="IO-Adam: Rethinking Memory-Efficient Adaptive Optimizers from Gradient Computation",
        claim="io_adam",
    ),
    Method(
        name="circumerge",
        job="merges many LoRA adapters into one ordinary LoRA adapter, quickly and without the base model",
        stage="merge",
        module="acclimate.merge:merge_adapters",
        option="acclimate merge",
        status="ready",
        paper="Sketch-Based Low-Rank Model Merging with Shared Circulant Transforms",
        claim="circumerge",
    ),
    Method(
        name="linking",
        job="shows, with a certificate, which tangles in the data a narrow network cannot undo, and at which layer",
        stage="geometry",
        module="acclimate.geometry.linking:linking_profile",
        option="from acclimate.geometry.linking import linking_profile",
        paper="Low-dimensional topology of deep neural networks",
        claim="linking",
    ),
    Method(
        name="neural-hss",
        job="learns the solution operator of a PDE from a handful of solves",
        stage="science",
        module="acclimate.science.operators:NeuralHSSRegressor",
        option="from acclimate.science.operators import NeuralHSSRegressor",
        paper="Neural-HSS: Hierarchical Semi-Separable Neural PDE Solver",
        claim="neural_hss",
    ),
    Method(
        name="shift-aware-whitening",
        job="compresses a model's linear layers to low rank without fine-tuning, for the inputs they will really see",
        stage="compress",
        module="acclimate.compress.whitening:compress_low_rank",
        option="acclimate compress",
        status="ready",
        paper="Mitigating Error Propagation in Low-Rank Approximation of Large Models via Distribution-Aware Whitening",
        claim="shift_aware_whitening",
    ),
    Method(
        name="principal",
        job="starts LoRA at the part of each weight that matters most to its outputs on your data",
        stage="init",
        module="acclimate.compress.lora_start:principal_init",
        option="--init principal",
        status="ready",
    ),
    Method(
        name="ntk-selector",
        job="finds the rows of a huge general pool that move the model as a small domain set would",
        stage="select",
        module="acclimate.select.ntk:NTKSelector",
        option="acclimate select ntk-selector",
        paper="Mining Useful General Data for Low-Resource Domain Adaptation",
        claim="ntk_selector",
    ),
    Method(
        name="neural-lds",
        job="sample points that stay evenly spread at every length, as a drop-in for SciPy's Sobol engine",
        stage="geometry",
        module="acclimate.geometry.neural_lds:NeuralLDS",
        option="from acclimate.geometry.neural_lds import NeuralLDS",
        paper="Neural Low-Discrepancy Sequences",
        claim="neural_lds",
    ),
    Method(
        name="rank-learner",
        job="orders people by how much a treatment would help them, from observational data",
        stage="estimator",
        module="acclimate.estimators.rank_learner:RankLearner",
        option="from acclimate.estimators import RankLearner",
        paper="Rank-Learner: Orthogonal Ranking of Treatment Effects",
        claim="rank_learner",
        aliases=("ranklearner",),
    ),
    Method(
        name="monosoup",
        job="makes one fine-tuned checkpoint robust, as a soup of many would be, with no data and no knobs",
        stage="merge",
        module="acclimate.merge.monosoup:monosoup",
        option="acclimate soup",
        status="ready",
        paper="Model soups need only one ingredient",
        claim="monosoup",
    ),
    Method(
        name="projq",
        job="quantises weights so that what is lost is low-rank, and hands that part to a LoRA adapter",
        stage="compress",
        module="acclimate.compress.projq:quantize_projq",
        option="acclimate quantize",
        paper="ProjQ: Project-and-Quantize for Adapter-Aware LLM Compression",
        claim="projq",
        status="ready",
    ),
    Method(
        name="flowdup",
        job="gives each federated client its own model from its unlabelled data in one forward pass",
        stage="federated",
        module="acclimate.federated.flowdup:FLowDUP",
        option="acclimate federate flowdup",
        paper="Federated Learning with Unlabeled Clients: Personalization Can Happen in Low Dimensions",
        extra="federated",
        claim="flowdup",
    ),
    Method(
        name="ia-sft",
        job="detects change in hyperspectral images from a few labelled pixels and well-chosen pseudo-labels",
        stage="science",
        module="acclimate.science.hyperspectral:HSIChangeDetector",
        option="from acclimate.science.hyperspectral import HSIChangeDetector",
        paper="Rethinking Low-Confidence Pseudo Labels: Influence-Aware Semi-Supervised Fine-Tuning for Hyperspectral Change Detection",
        claim="ia_sft",
    ),
    Method(
        name="safe-transfer",
        job="a control policy that is careful in a new world until it has recognised it",
        stage="control",
        module="acclimate.control.safe_transfer:LatentSafeSAC",
        option="from acclimate.control.safe_transfer import LatentSafeSAC",
        paper="Transferable Reinforcement Learning via Probabilistic Latent Embeddings and Dynamic Policy Adaptation for Sim-to-Real Deployment",
        extra="rl",
        claim="safe_transfer",
    ),
    Method(
        name="multiview",
        job="clusters samples that are seen through several feature sets, some of them corrupted",
        stage="estimator",
        module="acclimate.estimators.multiview:TensorSubspaceClustering",
        option="from acclimate.estimators import TensorSubspaceClustering",
        paper="Nonconvex Low-Rank Tensor Representation with Deep Priors for Multiview Subspace Clustering",
        claim="multiview",
    ),
    Method(
        name="spectral-embedding",
        job="embeds a network and tells what too few or too many dimensions cost",
        stage="estimator",
        module="acclimate.estimators.spectral_embedding:AdjacencySpectralEmbedding",
        option="from acclimate.estimators import AdjacencySpectralEmbedding",
        paper="On the Effect of Misspecifying the Embedding Dimension in Low-rank Network Models",
        claim="spectral_embedding",
    ),
    Method(
        name="lsr1",
        job="a meta-trained quasi-Newton optimiser that needs fewer iterations on problems you solve again and again",
        stage="optimizer",
        module="acclimate.optim.learned_sr1:LSR1",
        option="from acclimate.optim import LSR1",
        status="ready",
        paper="L-SR1: Learned Symmetric-Rank-One Preconditioning",
        claim="lsr1",
        aliases=("l-sr1",),
    ),
    Method(
        name="bcp",
        job="gives a frozen image-text model label sets that belong together, learned from the unlabelled stream",
        stage="shift",
        module="acclimate.shift.bcp:BCP",
        option="acclimate tag",
        paper="Multi-Label Test-Time Adaptation with Bayesian Conditional Priors",
        extra="vision",
        claim="bcp",
    ),
    Method(
        name="lozo-plus",
        job="fine-tunes a language model with forward passes only, at the memory of inference",
        stage="optimizer",
        module="acclimate.optim.lozo_plus:LOZOPlusFactory",
        option="--optimizer lozo-plus",
        status="ready",
        paper="LOZO+: Provably Efficient Zeroth-Order Fine-Tuning via Greedy Low-Rank Subspace Selection",
        claim="lozo_plus",
    ),
    Method(
        name="pft",
        job="repairs the vibrations of a pretrained interatomic potential with force constants from DFT",
        stage="science",
        module="acclimate.science.phonons:PhononFineTuner",
        option="acclimate phonons finetune",
        paper="PFT: Phonon Fine-tuning for Machine Learned Interatomic Potentials",
        extra="materials",
        claim="pft",
    ),
    Method(
        name="in-context",
        job="learns control with a frozen regression model: no gradient step, no tuning, few interactions",
        stage="control",
        module="acclimate.control.in_context:ICRAgent",
        option="from acclimate.control.in_context import ICRAgent",
        paper="ICR-RL: Deep Reinforcement Learning via In-Context-Regression",
        extra="rl",
        claim="in_context",
        aliases=("icr-rl",),
    ),
    Method(
        name="fisher-init",
        job="starts a LoRA in the directions of the weights that your data say matter",
        stage="init",
        module="acclimate.adapters.fisher:fisher_init",
        option="--init fisher",
        status="ready",
        paper="Learning in the Fisher Subspace: A Guided Initialization for LoRA Fine-Tuning",
        claim="fisher_init",
        aliases=("fisher",),
    ),
    Method(
        name="psahs",
        job="makes a classifier trained on one labelled graph work on another whose neighbours agree less",
        stage="science",
        module="acclimate.science.graphs:PSAHS",
        option="from acclimate.science.graphs import PSAHS",
        paper="Progressive Graph Structure Adjustment for Homophily Shift Adaptation",
        extra="graphs",
        claim="psahs",
    ),
    Method(
        name="edco",
        job="re-ranks the training pool while training runs, so that each round trains on what the model is least sure of",
        stage="select",
        module="acclimate.select.entropy_curriculum:EDCO",
        option="acclimate select edco",
        paper="EDCO: Dynamic Curriculum Orchestration for Domain-specific Large Language Model Fine-tuning",
        claim="edco",
    ),
    Method(
        name="patchcode",
        job="pretrains an EEG encoder on unlabelled recordings, so that a handful of labels is enough",
        stage="science",
        module="acclimate.science.eeg:PatchCode",
        option="acclimate eeg pretrain",
        paper="PATCHCODE: Discrete Latent Predictive Learning for EEG Foundation Model",
        extra="eeg",
        claim="patchcode",
    ),
    Method(
        name="uds",
        job="scores each candidate batch in one forward pass and trains only on rows that are useful and new",
        stage="select",
        module="acclimate.select.uncertainty_diversity:UDSTrainer",
        option="acclimate select uds",
        paper="Utility-Diversity Aware Online Batch Selection for LLM Supervised Fine-tuning",
        claim="uds",
    ),
    Method(
        name="muon",
        job="fine-tunes Adam-pretrained models with Muon, and measures whether the change of optimiser hurts",
        stage="optimizer",
        module="acclimate.optim.muon:MuonFactory",
        option="--optimizer muon",
        status="ready",
        paper="Can Muon Fine-tune Adam-Pretrained Models?",
        claim="muon_mismatch",
        aliases=("muon-mismatch",),
    ),
    Method(
        name="cft",
        job="fine-tunes a text classifier so that hidden shortcuts hurt less when they flip at deployment",
        stage="shift",
        module="acclimate.shift.causal:get_cft_model",
        option="from acclimate.shift.causal import get_cft_model",
        paper="Causal Fine-Tuning under Latent Confounded Shift",
        claim="cft",
        aliases=("causal-fine-tuning",),
    ),
    Method(
        name="surge",
        job="trains networks whose weights are one bit each, and exports them packed",
        stage="compress",
        module="acclimate.compress.surge:binarize",
        option="from acclimate.compress.surge import binarize",
        status="ready",
        paper="SURGE: Surrogate Gradient Adaptation in Binary Neural Networks",
        claim="surge",
    ),
    Method(
        name="safe-residual",
        job="corrects a fixed predictor with few labels, and falls back to it when the data do not support the correction",
        stage="estimator",
        module="acclimate.estimators.safe_residual:SafeResidualRegressor",
        option="from acclimate.estimators import SafeResidualRegressor",
        paper="Black-Box Assisted Regression: Phase Transitions and Minimax Optimality",
        claim="safe_residual",
        aliases=("sre",),
    ),
    Method(
        name="gr-lora",
        job="learns new classes task after task without forgetting the old ones, with orthogonal LoRA",
        stage="continual",
        module="acclimate.continual.gr_lora:GRLoRAClassifier",
        option="acclimate continual gr-lora",
        paper="GR-LoRA: Gradient-Recycling Low-Rank Adaptation for Class-Incremental Learning",
        claim="gr_lora",
    ),
    Method(
        name="difficulty",
        job="tells how hard the training rows should be, given how many you can afford",
        stage="select",
        module="acclimate.select.difficulty:DifficultyBudget",
        option="acclimate select difficulty",
        paper="Data Difficulty and the Generalization-Extrapolation Tradeoff in LLM Fine-Tuning",
        claim="difficulty",
    ),
    Method(
        name="a-tpt",
        job="keeps a zero-shot image-text classifier usable when an image has been attacked",
        stage="shift",
        module="acclimate.shift.attention_tpt:ATPT",
        option="acclimate guard",
        paper="Towards Fine-Grained Robustness: Attention-Guided Test-Time Prompt Tuning for Vision-Language Models",
        extra="vision",
        claim="a_tpt",
        aliases=("atpt",),
    ),
    Method(
        name="lie-bracket",
        job="tells in which order to train on several data sources so that a target ends best",
        stage="order",
        module="acclimate.order.lie_bracket:LieBracketPlanner",
        option="acclimate order",
        paper="The Geometry of Sequential Learning: Lie-Bracket Prediction of Transfer Order",
        claim="lie_bracket",
    ),
    Method(
        name="pooling",
        job="tells whether pooling related data sets can help, and what no algorithm can find out from the data alone",
        stage="estimator",
        module="acclimate.estimators.pooling:PooledEstimator",
        option="from acclimate.estimators import PooledEstimator",
        paper="When More Data Doesn't Help: Limits of Adaptation in Multitask Learning",
        claim="pooling",
    ),
    Method(
        name="frameft",
        job="fine-tunes by learning a few hundred sparse coefficients per layer; adapters of a few kilobytes",
        stage="adapter",
        module="acclimate.adapters.frame:FrameFTConfig",
        option="--adapter frameft",
        status="ready",
        paper="Fine-Tuning of Transformer models with Frames",
        claim="frameft",
    ),
    Method(
        name="cfo",
        job="fine-tunes a flow or diffusion model for a reward while it keeps to constraints, with no penalty to tune",
        stage="science",
        module="acclimate.science.flows:CFO",
        option="from acclimate.science.flows import CFO",
        paper="Constrained Flow Optimization via Sequential Fine-Tuning for Molecular Design",
        claim="cfo",
    ),
)


def all_methods() -> tuple[Method, ...]:
    """Every row: the built-in ones, then what installed packages add through the entry-point group."""
    return tuple(_rows())


def find(name: str, stage: str | None = None) -> Method:
    """The row called `name` (aliases, and underscores for hyphens, are understood), of one `stage` if given.

    Raises InputError, with the closest name and those that are ready, when there is none.
    """
    wanted = name.lower().replace("_", "-")
    for method in _rows():
        if wanted in (method.name, *method.aliases) and stage in (None, method.stage):
            return method
    candidates = [method for method in all_methods() if stage in (None, method.stage)]
    hint = did_you_mean(wanted, [method.name for method in candidates])
    raise InputError(f"Unknown {stage or 'method'} '{name}'.{hint} The {_ready(stage)}")


def check_ready(name: str, stage: str) -> Method:
    """The row `name` of `stage`, if it can be used; imports nothing.

    Raises InputError for an unknown or planned method, MissingError for a third party's entry point that is broken.
    """
    method = find(name, stage)
    if method.status == "broken":
        raise MissingError(f"The {stage} '{method.name}' cannot be used: {method.job}")
    if method.status == "planned":
        raise InputError(f"The {stage} '{method.name}' is planned, not built yet; {_ready(stage)}")
    return method


def require(name: str, stage: str) -> Any:
    """What the row `name` of `stage` names in `module`, imported; None for a method that has no module.

    Raises what `check_ready` raises, and MissingError when the method's pip extra is not installed.
    """
    method = check_ready(name, stage)
    if method.module is None:
        return None
    module, _, attribute = method.module.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if method.extra is None or error.name is None:
            raise
        raise missing_extra(error.name, method.extra, f"The {stage} '{method.name}'") from error


def _rows() -> Iterator[Method]:
    # Built-in rows come first: they win a clash, and finding one of them loads no entry point.
    yield from _BUILT_IN
    taken = {(name, method.stage) for method in _BUILT_IN for name in (method.name, *method.aliases)}
    for method in _third_party_methods():
        if (method.name, method.stage) in taken:
            reason = f"there is already a method '{method.name}' of stage '{method.stage}'"
            yield _broken(method.name, method.stage, reason)
        else:
            taken.add((method.name, method.stage))
            yield method


def _ready(stage: str | None) -> str:
    kind = "methods" if stage is None else _PLURALS.get(stage, f"{stage} methods")
    names = sorted(m.name for m in all_methods() if m.status == "ready" and stage in (None, m.stage))
    return f"ready {kind}: {', '.join(names) or 'none yet'}."


def _third_party_methods() -> Iterator[Method]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            loaded = entry.load()
            methods = [loaded] if isinstance(loaded, Method) else list(loaded)
            for method in methods:
                _check(method)
        # A plugin can fail in any way at import, and must not take the table with it.
        except Exception as error:
            yield _broken(entry.name, "third-party", f"{entry.value}: {type(error).__name__}: {error}")
        else:
            yield from methods


def _check(method: object) -> None:
    if not isinstance(method, Method):
        raise TypeError(f"expected an acclimate.methods.Method, got {type(method).__name__}")
    if not _KEBAB.fullmatch(method.name):
        raise ValueError(f"the name '{method.name}' is not kebab-case (lower-case words joined by hyphens)")


def _broken(name: str, stage: str, reason: str) -> Method:
    return Method(name=name, job=f"does not load: {reason}", stage=stage, module=None, option="", status="broken")
