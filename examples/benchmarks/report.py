"""Turn the committed results into docs/performance.md, its charts, docs/kernels.md and the figures of the README.

    python examples/benchmarks/report.py [--check]

Every number in them comes from a JSON file under `examples/benchmarks/results/`; what has no file, or was measured
without a GPU where only one counts, is said to be not measured yet. `--check` writes nothing, and fails where a text
differs from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
KERNELS_PAGE = ROOT / "docs" / "kernels.md"
README = ROOT / "README.md"
BEGIN = "<!-- figures: written by examples/benchmarks/report.py -->\n"
END = "<!-- end of figures -->"

Report = dict[str, Any]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; the first column is text, the others are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(report: Report) -> str:
    """What the figures were measured on, and with which command."""
    machine = report["machine"]
    releases = machine["releases"]
    hardware = machine["gpu"] or f"{machine['cpu']}, {machine['cpu_cores']} cores, no GPU"
    photographs = report.get("photographs")
    files = ""
    if photographs:
        kind = "photographs" if photographs.get("given", True) else "generated images"
        files = f", {photographs['count']} {kind} of {photographs['mean_bytes'] / 1000:.0f} kB"
    return (
        f"{hardware}; torch {releases['torch']}, torchvision {releases['torchvision']}, Triton {releases['triton']}, "
        f"Pillow {releases['pillow']}{files}; commit {machine['commit']}, {machine['date']}: `{report['command']}`."
    )


def worker_cost(report: Report) -> str:
    rows = []
    for name, result in report["worker_cost"].items():
        mark = " (partly in stock code)" if result["fallbacks"] else ""
        times = [f"{result[key]['p50']:.2f}" for key in ("stock_ms", "torch_sink_ms")]
        on_cpu = [f"{result['on_cpu_ms']['p50']:.2f}", f"{result['on_cpu_ratio']:.2f}"]
        rows.append([name + mark, *times, f"{result['ratio']:.1f}", *on_cpu])
    heads = ["pipeline", "stock", "torch_sink, device elsewhere", "ratio", "torch_sink, no device", "ratio"]
    return table(heads, rows)


def loader(report: Report) -> str:
    rows = [
        [
            name,
            f"{result['images_per_second']:.0f}",
            f"{result['wait_p50_ms']:.2f}",
            f"{result['wait_p99_ms']:.2f}",
            f"{result['resident_mib']:.0f}",
        ]
        for name, result in report["loaders"].items()
    ]
    return table(["loader", "images/s", "p50 wait, ms", "p99 wait, ms", "resident, MiB"], rows)


def loop(report: Report) -> str:
    parts = []
    for model, results in report["models"].items():
        rows = []
        for name, result in results.items():
            idle = f"{result['gpu_idle_share']:.1%}" if "gpu_idle_share" in result else "-"
            figures = [f"{result['steps_per_second']:.1f}", f"{result['host_microseconds']:.0f}"]
            rows.append([name, *figures, f"{result['syncs_per_step']:.2f}", idle])
        parts.append(table([model, "steps/s", "host us a step", "syncs a step", "GPU idle"], rows))
    return "\n\n".join(parts)


def transforms(report: Report) -> str:
    parts = []
    for pipeline, contenders in report["pipelines"].items():
        batches = list(next(iter(contenders.values()))["images_per_second"])
        rows = [
            [name, *[f"{result['images_per_second'][batch]['p50']:.0f}" for batch in batches], str(result["launches"])]
            for name, result in contenders.items()
        ]
        parts.append(table([pipeline, *[f"images/s at {batch}" for batch in batches], "launches"], rows))
    return "\n\n".join(parts)


def decode(report: Report) -> str:
    batches = list(next(iter(report["decoders"].values()))["images_per_second"])
    rows = []
    for name, result in report["decoders"].items():
        speeds = [f"{result['images_per_second'][batch]['p50']:.0f}" for batch in batches]
        rows.append([name, *speeds, f"{result['difference']['mean_abs']:.4f}", str(result["difference"]["largest"])])
    heads = ["decoder", *[f"images/s at {batch}" for batch in batches], "mean difference to Pillow", "largest"]
    return table(heads, rows)


def train(report: Report) -> str:
    parts = []
    for model, contenders in report["models"].items():
        rows = []
        for name, counts in contenders.items():
            for workers, result in counts.items():
                idle = f"{result['gpu_idle_share']:.0%}" if "gpu_idle_share" in result else "-"
                speed, cpu = result["images_per_second"]["p50"], result["cpu_seconds_per_1000_images"]
                rows.append([name, "-" if name == "synthetic" else workers, f"{speed:.0f}", f"{cpu:.2f}", idle])
        parts.append(table([model, "workers", "images/s", "CPU s per 1,000 images", "GPU idle"], rows))
    return "\n\n".join(parts)


def scale(report: Report) -> str:
    parts = []
    for name in ("batch", "photograph", "sink_size"):
        values = report[name]["values"]
        rows = [[size, f"{value['p50']:.3f}"] for size, value in values.items()]
        parts.append(table([name.replace("_", " "), report[name]["unit"]], rows))
    rows = [
        [size, f"{value['first_batch_ms']['p50']:.2f}", f"{value['batch_us']['p50']:.0f}"]
        for size, value in report["dataset"]["values"].items()
    ]
    parts.append(table(["samples in the dataset", "first batch, ms", "each later batch, us"], rows))
    return "\n\n".join(parts)


# Result file -> title, what it says, whether only a GPU's figures count, and the section's table.
SECTIONS: dict[str, tuple[str, str, bool, Callable[[Report], str]]] = {
    "worker_cost": (
        "Data workers",
        "CPU milliseconds per sample in a data worker: dataset and collate, one thread, files in the page cache.",
        False,
        worker_cost,
    ),
    "loader": ("Loaders", "One pipeline of stock torchvision code behind three loaders, in turns.", False, loader),
    "loop": ("Training loops", "Batches that already lie on the device; the loops take turns.", False, loop),
    "transforms": ("Transforms", "From decoded uint8 images to the batch, on the device.", True, transforms),
    "decode": ("Decoders", "The same files from memory, in turns.", True, decode),
    "train": ("Training from JPEG files", "End to end, bfloat16 autocast, channels_last.", True, train),
    "scale": ("Scale", "How cost grows when one size grows alone.", True, scale),
}


def read_results() -> dict[str, Report]:
    """The committed results by name; a file counts only where its section can use it."""
    found = {}
    for name, (_, _, needs_gpu, _) in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.is_file():
            report = json.loads(path.read_text())
            if not needs_gpu or report["machine"]["gpu"]:
                found[name] = report
    return found


# Result file -> the bars of its chart: what they measure, and (name, value) of each.
CHARTS: dict[str, Callable[[Report], tuple[str, list[tuple[str, float]]]]] = {
    "worker_cost": lambda report: (
        "stock / torch_sink, CPU time per sample in a worker",
        [(name, result["ratio"]) for name, result in report["worker_cost"].items()],
    ),
    "loader": lambda report: (
        "images/s",
        [(name, result["images_per_second"]) for name, result in report["loaders"].items()],
    ),
    "loop": lambda report: (
        "ms a step",
        [
            (f"{model}: {name}", 1e3 / result["steps_per_second"])
            for model, results in report["models"].items()
            for name, result in results.items()
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
            for model, contenders in report["models"].items()
            for name, counts in contenders.items()
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
    return PAGE.parent / "images" / f"{name}.png"


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
    chart_of(name).parent.mkdir(exist_ok=True)
    figure.savefig(chart_of(name), dpi=90)
    pyplot.close(figure)


def page(results: dict[str, Report]) -> str:
    """The text of docs/performance.md."""
    lines = ["# Performance", ""]
    lines += ["Written by `python examples/benchmarks/report.py` from `examples/benchmarks/results/`.", ""]
    for name, (title, says, needs_gpu, body) in SECTIONS.items():
        lines += [f"## {title}", "", says, ""]
        if name in results:
            lines += [body(results[name]), "", provenance(results[name]), ""]
            if name in CHARTS:
                lines += [f"![{title}](images/{name}.png)", ""]
        else:
            where = " on a GPU" if needs_gpu else ""
            lines += [f"Not measured yet{where}: `python examples/benchmarks/{name}.py`.", ""]
    return "\n".join(lines)


def kernels_page(report: Report) -> str:
    """The text of docs/kernels.md."""
    lines = ["# Kernels", "", "Written by `python examples/benchmarks/report.py`; `make kernels` measures again.", ""]
    which = "The smallest and the largest variants" if "--some" in report["command"] else "Every variant"
    lines += [
        f"{which} that the launchers can choose, compiled ahead of time. Widths are bits of one thread's access to",
        "global memory, times the number of such instructions; each instruction of the machine code counts once.",
        "",
    ]
    rows = [
        [
            row["variant"],
            row["target"].partition(":")[2],
            *[str(row[key]) for key in ("registers", "spills", "shared", "instructions")],
            *[" ".join(f"{bits}x{count}" for bits, count in row[key].items()) for key in ("loads", "stores")],
        ]
        for row in report["kernels"]
    ]
    heads = ["variant", "target", "registers", "spilled bytes", "shared bytes", "instructions", "loads", "stores"]
    lines += [table(heads, rows), "", "## Work", ""]
    lines += [
        "Per output pixel of a stage, estimated from the plan of a 500 x 375 photograph; each byte of the input is",
        "counted once, and arithmetic by the formulas. The draws are those of one seed.",
        "",
    ]
    rows = [
        [
            f"{name}: {stage['stage']}",
            str(stage["taps"]),
            *[f"{stage[key]:.1f}" for key in ("bytes_read", "bytes_written")],
            str(stage["arithmetic"]),
        ]
        for name, stages in report["work"].items()
        for stage in stages
    ]
    lines += [table(["pipeline: stage", "taps", "bytes read", "bytes written", "arithmetic"], rows), ""]
    releases, commit = report["machine"]["releases"], report["machine"]["commit"]
    lines += [f"Triton {releases['triton']}, commit {commit}, {report['machine']['date']}: `{report['command']}`.", ""]
    return "\n".join(lines)


def readme_figures(results: dict[str, Report]) -> str:
    """The README's figures: what a worker spends on three pipelines, and training speed once there is one."""
    report = results["worker_cost"]
    chosen = ("v1 train", "v1 train + ColorJitter", "v1 train + RandAugment")
    rows = []
    for name in chosen:
        result = report["worker_cost"][name]
        times = [f"{result[key]['p50']:.2f}" for key in ("stock_ms", "torch_sink_ms")]
        rows.append([name, *times, f"{result['ratio']:.1f}"])
    text = "CPU milliseconds per sample in a data worker, pixels made on a device:\n\n"
    text += table(["pipeline", "stock", "torch_sink", "ratio"], rows)
    text += f"\n\n{provenance(report)}\n"
    if "train" not in results:
        return text + "Training speed on a GPU: not measured yet.\n"
    return text + best_training(results["train"]) + "\n"


