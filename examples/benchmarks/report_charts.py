"""The charts of docs/performance.md: one row of bars a result file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from report_tables import Report

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

# Result file -> the bars of its chart: what they measure, and (name, value) of each.
CHARTS: dict[str, Callable[[Report], tuple[str, list[tuple[str, float]]]]] = {
    "worker_cost": lambda report: (
        "stock / torch_sink, CPU time per sample in a worker",
        [(name, result["ratio"]) for name, result in report["worker_cost"].items()],
    ),
    "loader": lambda report: (
        "images/s",
        [(name, result["images_per_second"]["p50"]) for name, result in report["loaders"].items()],
    ),
    "loop": lambda report: (
        "ms a step",
        [
            (f"{model}: {name}", result["step_milliseconds"]["p50"])
            for model, measured in report["models"].items()
            for name, result in measured["loops"].items()
        ],
    ),
    "decode": lambda report: (
        "images/s, largest batch",
        [(name, list(r["images_per_second"].values())[-1]["p50"]) for name, r in report["decoders"].items()],
    ),
    "train": lambda report: (
        "images/s from JPEG files",
        [
            (f"{model}: {name}, {workers} workers", result["images_per_second"]["p50"])
            for model, measured in report["models"].items()
            for name, counts in measured["contenders"].items()
            for workers, result in counts.items()
        ],
    ),
    "transforms": lambda report: (
        "images/s, largest batch",
        [
            (f"{pipeline}: {name}", list(result["images_per_second"].values())[-1]["p50"])
            for pipeline, contenders in report["pipelines"].items()
            for name, result in contenders.items()
        ],
    ),
}


def chart_of(name: str) -> Path:
    return IMAGES / f"{name}.png"


def draw(name: str, report: Report) -> None:
    """Draw one section's bars. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    unit, bars = CHARTS[name](report)
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(bars)), layout="constrained")
    labels, values = zip(*bars, strict=True)
    axis.bar_label(axis.barh(labels, values), fmt="%.4g", padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set(xlabel=unit, title=report["machine"]["gpu"] or f"{report['machine']['cpu']}, no GPU")
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(chart_of(name), dpi=90)
    pyplot.close(figure)
