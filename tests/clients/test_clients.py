"""Every program trains to the same losses with torch_sink's lines, and docs/works_with.md says what fell back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import _geometry

from clients import CLIENTS
from clients.client import Client, Outcome, compare, write_photos

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "made_by"))

import update_works_with as page  # noqa: E402

pytestmark = [pytest.mark.once_on_oldest, pytest.mark.filterwarnings("ignore")]
ROWS = page.read_rows()


@pytest.fixture(scope="module")
def client_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("client_photos"))


def in_a_process(names: list[str], photos: Path, folder: Path, **variables: str) -> dict[str, Outcome]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "-m", "clients.alone", str(photos), str(folder), *names],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": paths, **variables}, timeout=1800,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    printed = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"program"')]
    return {row.pop("program"): Outcome(**row) for row in printed}


def kinds(fell_back: Any) -> set[tuple[str, str]]:
    """Without the names of the code that read: Python's releases write them differently."""
    return {(operation, reason.partition(":")[0]) for operation, reason in fell_back}


def installed(name: str) -> Client:
    """A client; CI, which installs all libraries, fails where one is missing."""
    client = CLIENTS[name]
    if not client.is_installed:
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(f"{client.package} is not installed: it is in the extra third-party")
    return client


def check(name: str, outcome: Outcome) -> None:
    row = ROWS[name]
    assert outcome.ours == outcome.stock
    assert len(set(outcome.stock)) >= 5, "training changes the losses"
    assert outcome.has_recorded, "the image backend took no part"
    assert outcome.wraps == row["wraps"]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_trains_to_the_same_losses(name: str, client_photos: Path, tmp_path: Path) -> None:
    client = installed(name)
    if client.is_alone:
        outcome = in_a_process([name], client_photos, tmp_path)[name]
    else:
        outcome = compare(client, client_photos, tmp_path)
    check(name, outcome)
    if not _geometry._do_native_uint8_resize_on_cpu(InterpolationMode.BILINEAR):
        return  # bytes are resized through floats, behind which more falls back than where the page was written
    assert kinds(outcome.fell_back) <= kinds(ROWS[name]["fell_back"]), (
        "docs/made_by/update_works_with.py writes the page"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_trains_to_the_same_losses_with_interpreted_kernels(
    name: str, client_photos: Path, tmp_path: Path
) -> None:
    """Batches are recorded in the workers and made by the kernels, as on a device."""
    installed(name)
    outcome = in_a_process([name], client_photos, tmp_path, TRITON_INTERPRET="1")[name]
    check(name, outcome)
    assert kinds(outcome.fell_back) == kinds(ROWS[name]["fell_back"])


def test_the_page_says_what_the_runs_said() -> None:
    assert page.PAGE.read_text() == page.page(ROWS)
    assert list(ROWS) == list(CLIENTS), "docs/made_by/update_works_with.py --programs NAME runs what is new"
    for name, client in CLIENTS.items():
        row = ROWS[name]
        assert (row["name"], row["package"], row["note"]) == (client.name, client.package, client.note)
        assert row["is_equal"], name
        assert f"| {client.name} |" in page.PAGE.read_text()
