"""Every variant of the stage kernels that a launcher can choose, compiled, against stock torchvision."""

from __future__ import annotations

import itertools

import pytest
import torch
from simulators.executor.project import compiled_on_cpu
from torchvision.transforms import v2

import torch_sink
from kernels.test_variants import FLOATS, of_bytes, of_floats
from torch_sink.cli.photos import make_photo

PIPELINES = {
    **{f"bytes, {flags}": of_bytes(*flags) for flags in itertools.product((False, True), repeat=4)},
    **{f"floats, {flags}": of_floats(*flags) for flags in itertools.product((False, True), repeat=3)},
}
# A float is stored in the type of the batch: one rounding of it, beside what float32 may differ by.
LARGEST = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 4e-6, torch.float64: 4e-6}


# Of floats that were computed with, stock code makes bytes and float64.
OF_BYTES = (torch.uint8, *FLOATS)
CASES = [
    (name, dtype)
    for name in PIPELINES
    for dtype in (OF_BYTES if name.startswith("bytes") else (torch.float32, torch.float16, torch.bfloat16))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_variant_gives_what_stock_code_gives(name: str, dtype: torch.dtype) -> None:
    pipeline = v2.Compose([PIPELINES[name], v2.ToDtype(dtype, scale=True)])
    photos = [make_photo(31, 22, seed) for seed in range(2)]
    torch.manual_seed(1)
    expected = torch.stack([pipeline(photo) for photo in photos]).as_subclass(torch.Tensor)
    torch.manual_seed(1)
    with compiled_on_cpu() as executor, torch_sink.image_backend("device"):
        made = torch.utils.data.default_collate([pipeline(photo) for photo in photos]).to("cpu")
    assert executor.launches
    assert not executor.faults
    assert made.dtype == expected.dtype
    assert (made.double() - expected.double()).abs().max() <= LARGEST.get(dtype, 0)
