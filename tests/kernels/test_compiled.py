"""Runs tests of the folder `interpreted` with compiled kernels, on the CPU: what Triton makes of them for an H100.

Every day some that go through every kernel, with `-m slow` all of them. They compare with stock torchvision and Pillow,
warps run in an order that is drawn, and nothing may race, leave its bounds or read what nobody wrote.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_sink.triton_kernels.jpeg import jpeg_variants
from torch_sink.triton_kernels.stages import variants

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels/interpreted"
CHOSEN = {
    "test_pipelines.py": ("imagenet", "jitter", "erase", "test_mixes"),
    "test_batches.py": ("test_forms_of_samples", "test_an_empty_tail", "test_the_loop_of_a_plain_script"),
    "test_float_pipelines.py": ("blur", "statistics", "affine", "bicubic"),
    "test_jpeg.py": ("test_boxes", "test_damaged_files", "test_one_decoder"),
    "test_augmix.py": ("resized", "test_gray"),
}
LAUNCHED = re.compile(r"^launched (\w+) \d+ times$", re.MULTILINE)


def run(*options: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """One process for all files: each would load torch anew, which takes seconds."""
    command = [sys.executable, "-m", "pytest", "-p", "kernels.compiled.plugin", "-p", "no:cacheprovider", "--tb=short"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.run(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env=environment,
        cwd=ROOT,
    )


def check(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout[-20_000:]
    listed = {variant.kernel.__name__ for variant in (*variants(), *jpeg_variants(32))}
    assert set(LAUNCHED.findall(finished.stdout)) == listed


def test_every_kernel_runs_compiled() -> None:
    files = [f"{FOLDER}/{name}" for name in CHOSEN]
    words = " or ".join(word for chosen in CHOSEN.values() for word in chosen)
    finished = run(*files, "-m", "not slow", "-k", words, seconds=1200)
    check(finished)
    assert int(re.search(r"\b(\d+) passed", finished.stdout)[1]) >= 30  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("marked", ["not slow", "slow"])
def test_everything_runs_compiled(marked: str) -> None:
    check(run(FOLDER, "-m", marked, seconds=6 * 3600))
