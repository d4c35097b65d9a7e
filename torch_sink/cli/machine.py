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
import re
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

from torch_sink.common.platforms import usable_cores
from torch_sink.image.core.atoms import Kind
from torch_sink.triton_kernels import rows

if TYPE_CHECKING:
    from torch_sink.image.execute.batch import LazyBatch
    from torch_sink.image.plan.build import Plan

LANES = 32
SCHEDULERS = 4
ARITHMETIC = ("float32", "float64", "integer")
# Instructions of the machine for one of PTX, where it is not one: assumed.
EXPANDED = {"div.rn.f32": 10, "div.rn.f64": 30, "div.s32": 20, "div.u32": 20, "rem.s32": 20, "rem.u32": 20}
_WIDE_INTEGER = re.compile(r"\.(s64|u64|b64)$|^(mad|mul)\.wide\.[su]32$")
_ELSEWHERE = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "bar", "bra", "brx", "ret", "shfl", "redux", "vote")
_ALONG_AN_AXIS = (Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.FILTER_X, Kind.FILTER_Y)
RELEASES = ("torch-sink", "torch", "torchvision", "triton", "pillow", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return releases, processor, accelerator, thread count, date and commit as JSON-ready values."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "releases": {name: release_of(name) for name in RELEASES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu_name(),
        "gpu_driver": gpu_driver(),
        "commit": commit_of(Path(__file__).resolve().parent),
    }


def release_of(distribution: str) -> str | None:
    """Return the installed release of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name as the kernel reports it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_name() -> str | None:
    """Return the name of the first accelerator, None without one."""
    # current_accelerator() names "cuda" for every CUDA build, with a GPU or without.
    if not torch.accelerator.is_available():
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())


def gpu_driver() -> str | None:
    """Return the NVIDIA driver's release, None where `nvidia-smi` does not answer."""
    return _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit_of(folder: Path) -> str | None:
    """Return the git commit of a checkout, with "+changes" if it differs; None for an installed package."""
    commit = _output_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changes = _output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changes else "")


def _output_of(*command: str) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = finished.stdout.strip().splitlines()
    return lines[0].strip() if lines else None


class Device(NamedTuple):
    """One GPU.

    Attributes:
        multiprocessors: how many SMs.
        gigahertz: their boost clock.
        units: of one SM, for each kind of arithmetic.
        bus: bandwidth of its PCIe bus in one direction, in GB/s.
    """

    multiprocessors: int
    gigahertz: float
    units: dict[str, int]
    bus: float


DEVICES = {
    "A100": Device(108, 1.41, {"float32": 64, "float64": 32, "integer": 64}, 32),
    "H100": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "H200": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "B200": Device(148, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "RTX4090": Device(128, 2.52, {"float32": 128, "float64": 2, "integer": 64}, 32),
}

# What is executed: instructions of warps in all ("issue") and by kind of arithmetic, and wavefronts ("load-store").
Work = Mapping[str, float]


def work_of(instructions: Mapping[str, int], wavefronts: int) -> Counter[str]:
    """Sums up what warps execute.

    Args:
        instructions: {name in PTX: how often a warp executes it}.
        wavefronts: of loads, stores and atomic operations.
    """
    work: Counter[str] = Counter({"load-store": wavefronts})
    for name, times in instructions.items():
        executed = times * machine_instructions(name)
        work["issue"] += executed
        if kind := kind_of(name):
            work[kind] += executed
    return work


def kind_of(name: str) -> str:
    """What computes an instruction: "float32", "float64", "integer", or "" for another unit."""
    if name.partition(".")[0] in _ELSEWHERE:
        return ""
    return "float64" if ".f64" in name else "float32" if ".f32" in name else "integer"


def machine_instructions(name: str) -> int:
    """About how many instructions of the machine one of PTX becomes."""
    return EXPANDED.get(name, 2 if kind_of(name) == "integer" and _WIDE_INTEGER.search(name) else 1)


def microseconds(work: Work, device: Device) -> float:
    """The model's time for what warps execute."""
    cycles = [work.get("issue", 0) / SCHEDULERS, work.get("load-store", 0)]
    cycles += [work.get(kind, 0) * LANES / device.units[kind] for kind in ARITHMETIC]
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
    recorded = batch.recorded
    jpegs, boxes = recorded.packed.jpegs, recorded.plan().boxes
    pixels = boxes[jpegs.sources, 2:].astype(np.int64).prod(axis=1).sum()
    found = [Counter({"encoded byte": int(jpegs.segments[:, 1].sum()), "decoded pixel": int(pixels)})]
    return found + [launch for run in recorded.plan().runs for launch in _features_of_plan(run.plan)]


def _features_of_plan(plan: Plan) -> Iterator[Counter[str]]:
    yield Counter(weight=int((plan.resizes[:, rows.OUT_SIZE] * plan.resizes[:, rows.TAPS]).sum()))
    for launch in plan.launches:
        measured = plan.statistics[launch.statistics_begin : launch.statistics_end, rows.MEASURED_JOB]
        if len(measured):
            yield Counter(measured=int(plan.jobs[measured][:, [rows.HEIGHT, rows.WIDTH]].prod(axis=1).sum()))
        stage: Counter[str] = Counter()
        for job in plan.jobs[plan.slot_jobs[launch.begin : launch.end]].tolist():
            pixels = math.prod(-(-job[rows.HEIGHT + axis] // side) * side for axis, side in enumerate(costs()["tile"]))
            stage["stage, heavy" if launch.is_heavy else "stage"] += pixels
            head = [job[rows.HEAD]] if job[rows.HEAD] else []
            for row in (*head, *range(job[rows.TAIL_BEGIN], job[rows.TAIL_END])):
                code, *values = plan.operations[row].tolist()
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
    if kind in _ALONG_AN_AXIS:
        return value
    if kind == Kind.BOX_BLUR:
        return 2 * value + 3
    if kind == Kind.GRID:
        return (1, 4, 16)[value]
    return {0: 1, 2: 4, 3: 16}[value] if kind == Kind.WARP else 0
