"""The README: its code runs, its figures come from the committed results, and it stays short; docs name real files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm

from torch_sink.cli.photos import write_photos

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_code_block_runs(number: int, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", count=8)
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number].replace("resnet18(", "shufflenet_v2_x0_5("))  # which is trained sooner
    finished = warm.run(script, cwd=tmp_path, timeout=240)
    assert finished.returncode == 0, finished.stderr
    if "fallback_report" in BLOCKS[number]:
        assert "<lambda>" in finished.stdout


def test_it_is_short_and_shows_code_early() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 20
    assert len(BLOCKS) >= 2


def test_figures_come_from_the_committed_results() -> None:
    finished = warm.run(ROOT / "examples" / "benchmarks" / "report.py", "--check", timeout=60)
    assert finished.returncode == 0, finished.stderr


def test_every_command_that_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for file in re.findall(r"(?:examples|tests)/[\w/]+\.py", README):
        assert (ROOT / file).is_file(), file


PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"])
FILES = [
    path
    for folder in ("torch_sink", "triton_kernels", "examples", "tests", "docs")
    for path in ROOT.glob(f"{folder}/**/*.py")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    for named in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        assert any(file.as_posix().endswith(f"/{named}") for file in FILES), named
    for named in re.findall(r"`((?:\w+/)+)`", page.read_text()):
        assert (ROOT / named).is_dir() or any(f"{file.parent}/".endswith(f"/{named}") for file in FILES), named
