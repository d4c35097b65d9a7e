"""Kernels of the project that are broken on purpose: what runs every day would not stay green."""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from simulators.executor.project import Executor, compiled_on_cpu, executable_of
from simulators.executor.ptx.findings import Fault
from simulators.executor.target import target_only
from torchvision.transforms import v2

import torch_sink
from kernels.jpeg_cases import encode, photo
from torch_sink.cli.photos import make_photo

pytestmark = pytest.mark.once


def resized_with_statistic() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of two images in odd sizes, and what stock code makes of them."""
    pipeline = v2.Compose([v2.Resize((19, 67)), v2.RandomAutocontrast(p=1), v2.PILToTensor()])
    images = [make_photo(41, 30, 0), make_photo(33, 52, 1)]
    with torch_sink.image_backend("device"):
        made = torch.utils.data.default_collate([pipeline(image) for image in images]).to("cpu")
    return made.as_subclass(torch.Tensor), torch.stack([pipeline(image) for image in images])


def decoded() -> tuple[torch.Tensor, torch.Tensor]:
    data = encode(photo(37, 21), subsampling="4:2:0")
    with torch_sink.image_backend("device"):
        made = torch_sink.decode_images([data], device="cpu", provider="triton")[0]
    image = Image.open(io.BytesIO(data))
    return made, v2.functional.pil_to_tensor(image)


Work = Callable[[], tuple[torch.Tensor, torch.Tensor]]
WORK: dict[str, Work] = {"stages": resized_with_statistic, "decoder": decoded}


def run(work: Work, change: Callable[[str], str]) -> tuple[Executor, bool]:
    """The executor after some work, and whether the result is that of stock code."""
    with compiled_on_cpu(change=change) as executor:
        try:
            made, expected = work()
        except Fault:
            return executor, False
    return executor, torch.equal(made, expected)


@pytest.mark.parametrize("name", WORK)
def test_unbroken(name: str) -> None:
    executor, is_right = run(WORK[name], str)
    assert is_right
    assert not executor.faults
    assert executor.launches


@pytest.mark.parametrize("name", WORK)
def test_without_barriers(name: str) -> None:
    executor, _ = run(WORK[name], lambda ptx: re.sub(r"bar\.(warp\.)?sync[^;]*;", "", ptx))
    assert any("without barrier" in fault for fault in executor.faults)


def executed_barriers(ptx: str) -> list[int]:
    """Which of the barriers of a text were executed, in their order."""
    executable = executable_of(ptx)
    blocks = [number for number, block in enumerate(executable.program.blocks) if block.end.name == "bar.sync"]
    return [place for place, number in enumerate(blocks) if number in executable.blocks]


def without(ptx: str, place: int) -> str:
    """A text without one of its barriers."""
    *_, barrier = itertools.islice(re.finditer(r"bar\.sync[^;]*;", ptx), place + 1)
    return ptx[: barrier.start()] + ptx[barrier.end() :]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_without_one_barrier(name: str) -> None:
    """Most are missed. Some stand where others would do, or between stores of equal values, as in a loop over taps."""
    executor, _ = run(WORK[name], str)
    missed, unnoticed = 0, []
    for ptx in sorted(executor.programs):
        for place in executed_barriers(ptx):
            broken = functools.partial(
                lambda text, ptx, place: without(text, place) if text == ptx else text, ptx=ptx, place=place
            )
            found, is_right = run(WORK[name], broken)
            if found.faults or not is_right:
                missed += 1
            else:
                unnoticed.append(f"{place} of {executable_of(ptx).program.name}")
    assert missed > 2 * len(unnoticed), unnoticed


@pytest.mark.parametrize("name", WORK)
def test_without_masks_of_stores(name: str) -> None:
    executor, _ = run(WORK[name], lambda ptx: re.sub(r"@!?%p\d+ st\.global", "st.global", ptx))
    assert executor.faults


@pytest.mark.parametrize("name", WORK)
def test_without_masks_of_loads(name: str) -> None:
    executor, is_right = run(WORK[name], lambda ptx: re.sub(r"@!?%p\d+ ld\.global", "ld.global", ptx))
    assert executor.faults or not is_right


def test_with_another_constant() -> None:
    _, is_right = run(resized_with_statistic, lambda ptx: ptx.replace(", 255;", ", 240;"))
    assert not is_right


NAN = """
import triton
import triton.language as tl

NAN = tl.constexpr(float("nan"))

@triton.jit
def kernel(values):
    tl.store(values, NAN)
"""


def module_of(source: str, folder: Path) -> ModuleType:
    file = folder / "kernel_of_a_test.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_with_a_constant_that_is_nan(tmp_path: Path) -> None:
    module = module_of(NAN, tmp_path)
    launched: list[object] = []
    with target_only(launched.append), pytest.raises(RuntimeError, match="NAN has changed"):
        module.kernel[(1,)](torch.zeros(1), num_warps=1, enable_fp_fusion=False)
    assert not launched
