"""`acclimate doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from typing import Any

import typer

from acclimate.cli.common import Json, Quiet, Speaker, bytes_text

EXAMPLES = """
What is installed, which devices and extras there are, disk space, and whether the embedded models are ready.

**Examples**

    acclimate doctor
    acclimate doctor --json
"""

# One package that tells whether an extra is there, and what the extra is for.
EXTRAS = {
    "materials": ("ase", "phonons and interatomic potentials"),
    "eeg": ("mne", "EEG"),
    "graphs": ("torch_geometric", "graphs"),
    "rl": ("gymnasium", "reinforcement learning"),
    "federated": ("flwr", "federated learning"),
    "vision": ("PIL", "images"),
    "bench": ("psutil", "peers for `acclimate bench`"),
    "docs": ("mkdocs", "building the documentation"),
}


def doctor(as_json: Json = False, quiet: Quiet = False) -> None:
    from rich.table import Table

    from acclimate.models import EMBEDDED, cache_dir, is_ready
    from acclimate.runs import provenance

    facts: dict[str, Any] = provenance()
    place = cache_dir()
    while not place.exists():
        place = place.parent
    facts["disk_free_bytes"] = shutil.disk_usage(place).free
    facts["extras"] = {name: importlib.util.find_spec(package) is not None for name, (package, _) in EXTRAS.items()}
    facts["models"] = {name: is_ready(name) for name in EMBEDDED}
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    hardware = facts["hardware"]
    table.add_row("processor", f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB memory")
    table.add_row("GPUs", ", ".join(hardware["gpus"]) or "none; training runs on the processor, in fp32")
    table.add_row("disk", f"{bytes_text(facts['disk_free_bytes'])} free for converted models")
    for name, ready in facts["models"].items():
        table.add_row(f"model {name}", "ready" if ready else f"not yet: acclimate models add {name}")
    for name, there in facts["extras"].items():
        table.add_row(
            f"extra {name}",
            "installed" if there else f"not installed ({EXTRAS[name][1]}): pip install 'acclimate[{name}]'",
        )
    Speaker(as_json, quiet).result(facts, table)


def register(app: typer.Typer) -> None:
    app.command("doctor", help=EXAMPLES)(doctor)
