"""Make `src/acclimate/samples/nist_strd/fits.json.gz` of NIST's files: `python scripts/pack_nist_strd.py lmfit-1.0.2.tar.gz`.

The source distribution of lmfit 1.0.2 has the 27 files of nonlinear regression in `NIST_STRD`. Of each: the two starts, the certified parameters and
sum of squares, and the rows y, x (y, x1, x2 of Nelson).
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tarfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "src" / "acclimate" / "samples" / "nist_strd" / "fits.json.gz"


def parsed(text: str) -> dict[str, Any]:
    """What is used of one file."""
    parameters = re.findall(r"^\s*b\d+ =((?:\s+\S+){4})\s*$", text, re.MULTILINE)
    table = [[float(value) for value in line.split()] for line in parameters]
    residual = re.search(r"Residual Sum of Squares:\s+(\S+)", text)
    first, last = (int(line) for line in re.findall(r"Data +\(lines (\d+) to +(\d+)\)", text)[0])
    lines = text.splitlines()[first - 1 : last]
    level = re.search(r"(Lower|Average|Higher) Level of Difficulty", text)
    assert residual is not None
    assert level is not None
    return {
        "difficulty": level[1].lower(),
        "starts": [[row[0] for row in table], [row[1] for row in table]],
        "certified": [row[2] for row in table],
        "sum_of_squares": float(residual[1]),
        "rows": [[float(value) for value in line.split()] for line in lines if line.strip()],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    fits = {}
    with tarfile.open(parser.parse_args().archive) as archive:
        for member in sorted(archive.getmembers(), key=lambda found: found.name):
            path = Path(member.name)
            if path.parent.name == "NIST_STRD" and path.suffix == ".dat":
                file = archive.extractfile(member)
                assert file is not None
                fits[path.stem] = parsed(file.read().decode())
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(gzip.compress(json.dumps(fits, separators=(",", ":")).encode(), mtime=0))
    print(f"{len(fits)} data sets, {OUT.stat().st_size:,} bytes")
