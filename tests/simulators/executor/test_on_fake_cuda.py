"""Compiled kernels on the fake device: they wait in its streams and take the tensors that a device would take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from image.cases import opener
from image.check import assert_same_bits, lazy_batch
from image.jpeg_files import jpeg
from torchvision.transforms import v2

import torch_sink
from simulators.executor.on_fake_cuda import compiled_on_fake_cuda
from simulators.executor.project import Executor
from simulators.fake_cuda import FakeCuda, fake_cuda
from torch_sink.triton_kernels.launching import Launcher, compiler_options, probe_kernel

__all__ = ["fake_cuda"]

PROBE = Launcher(probe_kernel, warps=1)


@pytest.fixture
def executor(fake_cuda: FakeCuda) -> Iterator[Executor]:
    with compiled_on_fake_cuda(fake_cuda) as executor:
        yield executor


def test_a_launch_waits_for_what_was_issued_before_it(fake_cuda: FakeCuda, executor: Executor) -> None:
    values = torch.zeros(4, dtype=torch.uint8, device="cuda")
    PROBE((1,), [values])
    assert not executor.launches
    assert (values + 1).tolist() == [2, 1, 1, 1]
    assert executor.launches == {"probe_kernel": 1}


def test_a_launch_takes_memory_that_the_device_can_reach(fake_cuda: FakeCuda, executor: Executor) -> None:
    on_host = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        PROBE((1,), [on_host])
    locked = on_host.pin_memory()
    PROBE((1,), [locked])
    torch.cuda.synchronize()
    assert locked.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
def test_a_batch_of_another_than_the_current_device(fake_cuda: FakeCuda, executor: Executor) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        PROBE((1,), [torch.zeros(1, dtype=torch.uint8, device="cuda:1")])
    pipeline = v2.Compose([v2.Resize((9, 7)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    openers = [opener(jpeg(21, 19, "4:2:0", quality=20, seed=seed)) for seed in range(2)]
    expected = torch.stack([pipeline(open_image()) for open_image in openers])
    torch_sink.set_decode_provider("triton")
    try:
        with torch_sink.image_backend("device", device="cuda:1"):
            made = lazy_batch([pipeline(open_image()) for open_image in openers]).to("cuda:1")
        assert made.device == torch.device("cuda", 1)
        assert_same_bits(made.cpu(), expected.as_subclass(torch.Tensor))
        assert executor.launches["idct_kernel"] == 1
    finally:
        torch_sink.set_decode_provider(None)
    assert not executor.faults


def test_a_launch_takes_what_its_kernel_was_compiled_for(fake_cuda: FakeCuda, executor: Executor) -> None:
    """The project keeps compiled kernels and launches them without Triton's own look at the arguments."""
    values = torch.zeros(64, dtype=torch.uint8, device="cuda")
    compiled = probe_kernel[(1,)](values, **compiler_options())
    with pytest.raises(TypeError, match=r"torch.int32 for a kernel that was compiled for \*u8"):
        compiled[(1, 1, 1)](values.view(torch.int32))
    with pytest.raises(RuntimeError, match="misaligned address"):
        compiled[(1, 1, 1)](values[1:])
    with pytest.raises(RuntimeError, match=r"invalid argument, a grid of \(1, 65536, 1\)"):
        compiled[(1, 1 << 16, 1)](values)
    compiled[(0, 1, 1)](values)
    torch.cuda.synchronize()
    assert executor.launches == {"probe_kernel": 1}
