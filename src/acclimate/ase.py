"""Relax structures with L-SR1 wherever ASE's own optimisers are used: `from acclimate.ase import LSR1`. Needs `acclimate[materials]`."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from acclimate.errors import missing_extra
from acclimate.optim.sr1_policy import LSR1Policy, Memory, direction

try:
    from ase.optimize.optimize import Optimizer
except ModuleNotFoundError:
    raise missing_extra("ase", "materials", "Relaxing structures with L-SR1") from None

START = 0.05  # root mean square displacement of the atoms in the first step, in Angstrom


class LSR1(Optimizer):
    """The learned quasi-Newton optimiser of `acclimate.optim.learned_sr1`, as one of ASE's: `LSR1(atoms).run(fmax=0.05)`.

    Parameters
    ----------
    atoms
        Atoms, or a filter of them.
    restart, logfile, trajectory, append_trajectory, **kwargs
        As ASE's BFGS. `restart` is a JSON file with all that is remembered; with it a run goes on bit for bit.
    maxstep
        Furthest that an atom moves in a step, 0.2 Angstrom.
    policy
        "generic", "sr1", a directory, or an LSR1Policy.
    buffer
        Most vectors that are kept.
    """

    def __init__(
        self,
        atoms: Any,
        restart: str | Path | None = None,
        logfile: Any = "-",
        trajectory: str | Path | None = None,
        append_trajectory: bool = False,
        maxstep: float | None = None,
        policy: str | Path | LSR1Policy = "generic",
        buffer: int = 4,
        **kwargs: Any,
    ) -> None:
        if buffer < 1:
            raise ValueError(f"buffer must be at least 1, got {buffer}")
        self.maxstep = self.defaults["maxstep"] if maxstep is None else maxstep
        self.buffer = buffer
        self.policy: LSR1Policy | None = None
        if policy != "sr1":
            found = policy if isinstance(policy, LSR1Policy) else LSR1Policy.from_pretrained(policy)
            self.policy = copy.deepcopy(found).double().eval()
        self.memory: Memory | None = None
        super().__init__(atoms, restart, logfile, trajectory, append_trajectory, **kwargs)

    def initialize(self) -> None:
        self.memory = None

    def read(self) -> None:
        self.memory = Memory(**{name: torch.from_numpy(np.array(value)) for name, value in self.load().items()})

    @torch.no_grad()
    def step(self, gradient: Any = None) -> None:
        """Move the atoms once. FloatingPointError: the forces are not finite; nothing is moved."""
        if gradient is None:
            gradient = self.optimizable.get_gradient()
        place = np.array(self.optimizable.get_x(), dtype=float)
        x = torch.from_numpy(place)[None]
        g = torch.from_numpy(np.array(gradient, dtype=float).reshape(1, -1))
        if not g.isfinite().all():
            raise FloatingPointError("the forces are not finite; the structure is as it was")
        memory = self.memory or Memory.of(x, self.buffer)
        d, self.memory, _ = direction(self.policy, memory, x, g, START * (x.shape[1] / 3) ** 0.5)
        move = d[0].numpy()
        longest = float(np.max(self.optimizable.gradient_norm(move)))
        if longest > self.maxstep:
            move = move * (self.maxstep / longest)
        self.optimizable.set_x(place + move)
        self.dump({field.name: getattr(self.memory, field.name).numpy() for field in dataclasses.fields(Memory)})
