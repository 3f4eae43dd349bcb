"""Bayesian-LoRA: a LoRA whose predictions know how sure they are.

A frozen layer y = W0 x gets (alpha/r) B A x, as in LoRA. Each factor W (A, or B transposed: r x n) is the mean of a sparse Gaussian
process posterior, so that a forward pass can draw weights instead of using the mean (`inducing.py` has the symbols):

    W = mean + s [P_r^T (sigma * xi) P_c + lambda (E - P_r^T U P_c)]         E, xi standard normal, U as E is at the inducing points
    p(y|x) = (1/S) sum over S draws of softmax(logits)
    loss = mean cross-entropy under one draw a step + beta_t KL / N_train

`parameterization="tied"` (the default) makes the LoRA factor itself the mean and lets it supply the bases: Z_c = [W; e], Z_r = [I; f],
with e, f learned. Training of the mean is then exactly LoRA's, learning rates carry over, and W exports as a plain LoRA. There is no
mean of V to learn: it is P_r W P_c^T / s. `"published"` has free bases and a free mean, as in the paper's code; it learns slowly.

KL per factor = KL(q(V) | N(0, I)) + |W - s P_r^T mu P_c|^2 / (2 s^2) + rn (lambda^2/2 - 1/2 - ln lambda). The last term is large and
drives lambda to `max_lambda`, which therefore is THE knob of the noise: choose it by the NLL on held-out rows (0.03, 0.1, 0.3).

Source: "Bayesian-LoRA: Probabilistic Low-Rank Adaptation of Large Language Models", arXiv 2601.21003, ICML 2026. The tied form, its
scale s and the defaults are ours.

Scale: trains under DDP as LoRA does. Draws come from torch's global generator, so ranks with the same seed share the draw, which is
then that of the whole batch; the KL has no data in it, every rank adds the same gradient after the reduction. All factors of one
shape are drawn in one stacked computation before the forward pass, so a drawn forward needs whole factors: FSDP must leave the adapter
unsharded. Activation checkpointing needs `use_reentrant=False`.
"""

from acclimate.adapters.bayesian_lora.config import BayesianLoraConfig as BayesianLoraConfig
from acclimate.adapters.bayesian_lora.tuner import BayesianLoraLayer as BayesianLoraLayer
from acclimate.adapters.bayesian_lora.tuner import BayesianLoraModel as BayesianLoraModel
from acclimate.adapters.bayesian_lora.tuner import set_sampling as set_sampling
from acclimate.adapters.bayesian_lora.tuner import tuner_of as tuner_of
