"""What pages say about the cost of a data worker: the tables, the README's figures, the first screens' line, bars."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping

from fallback_cost import WITH, WITHOUT
from report_tables import Report, provenance, table
from support_cost import AT_MOST, WAYS, worst
from worker_rows import HEADLINE, LARGE, SMALL

Spread = Mapping[str, float]
COLUMNS = 118
NO_DIFFERENCE = ", no difference"
SAYS = (
    "What a sample costs a data worker: CPU milliseconds of a worker process of a plain `DataLoader`, for files, "
    "transforms, collate, shared memory and its message, with files in the page cache. The file of a photograph comes "
    "once in a batch. Each figure is the median of the rounds; ratios are stock's time divided by torch_sink's, with "
    'the least and the most of the rounds, and "no difference" where 1 lies between them. "Recorded" is a worker on a '
    'machine with a GPU, which makes the pixels; "in slabs" is the same in front of a `SinkLoader`. "Without a device" '
    "the worker makes the pixels itself, in stock code."
)
ONE_PROCESS = "The same in one process, as with `num_workers=0`: no batch is handed over to another process."
START = "What a new process pays once, in CPU seconds (median, least to most):"
OF_SUPPORT = (
    "Each row of [the support table](support.md), with each choice of arguments that it tries, is a short pipeline on "
    "each kind of image that torchvision takes there: CPU time of one process that makes samples and collates them, "
    'divided by stock torchvision\'s, with the least and the most of the rounds. "Recorded" is for a device '
    'elsewhere; "without a device" the same process makes the pixels. The ten that cost most:'
)

OF_FALLBACK = (
    "The README's pipeline, `RandomResizedCrop(224)` and `ToTensor()`, with Pillow's median filter between the two, "
    "which falls back, and without it: CPU milliseconds of a data worker for a photograph, median of the rounds (least "
    "to most). In front of the filter the worker also decodes the photograph and crops it, as stock code does anyway."
)


def of_rounds(values: Spread, digits: int | None = None) -> str:
    """The median, the least and the most."""
    digits = digits if digits is not None else 1 if values["p50"] >= 3 else 2
    return f"{values['p50']:.{digits}f} ({values['least']:.{digits}f} to {values['most']:.{digits}f})"


def section(report: Report) -> str:
    """The body of the section "Data workers"."""
    rows = report["worker_cost"]
    ways = [("recorded", "torch_sink_ms", "ratio"), ("in slabs", "slabs_ms", "slabs_ratio")]
    ways.append(("without a device", "on_cpu_ms", "on_cpu_ratio"))
    alone = {name: result["one_process"] for name, result in rows.items() if "one_process" in result}
    in_workers = [
        [_name(name, result), str(result["batch_size"]), *_cells(result, ways)] for name, result in rows.items()
    ]
    in_process = [[name, *_cells(result, [ways[0], ways[2]])] for name, result in alone.items()]
    parts = [table(["pipeline", "batch", *_heads(ways)], in_workers)]
    parts += [ONE_PROCESS, table(["pipeline", *_heads([ways[0], ways[2]])], in_process)] if alone else []
    if start := report.get("start"):
        steps = list(start["stock"])
        lines = [[step, *(of_rounds(start[side][step], 2) for side in ("stock", "torch_sink"))] for step in steps]
        parts += [START, table(["", "stock", "torch_sink"], lines)]
    return "\n\n".join(parts)


def support_section(report: Report) -> str:
    """The body of the section on the rows of the support table: those that cost most."""
    parts = []
    measured = {size: results for size, results in report["support_cost"].items() if results}
    for (way, side), (size, results) in itertools.product(WAYS.items(), measured.items()):
        ordered = worst(results, side, len(results))
        above = sum(result[side]["p50"] > AT_MOST for _, result in ordered)
        lines = [[name, f"{result['stock_us']:.0f}", of_rounds(result[side], 2)] for name, result in ordered[:10]]
        parts += [f"{size}, {way}: {len(ordered)} pipelines, {above} of them above {AT_MOST}."]
        parts += [table(["pipeline", "stock, us", "divided by stock's"], lines)]
    return "\n\n".join(parts)


def fallback_section(report: Report) -> str:
    """The body of the section on the cost of a fallback."""
    rows = report["fallback_cost"]
    lines = [[name, of_rounds(row["stock_ms"], 3), of_rounds(row["torch_sink_ms"], 3)] for name, row in rows.items()]
    return table(["pipeline", "stock, ms", "recorded, ms"], lines)


def fallback_sentence(report: Report) -> str:
    """What the README says of the cost of a fallback."""
    rows = report["fallback_cost"]
    stock, ours = ({name: row[f"{side}_ms"]["p50"] for name, row in rows.items()} for side in ("stock", "torch_sink"))
    said = (
        "A fallback costs more than its own call, because the worker then also decodes the image and runs every "
        f"transform before it: with the median filter below, a photograph costs a data worker {ours[WITH]:.1f} ms of "
        f"CPU time instead of {ours[WITHOUT]:.2f}. The filter itself takes {stock[WITH] - stock[WITHOUT]:.1f} ms "
        f"({report['machine']['cpu']}, batch {rows[WITH]['batch_size']})."
    )
    return f"{textwrap.fill(said, COLUMNS)}\n"


def _name(name: str, result: Report) -> str:
    mark = " (partly in stock code)" if result["fallbacks"] else ""
    return name.removesuffix(f", batch {result['batch_size']}") + mark


def _heads(ways: list[tuple[str, str, str]]) -> list[str]:
    return ["stock, ms", *[head for way, *_ in ways for head in (f"{way}, ms", f"stock / {way}")]]


def _cells(result: Report, ways: list[tuple[str, str, str]]) -> list[str]:
    cells = [_milliseconds(result["stock_ms"])]
    for _, milliseconds, ratio in ways:
        found = milliseconds in result
        cells += [_milliseconds(result[milliseconds]), _ratio(result[ratio])] if found else ["-", "-"]
    return cells


def _milliseconds(values: Spread) -> str:
    return f"{values['p50']:.2f}" if values["p50"] >= 1 else f"{values['p50']:.3f}"


def _ratio(values: Spread) -> str:
    return of_rounds(values) + (NO_DIFFERENCE if values["least"] <= 1 <= values["most"] else "")


def readme(report: Report) -> str:
    """The README's figures: three pipelines, at both batch sizes."""
    rows = []
    for name in HEADLINE:
        results = [report["worker_cost"].get(f"{name}, batch {size}") for size in (LARGE, SMALL)]
        if not all(results):  # a GPU machine measures the first one only
            continue
        cells = [[_milliseconds(found["stock_ms"]), _milliseconds(found["torch_sink_ms"]), of_rounds(found["ratio"], 1)]
                 for found in results]  # fmt: skip
        rows.append([name, *cells[0], *cells[1]])
    says = (
        "CPU time of a data worker (a process of a plain `DataLoader`) for a photograph, in ms, and stock's divided by "
        f"torch_sink's, with the least and the most of {report['options']['rounds']} rounds. Measured without a GPU: "
        "the pixels were not computed. `make demo` and `bench` measure the same, at batch 32."
    )
    sides = ["stock", "torch_sink", "ratio"]
    heads = ["pipeline", *[f"{side}, batch {size}" for size in (LARGE, SMALL) for side in sides]]
    return f"{textwrap.fill(says, COLUMNS)}\n\n{table(heads, rows)}\n\n{provenance(report)}\n"


def headline(report: Report) -> str:
    """The first screens' sentence on what is measured."""
    large, small = (report["worker_cost"][f"{HEADLINE[0]}, batch {size}"]["ratio"] for size in (LARGE, SMALL))
    rounds, cpu = report["options"]["rounds"], report["machine"]["cpu"]
    return (
        f"**Measured:** a data worker that no longer makes pixels takes {large['p50']:.1f} times less CPU time for a "
        f"photograph than with stock torchvision at batch {LARGE} ({large['least']:.1f} to {large['most']:.1f} in "
        f"{rounds} rounds), and {small['p50']:.1f} times less at batch {SMALL} ({small['least']:.1f} to "
        f"{small['most']:.1f}): ImageNet training transforms, plain `DataLoader`, {cpu}."
    )


def bars(report: Report) -> list[tuple[str, Spread]]:
    """What the chart shows: stock divided by torch_sink."""
    return [(_full(name, result), result["ratio"]) for name, result in report["worker_cost"].items()]


def _full(name: str, result: Report) -> str:
    return name if name.endswith(f"batch {result['batch_size']}") else f"{name}, batch {result['batch_size']}"
