"""Where the suites come from: a folder that somebody names, or the releases of their own projects. Never from here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Suite(NamedTuple):
    """A project's tests.

    Args:
        name: of the project.
        package: whose installed release is tested.
        url: of the release's archive, or of a file; "" where pip has it.
        names: what the source is called in a folder: a checkout, an unpacked or a packed release, or a file. Patterns.
        marker: a file of the tests, by whose path their folder is found.
        levels: how many folders above that file pytest runs.
        needs: what of that folder the tests need. Patterns.
        files: the test files, by mode. Patterns, relative to the folder.
    """

    name: str
    package: str
    url: str
    names: tuple[str, ...]
    marker: str
    levels: int
    needs: str
    files: dict[str, tuple[str, ...]]

    @property
    def version(self) -> str:
        """The installed release, without what a build adds to it ("+cpu")."""
        return metadata.version(self.package).partition("+")[0]


_TRANSFORMS = (
    "test_transforms.py", "test_transforms_tensor.py", "test_transforms_v2.py", "test_transforms_v2_utils.py",
    "test_transforms_video.py", "test_functional_tensor.py", "test_tv_tensors.py",
)  # fmt: skip
_DATA = (
    "test_datasets.py", "test_datasets_samplers.py", "test_datasets_utils.py", "test_datasets_video_utils.py",
    "test_image.py", "test_io.py", "test_utils.py",
)  # fmt: skip
_LOADERS = ("stateful_dataloader/test_dataloader.py", "stateful_dataloader/test_[!d]*.py", "nodes/test_*.py")

SUITES = (
    Suite(
        "torchvision", "torchvision", "https://github.com/pytorch/vision/archive/refs/tags/v{version}.tar.gz",
        ("vision", "vision-*", "torchvision*"), "test_transforms_v2.py", 0, "*",
        {"backend": _TRANSFORMS + _DATA, "handles": _TRANSFORMS + _DATA, "kernels": _TRANSFORMS},
    ),
    Suite(
        "Pillow", "pillow", "", ("Pillow", "pillow-*"), "Tests/helper.py", 1, "Tests",
        {"backend": ("Tests/test_*.py",), "handles": ("Tests/test_*.py",)},
    ),
    Suite(
        "PyTorch", "torch", "https://raw.githubusercontent.com/pytorch/pytorch/v{version}/test/test_dataloader.py",
        ("pytorch", "pytorch-*", "test_dataloader.py"), "test_dataloader.py", 0, "test_dataloader.py",
        {"backend": ("test_dataloader.py",), "sink": ("test_dataloader.py",)},
    ),
    Suite(
        "torchdata", "torchdata", "https://github.com/meta-pytorch/data/archive/refs/tags/v{version}.tar.gz",
        ("data", "data-*", "torchdata*"), "stateful_dataloader/test_state_dict.py", 1, "*",
        {"backend": _LOADERS, "sink": ("stateful_dataloader/test_dataloader.py",)},
    ),
)  # fmt: skip

# Of the tests; without their dependencies, which the environment has.
REQUIREMENTS = (
    *("pytest-mock", "pytest-timeout", "expecttest", "parameterized"),
    *("defusedxml", "olefile", "pycocotools", "lmdb", "h5py"),
)


def install_requirements(folder: Path) -> Path:
    """Installs what the suites need beside what the environment has into a folder, for them alone."""
    if not (folder / ".ready").exists():
        pip("install", "--no-deps", "--target", str(folder), *REQUIREMENTS)
        (folder / ".ready").touch()
    return folder


def pip(*arguments: str) -> None:
    """Calls pip; its message is that of the error."""
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
    subprocess.run(command, check=True, capture_output=True, text=True)


def find(suite: Suite, named: Path | None, scratch: Path) -> tuple[Path, str]:
    """The folder of a suite's tests, to which they may write, and what it was made of.

    Looks into `named` first, then at the release of the installed version.

    Raises:
        LookupError: it is in neither place; the message says what was tried.
    """
    source, why = _in_folder(suite, named), "no folder was named"
    if named is not None:
        why = f"{named} has none of {', '.join(suite.names)}"
    if source is None:
        try:
            source = _released(suite, scratch / "releases" / f"{suite.package}-{suite.version}")
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
            raise LookupError(f"{why}, and its release {suite.version} cannot be had: {' '.join(said)}") from error
    if source.is_file() and ".tar" in source.suffixes:
        unpacked = scratch / "unpacked" / suite.name
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(source) as archive:
            archive.extractall(unpacked, filter="data")
    else:
        unpacked = source
    return _copied(suite, unpacked, scratch / "sources" / suite.name), source.name


def _in_folder(suite: Suite, named: Path | None) -> Path | None:
    found = [path for name in suite.names for path in sorted(named.glob(name))] if named is not None else []
    return found[0] if found else None


def _released(suite: Suite, folder: Path) -> Path:
    """The release of the installed version: an archive, or a file."""
    version = suite.version
    folder.mkdir(parents=True, exist_ok=True)
    url = suite.url.format(version=version)
    is_archive = not url or url.endswith(".tar.gz")
    file = folder / (f"{suite.package}-{version}.tar.gz" if is_archive else url.rpartition("/")[2])
    if not url and not file.exists():
        requirement = f"{suite.package}=={version}"
        pip("download", "--no-deps", "--no-binary", suite.package, "-d", str(folder), requirement)
    elif not file.exists():
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read()
        file.write_bytes(content)
    return file


def _copied(suite: Suite, source: Path, root: Path) -> Path:
    """The folder in which pytest runs: a copy of what the tests need of a checkout, a release or a file."""
    inside = [source] if source.is_file() else source.rglob(Path(suite.marker).name)
    found = sorted((path for path in inside if path.match(suite.marker)), key=lambda path: (len(path.parts), path))
    if not found:
        raise LookupError(f"{source} has no {suite.marker}")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path in found[0].parents[suite.levels].glob(suite.needs):
        if path.is_dir():
            shutil.copytree(path, root / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, root)
    return root
