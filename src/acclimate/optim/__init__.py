"""How the weights move: optimisers that PyTorch, transformers' Trainer and Accelerate take like any other.

The public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acclimate.lazy import lazily

if TYPE_CHECKING:
    from acclimate.optim.forward_only import ZerothOrderTrainer, ZerothOrderTrainerMixin, replay
    from acclimate.optim.io_adam import IOAdamCallback, IOAdamFactory, IOAdamW
    from acclimate.optim.learned_sr1 import LSR1
    from acclimate.optim.lozo_plus import LOZOPlus, LOZOPlusFactory, doubled
    from acclimate.optim.memory import memory_account
    from acclimate.optim.meta_training import meta_train
    from acclimate.optim.muon import Muon, MuonFactory, build_muon
    from acclimate.optim.muon_routing import muon_param_groups
    from acclimate.optim.sr1_minimize import lsr1_method, minimize
    from acclimate.optim.sr1_policy import LSR1Policy
    from acclimate.optim.update_strength import MismatchCallback, snapshot, update_report

_WHERE = {
    "IOAdamCallback": "io_adam",
    "IOAdamFactory": "io_adam",
    "IOAdamW": "io_adam",
    "LOZOPlus": "lozo_plus",
    "LOZOPlusFactory": "lozo_plus",
    "LSR1": "learned_sr1",
    "LSR1Policy": "sr1_policy",
    "MismatchCallback": "update_strength",
    "Muon": "muon",
    "MuonFactory": "muon",
    "build_muon": "muon",
    "doubled": "lozo_plus",
    "ZerothOrderTrainer": "forward_only",
    "ZerothOrderTrainerMixin": "forward_only",
    "lsr1_method": "sr1_minimize",
    "memory_account": "memory",
    "meta_train": "meta_training",
    "minimize": "sr1_minimize",
    "muon_param_groups": "muon_routing",
    "replay": "forward_only",
    "snapshot": "update_strength",
    "update_report": "update_strength",
}

__all__ = [
    "LSR1",
    "IOAdamCallback",
    "IOAdamFactory",
    "IOAdamW",
    "LOZOPlus",
    "LOZOPlusFactory",
    "LSR1Policy",
    "MismatchCallback",
    "Muon",
    "MuonFactory",
    "ZerothOrderTrainer",
    "ZerothOrderTrainerMixin",
    "build_muon",
    "doubled",
    "lsr1_method",
    "memory_account",
    "meta_train",
    "minimize",
    "muon_param_groups",
    "replay",
    "snapshot",
    "update_report",
]

__getattr__ = lazily(__name__, _WHERE)
