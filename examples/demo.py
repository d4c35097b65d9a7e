"""Train a small network on JPEG files twice, with stock PyTorch and with torch_sink, and compare the two runs.

    python examples/demo.py

The two scripts, `demo_stock.py` and `demo_sink.py`, are the same text but for the torch_sink lines. Writes
`demo_report.json` and `demo_report.png`; exits with 1 when the two runs did not train equally well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from demo_report import Run, build_report, changed_lines, draw_chart, find_faults, format_table
from digits import write_digits
from torch_sink.cli.machine import describe_machine

HERE = Path(__file__).resolve().parent
SCRIPTS = {"stock": HERE / "demo_stock.py", "torch_sink": HERE / "demo_sink.py"}
LAUNCH_COUNT_EPOCHS = 2


def main() -> int:
    arguments = parse_arguments()
    started = time.perf_counter()
    difference = changed_lines(SCRIPTS["stock"], SCRIPTS["torch_sink"])
    with tempfile.TemporaryDirectory(prefix="torch_sink_demo_") as scratch_name:
        scratch = Path(scratch_name)
        train_count, test_count = write_digits(scratch / "digits")
        print(f"{train_count} training and {test_count} test images, written as JPEG files.")
        print("\nFrom the stock script to the torch_sink script:\n")
        print("\n".join("    " + line for line in difference), flush=True)
        runs = {name: train(name, scratch, arguments) for name in SCRIPTS}

    report = build_report(runs["stock"], runs["torch_sink"], describe_machine(), difference)
    json_path, chart_path = arguments.output / "demo_report.json", arguments.output / "demo_report.png"
    json_path.write_text(json.dumps(report, indent=1) + "\n")
    draw_chart(report, chart_path)
    print(f"\n{format_table(report)}\n\nWritten: {json_path}, {chart_path} ({time.perf_counter() - started:.0f} s)")
    faults = find_faults(report, arguments.minimum_accuracy)
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if faults else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stock PyTorch and torch_sink, side by side.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2, help="data workers (default: 2)")
    parser.add_argument("--output", type=Path, default=Path.cwd(), help="folder for the report (default: here)")
    parser.add_argument("--minimum-accuracy", type=float, default=0.97, help="fail below this (default: 0.97)")
    arguments = parser.parse_args()
    if not arguments.output.is_dir():
        parser.error(f"--output {arguments.output} is not a folder")
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1 is needed")
    return arguments


def train(name: str, scratch: Path, arguments: argparse.Namespace) -> Run:
    """Run one of the two scripts in a process of its own and read what it measured."""
    print(f"\n{name}:", flush=True)
    report = run_script(name, scratch, arguments.workers, arguments.epochs)
    if not torch.cuda.is_available():
        return Run.read(report)
    # The profiler that counts launches slows the run down, so the count comes from a short run of its own.
    counted = run_script(name, scratch, arguments.workers, LAUNCH_COUNT_EPOCHS, "--count-launches")
    return Run.read(report, counted)


def run_script(name: str, scratch: Path, workers: int, epochs: int, *options: str) -> Path:
    report = scratch / f"{name}{''.join(options)}.json"
    command = [sys.executable, SCRIPTS[name], "--data", scratch / "digits", "--report", report]
    command += ["--epochs", str(epochs), "--workers", str(workers), *options]
    # OpenMP threads that spin while they wait take the cores that the data workers need: on a busy machine with two
    # cores a step then takes ten times as long.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    subprocess.run([str(part) for part in command], check=True, env=environment)
    return report


if __name__ == "__main__":
    sys.exit(main())
