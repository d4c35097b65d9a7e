"""The description of a machine that every benchmark writes."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torch_sink import __version__
from torch_sink.common import usable_cores

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