def best_training(report: Report) -> str:
    """Images per second from files with the fewest workers, against stock with the same."""
    model, contenders = next(iter(report["models"].items()))
    workers = next(iter(contenders["torch_sink"]))
    ours, stock = (contenders[name][workers]["images_per_second"]["p50"] for name in ("torch_sink", "stock"))
    hardware = report["machine"]["gpu"]
    return f"{model} from JPEG files, {workers} workers, {hardware}: {ours:.0f} images/s, stock {stock:.0f}."


def insert_figures(text: str, figures: str) -> str:
    """The README's text with new figures between its two markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the lines {BEGIN.strip()!r} and {END!r} that surround the figures")
    return f"{before}{BEGIN}{figures}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a text is out of date")
    arguments = parser.parse_args()
    results = read_results()
    kernels = json.loads((RESULTS / "kernels.json").read_text())
    texts = {
        PAGE: page(results),
        KERNELS_PAGE: kernels_page(kernels),
        README: insert_figures(README.read_text(), readme_figures(results)),
    }
    outdated = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    outdated += [chart_of(name) for name in results if name in CHARTS and not chart_of(name).is_file()]
    if arguments.check:
        for path in outdated:
            print(f"{path.relative_to(ROOT)} differs from the results: run `make report`", file=sys.stderr)
        return int(bool(outdated))
    for path, text in texts.items():
        path.write_text(text)
    for name in CHARTS.keys() & results.keys():
        draw(name, results[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
