"""Stock torchvision against the "device" backend: the one comparison that all tests of pixels use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from unittest import mock

import torch
from PIL import Image
from torch.utils.data import default_collate

import torch_sink
from torch_sink.image.core.ops import BLENDED, Op, makes_floats
from torch_sink.image.core.proof import Proof, Verdict
from torch_sink.image.handles.tensor import Handle
from torch_sink.image.run.batch import Images, LazyBatch

# In a process with this variable, batches run through the Triton kernels; in any other one through the CPU path.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Where pixels are made, inside `kernels_on`; elsewhere on the CPU.
_device = ContextVar("device", default="cpu")

Opener = Callable[[], Image.Image]
Pipeline = Callable[[Any], Any]
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last)


class Promise(NamedTuple):
    """How close the kernels come to stock code; without arguments, its very bits.

    Attributes:
        largest: largest difference of two values, in the units of the result.
        equal_share: smallest share of values that are equal, 0 to 1.
        rounding: a difference that counts as none.
    """

    largest: float = 0.0
    equal_share: float = 1.0
    rounding: float = 0.0


EXACT = Promise()
_CLOSE_SHARE = 0.98  # of small images, where one pixel is many values of a hundred


def promise_of_calls(programs: Sequence[Sequence[Op]], expected: torch.Tensor) -> Promise:
    """What docs/parity.md promises of a batch, on whatever processor.

    Args:
        programs: the recorded calls of each image.
        expected: the batch that stock code makes.
    """
    on_bytes, on_floats = [], []
    for program in programs:
        converted = next((at for at, op in enumerate(program) if makes_floats(op)), len(program))
        on_bytes += [op.promise for op in program[:converted]]
        on_floats += [op.promise for op in program[converted:]]
    rounding = max((promise.floats for promise in on_floats), default=0.0)
    if not expected.is_floating_point():
        rounding = 0.0  # where floats become others, a table of the bytes makes them
    if rounding:
        spread = max((expected.max() - expected.min()).item(), 1.0)
        last_bit = torch.finfo(expected.dtype).eps if expected.dtype.itemsize == 2 else 0.0
        rounding = spread * max(rounding, last_bit)
    if any(promise.largest == math.inf for promise in (*on_bytes, *on_floats)):
        return Promise(math.inf, _CLOSE_SHARE, rounding)
    if rounded := sum(promise.is_rounded or promise == BLENDED for promise in on_bytes):
        return Promise(rounded if expected.dtype == torch.uint8 else math.inf, _CLOSE_SHARE, rounding)
    return Promise(rounding, 0.0) if rounding else EXACT


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal type, dtype, shape, strides and bits; NaN equals itself, 0 does not equal -0."""
    assert type(actual) is type(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    if not torch.equal(_bytes(actual), _bytes(expected)):
        different = (actual != expected).as_subclass(torch.Tensor)
        first = tuple(different.nonzero()[0].tolist()) if different.any() else ()
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} values differ, the first at {first}: "
            f"{actual[first]} instead of {expected[first]}"
        )


