"""The part of torch that keeps the current device and streams of each thread, where there is no device."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
# torch's own stand-in, which its headers have for its tests.
SOURCE = """
#include <c10/core/impl/FakeGuardImpl.h>

extern "C" void set_guard() {
    using namespace c10;
    using Guard = impl::FakeGuardImpl<DeviceType::CUDA>;
    impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(new Guard());
}
"""


def set_guard() -> None:
    """Put torch's stand-in in the place of the guard that asks the driver."""
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # from torch 2.9 on
        torch._C._ensureCUDADeviceGuardSet()
    else:
        ctypes.CDLL(str(_compiled())).set_guard()


def _compiled() -> Path:
    """The library, which is compiled once for a release of torch and a user."""
    library = Path(tempfile.gettempdir(), f"torch_sink_tests_guard_{torch.__version__}_{os.getuid()}.so")
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(SOURCE)
            paths = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
            command = ["g++", "-std=c++17", "-shared", "-fPIC", *paths, str(source), "-o", str(made), "-lc10"]
            subprocess.run(command, check=True)
            kept = library.with_suffix(f".{os.getpid()}")
            kept.write_bytes(made.read_bytes())
            kept.replace(library)  # at once: other processes may look for it
    return library
