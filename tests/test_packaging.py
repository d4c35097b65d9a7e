"""The list of packages in pyproject.toml names every folder of code: a folder it lacks is missing from the wheel."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import torch_sink

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]


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


def test_the_version_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(
        rf'^version = "{re.escape(torch_sink.__version__)}"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert torch_sink.__version__ == "0+unknown"
