"""A clone as it lies on a machine where nobody installed it: no `.git`, packages on a path alone, no home folder."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from PIL import Image

from torch_sink.cli.photos import write_photos

ROOT = Path(__file__).resolve().parents[1]
BASE_PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
# What a shell may say about caches, and about where the project's own files are.
_TOLD = ("PYTHON", "TRITON_", "TORCHINDUCTOR_", "XDG_", "TORCH_SINK_", "VIRTUAL_ENV", "MAKE", "PYTEST_")


def copy_clone(folder: Path) -> Path:
    """A copy of what git does not ignore."""
    ignored = (ROOT / ".gitignore").read_text().split()
    names = shutil.ignore_patterns(".git", *(name.strip("/") for name in ignored if "/" not in name.strip("/")))
    return Path(shutil.copytree(ROOT, folder, ignore=names, symlinks=True))


def link_packages(folder: Path) -> Path:
    """All packages of this environment by links, without what an install of the project left there."""
    folder.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.suffix != ".pth" and "torch_sink" not in package.name:
            (folder / package.name).symlink_to(package)
    return folder


def small_photographs(folder: Path) -> Path:
    """An ImageFolder tree of files that are decoded in no time."""
    for path in write_photos(folder, count=8, classes=2):
        with Image.open(path) as image:
            image.resize((64, 48)).save(path, quality=90)
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """Variables of a process that finds packages in these folders, and whose home cannot be written by anybody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_TOLD)}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, folders)), "HOME": "/proc/nowhere", "OMP_NUM_THREADS": "1"}
