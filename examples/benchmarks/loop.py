"""Cost of a training loop on the host: plain loops, compiled loops and StepLoop in every mode.

    python examples/benchmarks/loop.py [--steps 200] [--models mlp shufflenet resnet50] [--output loop.json]

For each model and loop: steps a second, host time a step (what the training thread spends on the CPU), host syncs a
step, and on a GPU the share of time in which it has nothing to do. Compile and capture seconds stand apart, with the
number of steps after which they are paid back. Writes a table, JSON, and a PNG where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torch_sink

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def make_mlp() -> tuple[nn.Module, tuple[int, ...], int]:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)), (64,), 64


def make_torchvision(name: str, size: int, batch: int) -> Callable[[], tuple[nn.Module, tuple[int, ...], int]]:
    def make() -> tuple[nn.Module, tuple[int, ...], int]:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=10), (3, size, size), batch

    return make


def models(cuda: bool) -> dict[str, Callable[[], tuple[nn.Module, tuple[int, ...], int]]]:
    size, batch = (224, 128) if cuda else (32, 8)
    return {
        "mlp": make_mlp,
        "shufflenet": make_torchvision("shufflenet_v2_x0_5", size, batch),
        "resnet50": make_torchvision("resnet50", size, batch),
    }


class Setup:
    """A fresh model, optimizer and four batches that already lie on the device."""

    def __init__(self, make: Callable[[], tuple[nn.Module, tuple[int, ...], int]], device: torch.device) -> None:
        torch.manual_seed(0)
        model, shape, batch = make()
        self.device, self.batch = device, batch
        self.model = model.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batches: Batches = [
            (torch.randn(batch, *shape, device=device), torch.arange(batch, device=device) % 10) for _ in range(4)
        ]

    def stream(self, steps: int) -> Batches:
        return [self.batches[step % 4] for step in range(steps)]


def plain(read_loss: bool, compile_mode: str | None) -> Callable[[Setup], Callable[[int], int]]:
    """A plain loop; returns a function that runs steps and gives the number of host syncs."""

    def prepare(setup: Setup) -> Callable[[int], int]:
        model = torch.compile(setup.model, mode=compile_mode) if compile_mode else setup.model

        def run(steps: int) -> int:
            losses = []
            for inputs, targets in setup.stream(steps):
                setup.optimizer.zero_grad()
                loss = cross_entropy(model(inputs), targets)
                loss.backward()
                setup.optimizer.step()
                losses.append(loss.item() if read_loss else loss.detach())
            return steps if read_loss else 0

        return run

    return prepare


def sink(mode: str, sink_size: int) -> Callable[[Setup], Callable[[int], int]]:
    """The same steps in a StepLoop."""

    def prepare(setup: Setup) -> Callable[[int], int]:
        loop = torch_sink.StepLoop(setup.model, cross_entropy, setup.optimizer, sink_size=sink_size, mode=mode)
        return lambda steps: loop.run(setup.stream(steps)).host_syncs

    return prepare


def loops(cuda: bool) -> dict[str, Callable[[Setup], Callable[[int], int]]]:
    found = {
        "plain, .item()": plain(True, None),
        "plain": plain(False, None),
        "torch.compile": plain(False, "default"),
        **{f"StepLoop eager, sink {n}": sink("eager", n) for n in (1, 10, 100)},
        "StepLoop compile, sink 100": sink("compile", 100),
    }
    if cuda:
        found["reduce-overhead"] = plain(False, "reduce-overhead")
        found.update({f"StepLoop graph, sink {n}": sink("graph", n) for n in (1, 10, 100)})
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def idle_share(run: Callable[[int], int], steps: int) -> float:
    """Share of the profiled time in which no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        run(steps)
        torch.cuda.synchronize()
        wall_microseconds = (time.perf_counter() - began) * 1e6
    busy = sum(event.self_device_time_total for event in profiler.key_averages())
    return max(0.0, 1 - busy / wall_microseconds)


