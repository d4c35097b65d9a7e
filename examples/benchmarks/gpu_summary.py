"""The last lines of `make gpu`: what passed, what failed with its first error, and the figures that matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]


def verdict(report: Mapping[str, Any]) -> str:
    """The table of a report: a line for each run, those of failed test files, and the figures."""
    machine = report["machine"]
    head = f"{machine['gpu'] or 'no GPU'}, torch {machine['releases']['torch']}, commit {machine['commit']}"
    runs = report["runs"]
    lines = ["", head, *(_line(run) for run in runs if run["part"] != "tests")]
    tests = [run for run in runs if run["part"] == "tests"]
    if tests:
        lines += ["", *_lines_of_tests(tests)]
    results = {run["name"]: run["result"] for run in runs if "result" in run}
    lines += ["", *(f"{name:56}{value:>22}" for name, value in figures(results))]
    return "\n".join(lines)


def has_failed(run: Mapping[str, Any]) -> bool:
    """Whether something is wrong: a run that time ended has only measured less."""
    return run["status"] == "failed"


def _line(run: Mapping[str, Any]) -> str:
    line = f"{run['name']:14}{run['status']:14}{run['seconds']:7.1f} s"
    return f"{line}  {run['error']}" if run.get("error") else line


def _lines_of_tests(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = {key: sum(run.get(key, 0) for run in runs) for key in ("passed", "failed", "skipped")}
    well = sum(run["status"] == "passed" for run in runs)
    told = ", ".join(f"{count} {key}" for key, count in counts.items())
    lines = [f"tests: {well} of {len(runs)} files passed; {told}"]
    bad = sorted((run for run in runs if run["status"] != "passed"), key=lambda run: run["name"])
    return lines + [f"  {run['name']}: {run['status']}: {run['error']}" for run in bad]


def figures(results: Mapping[str, Result]) -> list[tuple[str, str]]:
    """Name and value of each figure; "-" where it has not been measured."""
    found = []
    for name, script, read in FIGURES:
        try:
            value = read(results[script])
        except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError):
            value = "-"
        unfinished = results.get(script, {}).get("unfinished") and value != "-"
        found.append((name, f"{value}, unfinished" if unfinished else value))
    return found


def _last(found: Mapping[str, Any]) -> Any:
    """What was measured with the largest number: of images, of workers."""
    return found[max(found, key=int)]


def _train(result: Result, contender: str, key: str = "images_per_second") -> float:
    first = next(iter(result["models"].values()))["contenders"]
    return float(_last(first[contender])[key]["p50"])


def _peak(result: Result, name: str) -> str:
    """Of stock and of torch_sink."""
    contenders = next(iter(result["models"].values()))["contenders"]
    measured = [next(iter(contenders[contender].values()))["peak_bytes"][name] for contender in ("stock", "torch_sink")]
    return " -> ".join(f"{value / 2**30:.2f}" for value in measured)


def _stages(result: Result, contender: str, key: str = "images_per_second") -> float:
    return float(_last(result["pipelines"]["v1 train"][contender][key])["p50"])


def _graph(result: Result, key: str) -> float:
    loops: Result = next(iter(result["models"].values()))["loops"]
    return float(loops["StepLoop graph, sink 100"][key]["p50"])


def _worker(result: Result) -> str:
    cost = result["worker_cost"]["v1 train, batch 256"]
    return f"{cost['stock_ms']['p50']:.2f} -> {cost['torch_sink_ms']['p50']:.2f}"


def _host(result: Result) -> str:
    cost = result["host_cost"]["v1 train"]["pinned"]["us_an_image"]["in all"]
    return f"{cost['p50']:.1f}"


# Name, benchmark, how to read it from the benchmark's report.
FIGURES: tuple[tuple[str, str, Callable[[Result], str]], ...] = (
    ("training with torch_sink, images/s", "train", lambda result: f"{_train(result, 'torch_sink'):,.0f}"),
    (
        "  times stock",
        "train",
        lambda result: f"{_train(result, 'torch_sink') / _train(result, 'stock'):.2f}",
    ),
    (
        "  share of training on one batch that stays on the GPU",
        "train",
        lambda result: f"{_train(result, 'torch_sink') / _train(result, 'synthetic'):.0%}",
    ),
    ("  GPU idle", "train", lambda result: f"{_train(result, 'torch_sink', 'gpu_idle_share'):.1%}"),
    ("  peak GiB allocated, stock -> torch_sink", "train", lambda result: _peak(result, "allocated")),
    ("  peak GiB reserved, stock -> torch_sink", "train", lambda result: _peak(result, "reserved")),
    ("  peak GiB page-locked, stock -> torch_sink", "train", lambda result: _peak(result, "page_locked")),
    (
        "JPEG decoding in kernels, images/s",
        "decode",
        lambda result: f"{_last(result['decoders']['torch_sink, triton']['images_per_second'])['p50']:,.0f}",
    ),
    (
        "  the kernels alone",
        "jpeg",
        lambda result: f"{_last(result['batches'])['device']['images_per_second_kernels']['p50']:,.0f}",
    ),
    ("resized crop to tensor, images/s", "transforms", lambda result: f"{_stages(result, 'torch_sink'):,.0f}"),
    (
        "  the kernels alone",
        "transforms",
        lambda result: f"{_stages(result, 'torch_sink, kernels alone'):,.0f}",
    ),
    ("StepLoop, graph mode, host us a step", "loop", lambda result: f"{_graph(result, 'host_microseconds'):.1f}"),
    ("the training process's CPU us an image, launches", "host_cost", _host),
    ("a data worker's CPU ms a sample, stock -> torch_sink", "worker_cost", _worker),
)
