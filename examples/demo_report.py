"""From the two runs of the demo to a table, a chart and a verdict. Every number in them was measured by the runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

RUNS = ("stock", "torch_sink")
COLORS = ("0.75", "tab:blue")


@dataclass(frozen=True)
class Run:
    """What one of the two scripts wrote, and what follows from it."""

    losses: list[float]
    accuracy: float
    images: int
    steps: int
    seconds: float
    worker_seconds: float
    host_syncs: int
    launches_per_batch: float | None

    @classmethod
    def read(cls, path: Path, launches_path: Path | None = None) -> Run:
        """Read a run's JSON, and the launches from the JSON of a second, shorter run that counted them."""
        values = json.loads(path.read_text())
        del values["launches"]
        counted = json.loads(launches_path.read_text()) if launches_path is not None else {"launches": None}
        launches = counted["launches"]
        return cls(**values, launches_per_batch=None if launches is None else launches / counted["steps"])

    @property
    def images_per_second(self) -> float:
        """Training images per second of wall time."""
        return self.images / self.seconds

    @property
    def worker_ms_per_image(self) -> float:
        """CPU milliseconds that the data workers spent on one image."""
        return 1000 * self.worker_seconds / self.images

    @property
    def host_syncs_per_100_steps(self) -> float:
        """How often the host waited for the device in 100 training steps."""
        return 100 * self.host_syncs / self.steps

    def figures(self, gpu: str | None) -> dict[str, float | str]:
        """The rows of the report; `gpu` is the name of the GPU that the run used."""
        not_measured = "not measured (no GPU)" if gpu is None else "not measured"
        return {
            "test accuracy": self.accuracy,
            "final loss": self.losses[-1],
            "images per second": self.images_per_second,
            "worker CPU ms per image": self.worker_ms_per_image,
            "host syncs per 100 steps": self.host_syncs_per_100_steps,
            "kernel launches per batch": not_measured if self.launches_per_batch is None else self.launches_per_batch,
        }


def largest_loss_difference(stock: Run, sink: Run) -> float:
    """Return the largest difference between the two loss curves; infinite if one is longer or holds a NaN."""
    if len(stock.losses) != len(sink.losses):
        return float("inf")
    differences = [abs(a - b) for a, b in zip(stock.losses, sink.losses, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("inf")


def build_report(stock: Run, sink: Run, machine: dict[str, Any], script_diff: list[str]) -> dict[str, Any]:
    """Return the JSON-ready report."""
    return {
        "command": "make demo",
        "machine": machine,
        "stock": stock.figures(machine["gpu"]),
        "torch_sink": sink.figures(machine["gpu"]),
        "largest loss difference": largest_loss_difference(stock, sink),
        "steps": stock.steps,
        "losses": {"stock": stock.losses, "torch_sink": sink.losses},
        "script_diff": script_diff,
    }


def format_table(report: dict[str, Any]) -> str:
    """Return both runs side by side as text."""
    lines = [f"{'':28}{'stock':>22}{'torch_sink':>22}"]
    for name, value in report["stock"].items():
        lines.append(f"{name:28}{_format(value):>22}{_format(report['torch_sink'][name]):>22}")
    lines.append(f"{'largest loss difference':28}{report['largest loss difference']:>44.6g}")
    return "\n".join(lines)


def find_faults(report: dict[str, Any], minimum_accuracy: float) -> list[str]:
    """Return what contradicts the promise of equal training; empty when the demo succeeded.

    On the CPU the loss curves have to be equal bit for bit. On a GPU they need not be: convolutions there add in an
    order that changes from run to run, with stock PyTorch too.
    """
    faults = []
    for name in RUNS:
        accuracy = report[name]["test accuracy"]
        if not accuracy >= minimum_accuracy:
            faults.append(f"test accuracy of the {name} run is {accuracy:.2%}, expected {minimum_accuracy:.0%} or more")
    if report["machine"]["gpu"] is None and report["largest loss difference"] != 0:
        faults.append(f"the loss curves differ by up to {report['largest loss difference']:.6g}, expected equal bits")
    return faults


def changed_lines(stock_script: Path, sink_script: Path) -> list[str]:
    """Return the lines that turn the stock script into the other one, as `-old` and `+new`."""
    old, new = (script.read_text().splitlines() for script in (stock_script, sink_script))
    return [line for line in unified_diff(old, new, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))]


def draw_chart(report: dict[str, Any], path: Path) -> None:
    """Draw both loss curves and the timing bars into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, speed, workers) = pyplot.subplots(1, 3, figsize=(13, 4), width_ratios=(3, 1, 1))
    curves.plot(report["losses"]["stock"], linewidth=3, color=COLORS[0], label="stock")
    curves.plot(report["losses"]["torch_sink"], linewidth=1, color=COLORS[1], label="torch_sink")
    curves.set(xlabel="training step", ylabel="loss", title="loss of every step")
    curves.legend()
    for axes, name in ((speed, "images per second"), (workers, "worker CPU ms per image")):
        bars = axes.bar(RUNS, [report[run][name] for run in RUNS], color=COLORS)
        axes.bar_label(bars, fmt=lambda value: f"{value:.0f}" if value >= 100 else f"{value:.3g}")
        axes.margins(y=0.15)
        axes.set(title=name)
    figure.suptitle(report["machine"]["gpu"] or f"{report['machine']['cpu_cores']} CPU cores, no GPU")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
