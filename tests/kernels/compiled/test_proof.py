"""Compiled kernels prove themselves on the fake device."""

from __future__ import annotations

import pytest
import torch
from simulators.executor.on_fake_cuda import compiled_on_fake_cuda
from simulators.fake_cuda import FakeCuda, fake_cuda

from torch_sink.image.core.proof import Verdict
from torch_sink.image.run.stage_proof import STAGE_KERNELS

__all__ = ["fake_cuda"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in STAGE_KERNELS if each != torch.float32)],
)
def test_compiled_stages_hold(dtype: torch.dtype, fake_cuda: FakeCuda) -> None:
    with compiled_on_fake_cuda(fake_cuda) as executor:
        assert STAGE_KERNELS[dtype].prove(torch.device("cuda")) == Verdict(True)
    assert not executor.faults
    assert executor.launches["statistics_kernel"]
