"""What is said of releases that nobody has tested, and of builds of Python that count references in another way."""

from __future__ import annotations

import multiprocessing
import os
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path

import bare
import pytest
import warm

from torch_sink import releases
from torch_sink.cli import doctor

pytestmark = pytest.mark.once

# A program that nobody but a user has started.
PROGRAM = """
import multiprocessing.process; multiprocessing.process._parent_process = None
import torch_sink
with torch_sink.image_backend("device", device="cpu"):
    pass
import torch_sink.sink
"""


def said_of(monkeypatch: pytest.MonkeyPatch, **installed: str) -> list[str]:
    """The warnings where these releases are installed, and of other packages what is here."""
    stock = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name) or stock(name))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        releases.warn_of_newer()
    return [str(each.message) for each in shown]


def test_newer_packages_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = said_of(monkeypatch, torch="2.99.0.dev20270101+cu150", torchvision="1.0.0")
    assert "\n" not in said
    assert f"torch 2.99.0.dev20270101+cu150 (tested up to {releases.NEWEST['torch']})" in said
    assert f"torchvision 1.0.0 (tested up to {releases.NEWEST['torchvision']})" in said
    assert "triton" not in said


def test_repairs_of_a_tested_release_and_older_ones_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    repaired = {package: f"{newest}.99+cpu" for package, newest in releases.NEWEST.items()}
    assert not said_of(monkeypatch, **repaired)
    assert not said_of(monkeypatch, **releases.OLDEST)


def test_a_child_process_leaves_it_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    assert not said_of(monkeypatch, torch="99.0.0")


def test_the_first_rank_warns_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert said_of(monkeypatch, torch="99.0.0")
    monkeypatch.setenv("RANK", "1")
    assert not said_of(monkeypatch, torch="99.0.0")


def test_the_line_that_imports_torch_sink_is_warned_once(tmp_path: Path) -> None:
    about = tmp_path / "torchvision-99.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 99.1\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(bare.ROOT)])}
    finished = warm.run(program, timeout=240, env=environment)
    assert finished.returncode == 0, finished.stderr
    (said,) = [line for line in finished.stderr.splitlines() if "does not know" in line]
    assert said.startswith(f"{program}:3: UserWarning: this torch_sink does not know torchvision 99.1 (tested up to ")


def test_a_free_threaded_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    releases.check_python()
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(ImportError, match=r"needs a build of Python with the GIL.* run python3\.14, not python3\.14t"):
        releases.check_python()


def test_doctor_names_what_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.__version__", "99.1")
    found = doctor._check_release("torchvision")
    assert (found.state, found.subject) == ("missing", "torchvision")
    assert found.detail == f"99.1, newer than the {releases.NEWEST['torchvision']} that this torch_sink is tested with"


def test_no_package_here_is_newer_than_what_is_tested() -> None:
    """Who adds a release to the tests says so in torch_sink/releases.py."""
    newer = [package for package in releases.NEWEST if releases.is_newer(package, metadata.version(package))]
    assert not newer
