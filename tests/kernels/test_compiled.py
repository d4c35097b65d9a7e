"""Runs tests of the folder `interpreted` with compiled kernels, without a GPU: what Triton makes of them for an H100.

Every day some that go through every kernel, others on the oldest Triton, as on a machine with a GPU, which the fake CUDA
device stands for; fewer where these have passed with the same code (`seen.py`). With `-m slow` all of them, also on
tensors of the CPU, in memory full of other garbage. They compare with stock torchvision and Pillow, warps run in an order
that is drawn, and nothing may race, leave its bounds or read what nobody wrote.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import seen
from kernels.releases import everyday
from torch_sink.triton_kernels.jpeg import jpeg_variants
from torch_sink.triton_kernels.stages import variants

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels/interpreted"
CHOSEN = {
    "test_pipelines.py": ("imagenet", "jitter", "erase", "test_mixes", "test_gray"),
    "test_batches.py": ("dict-1", "test_an_empty_tail", "test_the_loop_of_a_plain_script", "test_damaged_images"),
    "test_float_pipelines.py": ("blur", "statistics", "affine", "bicubic"),
    "test_jpeg.py": ("test_boxes", "test_damaged_files", "test_one_decoder"),
    "test_jpeg_batches.py": (
        "test_files_of",
        "test_a_file_twice",
        "test_stages",
        "test_a_batch_too_large",
        "(test_jpeg_batches and replaced[skip])",
    ),
    "test_jpeg_entropy.py": ("test_jpeg_entropy",),
    "test_kernel_filters.py": ("test_named_kernels", "test_random_kernels", "test_small_images"),
    "test_parity.py": ("test_a_tile_that", "test_pixels_that"),
}
# What runs where all of these have passed with this very code and Triton.
AGAIN = {
    "test_pipelines.py": ("imagenet", "jitter"),
    "test_jpeg.py": ("test_boxes", "test_damaged_files", "test_one_decoder"),
    "test_jpeg_tables.py": ("test_jpeg_tables",),
}
LAUNCHED = re.compile(r"^launched (\w+) \d+ times$", re.MULTILINE)


def run(*options: str, seconds: int, on_fake_cuda: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    """One process for all files: each would load torch anew, which takes seconds."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "simulators.executor.plugin",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    environment = {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": "1",
        "KERNELS_ON_FAKE_CUDA": str(int(on_fake_cuda)),
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


@pytest.mark.timeout(1500)
def test_every_kernel_runs_compiled() -> None:
    name = "every kernel runs compiled"
    is_seen = seen.is_seen(name)
    those = AGAIN if is_seen else CHOSEN
    files = [f"{FOLDER}/{name}" for name in those]
    words = " or ".join(word for chosen in those.values() for word in chosen)
    # A machine with CUDA has its own device: there they run on tensors of the CPU.
    on_fake_cuda = not torch.cuda.is_available()
    chosen = ("-m", everyday(), "-k", words)
    finished = run(*files, *chosen, seconds=1200, on_fake_cuda=on_fake_cuda, QUARTER_OF_LONG_FILES="1")
    assert finished.returncode == 0, finished.stdout[-20_000:]
    passed = int(re.search(r"\b(\d+) passed, \d+ deselected in", finished.stdout)[1])  # type: ignore[index]
    assert passed >= (10 if is_seen else 150)
    if not is_seen:
        check(finished)
        seen.note(name)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize(("marked", "on_fake_cuda"), [("not slow", True), ("not slow", False), ("slow", False)])
def test_everything_runs_compiled(marked: str, on_fake_cuda: bool) -> None:
    if on_fake_cuda and torch.cuda.is_available():
        pytest.skip("a machine with CUDA has its own")
    check(run(FOLDER, "-m", marked, seconds=6 * 3600, on_fake_cuda=on_fake_cuda))