class Measurement:
    """One loop over one model; rounds of all loops are interleaved, so that a busy machine slows all of them."""

    def __init__(self, prepare: Callable[[Setup], Callable[[int], int]], setup: Setup) -> None:
        self._setup, self._walls, self._hosts, self._syncs = setup, [], [], 0
        began = time.perf_counter()
        self._run = prepare(setup)
        self._run(8)
        synchronize(setup.device)
        self._first_seconds = time.perf_counter() - began

    def round(self, steps: int) -> None:
        """Run `steps` steps and note times a step."""
        device = self._setup.device
        synchronize(device)
        wall, host = time.perf_counter(), time.thread_time()
        self._syncs = self._run(steps)
        self._hosts.append((time.thread_time() - host) / steps)
        synchronize(device)
        self._walls.append((time.perf_counter() - wall) / steps)

    def result(self, steps: int) -> dict[str, float]:
        """Medians over the rounds."""
        step_seconds = statistics.median(self._walls)
        result = {
            "steps_per_second": 1 / step_seconds,
            "step_milliseconds": step_seconds * 1e3,
            "host_microseconds": statistics.median(self._hosts) * 1e6,
            "syncs_per_step": self._syncs / steps,
            "first_8_steps_seconds": self._first_seconds,
        }
        if self._setup.device.type == "cuda":
            result["gpu_idle_share"] = idle_share(self._run, min(steps, 50))
        return result


def add_break_even(results: dict[str, dict[str, float]]) -> None:
    """Steps after which a loop has won back what its first steps cost more than the plain loop's."""
    base = results["plain"]
    for entry in results.values():
        gain = (base["step_milliseconds"] - entry["step_milliseconds"]) / 1e3
        cost = entry["first_8_steps_seconds"] - base["first_8_steps_seconds"]
        entry["break_even_steps"] = cost / gain if gain > 0 and cost > 0 else (0.0 if cost <= 0 else float("inf"))


def print_table(model: str, results: dict[str, dict[str, float]]) -> None:
    heads = [("steps/s", 9), ("ms/step", 9), ("host us", 9), ("syncs", 7), ("idle", 6), ("first 8", 8), ("even", 8)]
    print(f"\n{model}\n{'loop':28} " + " ".join(f"{head:>{width}}" for head, width in heads))
    for name, entry in results.items():
        idle = f"{entry['gpu_idle_share']:6.1%}" if "gpu_idle_share" in entry else f"{'-':>6}"
        print(
            f"{name:28} {entry['steps_per_second']:9.1f} {entry['step_milliseconds']:9.3f} "
            f"{entry['host_microseconds']:9.0f} {entry['syncs_per_step']:7.2f} {idle} "
            f"{entry['first_8_steps_seconds']:7.2f}s {entry['break_even_steps']:8.0f}"
        )


def draw(report: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    tables = report["models"]
    figure, axes = pyplot.subplots(1, len(tables), figsize=(6 * len(tables), 4), squeeze=False, layout="constrained")
    for axis, (model, results) in zip(axes[0], tables.items(), strict=True):
        axis.barh(list(results), [entry["step_milliseconds"] for entry in results.values()])
        axis.invert_yaxis()
        axis.set_title(model)
        axis.set_xlabel("milliseconds a step")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=None, choices=("mlp", "shufflenet", "resnet50"))
    parser.add_argument("--loops", nargs="+", default=None, help="only loops whose name contains one of these")
    parser.add_argument("--output", type=Path, default=Path("loop_benchmark.json"))
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    chosen = arguments.models or (["mlp", "shufflenet", "resnet50"] if cuda else ["mlp", "shufflenet"])
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": arguments.steps,
        "models": {},
    }
    for model in chosen:
        measurements = {
            name: Measurement(prepare, Setup(models(cuda)[model], device))
            for name, prepare in loops(cuda).items()
            if not arguments.loops or name == "plain" or any(part in name for part in arguments.loops)
        }
        for _ in range(arguments.rounds):
            for measurement in measurements.values():
                measurement.round(arguments.steps)
        results = {name: measurement.result(arguments.steps) for name, measurement in measurements.items()}
        add_break_even(results)
        print_table(model, results)
        report["models"][model] = results
    arguments.output.write_text(json.dumps(report, indent=1))
    draw(report, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
