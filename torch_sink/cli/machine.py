"""What a measurement was taken on, and how long a GPU that is not here would take.

Every benchmark writes releases, processor and accelerator beside its figures.

Times of kernels are modeled from plans; nothing was measured on a GPU. What each operation executes was counted: its
compiled kernel ran on the CPU, instruction by instruction (`kernel_costs.json`, written by
`examples/benchmarks/kernel_costs.py`). A plan says for how many pixels each runs. Each SM has four schedulers, each of
which issues one instruction of a warp a cycle, some units for each kind of arithmetic, and a load-store unit that does
a wavefront a cycle. The time is that of whichever is busy longest, if all SMs share the work evenly, nobody waits for
memory, and the clock is the highest that is named for it: a lower bound.

Units, clocks and buses: NVIDIA's whitepapers of the A100, H100 and Ada GPUs and their data sheets (an H200 has the SMs
of an H100); for the B200 hmc-tech.com/gpus, and for its units of integers and float64 those of an H100, which is
assumed.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torch_sink import __version__
from torch_sink.common import usable_cores
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

if TYPE_CHECKING:
    from torch_sink.image.program.program import Program
    from torch_sink.image.run.batch import LazyBatch

# Of this checkout, with "+changes" if it differs; an installed package has none.
_COMMIT = ("git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")
RELEASES = ("torch", "torchvision", "triton", "pillow", "numpy")


def describe_machine() -> dict[str, Any]:
    """Releases, processor, accelerator, thread count, date and commit as JSON-ready values."""
    installed = {name: [*metadata.distributions(name=name)] for name in RELEASES}
    releases = {name: found[0].version if found else None for name, found in installed.items()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "releases": {"torch-sink": __version__, **releases},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu_name(),
        "gpu_driver": gpu_driver(),
        "commit": _output_of(*_COMMIT, cwd=Path(__file__).parent),
    }


def cpu_name() -> str:
    """The processor's name as the system's kernel reports it, else the architecture."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpu_name() -> str | None:
    """The name of the first accelerator, None without one."""
    # current_accelerator() names "cuda" for every CUDA build, with a GPU or without.
    if not torch.accelerator.is_available():
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())


def gpu_driver() -> str | None:
    """The NVIDIA driver's release, None where `nvidia-smi` does not answer."""
    return _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output_of(*command: str, cwd: Path | None = None) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=cwd)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip().partition("\n")[0] or None


class Device(NamedTuple):
    """One GPU."""

    multiprocessors: int
    gigahertz: float  # boost clock
    units: dict[str, int]  # of one multiprocessor, for each kind of arithmetic
    bus: float  # bandwidth of PCIe in one direction, in GB/s


LANES, SCHEDULERS = 32, 4
DEVICES = {
    "A100": Device(108, 1.41, {"float32": 64, "float64": 32, "integer": 64}, 32),
    "H100": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "H200": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "B200": Device(148, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "RTX4090": Device(128, 2.52, {"float32": 128, "float64": 2, "integer": 64}, 32),
}


def microseconds(work: Mapping[str, float], device: Device) -> float:
    """The model's time for instructions of warps, in all ("issue") and by kind, and wavefronts ("load-store")."""
    cycles = [work.get("issue", 0) / SCHEDULERS, work.get("load-store", 0)]
    cycles += [work.get(kind, 0) * LANES / units for kind, units in device.units.items()]
    return max(cycles) / (device.multiprocessors * device.gigahertz * 1e3)


@functools.cache
def costs() -> dict[str, Any]:
    """What was counted: for each launch of the decoder and of a plan, {feature: work for one}, and the host's cost."""
    found: dict[str, Any] = json.loads(files("torch_sink.cli").joinpath("kernel_costs.json").read_text())
    return found


def modeled(features: Mapping[str, float]) -> Counter[str]:
    """What kernels execute for something that has these features; those without a cost count nothing."""
    work: Counter[str] = Counter()
    for name, amount in features.items():
        for unit, each in costs()["features"].get(name, {}).items():
            work[unit] += amount * each
    return work


def features_of_batch(batch: LazyBatch) -> list[Counter[str]]:
    """What each launch for a batch has to do, that of the decoder first. Amounts are bytes, and pixels of whole tiles.

    A head that reads several pixels has a cost of its own and one for each of these, its taps.
    """
    program = batch.program
    if not program.launches:
        return [Counter()]
    pixels = program.array("boxes")[program.array("files")[:, 0], 2:].astype(np.int64).prod(axis=1).sum()
    encoded = 0 if program.jpegs is None else program.jpegs.encoded_bytes
    return [Counter({"encoded byte": encoded, "decoded pixel": int(pixels)}), *_features_of_launches(program)]


def _features_of_launches(program: Program) -> Iterator[Counter[str]]:
    work, jobs, operations = (program.array(name) for name in ("work", "jobs", "operations"))
    resizes = work[work[:, rows.WORK] == rows.WEIGHTS]
    yield Counter(weight=int((resizes[:, rows.OUT_SIZE] * resizes[:, rows.TAPS]).sum()))
    for launch in program.launches:
        statistics = program.array("statistics")[launch.statistics_begin : launch.statistics_end]
        if len(statistics):
            measured = jobs[statistics[:, rows.MEASURED_JOB]]
            yield Counter(measured=int(measured[:, [rows.HEIGHT, rows.WIDTH]].prod(axis=1).sum()))
        stage: Counter[str] = Counter()
        for job in program.jobs_of(launch).tolist():
            pixels = math.prod(-(-job[rows.HEIGHT + axis] // side) * side for axis, side in enumerate(costs()["tile"]))
            stage["stage, heavy" if launch.is_heavy else "stage"] += pixels
            head = [job[rows.HEAD]] if job[rows.HEAD] else []
            for row in (*head, *range(job[rows.TAIL_BEGIN], job[rows.TAIL_END])):
                code, *values = operations[row].tolist()
                stage[name_of(Kind(code))] += pixels
                stage[f"{name_of(Kind(code))}, tap"] += pixels * _taps(Kind(code), values[2])
        yield +stage


def launches_of(batch: LazyBatch) -> Counter[str]:
    """How often each kernel is launched for a batch; "decoder" stands for all of those."""
    encoded, *launches = features_of_batch(batch)
    found = Counter(dict.fromkeys(("decoder", "prologue", "statistics", "stage"), 0))
    found.update({"weight": "prologue", "measured": "statistics"}.get(next(iter(each)), "stage") for each in launches)
    for least, count in costs()["decoder_launches"]:
        if encoded["encoded byte"] > least:
            found["decoder"] = count
    return found


def name_of(kind: Kind) -> str:
    """Of a piece of kernel work, as the printed plan names it."""
    return kind.name.lower()


def _taps(kind: Kind, value: int) -> int:
    """How many pixels a head reads for one; `value` is the parameter that says so."""
    if kind in (Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.FILTER_X, Kind.FILTER_Y):
        return value
    if kind == Kind.BOX_BLUR:
        return 2 * value + 3
    if kind == Kind.CONVOLUTION:
        return value**2
    if kind == Kind.GRID:
        return (1, 4, 16)[value]
    return {0: 1, 2: 4, 3: 16}[value] if kind == Kind.WARP else 0
