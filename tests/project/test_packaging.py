"""What is published: the sdist and the wheel hold the package and nothing else, and the installed wheel runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import bare
import pytest
import warm
from packaging.requirements import Requirement

import torch_sink
from torch_sink.releases import NEWEST, OLDEST, PYTHONS

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
NAME = f"torch_sink-{torch_sink.__version__}"
NAMES = ("torch", "torchvision", "Triton")
ABOUT = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")


def minors(first: str, last: str) -> list[str]:
    """Every minor release from one to another."""
    (major, begin), (_, end) = first.split("."), last.split(".")
    return [f"{major}.{minor}" for minor in range(int(begin), int(end) + 1)]


def test_the_oldest_releases_are_the_same_everywhere() -> None:
    names = ("pyproject.toml", "Makefile", ".ci/make_environment", "README.md", "docs/start.md")
    texts = {name: (ROOT / name).read_text() for name in names}
    python = PYTHONS[0]
    assert f'requires-python = ">={python}"\n' in texts["pyproject.toml"]
    for name in (".ci/make_environment", "README.md", "docs/start.md"):
        assert f"Python {python} or later" in texts[name], name
    assert f"sys.version_info < ({python.replace('.', ', ')})" in texts[".ci/make_environment"]
    assert {each.name: str(each.specifier)[2:] for each in map(Requirement, promised()[0]) if each.specifier} == OLDEST
    pinned = " ".join(f"{name}=={OLDEST[name]}.0" for name in ("torch", "torchvision", "triton"))
    assert f"OLDEST_RELEASES = {pinned} " in texts["Makefile"]
    assert f"torch {OLDEST['torch']} or later" in texts["README.md"]


def test_a_page_says_which_releases_are_tested() -> None:
    text = " ".join((ROOT / "docs" / "start.md").read_text().split())
    tested = [f"{name} {OLDEST[name.lower()]} to {newest}" for name, newest in zip(NAMES, NEWEST.values(), strict=True)]
    python = f"Python {PYTHONS[0]} to {PYTHONS[1]}"
    assert f"torch_sink is tested with {python}, {tested[0]}, {tested[1]} and {tested[2]}." in text


def test_the_releases_in_between_are_tried_every_week() -> None:
    text = (ROOT / ".github" / "workflows" / "releases.yml").read_text()
    (listed,) = re.findall(r"^ *torch: (\[.*\])$", text, re.MULTILINE)
    assert json.loads(listed) == minors(OLDEST["torch"], NEWEST["torch"])


def requirements(lines: str) -> set[str]:
    """Those of a list in TOML, each written in one way."""
    return {str(Requirement(line)) for line in re.findall(r"""["'](.+?)["'](?:,|\s*$)""", lines, re.MULTILINE)}


def promised() -> tuple[set[str], dict[str, set[str]]]:
    """The requirements of pyproject.toml, and those of each extra."""
    text = (ROOT / "pyproject.toml").read_text()
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    extras = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    lists = re.findall(r"^([\w-]+) = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL)
    return requirements(needed), {name: requirements(lines) for name, lines in lists}


def sources() -> set[str]:
    """Every file of the package by its path in a clone, data included."""
    found = (path for name in ("torch_sink", "triton_kernels") for path in (ROOT / name).rglob("*"))
    files = {path.relative_to(ROOT).as_posix() for path in found if path.is_file() and path.suffix != ".pyc"}
    assert {"torch_sink/py.typed", "torch_sink/tracing/page.html"} < files
    return files


def build(clone: Path, what: str, folder: Path) -> Path:
    """As a frontend builds without isolation, which needs no network."""
    made = _run(clone, "-c", f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))")
    return folder / made.splitlines()[-1]


def _run(folder: Path, *arguments: str, packages: tuple[Path, ...] = ()) -> str:
    """In a process of the environment, or in a bare one with these packages."""
    python, environment = (bare.BASE_PYTHON, bare.environment(*packages)) if packages else (sys.executable, None)
    command = [str(python), *arguments]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a whole clone, tests and pages included, so that building leaves nothing here."""
    folder = tmp_path_factory.mktemp("sdist")
    return build(bare.copy_clone(folder / "clone"), "sdist", folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, as pip does where there is no wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    return build(sdist.parent / NAME, "wheel", sdist.parent)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return message_from_string(zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/METADATA").decode())


def test_the_sdist_holds_what_the_wheel_is_built_from(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {entry.name.partition("/")[2] for entry in archive if entry.isfile()}
    beside = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name for name in names if ".egg-info/" not in name} == sources() | beside


def test_the_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {f"{NAME}.dist-info/{name}" for name in ABOUT}
    assert names - about == {re.sub(r"^triton_kernels/", "torch_sink/triton_kernels/", name) for name in sources()}
    assert about <= names
    assert zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"torch-sink = torch_sink.cli:main" in zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/entry_points.txt")


def test_the_metadata_are_those_of_pyproject(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("torch-sink", torch_sink.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    listed = [found for each in metadata.get_all("Classifier", ()) for found in re.findall(r":: (3\.\d+)$", each)]
    assert listed == minors(*PYTHONS)
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    needed, extras = promised()
    assert set(metadata.get_all("Provides-Extra", ())) == extras.keys()
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", ())]
    assert {str(each) for each in found if "extra" not in str(each.marker)} == needed
    for extra, expected in extras.items():
        of_extra = [each for each in found if each.marker is not None and each.marker.evaluate({"extra": extra})]
        assert {str(each).partition(";")[0].strip() for each in of_extra if "extra" in str(each.marker)} == expected


def test_every_extra_that_a_text_names_exists() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "torch_sink").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"torch-sink\[([\w-]+)\]", text.read_text())}
    assert named
    assert named <= promised()[1].keys()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bare folder with the wheel alone, and one with what it requires."""
    folder = tmp_path_factory.mktemp("site")
    _run(folder, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "ours"), str(wheel))
    return folder / "ours", bare.link_packages(folder / "others")


