"""Cost of a training loop on the host: plain loops, compiled loops and StepLoop in every mode.

    python examples/benchmarks/loop.py [--rounds 15] [--seconds 110] [--threads 2] [--models mlp shufflenet resnet50]

For each model and loop: steps a second, host time a step (what the training thread spends on the CPU), what a step
costs over the plain loop, or over the plain compiled loop where the loop compiles (wall time, and host time, which a
busy machine disturbs less; medians of the differences within a round), host syncs a step, and on a GPU the share of
time in which it has nothing to do. A StepLoop of which a step was not what its mode says (captured, compiled, eager) is
not published. Compile and capture seconds stand apart, with the number of steps after which they
are paid back; the compiler's cache is empty at first, and what differs in its steps per sync only shares it.

Each loop gets the same batches, without an end, the same model with the same weights, and SGD, which is fused for all
of them on a GPU; `cudnn.benchmark` is on. When all have compiled they take turns, in the opposite order in every second
round. On the CPU a loop of eager code gets a new model for each round: where its tensors fall in memory can make it
some percent faster or slower, which is nothing that the loop does. A slow model gets fewer rounds, so that no model
takes much longer than --seconds, but three at least.

Writes a table, JSON after each loop and each round, and a PNG where matplotlib is installed.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

import harness
import torch_sink
from torch_sink.cli.worker_cost import percentiles

Batches = list[tuple[torch.Tensor, torch.Tensor]]
LEAST_ROUNDS = 3


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


@dataclass(frozen=True)
class Case:
    """A model, the shape of its inputs with the batch in front, and the steps of a round."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int = 100


def cases(cuda: bool) -> dict[str, Case]:
    shufflenet = partial(torchvision.models.shufflenet_v2_x0_5, num_classes=10)
    if not cuda:
        return {
            "mlp": Case(make_mlp, (64, 64), 200),
            "cnn": Case(make_cnn, (16, 3, 32, 32)),
            "shufflenet": Case(shufflenet, (4, 3, 32, 32), 30),
        }
    resnet = partial(torchvision.models.resnet50, num_classes=10)
    return {
        "mlp": Case(make_mlp, (64, 64), 200),
        "shufflenet": Case(shufflenet, (128, 3, 224, 224), 200),
        "resnet50": Case(resnet, (128, 3, 224, 224)),
    }


KINDS = {"graph": "captured", "compile": "compiled", "eager": "eager"}  # of the steps of a StepLoop, by its mode
# Runs steps, and gives the number of host syncs; raises ValueError where steps ran otherwise than the loop's name says.
Run = Callable[[int], int]


