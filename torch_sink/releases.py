"""The releases of Python and of other packages that torch_sink is tested with, and what it says of others.

This is the one list of them: a test compares requirements, the environments of the tests and the pages with it.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import sysconfig
import warnings

PYTHONS = ("3.10", "3.15")
OLDEST = {"torch": "2.8", "torchvision": "0.23", "triton": "3.4", "pillow": "11.2.1"}
NEWEST = {"torch": "2.15", "torchvision": "0.29", "triton": "3.9"}


def numbers_of(release: str) -> tuple[int, ...]:
    """The numbers of a release, for comparisons: (2, 16, 0) of "2.16.0.dev20270101+cu130"."""
    parts = release.split("+")[0].split(".")[:3]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def is_newer(package: str, release: str) -> bool:
    """Whether a release is of a later minor release than the newest that is tested."""
    newest = NEWEST.get(package)
    return newest is not None and numbers_of(release)[:2] > numbers_of(newest)


def check_python() -> None:
    """Refuse a build of Python that the tests do not run on.

    Raises:
        ImportError: a free-threaded build, which counts references in two places for each object.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError(
            "torch_sink needs a build of Python with the GIL, and this is a free-threaded one: run python3.14, not "
            "python3.14t. What a call in place may change is found by counting references, which differs there"
        )


def warn_of_newer() -> None:
    """Warn, in one line, of packages that are newer than those tested.

    Data workers leave that to their parent, and the ranks that torchrun starts to the first one: they import this
    before they form a group.
    """
    if multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return
    found = {}
    for package in NEWEST:
        try:
            release = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if is_newer(package, release):
            found[package] = release
    if found:
        named = ", ".join(f"{package} {release} (tested up to {NEWEST[package]})" for package, release in found.items())
        warnings.warn(
            f"this torch_sink does not know {named}: pixels and captured steps may differ from those of stock code, or "
            "fail; install a newer torch_sink, or compare a short run with image_backend('PIL') and mode='eager'",
            stacklevel=3,
        )
