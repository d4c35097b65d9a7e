"""Which long tests of kernels have passed with the code and the Triton that are here, and so run in part.

`make seen` runs them whole, on the newest releases and on the oldest, and writes `seen.json`. Whatever a result depends
on is in a digest: whoever changes the package, a simulator, one of these tests or their helpers, or has another release of
Triton, torch, torchvision, Pillow or NumPy, runs them whole.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("seen.json")
# The tests read batches through loaders and loops, and compare by helpers that other tests have too.
SOURCES = (
    "triton_kernels", "torch_sink", "tests/kernels", "tests/simulators", "tests/image/*.py", "tests/*.py",
    "examples/benchmarks/kernel*.py", "pyproject.toml",
)  # fmt: skip
COMPARED = ("torchvision", "pillow", "numpy")  # stock code, and what interprets kernels


@functools.cache
def digest() -> str:
    """16 hexadecimal digits of all sources."""
    files = [path for pattern in SOURCES for path in ROOT.glob(pattern)]
    files += [path for folder in files if folder.is_dir() for path in folder.rglob("*.py")]
    found = hashlib.sha256()
    for path in sorted({path for path in files if path.is_file()}):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def releases() -> str:
    """That of Triton, which compiles and interprets, and the minor ones of what the results are compared with."""
    found = {"torch": torch.__version__, **{name: version(name) for name in COMPARED}}
    minor = (f"{name} {'.'.join(number.split('.')[:2])}" for name, number in found.items())
    return ", ".join([f"triton {triton.__version__}", *minor])


def is_seen(test: str) -> bool:
    """Whether a test has passed whole with all that is here. False while `make seen` runs."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return "RECORD_SEEN" not in os.environ and record.get(releases(), {}).get(test) == digest()


def note(test: str) -> None:
    """Note that a test has passed whole, if `make seen` runs it."""
    if "RECORD_SEEN" in os.environ:
        record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
        record.setdefault(releases(), {})[test] = digest()
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
