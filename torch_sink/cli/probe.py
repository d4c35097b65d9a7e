"""Launches the smallest kernel there is, and says in plain words why it cannot be launched."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import textwrap
import time
import traceback
from pathlib import Path

import torch
import triton
import triton.language as tl

# A part of what Triton, its assembler or the driver say -> what is wrong, what to do.
_KNOWN = (
    ("libcuda.so cannot found", "Triton does not find libcuda.so.1", "run ldconfig, or set TRITON_LIBCUDA_PATH"),
    ("unsupported toolchain", "the driver is too old for what Triton assembles", "update the NVIDIA driver"),
    ("kernel image is invalid", "the driver is too old for what Triton assembles", "update the NVIDIA driver"),
    ("version is insufficient", "the driver is too old for this build of torch", "update the NVIDIA driver"),
    ("is not defined for option 'gpu-name'", "Triton does not know this GPU yet", "pip install -U torch triton"),
    ("failed to map segment", "Triton's cache lies where nothing may be executed", "set TRITON_CACHE_DIR"),
)
_INSTALL_COMPILER = "install one, for instance: apt install gcc; or name one: CC=/path/to/cc"


@triton.jit  # type: ignore[untyped-decorator]
def probe_kernel(values):  # type: ignore[no-untyped-def]
    """Writes 1 to values[0], uint8."""
    tl.store(values, 1)


def launch(device: torch.device) -> float:
    """Compile and launch the kernel on a device, wait for it, and return the seconds that took.

    Raises:
        Exception: whatever Triton, a compiler or the driver raises.
    """
    started = time.perf_counter()
    values = torch.zeros(16, dtype=torch.uint8, device=device)
    probe_kernel[(1,)](values, enable_fp_fusion=False)  # asked for nothing, Triton warns
    if values.tolist() != [1, *[0] * 15]:
        raise RuntimeError(f"the kernel that writes 1 left {values.tolist()}")
    return time.perf_counter() - started


def diagnose(error: Exception) -> tuple[str, str]:
    """What is wrong, and what to do, where the kernel could not be launched."""
    for check in (missing_compiler, missing_header, unwritable_cache):
        if found := check():
            return found
    said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
    all_said = "".join(traceback.format_exception(error, limit=0))  # what it was raised from, too
    for part, wrong, remedy in _KNOWN:
        if part in all_said:
            return f"{wrong} ({said})", remedy
    return said, "python -m torch_sink doctor 2>&1 shows what the compiler says; report it with this line"


def missing_compiler() -> tuple[str, str] | None:
    """Triton builds its launcher with a C compiler when it is used first on a machine."""
    named = os.environ.get("CC")
    if named is not None:
        found = shutil.which(named) is not None
        return None if found else (f"Triton needs a C compiler, and CC={named} is none", _INSTALL_COMPILER)
    if shutil.which("gcc") or shutil.which("clang"):
        return None
    return "Triton needs a C compiler, and there is neither gcc nor clang", _INSTALL_COMPILER


def missing_header() -> tuple[str, str] | None:
    """The launcher includes Python.h."""
    folder = Path(sysconfig.get_paths()["include"])
    if (folder / "Python.h").is_file():
        return None
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return f"Triton needs Python.h, and it is not in {folder}", f"install it, for instance: apt install {release}-dev"


def unwritable_cache() -> tuple[str, str] | None:
    """Compiled kernels go into a folder."""
    folder = str(triton.knobs.cache.dir)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        reason = f"Triton's cache {folder} cannot be written: {error.strerror}"
        return reason, "set TRITON_CACHE_DIR to a folder that can be written"