def assert_keeps(promise: Promise, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal type, dtype, shape and strides, and values as close as promised; NaN equals itself."""
    if promise == EXACT:
        assert_same_bits(actual, expected)
        return
    assert type(actual) is type(expected)
    assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
    made, wanted = actual.double(), expected.double()
    difference = (made - wanted).abs()
    equal = (difference <= promise.rounding) | (made.isnan() & wanted.isnan())
    largest = difference.where(~equal, 0).max().item()
    share = equal.double().mean().item()
    # A value that is NaN on one side only is further away than any promise.
    assert largest <= promise.largest, f"values differ by up to {largest}, promised: {promise.largest}"
    assert share >= promise.equal_share, f"{share:.4%} of the values are equal, promised: {promise.equal_share:.4%}"


@contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Checks inside run the kernels of the operations on a device, right or wrong, on pixels that Pillow decoded."""
    token = _device.set(device)
    torch_sink.set_decode_provider("pillow")
    try:
        with mock.patch.object(Proof, "verdict", return_value=Verdict(True)):
            yield
    finally:
        torch_sink.set_decode_provider(None)
        _device.reset(token)


def runs_kernels() -> bool:
    """True where batches run through the kernels, and not in stock code."""
    return INTERPRETED or _device.get() != "cpu"


def device_in_use() -> str:
    """What tests give to the backend as the device."""
    return _device.get()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().as_subclass(torch.Tensor).contiguous()
    if tensor.is_floating_point():
        tensor = tensor.where(~tensor.isnan(), torch.nan)  # processors write it with different bits
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN or 0xAA, so that a value that nobody writes is seen."""
    stock_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = stock_empty(*args, **kwargs)
        if tensor.device.type != "meta":
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0xAA if tensor.dtype == torch.uint8 else 0x55)
        return tensor

    with mock.patch.object(torch, "empty", empty):
        yield


def run(pipeline: Pipeline, openers: Sequence[Opener], seed: int) -> tuple[list[Any], torch.Tensor]:
    """The results of a pipeline on every image, and the generator's state afterwards."""
    torch.manual_seed(seed)
    results = [pipeline(open_image()) for open_image in openers]
    return results, torch.get_rng_state()


def lazy_batch(handles: Sequence[Any]) -> LazyBatch:
    """The batch of some handles, unexecuted also where `default_collate` would execute it."""
    return LazyBatch(Images([handle.lazy_recording for handle in handles], device_in_use(), INTERPRETED))


def check_pipeline(
    pipeline: Pipeline,
    openers: Sequence[Opener],
    *,
    seed: int = 0,
    dtypes: Sequence[torch.dtype] = (),
    promise: Promise | None = None,
) -> None:
    """Same draws, same bits, nothing in stock code.

    Args:
        pipeline: ends in a tensor or `tv_tensors.Image` of one shape for all images.
        openers: each opens one image afresh.
        seed: for torch's global generator.
        dtypes: also execute into these, in both memory formats, and one by one.
        promise: what the kernels are held to, that of the recorded calls by default; the CPU path is exact always.
    """
    expected, stock_state = run(pipeline, openers, seed)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True), poisoned_memory():
        handles, state = run(pipeline, openers, seed)
        assert torch.equal(state, stock_state), "the generator was used differently"
        for handle, tensor in zip(handles, expected, strict=True):
            assert isinstance(handle, Handle), f"{type(handle)} is no handle: something was not recorded"
            assert handle.is_recording
            assert (handle.shape, handle.dtype, handle.ndim) == (tensor.shape, tensor.dtype, tensor.ndim)
            assert isinstance(handle, type(tensor))
        together = default_collate(expected)
        kept = (
            promise_of_calls([handle.lazy_recording.calls for handle in handles], together)
            if promise is None
            else promise
        )
        kept = kept if runs_kernels() else EXACT
        collated = default_collate(handles)
        assert (type(collated) is LazyBatch) == runs_kernels()
        assert_keeps(kept, collated.to(device_in_use()).cpu(), together)
        if dtypes:
            _check_outputs(handles, expected, together, dtypes, kept)
        assert_same_bits(handles[-1].materialize(), expected[-1])


def _check_outputs(
    handles: Sequence[Any],
    expected: Sequence[torch.Tensor],
    together: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    promise: Promise,
) -> None:
    for dtype in dtypes:
        for memory_format in MEMORY_FORMATS:
            batch = lazy_batch(handles)
            made, rows = batch.__torch_sink_execute__(device_in_use(), dtype=dtype, memory_format=memory_format)
            assert rows is None
            assert_keeps(promise, made.cpu(), together.to(dtype, memory_format=memory_format, copy=True))
    for handle, tensor in zip(handles, expected, strict=True):
        made = lazy_batch([handle]).__torch_sink_execute__(device_in_use())[0]
        assert_keeps(promise, made.cpu(), default_collate([tensor]))
