"""The charts of docs/performance.md: one row of bars a result file."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

import report_worker
from report_tables import Report
from report_worker import Spread

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

Bar = tuple[str, float, float, float]  # name, value, and where its error bar begins and ends


def bar(name: str, values: Spread) -> Bar:
    """The median, and the middle of the rounds."""
    return name, values["p50"], values["p20"], values["p80"]


# Result file -> the bars of its chart: what they measure, and each of them.
CHARTS: dict[str, Callable[[Report], tuple[str, list[Bar]]]] = {
    "worker_cost": lambda report: (
        "stock / torch_sink, CPU time of a sample in a worker",
        [(name, values["p50"], values["least"], values["most"]) for name, values in report_worker.bars(report)],
    ),
    "loader": lambda report: (
        "images/s",
        [bar(name, result["images_per_second"]) for name, result in report["loaders"].items()],
    ),
    "loop": lambda report: (
        "time of a step, divided by the plain loop's",
        [
            bar(f"{model}: {name}", {key: 1 + share for key, share in result["extra_share"].items()})
            for model, measured in report["models"].items()
            for name, result in measured["loops"].items()
        ],
    ),
    "decode": lambda report: (
        "images/s, largest batch",
        [bar(name, list(r["images_per_second"].values())[-1]) for name, r in report["decoders"].items()],
    ),
    "train": lambda report: (
        "images/s from JPEG files",
        [
            bar(f"{model}: {name}, {workers} workers", result["images_per_second"])
            for model, measured in report["models"].items()
            for name, counts in measured["contenders"].items()
            for workers, result in counts.items()
        ],
    ),
    "transforms": lambda report: (
        "images/s, largest batch",
        [
            bar(f"{pipeline}: {name}", list(result["images_per_second"].values())[-1])
            for pipeline, contenders in report["pipelines"].items()
            for name, result in contenders.items()
        ],
    ),
}


WIDTH, ROW, BAR, TOP, MARGIN = 520, 44, 18, 64, 14  # in pixels; narrow, for a phone shows it whole
MIDDLE, SPREADS = "20th to 80th percentile", {"worker_cost": "least to most of the rounds"}
STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
    .head { font-weight: 600; }
    .note { font-size: 12px; fill: #59636e; }
    .page { fill: #ffffff; }
    .bar { fill: #0969da; }
    .spread { stroke: #1f2328; fill: none; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .note { fill: #a8b1bb; }
      .page { fill: #0d1117; }
      .bar { fill: #58a6ff; }
      .spread { stroke: #f0f6fc; }
    }"""


def chart_of(name: str) -> Path:
    return IMAGES / f"{name}.svg"


def chart(name: str, report: Report) -> str:
    """One section's bars as an SVG, for light and dark pages: each with its name, its value and its spread."""
    unit, bars = CHARTS[name](report)
    spread = SPREADS.get(name, MIDDLE)
    height = TOP + ROW * len(bars) + MARGIN
    scale = (WIDTH - 2 * MARGIN - 60) / max(high for *_, high in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img">',
        f"<title>{escape(unit)}</title>",
        f"<style>{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="head" x="{MARGIN}" y="26">{escape(unit)}</text>',
        f'<text class="note" x="{MARGIN}" y="46">{escape(f"{_machine(report)}; thin line: {spread}")}</text>',
    ]
    for number, (label, value, low, high) in enumerate(bars):
        top, length = TOP + ROW * number, max(scale * value, 1)
        begin, end = MARGIN + scale * low, MARGIN + scale * high
        lines += [
            f'<text x="{MARGIN}" y="{top + 14}">{escape(label)}</text>',
            f'<rect class="bar" x="{MARGIN}" y="{top + 20}" width="{length:.1f}" height="{BAR}" rx="3"/>',
            f'<path class="spread" d="M{begin:.1f} {top + 25}v8m0 -4H{end:.1f}m0 -4v8"/>',
            f'<text x="{max(MARGIN + length, end) + 6:.1f}" y="{top + 34}">{value:.3g}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _machine(report: Report) -> str:
    return report["machine"]["gpu"] or f"{report['machine']['cpu']}, no GPU"