class Setup(ExitStack):
    """A fresh model, optimizer and four batches that already lie on the device; closes what trains the model."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.device, self.steps = device, case.steps
        self.model = case.make().to(device)
        # Mode "graph" fuses it in any case.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")
        targets = torch.arange(case.shape[0], device=device) % 10
        batches: Batches = [(torch.randn(case.shape, device=device), targets) for _ in range(4)]
        self.batches = harness.Repeated(batches)


def plain(read_loss: bool, compile_mode: str | None) -> Callable[[Setup], Run]:
    """A plain loop; returns a function that runs steps and gives the number of host syncs."""

    def prepare(setup: Setup) -> Run:
        model = torch.compile(setup.model, mode=compile_mode) if compile_mode else setup.model
        batches = iter(setup.batches)

        def run(steps: int) -> int:
            losses = []
            for inputs, targets in itertools.islice(batches, steps):
                setup.optimizer.zero_grad()
                loss = cross_entropy(model(inputs), targets)
                loss.backward()
                setup.optimizer.step()
                losses.append(loss.item() if read_loss else loss.detach())
            return steps if read_loss else 0

        return run

    return prepare


def sink(mode: str, steps_per_sync: int) -> Callable[[Setup], Run]:
    """The same steps in a StepLoop."""

    def prepare(setup: Setup) -> Run:
        loop = torch_sink.StepLoop(
            setup.model, cross_entropy, setup.optimizer, steps_per_sync=steps_per_sync, mode=mode
        )
        setup.enter_context(loop)
        # One for all runs: another loader would have other slots, for which the step would be captured again.
        batches = setup.enter_context(torch_sink.SinkLoader(setup.batches, batches_per_epoch=1, device=setup.device))

        def run(steps: int) -> int:
            began = loop.step_count
            batches.batches_per_epoch = steps
            history = loop.run(batches)
            if began:  # else these are the first steps, which compile and capture
                harness.check_steps(history, KINDS[mode])
            return history.host_syncs

        return run

    return prepare


def loops(cuda: bool) -> dict[str, Callable[[Setup], Run]]:
    """In the order in which they are measured first: where time ends, those that matter most are there."""
    found = {"plain": plain(False, None), "torch.compile": plain(False, "default")}
    if cuda:
        found.update({f"StepLoop graph, sink {n}": sink("graph", n) for n in (100, 10, 1)})
        found["reduce-overhead"] = plain(False, "reduce-overhead")
    found["plain, .item()"] = plain(True, None)
    for mode in ("eager", "compile"):
        found.update({f"StepLoop {mode}, sink {n}": sink(mode, n) for n in (1, 10, 100)})
    return found


class Measurement:
    """One loop over one model; rounds of all loops are interleaved, so that a busy machine slows all of them.

    Args:
        prepare: makes the loop.
        make_setup: makes what it trains.
        renews: whether each round begins with a new setup.

    Attributes:
        problem: why it is not published: a round's steps were not what the loop is called.
    """

    def __init__(self, prepare: Callable[[Setup], Run], make_setup: Callable[[], Setup], *, renews: bool) -> None:
        self._prepare, self._make_setup, self._renews = prepare, make_setup, renews
        self._syncs = 0
        self.problem: str | None = None
        self.hosts: list[float] = []
        self.walls: list[float] = []
        self._idle: float | None = None
        self._setup, self._run, self._first_seconds = self._begun()

    def _begun(self) -> tuple[Setup, Run, float]:
        """A setup, the loop over it, and the seconds of its first eight steps."""
        setup = self._make_setup()
        began = time.perf_counter()
        run = self._prepare(setup)
        run(8)
        harness.synchronize()
        return setup, run, time.perf_counter() - began

    def round(self) -> None:
        """Run the steps of a round and note times a step."""
        if self._renews and self.walls:
            self.close()
            self._setup, self._run, _ = self._begun()
        steps = self._setup.steps
        harness.synchronize()
        wall, host = time.perf_counter(), time.thread_time()
        try:
            self._syncs = self._run(steps)
        except ValueError as error:
            self.problem = str(error)
        self.hosts.append((time.thread_time() - host) / steps)
        harness.synchronize()
        self.walls.append((time.perf_counter() - wall) / steps)

    def close(self) -> None:
        """Give back what the loop holds."""
        self._setup.close()

    def forget_rounds(self) -> None:
        """Those before this do not count."""
        self.hosts, self.walls = [], []

    def watch_gpu(self) -> None:
        """Note in which share of the time the GPU, if there is one, has nothing to do."""
        if self._setup.device.type == "cuda" and self.problem is None:
            self._idle = harness.gpu_idle_share(lambda: self._run(50))

    def result(self) -> dict[str, Any]:
        """Percentiles over the rounds."""
        result: dict[str, Any] = {
            "steps_per_second": harness.rates(1, self.walls),
            "step_milliseconds": percentiles([wall * 1e3 for wall in self.walls]),
            "host_microseconds": percentiles([host * 1e6 for host in self.hosts]),
            "syncs_per_step": self._syncs / self._setup.steps,
            "first_8_steps_seconds": self._first_seconds,
        }
        return result if self._idle is None else {**result, "gpu_idle_share": self._idle}


def measure(
    case: Case, device: torch.device, names: list[str] | None, rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """The loops on one model: first each alone, where it compiles, then in turns, until rounds or time are over.

    Compiling takes none of the time. The results so far come after each loop and after each round.
    """
    make_setup = partial(Setup, case, device)
    measurements: dict[str, Measurement] = {}
    with ExitStack() as stack:
        for name, prepare in loops(device.type == "cuda").items():
            if not names or name in ("plain", "torch.compile") or any(part in name for part in names):
                renews = device.type == "cpu" and "compile" not in name
                measurements[name] = Measurement(prepare, make_setup, renews=renews)
                stack.callback(measurements[name].close)
                measurements[name].round()
                yield summary(measurements, case)
        for measurement in measurements.values():
            measurement.forget_rounds()
        began, names_in_turn = time.perf_counter(), list(measurements)
        for done in range(rounds):
            if done >= LEAST_ROUNDS and time.perf_counter() - began >= seconds:
                break
            # There and back, so that no loop always runs after the same one.
            for name in names_in_turn if done % 2 == 0 else reversed(names_in_turn):
                measurements[name].round()
            yield summary(measurements, case)
        for measurement in measurements.values():
            measurement.watch_gpu()
        yield summary(measurements, case)


def summary(measurements: dict[str, Measurement], case: Case) -> dict[str, Any]:
    """The results of a model's loops, after equally many rounds of each; and which are refused, and why."""
    refused = {name: measurement.problem for name, measurement in measurements.items() if measurement.problem}
    results = {name: measurement.result() for name, measurement in measurements.items() if name not in refused}
    add_differences(results, measurements)
    add_break_even(results)
    return {"rounds": len(measurements["plain"].walls), "steps": case.steps, "loops": results, "refused": refused}


