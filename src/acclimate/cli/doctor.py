"""`acclimate doctor`."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from typing import Any

import typer

from acclimate.cli.common import Json, Quiet, Speaker, bytes_text

EXAMPLES = """
What is installed, which devices and extras there are, disk space, and whether the embedded models are ready.

**Examples**

```
acclimate doctor
acclimate doctor --json
```
"""


def extras() -> dict[str, list[str]]:
    """Extra -> the packages it would bring that are not installed, from acclimate's own metadata."""
    distribution = importlib.metadata.distribution("acclimate")
    missing: dict[str, list[str]] = {name: [] for name in distribution.metadata.get_all("Provides-Extra") or []}
    for requirement in distribution.requires or []:
        match = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", requirement)
        if match:
            try:
                importlib.metadata.version(match[1])
            except importlib.metadata.PackageNotFoundError:
                missing[match[2]].append(match[1])
    return missing


def doctor(as_json: Json = False, quiet: Quiet = False) -> None:
    from rich.markup import escape
    from rich.table import Table

    from acclimate.models import EMBEDDED, cache_dir, is_ready
    from acclimate.runs import provenance

    facts: dict[str, Any] = provenance()
    place = cache_dir()
    while not place.exists():
        place = place.parent
    facts["disk_free_bytes"] = shutil.disk_usage(place).free
    facts["extras"] = {name: not missing for name, missing in extras().items()}
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
    for name, missing in extras().items():
        wanted = f"lacks {', '.join(missing)}: pip install 'acclimate[{name}]'"
        table.add_row(f"extra {name}", escape(wanted) if missing else "installed")
    Speaker(as_json, quiet).result(facts, table)


def register(app: typer.Typer) -> None:
    app.command("doctor", help=EXAMPLES)(doctor)
