"""Part D of the claim `lsr1`: relaxing 20 rattled crystals on the energy surface of CHGNet (a pretrained potential; extra `materials`).

Crystals of 4 to 16 atoms, lattice constants near the measured ones and fixed, every coordinate displaced by a normal deviation of 0.1 Angstrom. A relaxation is over when
no force is above 0.05 eV/Angstrom; what counts is how often forces were computed. All optimisers have their defaults.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

from acclimate.claims.base import Row

METRIC = "force calls until no force of CHGNet is above 0.05 eV/A"
INSTALL = 'pip install "acclimate[materials]"'
MOST = 300  # steps

METALS = {"Al": "fcc", "Cu": "fcc", "Ni": "fcc", "W": "bcc", "V": "bcc", "Mg": "hcp", "Ti": "hcp"}
DIAMONDS = ("C", "Si", "Ge")
COMPOUNDS: dict[str, tuple[str, tuple[float, ...]]] = {
    "GaAs": ("zincblende", (5.65,)),
    "SiC": ("zincblende", (4.36,)),
    "NaCl": ("rocksalt", (5.64,)),
    "MgO": ("rocksalt", (4.21,)),
    "LiF": ("rocksalt", (4.03,)),
    "CsCl": ("cesiumchloride", (4.12,)),
    "CaF2": ("fluorite", (5.46,)),
    "ZnO": ("wurtzite", (3.25, 5.21)),
}
WITH_BASIS: dict[str, tuple[tuple[str, ...], list[tuple[float, float, float]], int, list[float]]] = {
    "TiO2": (("Ti", "O"), [(0, 0, 0), (0.305, 0.305, 0)], 136, [4.59, 4.59, 2.96, 90, 90, 90]),
    "SrTiO3": (("Sr", "Ti", "O"), [(0, 0, 0), (0.5, 0.5, 0.5), (0.5, 0.5, 0)], 221, [3.905, 3.905, 3.905, 90, 90, 90]),
}


def crystals() -> dict[str, Any]:
    """The structures by name, rattled (ASE Atoms)."""
    from ase.build import bulk
    from ase.spacegroup import crystal

    found: dict[str, Any] = {}
    for name, structure in METALS.items():
        found[name] = bulk(name, structure, cubic=structure != "hcp")
    for name in DIAMONDS:
        found[name] = bulk(name, "diamond", cubic=True)
    for name, (structure, lengths) in COMPOUNDS.items():
        lattice: dict[str, Any] = dict(zip(("a", "c"), lengths, strict=False))
        found[name] = bulk(name, structure, cubic=structure != "wurtzite", **lattice)
    for name, (symbols, basis, group, cell) in WITH_BASIS.items():
        found[name] = crystal(symbols, basis, spacegroup=group, cellpar=cell)
    for seed, (name, atoms) in enumerate(found.items()):
        if len(atoms) <= 4 and name != "Al":
            found[name] = atoms = atoms * (2, 2, 1)
        atoms.rattle(0.1, seed=seed)
    return found


def optimisers() -> dict[str, Callable[[Any], Any]]:
    from ase.optimize import BFGS, FIRE, LBFGS

    from acclimate.ase import LSR1

    classes: dict[str, Any] = {
        "L-SR1": LSR1,
        "SR1": functools.partial(LSR1, policy="sr1"),
        "ASE BFGS": BFGS,
        "ASE LBFGS": LBFGS,
        "ASE FIRE": FIRE,
    }
    return {name: functools.partial(make, logfile=None) for name, make in classes.items()}


def relaxed(make: Callable[[Any], Any], atoms: Any, calculator: Any) -> tuple[int | None, float]:
    """Force calls (None: not relaxed within `MOST` steps), and the energy per atom."""
    calls = 0
    calculate = calculator.calculate

    def counted(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        calculate(*args, **options)

    calculator.calculate = counted
    try:
        calculator.reset()
        atoms.calc = calculator
        done = make(atoms).run(fmax=0.05, steps=MOST)
        return (calls if done else None), float(atoms.get_potential_energy()) / len(atoms)
    finally:
        del calculator.calculate


def relaxations(report: Callable[[str], None]) -> list[Row]:
    """Rows of part D; "seeds" are the crystals, and one that was not relaxed counts as `MOST` calls. Without CHGNet, one row that says what to install."""
    if importlib.util.find_spec("chgnet") is None:
        report(f"D: not measured, CHGNet is missing ({INSTALL})")
        return [Row.from_values("not measured: CHGNet is missing", METRIC, [math.nan], [0], extra={"install": INSTALL})]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from chgnet.model.dynamics import CHGNetCalculator

        calculator = CHGNetCalculator(use_device="cpu")
        structures = crystals()
        found = {
            system: {name: relaxed(make, atoms.copy(), calculator) for name, atoms in structures.items()}
            for system, make in optimisers().items()
        }
    lowest = {name: min(of_system[name][1] for of_system in found.values()) for name in structures}
    rows = []
    for system, results in found.items():
        calls = {name: count for name, (count, _) in results.items()}
        extra = {
            "calls": calls,
            "not relaxed": sum(count is None for count in calls.values()),
            "ended 1 meV/atom or more above the lowest": [
                name for name, (_, energy) in results.items() if energy > lowest[name] + 1e-3
            ],
        }
        values = [float(MOST if count is None else count) for count in calls.values()]
        rows.append(Row.from_values(system, METRIC, values, list(range(len(values))), extra=extra))
        report(f"D, {system}: {rows[-1].mean:.1f} calls; " + ", ".join(f"{n} {c or 'no'}" for n, c in calls.items()))
    return rows
