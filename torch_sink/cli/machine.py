"""The description of a machine that every benchmark writes, and a model of the time of kernels on a given GPU.

The model measures nothing on a GPU. The instructions of each operation were counted by running its compiled kernel on
the CPU, instruction by instruction (`kernel_costs.json`, written by `examples/benchmarks/kernel_costs.py`); a program
says for how many pixels each operation runs. An SM has four schedulers, each of which issues one warp instruction per
cycle, units for each kind of arithmetic, and a load-store unit that handles one wavefront per cycle. The modeled time
is that of the busiest part, with the work spread evenly over all SMs at boost clock and no waits for memory: a lower
bound. `ESTIMATED` says how far real times may lie above it.

Sources of units, clocks and bandwidths: NVIDIA's whitepapers and data sheets of the A100, H100 and Ada GPUs (an H200
has the SMs of an H100), and hmc-tech.com/gpus for the B200, with the integer and float64 units of an H100 assumed.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
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
    from torch_sink.image.run.batch import LazyBatch

# Prints the commit of a clone, with "+changes" if files differ from it; fails for an installed package.
_COMMIT = ("git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")
RELEASES = ("torch", "torchvision", "triton", "pillow", "numpy")


def describe_machine() -> dict[str, Any]:
    """Releases, processor, accelerator, thread count, date and commit, as JSON-ready values."""
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
    """The processor's name in /proc/cpuinfo, else the architecture."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def gpu_name() -> str | None:
    """The name of the first accelerator; None if there is none."""
    # current_accelerator() returns "cuda" for every CUDA build, even without a GPU.
    if not torch.accelerator.is_available():
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())


def gpu_driver() -> str | None:
    """The NVIDIA driver's release; None if `nvidia-smi` fails."""
    return _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _output_of(*command: str, cwd: Path | None = None) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=cwd)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip().partition("\n")[0] or None


class Device(NamedTuple):
    """The figures of a GPU that the model needs."""

    multiprocessors: int
    gigahertz: float  # boost clock
    units: dict[str, int]  # kind of arithmetic -> units of one multiprocessor
    bus: float  # bandwidth of PCIe in one direction, in GB/s


# The multiple of the modeled time that real kernels are expected to take: estimated for 256 photographs of ImageNet on
# an H100, from the longest chains of dependent instructions, from lanes and warps of unequal length, and from the
# traffic to memory. Nothing of it was measured.
ESTIMATED = {"decode": (2.0, 3.0), "kernels": (1.3, 1.7)}

LANES, SCHEDULERS = 32, 4
DEVICES = {
    "A100": Device(108, 1.41, {"float32": 64, "float64": 32, "integer": 64}, 32),
    "H100": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "H200": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "B200": Device(148, 1.98, {"float32": 128, "float64": 64, "integer": 64}, 64),
    "RTX4090": Device(128, 2.52, {"float32": 128, "float64": 2, "integer": 64}, 32),
}


def microseconds(work: Mapping[str, float], device: Device) -> float:
    """The modeled time of `work`: warp instructions, in all ("issue") and by kind, and wavefronts ("load-store")."""
    cycles = [work.get("issue", 0) / SCHEDULERS, work.get("load-store", 0)]
    cycles += [work.get(kind, 0) * LANES / units for kind, units in device.units.items()]
    return max(cycles) / (device.multiprocessors * device.gigahertz * 1e3)


@functools.cache
def costs() -> dict[str, Any]:
    """The counted costs: feature -> work for one, the launches of the decoder, and the cost of the host."""
    found: dict[str, Any] = json.loads(files("torch_sink.cli").joinpath("kernel_costs.json").read_text())
    return found


def modeled(features: Mapping[str, float]) -> Counter[str]:
    """The work of kernels for these amounts of features; features without a known cost count as nothing."""
    work: Counter[str] = Counter()
    for name, amount in features.items():
        for unit, each in costs()["features"].get(name, {}).items():
            work[unit] += amount * each
    return work


def features_of_batch(batch: LazyBatch) -> list[Counter[str]]:
    """The amount of each feature in each launch of a batch, the decoder first: bytes, and pixels of whole tiles.

    A head that reads several pixels has two features, one for itself and one for its taps, the pixels that it reads.
    """
    program = batch.program
    if not program.launches:
        return [Counter()]
    decoded = program.array("boxes")[program.array("files")[:, 0], 2:].astype(np.int64).prod(axis=1).sum()
    encoded = 0 if program.jpegs is None else program.jpegs.encoded_bytes
    found: list[Counter[str]] = [Counter({"encoded byte": encoded, "decoded pixel": int(decoded)})]
    work, jobs, operations = (program.array(name) for name in ("work", "jobs", "operations"))
    resizes = work[work[:, rows.WORK] == rows.WEIGHTS]
    found.append(Counter(weight=int((resizes[:, rows.OUT_SIZE] * resizes[:, rows.TAPS]).sum())))
    for launch in program.launches:
        statistics = program.array("statistics")[launch.statistics_begin : launch.statistics_end]
        if len(statistics):
            measured = jobs[statistics[:, rows.MEASURED_JOB]]
            found.append(Counter(measured=int(measured[:, [rows.HEIGHT, rows.WIDTH]].prod(axis=1).sum())))
        stage: Counter[str] = Counter()
        for job in program.jobs_of(launch).tolist():
            pixels = math.prod(-(-job[rows.HEIGHT + axis] // side) * side for axis, side in enumerate(costs()["tile"]))
            stage["stage, heavy" if launch.is_heavy else "stage"] += pixels
            head = [job[rows.HEAD]] if job[rows.HEAD] else []
            for row in (*head, *range(job[rows.TAIL_BEGIN], job[rows.TAIL_END])):
                code, *values = operations[row].tolist()
                stage[name_of(Kind(code))] += pixels
                stage[f"{name_of(Kind(code))}, tap"] += pixels * _taps(Kind(code), values[2])
        found.append(+stage)
    return found


def launches_of(batch: LazyBatch) -> Counter[str]:
    """The number of launches of each kernel for a batch; "decoder" counts all kernels of the decoder."""
    encoded, *launches = features_of_batch(batch)
    found = Counter(dict.fromkeys(("decoder", "prologue", "statistics", "stage"), 0))
    found.update({"weight": "prologue", "measured": "statistics"}.get(next(iter(each)), "stage") for each in launches)
    for least, count in costs()["decoder_launches"]:
        if encoded["encoded byte"] > least:
            found["decoder"] = count
    return found


def name_of(kind: Kind) -> str:
    """The name of a kind of kernel work in a printed program."""
    return kind.name.lower()


def _taps(kind: Kind, value: int) -> int:
    """How many pixels a head reads to compute one; `value` is the parameter of the head that decides this."""
    if kind in (Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.FILTER_X, Kind.FILTER_Y):
        return value
    if kind == Kind.BOX_BLUR:
        return 2 * value + 3
    if kind == Kind.CONVOLUTION:
        return value**2
    if kind == Kind.GRID:
        return (1, 4, 16)[value]
    return {0: 1, 2: 4, 3: 16}[value] if kind == Kind.WARP else 0
