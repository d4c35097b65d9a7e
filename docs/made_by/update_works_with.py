"""Run other people's programs with and without torch_sink, and write docs/works_with.md from what the runs gave.

python docs/made_by/update_works_with.py [--programs NAME ...] [--table]

Needs the extra third-party. The kernels run in Triton's interpreter, so that batches are recorded and made as on a
device: all programs take some minutes. `--table` writes the page from the results that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the programs

if TYPE_CHECKING:
    from clients.client import Client

PAGE = ROOT / "docs" / "works_with.md"
RESULTS = ROOT / "examples" / "benchmarks" / "results" / "works_with.json"
Rows = dict[str, dict[str, Any]]
OWN_CODE = r"clients\.\w+\."  # of the programs: what the table's reader knows by the name of its function

TITLE = """# Works with

Programs that people already run, with two lines added:

```python
import torch_sink

torch_sink.set_image_backend("device")
```

and, where the table says so, `loader = torch_sink.SinkLoader(loader)`. Each program trained twice from the same
seeds, as it is and with the lines. "Equal" counts losses and metrics that have the same bits in both runs. What fell
back ran in stock code, with stock results: [troubleshooting](troubleshooting.md) says what each reason means and how
to avoid it.

The programs are in `tests/clients/`, short and in the manner of the libraries' own examples and of the public scripts.
They run with every change, and here with the kernels in Triton's interpreter, which makes batches as a device does; on
a GPU they have not run yet.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", nargs="+", metavar="NAME", help="run these alone (default: all)")
    parser.add_argument("--table", action="store_true", help="run nothing; write the page from the results")
    arguments = parser.parse_args()
    rows = read_rows()
    if not arguments.table:
        rows = run_programs(arguments.programs, rows)
    PAGE.write_text(page(rows))
    different = [name for name, row in rows.items() if not row["is_equal"]]
    print("not equal: " + ", ".join(different) if different else f"wrote {PAGE}")
    return int(bool(different))


def read_rows() -> Rows:
    """Return the results of the last run, by program; none where there was none."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def run_programs(names: list[str] | None, rows: Rows) -> Rows:
    """Run programs, each in a process of its own; the other rows stay.

    Args:
        names: of programs; None for all.
        rows: of earlier runs.
    """
    from clients import CLIENTS
    from clients.client import write_photos

    with tempfile.TemporaryDirectory() as scratch:
        photos = write_photos(Path(scratch, "photos"))
        for name in names or CLIENTS:
            print(name, flush=True)
            rows = {**rows, name: run_alone(CLIENTS[name], name, photos, Path(scratch))}
            rows = {known: rows[known] for known in CLIENTS if known in rows}
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def run_alone(client: Client, name: str, photos: Path, scratch: Path) -> dict[str, Any]:
    """Run one program in a process of its own, where Triton interprets; return its row."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "-m", "clients.alone", str(photos), str(scratch), name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
        check=True,
    )
    outcome = json.loads(finished.stdout.splitlines()[-1])
    return {
        "name": client.name,
        "package": client.package,
        "version": metadata.version(client.package),
        "releases": {"python": platform.python_version()}
        | {package: metadata.version(package) for package in ("torch", "torchvision")},
        "note": client.note,
        "wraps": outcome["wraps"],
        "is_equal": outcome["stock"] == outcome["ours"] and outcome["has_recorded"],
        "values": len(outcome["stock"]),
        "equal": sum(a == b for a, b in zip(outcome["stock"], outcome["ours"], strict=True)),
        "fell_back": outcome["fell_back"],
    }


def page(rows: Rows) -> str:
    """Return the text of docs/works_with.md."""
    lines = [TITLE, "| program | tried with | added | equal | fell back |", "|---|---|---|---|---|"]
    lines += [table_row(row) for row in rows.values()]
    releases = {tuple(row["releases"].items()) for row in rows.values()}
    said = "; ".join(sorted(", ".join(f"{name} {version}" for name, version in one) for one in releases))
    lines += ["", f"{said}; written by `python docs/made_by/update_works_with.py`."]
    return "\n".join(lines) + "\n"


def table_row(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    added = ["the two lines"] + ["`SinkLoader(loader)`"] * row["wraps"] + [row["note"]] * bool(row["note"])
    equal = f"{row['equal']} of {row['values']}"
    reasons = [f"{operation}: {re.sub(OWN_CODE, '', reason)}" for operation, reason in row["fell_back"]]
    fell_back = "<br>".join(reasons) or "nothing"
    tried = f"{row['package']} {row['version']}"
    return f"| {row['name']} | {tried} | {', '.join(added)} | {equal} | {fell_back} |"


if __name__ == "__main__":
    sys.exit(main())
