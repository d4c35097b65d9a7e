"""The compile gate: no kernel spills or computes inexactly, and none gets worse than the committed record unnoticed.

`make kernels` compiles every variant whose kernel has changed and renews the record. Here, a few small ones are always
compiled; of those that differ most, the ones whose kernels are not as recorded. On another Triton, whose code nobody
recorded, the small ones for every GPU and the largest for one, unless they have passed with the same code (`seen.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
import warm

from kernels import seen
from kernels.releases import is_oldest_torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
SCRIPT = BENCHMARKS / "kernels.py"
RECORD = json.loads((BENCHMARKS / "results" / "kernels.json").read_text())
QUICK = ("prologue", "statistics", "jpeg finish", "jpeg inverse transform", "jpeg color")
LARGEST = ("stage, light, float32", "stage, heavy, float32")
AS_RECORDED = triton.__version__ == RECORD["machine"]["releases"]["triton"]
EVERY_TARGET = "cuda:80", "cuda:90", "cuda:100", "hip:gfx942"


def compiled(*options: str) -> list[dict[str, Any]]:
    """What the variants use that the options choose."""
    finished = warm.run(SCRIPT, "--print", *options, timeout=3600)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout)


def check(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if row["spills"] or row["inexact"]]
    assert all(0 < row["registers"] <= 255 for row in rows)
    if AS_RECORDED:
        assert not regressions(rows), "run `make kernels` if it is meant"


def regressions(rows: list[dict[str, Any]]) -> list[str]:
    sys.path.insert(0, str(BENCHMARKS))
    from kernel_gate import regressions

    return regressions(rows, RECORD["kernels"])


def test_variants_of_every_day() -> None:
    name = "variants of every day"
    is_seen = seen.is_seen(name)
    names = ("jpeg color",) if is_seen else QUICK
    targets = ("cuda:90",) if is_seen else ("cuda:90", "hip:gfx942") if AS_RECORDED else EVERY_TARGET
    rows = compiled("--again", "--only", *names, "--targets", *targets)
    check(rows)
    made = {(row["variant"], row["target"]) for row in rows}
    assert made == {(name, target) for name in names for target in targets}
    if not is_seen:
        seen.note(name)


def test_others_of_every_day() -> None:
    if AS_RECORDED:
        check(compiled("--some", "--targets", "cuda:90", "hip:gfx942"))
    elif seen.is_seen("largest variants"):
        pytest.skip("the largest variants have passed with these kernels and this Triton: tests/kernels/seen.json")
    else:  # a minute for all targets; the oldest release has the other compiler
        target = "hip:gfx942" if is_oldest_torch() else "cuda:90"
        rows = compiled("--again", "--only", *LARGEST, "--targets", target)
        check(rows)
        assert [row["target"] for row in rows] == [target] * len(LARGEST)
        seen.note("largest variants")


@pytest.mark.once
def test_the_record_holds_every_variant() -> None:
    listed = warm.run(SCRIPT, "--list", timeout=300)
    assert listed.returncode == 0, listed.stderr
    recorded = [f"{row['variant']} on {row['target']}" for row in RECORD["kernels"]]
    assert sorted(recorded) == sorted(listed.stdout.splitlines())
    assert RECORD["outdated"] == 0, "run `make kernels`"


@pytest.mark.slow
@pytest.mark.once
def test_every_variant() -> None:
    rows = compiled("--again")
    check(rows)
    if AS_RECORDED:
        assert _without_seconds(rows) == _without_seconds(RECORD["kernels"]), "run `make kernels`"


def _without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "seconds": None} for row in sorted(rows, key=_name)]


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["variant"], row["target"]


@pytest.mark.once
def test_a_worse_kernel_is_noticed() -> None:
    row = next(row for row in RECORD["kernels"] if row["target"] == "cuda:90")
    assert regressions([row]) == []
    assert "instructions, before" in regressions([{**row, "instructions": int(1.2 * row["instructions"])}])[0]
    wide = {**row, "stores": {"128": 3}}
    assert regressions([wide]) == []
    assert "bits at once" in regressions([{**row, "stores": {"1": 3}}])[0]
    assert "is new" in regressions([{**row, "variant": "another"}])[0]


WORSE = """
import sys, triton, triton.language as tl
sys.path.insert(0, sys.argv[1])
from kernel_gate import faults
from kernel_usage import target, usage
from triton.compiler import ASTSource

@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(y + at, values / tl.load(y + at) * 2.0 + values)

where = target("cuda:90")
source = ASTSource(fn=kernel, signature={"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 4096})
used = usage(triton.compile(source, target=where, options={"num_warps": 1, "maxnreg": 32}), where)
print("\\n".join(faults([{"variant": "worse", "target": "cuda:90", **used}])))
"""


@pytest.mark.once
def test_the_gate_sees_inexact_division_and_spills(tmp_path: Path) -> None:
    script = tmp_path / "worse.py"
    script.write_text(WORSE)
    finished = warm.run(script, BENCHMARKS, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert "div.full.f32" in finished.stdout
    assert "fma.rn.f32" in finished.stdout
    assert "spills" in finished.stdout


FINGERPRINTS = """
import sys
sys.path.insert(0, sys.argv[1])
from kernel_record import fingerprint
import importlib.util
for file in sys.argv[2:]:
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(fingerprint(module.kernel, "cuda:90"))
"""
KERNEL = """
import triton, triton.language as tl
ADDED = tl.constexpr(1)

@triton.jit
def plus(value):
    return value + ADDED

@triton.jit
def kernel(x, y):
    tl.store(y, plus(tl.load(x)))
"""


@pytest.mark.once
def test_a_fingerprint_depends_on_code_and_constants_alone(tmp_path: Path) -> None:
    same = [KERNEL, "\n\n" + KERNEL.replace("    return", '    """Adds."""\n    # More.\n    return')]
    other = [KERNEL.replace("ADDED = tl.constexpr(1)", "ADDED = tl.constexpr(2)"), KERNEL.replace("value +", "value -")]
    files = [tmp_path / f"{number}.py" for number in range(4)]
    for file, text in zip(files, same + other, strict=True):
        file.write_text(text)
    command = [sys.executable, "-c", FINGERPRINTS, str(BENCHMARKS), *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    first, moved, constant, called = finished.stdout.split()
    assert first == moved
    assert len({first, constant, called}) == 3
