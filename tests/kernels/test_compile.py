"""The stage kernel compiles for every target without a GPU, spills nothing, and divides and adds exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

Groups = Sequence[Sequence[str]]

# Two processes that take about as long: AMD's compiler is another one.
GROUPS = (("cuda:90", "hip:gfx942"), ("cuda:80", "cuda:100"))


def compile_all(*options: str, program: str = "aot.py", groups: Groups = GROUPS) -> list[dict[str, Any]]:
    """What every variant uses on every target."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name(program)
    processes = [
        subprocess.Popen(
            [sys.executable, script, *options, *group],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for group in groups
    ]
    rows = []
    for process in processes:
        printed, errors = process.communicate()
        assert process.returncode == 0, errors[-4000:]
        rows += json.loads(printed)
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    assert {row["output"] for row in rows} == {"float32", "float16", "bfloat16", "uint8"}
    check_usage(rows, GROUPS)


def check_usage(rows: list[dict[str, Any]], groups: Groups) -> None:
    assert {row["target"] for row in rows} == {name for group in groups for name in group}
    assert not [row for row in rows if row["spills"]], "registers are spilled"
    assert not [row for row in rows if row["inexact"]], "results would differ from the interpreter's"
    assert all(0 < row["registers"] <= 255 for row in rows)


def test_the_smallest_and_the_largest_variants() -> None:
    """What lies between them is compiled by the slow test: one variant takes two seconds."""
    check(compile_all("--some"))


def test_the_largest_variant_on_floats() -> None:
    groups = (("cuda:90",), ("hip:gfx942",))
    check_usage(compile_all("--some", program="aot_float.py", groups=groups), groups)


@pytest.mark.slow
def test_every_variant() -> None:
    check(compile_all())


@pytest.mark.slow
def test_every_variant_on_floats() -> None:
    check(compile_all(program="aot_float.py"))
