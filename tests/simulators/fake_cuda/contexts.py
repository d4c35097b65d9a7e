"""One answer that torch asks of the driver itself: whether a device has a context, without which nothing runs there.

Autograd asks it before each backward pass, below everything that Python can reach, and there is no device to ask. So
the object that answers gets a copy of its table of virtual functions with one of them replaced.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
HEADER = TORCH / "include/ATen/detail/AcceleratorHooksInterface.h"
ENTRIES = 64  # more than the table has
Answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)


class Contexts:
    """Devices have a context while this is `installed`."""

    def __init__(self) -> None:
        find = ctypes.CDLL(str(TORCH / "lib/libtorch_cpu.so"))["_ZN2at6detail12getCUDAHooksEv"]
        find.restype = ctypes.c_void_p
        self._object = find()
        self._place = ctypes.c_void_p.from_address(self._object)
        self._original = self._place.value
        functions = (ctypes.c_void_p * ENTRIES).from_address(self._original)
        is_built = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(functions[_entry("isBuilt")])
        if not is_built(self._object):
            raise RuntimeError("the table of CUDA's hooks is not as its header says")
        self._table = (ctypes.c_void_p * ENTRIES)(*functions)
        self._answer = Answer(lambda _, device: True)
        self._table[_entry("hasPrimaryContext")] = ctypes.cast(self._answer, ctypes.c_void_p).value

    def install(self) -> None:
        """Answer for the driver."""
        self._place.value = ctypes.addressof(self._table)

    def remove(self) -> None:
        """Let the driver answer again."""
        self._place.value = self._original


def _entry(name: str) -> int:
    """Position of a function in the table: that in the class, behind the two destructors."""
    names = re.findall(r"\bvirtual\b[^(;]*?(~?\w+)\(", HEADER.read_text())
    if names[0] != "~AcceleratorHooksInterface":
        raise RuntimeError(f"{HEADER} does not begin with the destructor")
    return names.index(name) + 1
