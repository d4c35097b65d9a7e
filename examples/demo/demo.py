"""Show what torch_sink does on the machine at hand: train twice, with stock PyTorch and with torch_sink, and compare.

    python examples/demo/demo.py

`stock.py` and `sink.py` are the same text but for the torch_sink lines. Each runs twice, so that a difference in speed
can be told from noise. Besides, the CPU cost of a photograph in a data worker is measured: that benefit shows without a
GPU too. Prints a line for each step, with its seconds. Writes `demo_report.json` and `demo_report.png`; exits with 1
when the two did not train equally well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

from digits import write_digits
from torch_sink.cli.machine import describe_machine
from torch_sink.cli.photos import write_photos
from torch_sink.cli.pipelines import open_pipeline
from torch_sink.cli.progress import step as step_to
from torch_sink.cli.worker_cost import measure_worker_cost, spread

HERE = Path(__file__).resolve().parent
SCRIPTS = {"stock": HERE / "stock.py", "torch_sink": HERE / "sink.py"}
TURNS = ("stock", "torch_sink", "torch_sink", "stock")
SECONDS_A_DOT = 5  # so often a dot shows that training goes on
step = partial(step_to, file=sys.stdout)
PIPELINE, PHOTOGRAPHS, WORKER_BATCH = "v1 train", 64, 32
Report = dict[str, Any]


def main() -> int:
    arguments = parse_arguments()
    started = time.perf_counter()
    difference = changed_lines(SCRIPTS["stock"], SCRIPTS["torch_sink"])
    print("The lines that turn the stock script into the other one:\n")
    print("\n".join("    " + line for line in difference), end="\n\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="torch_sink_demo_") as scratch:
        digits, photos = Path(scratch, "digits"), arguments.photos or Path(scratch, "photos")
        with step("Writing 1,797 handwritten digits as JPEG files"):
            counts = write_digits(digits)
        runs = train_in_turns(digits, arguments.epochs)
        if arguments.photos is None:
            with step(f"Writing {PHOTOGRAPHS} photo-like JPEG files"):
                write_photos(photos, count=PHOTOGRAPHS)
        pipeline = open_pipeline(PIPELINE, photos, WORKER_BATCH)
        cost = measure_worker_cost(pipeline, step=step)
    report = {
        "command": "make demo",
        "machine": describe_machine(),
        "images": {"train": counts[0], "test": counts[1], "epochs": arguments.epochs},
        **runs,
        "largest_loss_difference": largest_difference(*(run["losses"] for run in runs.values())),
        "worker_cost": {**cost, "pipeline": PIPELINE, "photographs": str(arguments.photos or "generated")},
        "script_diff": difference,
    }
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
    parser.add_argument("--photos", type=Path, help="one folder of photographs per class (default: generated ones)")
    parser.add_argument("--output", type=Path, default=Path.cwd(), help="folder for the report (default: here)")
    parser.add_argument("--minimum-accuracy", type=float, default=0.97, help="fail below this (default: 0.97)")
    arguments = parser.parse_args()
    for folder in (arguments.output, arguments.photos or arguments.output):
        if not folder.is_dir():
            parser.error(f"{folder} is not a folder")
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1 is needed")
    return arguments


def changed_lines(stock_script: Path, sink_script: Path) -> list[str]:
    """The lines that turn the stock script into the other one, as `-old` and `+new`."""
    old, new = (script.read_text().splitlines() for script in (stock_script, sink_script))
    return [line for line in unified_diff(old, new, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))]


def train_in_turns(folder: Path, epochs: int) -> dict[str, Report]:
    """What the first run of each script gave, and the seconds of all its runs."""
    runs: dict[str, list[Report]] = {name: [] for name in SCRIPTS}
    for number, name in enumerate(TURNS, 1):
        runs[name].append(train(name, folder, epochs, f"Training with {name}, run {number} of {len(TURNS)}"))
    return {name: {**done[0], "seconds": [run["seconds"] for run in done]} for name, done in runs.items()}


def train(name: str, folder: Path, epochs: int, doing: str) -> Report:
    """Run one of the two scripts in a process of its own; what it measured."""
    # OpenMP threads that spin while they wait take the cores that the data workers need: on a busy machine with two
    # cores a step then takes ten times as long.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with step(doing):
        with subprocess.Popen([sys.executable, SCRIPTS[name], folder, str(epochs)], env=environment) as process:
            while not _has_ended(process):
                print(".", end="", flush=True)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        run: Report = json.loads((folder / "results.json").read_text())
        steps = f"{len(run['losses'])} steps in {run['seconds']:.0f} s"
        print(f" {steps}, with imports and test", end=" ", flush=True)
    return run


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Waits a while for a process; True if it has ended."""
    try:
        process.wait(SECONDS_A_DOT)
    except subprocess.TimeoutExpired:
        return False
    except BaseException:  # Ctrl-C
        process.kill()
        raise
    return True


def largest_difference(stock: list[float], sink: list[float]) -> float:
    """Of two loss curves; infinite if one is longer or holds a NaN."""
    differences = [abs(a - b) for a, b in zip(stock, sink, strict=False)]
    equal_length, no_nan = len(stock) == len(sink), all(each == each for each in differences)
    return max(differences) if equal_length and no_nan else float("inf")


def images_per_second(report: Report, name: str) -> list[float]:
    """Of each run, from the slowest to the fastest."""
    images = report["images"]["epochs"] * report["images"]["train"]
    return sorted(images / seconds for seconds in report[name]["seconds"])


