"""The charts of docs/performance.md: one row of bars a result file."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
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


WIDTH, ROW, BAR, TOP, MARGIN = 520, 44, 18, 64, 14  # in pixels; narrow, for a phone shows it whole
STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
    .head { font-weight: 600; }
    .note { font-size: 12px; fill: #59636e; }
    .page { fill: #ffffff; }
    .bar { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .note { fill: #a8b1bb; }
      .page { fill: #0d1117; }
      .bar { fill: #58a6ff; }
    }"""


def chart_of(name: str) -> Path:
    return IMAGES / f"{name}.svg"


def chart(name: str, report: Report) -> str:
    """One section's bars as an SVG, for light and dark pages: the name of each above it, its value behind it."""
    unit, bars = CHARTS[name](report)
    height = TOP + ROW * len(bars) + MARGIN
    scale = (WIDTH - 2 * MARGIN - 60) / max(value for _, value in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img">',
        f"<title>{escape(unit)}</title>",
        f"<style>{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="head" x="{MARGIN}" y="26">{escape(unit)}</text>',
        f'<text class="note" x="{MARGIN}" y="46">{escape(_machine(report))}</text>',
    ]
    for number, (label, value) in enumerate(bars):
        top, length = TOP + ROW * number, max(scale * value, 1)
        lines += [
            f'<text x="{MARGIN}" y="{top + 14}">{escape(label)}</text>',
            f'<rect class="bar" x="{MARGIN}" y="{top + 20}" width="{length:.1f}" height="{BAR}" rx="3"/>',
            f'<text x="{MARGIN + length + 6:.1f}" y="{top + 34}">{value:.4g}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _machine(report: Report) -> str:
    return report["machine"]["gpu"] or f"{report['machine']['cpu']}, no GPU"
