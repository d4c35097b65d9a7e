"""Turn the committed results into docs/performance.md, docs/inside/kernels.md, pictures and the figures of the README.

    python examples/benchmarks/report.py [--check]

Every number comes from a JSON file under `examples/benchmarks/results/`; what has no file, or was measured without a
GPU where only one counts, is said to be not measured yet.
`--check` writes nothing, and fails where a text differs from the results.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import report_worker
from report_charts import CHARTS, chart, chart_of
from report_kernels import kernels_page
from report_picture import PICTURE, picture, read_figures
from report_tables import GPU_FIGURES, Report, insert_between, of_epoch_border, provenance
from report_tables import SECTIONS as OTHER_SECTIONS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "examples" / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
KERNELS_PAGE = ROOT / "docs" / "inside" / "kernels.md"
README = ROOT / "README.md"
SETUP, MAKE_ENVIRONMENT = RESULTS / "setup_cost.json", ROOT / ".ci" / "make_environment"
BEGIN = "<!-- figures: written by examples/benchmarks/report.py -->\n"
END = "<!-- end of figures -->"
FALLBACK_BEGIN = "<!-- fallback: written by examples/benchmarks/report.py -->\n"
FALLBACK_END = "<!-- end of fallback -->"
SINK_PAGE = ROOT / "docs" / "data_sink.md"
BORDER_BEGIN = "<!-- border: written by examples/benchmarks/report.py -->\n"
BORDER_END = "<!-- end of border -->"
STATUS_BEGIN, STATUS_END = "<!-- status: written by examples/benchmarks/report.py -->\n", "<!-- end of status -->"
SECTIONS = {
    "worker_cost": ("Data workers", report_worker.SAYS, False, report_worker.section),
    "fallback_cost": ("A fallback", report_worker.OF_FALLBACK, False, report_worker.fallback_section),
    "support_cost": ("Each transform", report_worker.OF_SUPPORT, False, report_worker.support_section),
    **OTHER_SECTIONS,
}
FIRST_SCREENS = (README, ROOT / "docs" / "index.md", ROOT / "docs" / "start.md")


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


def page(results: dict[str, Report]) -> str:
    """The text of docs/performance.md."""
    lines = ["# Performance", ""]
    lines += ["Written by `python examples/benchmarks/report.py` from `examples/benchmarks/results/`.", ""]
    no_gpu = missing(results)
    if no_gpu:
        lines += ["These are figures of CPUs. What needs a GPU is [not measured yet](#not-measured-yet).", ""]
    for name, (title, says, needs_gpu, body) in SECTIONS.items():
        lines += [f"## {title}", "", says, ""]
        if name in results:
            lines += [body(results[name]), "", provenance(results[name]), ""]
            if name in CHARTS:
                lines += [f"![{title}](images/{name}.svg)", ""]
        else:
            where = " on a GPU" if needs_gpu else ""
            lines += [f"Not measured yet{where}: `python examples/benchmarks/{name}.py`.", ""]
    return "\n".join(lines + no_gpu)


def missing(results: dict[str, Report]) -> list[str]:
    """Which figures no GPU has given yet, and the command that gives them."""
    names = [name for name in GPU_FIGURES if name not in results or not results[name]["machine"]["gpu"]]
    if not names:
        return []
    return [
        "## Not measured yet",
        "",
        "On a GPU, these figures:",
        "",
        *[f"* {SECTIONS[name][0]} (`{name}.py`): {GPU_FIGURES[name]}." for name in names],
        "",
        "`make gpu RESULTS=examples/benchmarks/results DATA=photographs && make report` gives each of them. So that",
        "all parts end within nine minutes it measures fewer sizes than a part alone, as in `make gpu PART=train`.",
        "",
    ]


def readme_figures(results: dict[str, Report]) -> str:
    """The README's figures: what a worker spends on three pipelines, and training speed once there is one."""
    said = best_training(results["train"]) if "train" in results else "Training speed on a GPU: not measured yet."
    more = "All figures: [performance.md](docs/performance.md), written by `make report`."
    return f"{report_worker.readme(results['worker_cost'])}{said} {more}\n"


def status(results: dict[str, Report]) -> str:
    """What is measured and what is not, for the first screen of the README and of the pages."""
    measured = report_worker.headline(results["worker_cost"])
    on_gpu = "**Not yet run on a GPU:** speed there is unknown."
    if "train" in results:
        on_gpu = f"On a GPU: {best_training(results['train'])}"
    return f"{textwrap.fill(f'{measured} {on_gpu}', report_worker.COLUMNS)}\n"


def with_setup(text: str, report: Report) -> str:
    """Minutes and disk of a new environment, wherever a text names them."""
    minutes, gigabytes = math.ceil(report["setup_seconds"] / 60), round(report["bytes"] / 1e9)
    return re.sub(r"about \d+ minutes(,| and) \d+ GB", rf"about {minutes} minutes\1 {gigabytes} GB", text)


def best_training(report: Report) -> str:
    """Images per second from files with the fewest workers that both were measured with, against stock."""
    model, measured = next(iter(report["models"].items()))
    contenders = measured["contenders"]
    workers = min(contenders["torch_sink"].keys() & contenders["stock"].keys(), key=int)
    ours, stock = (contenders[name][workers]["images_per_second"]["p50"] for name in ("torch_sink", "stock"))
    hardware = report["machine"]["gpu"]
    return f"{model} from JPEG files, {workers} workers, {hardware}: {ours:.0f} images/s, stock {stock:.0f}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a text is out of date")
    arguments = parser.parse_args()
    results = read_results()
    kernels = json.loads((RESULTS / "kernels.json").read_text())
    texts = {
        PAGE: page(results),
        KERNELS_PAGE: kernels_page(kernels),
        PICTURE: picture(read_figures(RESULTS)),
        **{chart_of(name): chart(name, results[name]) for name in CHARTS.keys() & results.keys()},
    }
    for screen in FIRST_SCREENS:
        texts[screen] = insert_between(screen.read_text(), STATUS_BEGIN, STATUS_END, status(results))
    texts[README] = insert_between(texts[README], BEGIN, END, readme_figures(results))
    of_fallback = report_worker.fallback_sentence(results["fallback_cost"])
    texts[README] = insert_between(texts[README], FALLBACK_BEGIN, FALLBACK_END, of_fallback)
    border = textwrap.fill(of_epoch_border(results["epoch_border"]), report_worker.COLUMNS) + "\n"
    texts[SINK_PAGE] = insert_between(SINK_PAGE.read_text(), BORDER_BEGIN, BORDER_END, border)
    if SETUP.is_file():
        texts[README] = with_setup(texts[README], json.loads(SETUP.read_text()))
        texts[MAKE_ENVIRONMENT] = with_setup(MAKE_ENVIRONMENT.read_text(), json.loads(SETUP.read_text()))
    outdated = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    if arguments.check:
        for path in outdated:
            print(f"{path.relative_to(ROOT)} differs from the results: run `make report`", file=sys.stderr)
        return int(bool(outdated))
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