def test_a_project_runs_on_the_installed_wheel(installed: tuple[Path, Path], tmp_path: Path) -> None:
    program = ROOT / "tests" / "user_project.py"
    finished = warm.run(program, cwd=tmp_path, env=bare.environment(installed[0]), timeout=240)
    assert finished.returncode == 0, finished.stderr
    assert str(installed[0]) in finished.stdout


SHOW = """
import importlib, json, pkgutil
import torch_sink

names = [found.name for found in pkgutil.walk_packages(torch_sink.__path__, "torch_sink.")]
modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
print(json.dumps({module.__name__: module.__file__ for module in modules}))
"""


@pytest.mark.slow
def test_every_module_of_the_wheel_is_imported_from_it(installed: tuple[Path, Path], tmp_path: Path) -> None:
    files = json.loads(_run(tmp_path, "-c", SHOW, packages=installed))
    assert files["torch_sink.triton_kernels.launching"] == str(installed[0] / "torch_sink/triton_kernels/launching.py")
    assert all(Path(file).is_relative_to(installed[0]) for file in files.values())
    assert len(files) > 100


@pytest.mark.slow
def test_the_command_line_runs_outside_of_the_clone(installed: tuple[Path, Path], tmp_path: Path) -> None:
    assert "Everything that is needed works." in _run(tmp_path, "-m", "torch_sink", "doctor", packages=installed)


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {torch_sink.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[:2] == ["Unreleased", torch_sink.__version__]


def test_every_release_of_the_changelog_has_the_same_headings() -> None:
    _, *releases = re.split(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    expected = ["New features", "Breaking changes", "Deprecations", "Bug fixes"]
    assert [re.findall(r"^### (.*)$", text, re.MULTILINE) for text in releases] == [expected] * len(releases)
