"""Write the measured figures of the README from the committed results; with --check only compare.

python examples/update_readme.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
BEGIN = "<!-- figures: written by examples/update_readme.py -->\n"
END = "<!-- end of figures -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the README is out of date")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    current = readme.read_text()
    updated = insert_figures(current, worker_cost_figures(json.loads((RESULTS / "worker_cost.json").read_text())))
    if arguments.check and updated != current:
        print("The figures of README.md differ from examples/benchmarks/results: run `make readme`.", file=sys.stderr)
        return 1
    if not arguments.check:
        readme.write_text(updated)
    return 0


def insert_figures(text: str, figures: str) -> str:
    """Return the README's text with new figures between its two markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the lines {BEGIN.strip()!r} and {END!r} that surround the figures")
    return f"{before}{BEGIN}{figures}{END}{after}"


def worker_cost_figures(report: dict[str, Any]) -> str:
    """Return the table of what one sample costs in a data worker."""
    machine, photographs = report["machine"], report["photographs"]
    releases = machine["releases"]
    lines = ["CPU milliseconds per sample in a data worker; pixels made on a device, or by the worker itself:", ""]
    lines += ["| pipeline | stock | torch_sink, device elsewhere | ratio | torch_sink, no device | ratio |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, result in report["worker_cost"].items():
        stock, recording = result["stock_ms"]["p50"], result["torch_sink_ms"]["p50"]
        mark = " (partly in stock code)" if result["fallbacks"] else ""
        on_cpu = f"{result['on_cpu_ms']['p50']:.2f} | {result['on_cpu_ratio']:.2f}"
        lines.append(f"| {name}{mark} | {stock:.2f} | {recording:.2f} | {result['ratio']:.1f} | {on_cpu} |")
    source = "photographs" if photographs["given"] else "generated images"
    lines += [
        "",
        f"{machine['cpu']}, torch {releases['torch']}, torchvision {releases['torchvision']}, Pillow "
        f"{releases['pillow']}, {photographs['count']} {source} of {photographs['mean_bytes'] / 1000:.0f} kB, "
        f"{machine['date']}: `{report['command']}`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
