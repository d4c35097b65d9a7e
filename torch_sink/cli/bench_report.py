"""What `torch-sink bench` and the worker-cost benchmark write: one JSON, a table and a chart, all from the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_sink.cli.bench import measure_loader, measure_worker_cost
from torch_sink.cli.explain import find_images
from torch_sink.cli.machine import describe_machine


def run(folder: str | Path, pipelines: Sequence[str], *, workers: int, quick: bool = False) -> dict[str, Any]:
    """Measure worker cost and loader throughput in about two minutes.

    Args:
        folder: an `ImageFolder` tree.
        pipelines: names out of `torch_sink.cli.pipelines.PIPELINES`.
        workers: data workers of the loaders.
        quick: fewer images and rounds, for a first impression.

    Returns:
        The JSON-ready report.
    """
    report = describe_run("torch-sink bench", folder)
    report["worker_cost"] = measure_worker_cost(folder, pipelines, rounds=2 if quick else 5, images=16 if quick else 80)
    report["loader"] = {"workers": workers, **measure_loader(folder, workers=workers, seconds=1 if quick else 15)}
    return report


def describe_run(command: str, folder: str | Path) -> dict[str, Any]:
    """Return the head of every report: the command, the machine and the photographs."""
    sizes = [path.stat().st_size for path in find_images(folder)]
    photographs = {"count": len(sizes), "mean_bytes": round(statistics.mean(sizes))}
    return {"command": command, "machine": describe_machine(), "photographs": photographs}


def format_worker_cost(results: dict[str, dict[str, Any]]) -> str:
    """Return the worker cost as a table: CPU milliseconds a sample (median), and stock divided by torch_sink."""
    head = f"{'CPU ms per sample in a worker':32}{'stock':>10}{'recording':>12}{'ratio':>9}"
    lines = [f"{head}{'on the CPU':>13}{'ratio':>9}"]
    for name, result in results.items():
        stock, recording = result["stock_ms"]["p50"], result["torch_sink_ms"]["p50"]
        row = f"{name:32}{stock:>10.3f}{recording:>12.3f}{result['ratio']:>8.1f}x"
        lines.append(f"{row}{result['on_cpu_ms']['p50']:>13.3f}{result['on_cpu_ratio']:>8.2f}x")
        lines += [f"    ran in stock code: {what} ({count})" for what, count in result["fallbacks"].items()]
    return "\n".join(lines)


def format_report(report: dict[str, Any]) -> str:
    """Return the report of `run` as text."""
    machine, loader = report["machine"], report["loader"]
    device = machine["gpu"] or "no GPU: the pixels are made on the CPU"
    stock, sink = (loader[name]["images_per_second"] for name in ("stock", "torch_sink"))
    head = f"{machine['cpu']}, {machine['cpu_cores']} cores; {device}"
    label = f"images/s from {loader['workers']} workers"
    throughput = f"{label:32}{stock:>10.0f}{sink:>12.0f}{sink / stock:>8.2f}x"
    return f"{head}\n\n{format_worker_cost(report['worker_cost'])}\n\n{throughput}"


def draw_chart(report: dict[str, Any], path: Path) -> None:
    """Draw worker cost and loader throughput into a PNG file. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (cost, speed) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 1))
    names = list(report["worker_cost"])
    for offset, run_name in ((0.2, "stock"), (-0.2, "torch_sink")):
        places = [len(names) - index + offset for index in range(len(names))]
        values = [report["worker_cost"][name][f"{run_name}_ms"]["p50"] for name in names]
        cost.bar_label(cost.barh(places, values, height=0.38, label=run_name), fmt="%.2f", padding=3)
    cost.set_yticks([len(names) - index for index in range(len(names))], names)
    cost.margins(x=0.12)
    cost.set(xlabel="CPU ms per sample in a data worker (device elsewhere)")
    cost.legend()
    bars = [report["loader"][name]["images_per_second"] for name in ("stock", "torch_sink")]
    speed.bar_label(speed.bar(("stock", "torch_sink"), bars), fmt="%.0f")
    speed.margins(y=0.12)
    speed.set(title=f"images/s, {report['loader']['workers']} workers")
    figure.suptitle(report["machine"]["gpu"] or f"{report['machine']['cpu']}, no GPU")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
