"""What a measurement was taken on: releases, processor, accelerator. Every benchmark writes it beside its figures."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torch_sink.common.platforms import usable_cores

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
