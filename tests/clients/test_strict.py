"""Every program in a row of its own, where a warning is an error: stock's losses, and nothing of ours left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from covering import CoveringArray, Row

from clients import CLIENTS
from clients.client import write_photos
from clients.test_clients import ROOT, installed

SEED = 24
FACTORS = {
    "lines": ("before the imports", "after the imports"),
    "loader": ("SinkLoader", "as it was"),
    "timeline": ("no timeline", "timeline around", "timeline inside"),
}
# Their workers are started anew, which takes seconds each; most others have lambdas that such workers cannot take.
STARTED_ANEW = {
    "timm_prefetcher": "spawn", "stateful_data_loader": "spawn", "accelerate_loop": "spawn", "compiled_model": "spawn",
    "convnext": "forkserver", "torchmetrics_loop": "forkserver", "accumulate": "forkserver", "k_fold": "forkserver",
}  # fmt: skip
# Of a fork beside any thread, by Python 3.12 and later; those of a queue and of a timeline are meant.
FORKS = "ignore:This process (pid:DeprecationWarning"
# Each takes a process that loads all of it: where the libraries are the same, one release will do.
EVERYDAY = {
    "custom_dataset": pytest.mark.once, "lightning_fabric": pytest.mark.once_on_oldest,
}  # fmt: skip


def rows() -> dict[str, Row]:
    """A row for each program."""
    drawn = CoveringArray(FACTORS, seed=SEED).rows(len(CLIENTS))
    return {name: {**row, "start": STARTED_ANEW.get(name, "fork")} for name, row in zip(CLIENTS, drawn, strict=True)}


def parameters() -> Iterator[Any]:
    for name, row in rows().items():
        marks = EVERYDAY.get(name, pytest.mark.slow)
        yield pytest.param(name, row, id=f"{name}: {', '.join(row.values())}", marks=marks)


Ended = tuple[dict[str, Any], str, list[str]]


def run(name: str, photos: Path, folder: Path, row: Row) -> tuple[Ended, Ended]:
    """What stock code and ours give, what each says on stderr, and the temporary files that it leaves."""
    command = [sys.executable, "-W", "error", "-W", FORKS, "-m", "clients.strict", str(photos), str(folder), name]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with ExitStack() as stack:  # short paths: a socket's name goes into 108 bytes
        temporary = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        finished = subprocess.run(
            [*command, json.dumps(row), *temporary], capture_output=True, text=True, timeout=1200, cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        files = [os.listdir(each) for each in temporary]
    assert finished.returncode == 0, finished.stderr[-4000:]
    stock, ours = (
        (json.loads((folder / who / "ran.json").read_text()), (folder / who / "stderr").read_text(), left)
        for who, left in zip(("stock", "ours"), files, strict=True)
    )
    return stock, ours


@pytest.fixture(scope="module")
def client_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("client_photos"))


@pytest.mark.parametrize(("name", "row"), list(parameters()))
def test_a_program_where_warnings_are_errors(name: str, row: Row, client_photos: Path, tmp_path: Path) -> None:
    """What its library warns of with stock code as well is let through; so is what the library leaves behind."""
    installed(name)
    (stock, stock_says, stock_files), (ours, says, files) = run(name, client_photos, tmp_path, row)
    assert ours["losses"] == stock["losses"]
    assert ours["has_recorded"]
    for kind, names in ours["left"].items():
        assert not Counter(names) - Counter(stock["left"].get(kind, [])), kind
    assert len(files) <= len(stock_files), files
    assert says.count("Exception ignored") <= stock_says.count("Exception ignored"), says
    assert (tmp_path / "ours" / "run.html").exists() == (row["timeline"] != "no timeline")


@pytest.mark.once
def test_a_row_for_each_of_forty_programs() -> None:
    assert len(rows()) == len(CLIENTS) >= 40
    assert {*STARTED_ANEW, *EVERYDAY} <= set(CLIENTS)
