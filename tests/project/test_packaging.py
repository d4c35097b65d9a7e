"""The list of packages in pyproject.toml names every folder of code: a folder it lacks is missing from the wheel."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torch_sink
from torch_sink.cli.doctor import oldest_releases

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]


def listed_packages() -> list[str]:
    """Read without tomllib, which Python 3.10 lacks."""
    block = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return re.findall(r'"([\w.]+)"', block[1])


def folders_of_code() -> set[str]:
    ours = {file.parent for name in ("torch_sink", "triton_kernels") for file in (ROOT / name).rglob("*.py")}
    dotted = {".".join(folder.relative_to(ROOT).parts) for folder in ours}
    return {re.sub(r"^(torch_sink\.)?triton_kernels", "torch_sink.triton_kernels", name) for name in dotted}


def test_every_folder_of_code_is_installed() -> None:
    assert listed_packages() == sorted(folders_of_code())


def test_one_range_of_pythons_is_promised_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    oldest, after = map(int, re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', text, re.MULTILINE)[0])
    for page in ("README.md", "docs/start.md", ".ci/make_environment"):
        assert f"Python 3.{oldest} to 3.{after - 1}" in (ROOT / page).read_text(), page
    assert f"(3, {oldest}) <= sys.version_info < (3, {after})" in (ROOT / ".ci" / "make_environment").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what a clone holds, so that building leaves nothing here."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in ("torch_sink", "triton_kernels"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "triton_kernels"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    _run(folder, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sources))
    (made,) = folder.glob("*.whl")
    return made


def _run(folder: Path, *arguments: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_the_wheel_holds_the_code_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"torch_sink", f"torch_sink-{torch_sink.__version__}.dist-info"}
    code = sum(1 for folder in ("torch_sink", "triton_kernels") for _ in (ROOT / folder).rglob("*.py"))
    assert sum(name.endswith(".py") for name in names) == code
    data = {path for path in (ROOT / "torch_sink").rglob("*.*") if path.suffix in (".html", ".json", ".typed")}
    assert len(data) >= 3
    assert {path.relative_to(ROOT).as_posix() for path in data} <= set(names)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    _run(folder, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def test_a_project_runs_on_the_installed_wheel(site: Path, tmp_path: Path) -> None:
    assert str(site) in _run(tmp_path, str(ROOT / "tests" / "user_project.py"), PYTHONPATH=str(site))


def test_doctor_knows_the_oldest_releases_of_pyproject_in_a_clone_and_installed(site: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pairs = (part.strip(' "').split(";")[0].split(">=") for part in line.split(","))
    oldest = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    assert oldest.keys() == {"torch", "torchvision", "triton", "pillow"}
    assert oldest_releases() == oldest
    shown = "from torch_sink.cli import doctor; print(doctor.__file__, doctor.oldest_releases())"
    place, _, installed = _run(tmp_path, "-c", shown, PYTHONPATH=str(site)).partition(" ")
    assert place.startswith(str(site))
    assert ast.literal_eval(installed) == oldest