def said_of_speed(report: Report) -> tuple[list[str], str]:
    """The slowest and the fastest run of each script, in images per second, and whether that is a difference."""
    one, other = rates = [images_per_second(report, name) for name in SCRIPTS]
    overlap = one[0] <= other[-1] and other[0] <= one[-1]
    return [f"{rate[0]:.0f}-{rate[-1]:.0f}" for rate in rates], "no difference: the runs overlap" if overlap else ""


def format_table(report: Report) -> str:
    """Both runs side by side, with what each row means."""
    stock, sink, cost = (report[name] for name in ("stock", "torch_sink", "worker_cost"))
    gpu, difference, steps = report["machine"]["gpu"], report["largest_loss_difference"], len(stock["losses"])
    equal = f"equal bits in all {steps} steps" if difference == 0 else f"differ by up to {difference:.3g}"
    speeds, verdict = said_of_speed(report)
    where = "training, pixels made on the GPU" if gpu else "training; without a GPU both do the same work"
    where += f"; {verdict}" if verdict else ""
    recorded, on_stock = cost["torch_sink_ms"]["p50"], cost["stock_ms"]["p50"]
    syncs = [f"{100 * run['syncs'] / steps:.3g}" for run in (stock, sink)]
    accuracies = [f"{run['accuracy']:.2%}" for run in (stock, sink)]
    rows = [
        ("", "stock", "torch_sink", ""),
        ("loss of the last step", f"{stock['losses'][-1]:.4f}", f"{sink['losses'][-1]:.4f}", f"the losses: {equal}"),
        ("accuracy", *accuracies, f"of {report['images']['test']} test images"),
        ("images per second", *speeds, where),
        ("syncs in 100 steps", *syncs, "how often the training loop stops to wait for results"),
        (
            "ms for a photograph",
            f"{on_stock:.2f}",
            f"{recorded:.2f}",
            f"CPU time of a data worker when a GPU makes the pixels, batch {cost['batch_size']}: "
            f"{spread(cost['ratio'])} times less",
        ),
    ]
    return "\n".join(f"{name:24}{old:>10}{new:>12}   {means}".rstrip() for name, old, new, means in rows)


def find_faults(report: Report, minimum_accuracy: float) -> list[str]:
    """What contradicts the promise of equal training; empty when the demo succeeded.

    On the CPU the loss curves have to be equal bit for bit. On a GPU they need not be: convolutions there add in an
    order that changes from run to run, with stock PyTorch too.
    """
    faults = []
    for name in SCRIPTS:
        accuracy = report[name]["accuracy"]
        if not accuracy >= minimum_accuracy:
            faults.append(f"test accuracy of the {name} run is {accuracy:.2%}, expected {minimum_accuracy:.0%} or more")
    difference = report["largest_loss_difference"]
    if report["machine"]["gpu"] is None and difference != 0:
        faults.append(f"the loss curves differ by up to {difference:.6g}, expected equal bits")
    return faults


def draw_chart(report: Report, path: Path) -> None:
    """Draw the loss curves, the speed and the cost in a worker into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, speed, workers) = pyplot.subplots(1, 3, figsize=(13, 4), width_ratios=(3, 1.2, 1.1))
    colors = ("0.75", "tab:blue")
    for name, color, width in zip(SCRIPTS, colors, (3, 1), strict=True):
        curves.plot(report[name]["losses"], linewidth=width, color=color, label=name)
    curves.set(xlabel="training step", ylabel="loss", title="loss of every step")
    curves.legend()
    labels, verdict = said_of_speed(report)
    draw_runs(speed, f"training, images/s\n{verdict}".rstrip(), colors, labels, report)
    cost = report["worker_cost"]
    costs = [[cost[key][at] for at in ("p50", "least", "most")] for key in ("stock_ms", "torch_sink_ms")]
    draw_bars(workers, "data worker, CPU ms/photo\n(a GPU makes the pixels)", colors, costs)
    figure.suptitle(report["machine"]["gpu"] or f"{report['machine']['cpu_cores']} CPU cores, no GPU")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_runs(axes: Any, title: str, colors: tuple[str, str], labels: Sequence[str], report: Report) -> None:
    """A dot for each run, on a line from the slowest to the fastest: two of these show whether the runs overlap."""
    for name, color, label in zip(SCRIPTS, colors, labels, strict=True):
        rates = images_per_second(report, name)
        axes.plot([name] * len(rates), rates, "o-", color=color, markersize=9, linewidth=5)
        axes.annotate(label, (name, rates[-1]), (0, 9), textcoords="offset points", ha="center")
    axes.set(title=title, ylim=(0, 1.15 * axes.get_ylim()[1]), xlim=(-0.6, len(SCRIPTS) - 0.4))


def draw_bars(axes: Any, title: str, colors: tuple[str, str], figures: Sequence[Sequence[float]]) -> None:
    """A bar for each script: its figure, and a line from the least to the most that was measured."""
    for name, color, (value, least, most) in zip(SCRIPTS, colors, figures, strict=True):
        bar = axes.bar(name, value, color=color, yerr=[[value - least], [most - value]], ecolor="0.3", capsize=4)
        axes.bar_label(bar, fmt="{:.3g}", padding=2)
    axes.margins(y=0.15)
    axes.set(title=title)


if __name__ == "__main__":
    sys.exit(main())