def base_of(name: str) -> str:
    """The plain loop that does the same."""
    return "plain" if name.startswith("plain") or "eager" in name else "torch.compile"


def add_differences(results: dict[str, dict[str, Any]], measurements: dict[str, Measurement]) -> None:
    """What a step costs over the plain loop that does the same, within each round."""
    for name, entry in results.items():
        base = measurements[base_of(name)]
        pairs = list(zip(measurements[name].walls, base.walls, strict=True))
        hosts = zip(measurements[name].hosts, base.hosts, strict=True)
        entry["extra_host_microseconds"] = percentiles([(host - plain) * 1e6 for host, plain in hosts])
        entry["extra_microseconds"] = percentiles([(wall - plain) * 1e6 for wall, plain in pairs])
        entry["extra_share"] = percentiles([wall / plain - 1 for wall, plain in pairs])


def add_break_even(results: dict[str, dict[str, Any]]) -> None:
    """Steps after which a loop has won back what its first steps cost more than the plain loop's."""
    base = results["plain"]
    for entry in results.values():
        gain = (base["step_milliseconds"]["p50"] - entry["step_milliseconds"]["p50"]) / 1e3
        cost = entry["first_8_steps_seconds"] - base["first_8_steps_seconds"]
        entry["break_even_steps"] = 0 if cost <= 0 else round(cost / gain) if gain > 0 else None


def print_table(model: str, measured: dict[str, Any]) -> None:
    results = measured["loops"]
    heads = [
        ("steps/s", 9),
        ("ms/step", 9),
        ("host us", 9),
        ("extra host", 10),
        ("extra us", 9),
        ("extra", 7),
        ("syncs", 6),
        ("idle", 6),
    ]
    heads += [("first 8", 8), ("even", 8)]
    print(
        f"\n{model}, medians of {measured['rounds']} rounds\n{'loop':28} "
        + " ".join(f"{head:>{width}}" for head, width in heads)
    )
    for name, entry in results.items():
        idle = f"{entry['gpu_idle_share']:6.1%}" if "gpu_idle_share" in entry else f"{'-':>6}"
        even = "never" if entry["break_even_steps"] is None else entry["break_even_steps"]
        print(
            f"{name:28} {entry['steps_per_second']['p50']:9.1f} {entry['step_milliseconds']['p50']:9.3f} "
            f"{entry['host_microseconds']['p50']:9.0f} {entry['extra_host_microseconds']['p50']:10.0f} "
            f"{entry['extra_microseconds']['p50']:9.0f} {entry['extra_share']['p50']:7.1%} "
            f"{entry['syncs_per_step']:6.2f} {idle} "
            f"{entry['first_8_steps_seconds']:7.2f}s {even:>8}"
        )
    for name, problem in measured["refused"].items():
        print(f"{name:28} is not published: {problem}")


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
    for axis, (model, measured) in zip(axes[0], tables.items(), strict=True):
        results = measured["loops"]
        axis.barh(list(results), [entry["step_milliseconds"]["p50"] for entry in results.values()])
        axis.invert_yaxis()
        axis.set_title(model)
        axis.set_xlabel("milliseconds a step")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = harness.make_parser(__doc__, "loop")
    parser.add_argument("--rounds", type=harness.positive, default=15, help="turns of the loops (default: 15)")
    parser.add_argument("--seconds", type=float, default=110.0, help="for a model, at three rounds (default: 110)")
    parser.add_argument("--models", nargs="+", help="default: all of this device")
    parser.add_argument("--loops", nargs="+", help="the plain loops, and those whose name contains one of these")
    parser.add_argument("--threads", type=harness.positive, help="of torch's operators on the CPU (default: its own)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.backends.cudnn.benchmark = True
    device = harness.device_here()
    known = cases(device.type == "cuda")
    chosen = arguments.models or list(known)
    if not set(chosen) <= known.keys():
        parser.error(f"--models: on this device there are {', '.join(known)}")
    report = harness.describe(arguments, "loop.py")
    report["options"]["threads"] = torch.get_num_threads()
    report["models"] = {}
    with tempfile.TemporaryDirectory(prefix="torch_sink_loop_") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for model in chosen:
            for measured in measure(known[model], device, arguments.loops, arguments.rounds, arguments.seconds):
                report["models"][model] = measured
                harness.save(report, arguments.output)
            print_table(model, report["models"][model])
    harness.write(report, arguments.output)
    draw(report, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
