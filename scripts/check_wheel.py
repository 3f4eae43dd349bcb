"""Build the wheel, install it without dependencies in another folder, and use it there: no file may be missing from it.

The pinned environment's packages are visible to the installed copy; its editable acclimate is not, since the folder comes
first on the path and the commands run from an empty directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path, env: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python, env = sys.executable, dict(os.environ)
        # the build backend is in the environment already, so that this works offline
        run(
            python,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder / "dist"),
            str(ROOT),
            cwd=folder,
            env=env,
        )
        (wheel,) = (folder / "dist").glob("*.whl")
        target = folder / "site"
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
            str(wheel),
            cwd=folder,
            env=env,
        )
        env |= {"PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}
        where = run(python, "-c", "import acclimate; print(acclimate.__file__)", cwd=folder, env=env).strip()
        if not where.startswith(str(target)):
            sys.exit(f"the installed copy was not used: {where}")
        acclimate = (python, "-m", "acclimate")
        if "tune" not in run(*acclimate, "--help", cwd=folder, env=env):
            sys.exit("acclimate --help does not list tune")
        methods = json.loads(run(*acclimate, "methods", "--json", cwd=folder, env=env))
        if len(methods) < 38:
            sys.exit(f"acclimate methods lists {len(methods)} methods")
        small = (
            "--set",
            "train.max_steps=2",
            "--set",
            "train.batch_size=4",
            "--set",
            "max_eval_samples=8",
            "-o",
            "run",
        )
        result = json.loads(run(*acclimate, "tune", "--json", *small, cwd=folder, env=env))
        if result["info"]["status"] != "done" or not (folder / "run" / "report.html").exists():
            sys.exit("the tiny run did not finish")
    print(f"{wheel.name}: --help, methods ({len(methods)}) and a tiny tune work from the installed wheel")


if __name__ == "__main__":
    main()
