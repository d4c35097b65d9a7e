"""What a newcomer's first command takes: minutes and disk of `make setup` in a new clone, and minutes of `make demo`.

    python examples/benchmarks/setup_cost.py

Clones the last commit to a temporary folder and runs both there, without pip's cache. Needs a network, and as much room
in the temporary folder as it reports. Writes JSON; `report.py` writes the figures where they are promised.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import describe, make_parser, write

ROOT = Path(__file__).resolve().parents[2]


def seconds_of_make(target: str, clone: Path) -> float:
    """Wall seconds of one target of the Makefile, with this interpreter."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    began = time.perf_counter()
    subprocess.run(
        ["make", target, f"PYTHON={base}"], cwd=clone, check=True, env={**os.environ, "PIP_NO_CACHE_DIR": "1"}
    )
    return time.perf_counter() - began


def bytes_below(folder: Path) -> int:
    """What a folder takes on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def main() -> None:
    arguments = make_parser(__doc__, "setup_cost").parse_args()
    report = describe(arguments, "setup_cost.py")
    with tempfile.TemporaryDirectory(prefix="torch_sink_clone_") as scratch:
        clone = Path(scratch, "torch_sink")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        report["setup_seconds"] = seconds_of_make("setup", clone)
        report["bytes"] = bytes_below(clone / ".venv")
        report["demo_seconds"] = seconds_of_make("demo", clone)
    write(report, arguments.output)


if __name__ == "__main__":
    main()
