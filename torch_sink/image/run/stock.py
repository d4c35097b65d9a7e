"""Makes batches in stock code on the CPU, which defines the values that a handle stands for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_sink.common.transfer import transfer
from torch_sink.errors import DecodeError
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import STOCK, Op, count_before_values, replay
from torch_sink.image.core.recording import Recording
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import FinishedSource, PixelSource, Source, replayed, source_of
from torch_sink.image.program.program import Batch, Made, Program, Wanted, survivors


def make_in_stock_code(program: Program, batch: Batch, wanted: Wanted) -> Made:
    """Makes a batch of a program in stock code; raises `DecodeError` under the conditions of `survivors`."""
    packed, images = program.packed, slice(batch.first, batch.end)
    entries, calls = packed.entry_of_image[images], packed.calls(images)
    results = {at: _try_decode(packed.source(at)) for at in {*entries}}
    work: list[tuple[Any, tuple[Op, ...]]] = [(results[at], ops) for at, ops in zip(entries, calls, strict=True)]
    errors = {row: image for row, (image, _) in enumerate(work) if isinstance(image, DecodeError)}
    shown, broken_files = survivors(errors, len(work), len(batch.mixes), wanted.on_decode_error)
    rows = list(range(len(work))) if shown is None else shown
    result = wanted.result(batch, len(rows))
    if batch.mixes:
        whole = torch.empty(batch.shape, dtype=batch.dtype, device="cpu")
        missing: Any = FinishedSource(torch.zeros_like(whole[0])), ()
        run_on_cpu([missing if row in errors else each for row, each in enumerate(work)], whole)
        mixed = replay(whole, batch.mixes)
        result.copy_(mixed if shown is None else mixed[rows])
    else:
        run_on_cpu([work[row] for row in rows], result)
    return result, shown, broken_files


def make_for_device(program: Program, batch: Batch, wanted: Wanted) -> Made:
    """Makes a batch as `make_in_stock_code`, then copies it to the device on its current stream."""
    on_host = wanted._replace(device=torch.device("cpu"), dtype=wanted.dtype_of_result(batch), out=None)
    tensor, shown, broken_files = make_in_stock_code(program, batch, on_host)
    result = wanted.result(batch, len(tensor))
    transfer(tensor, result)
    return result, shown, broken_files


def _try_decode(source: Source) -> Source | DecodeError:
    """The source, with its file decoded; or the error."""
    if not isinstance(source, EncodedSource):
        return source
    try:
        return PixelSource(source.decode(), source.path)
    except DecodeError as error:
        return error


_SCALED = Op("v2.to_dtype", (torch.float32, True))
# Values of a group of images, few enough for the cache of a core.
_BYTES_AT_ONCE = 1 << 20


def run_on_cpu(images: Iterable[tuple[Source, tuple[Op, ...]]], out: torch.Tensor) -> None:
    """Makes images, of their sources and recorded calls, into `out` [N, C, H, W]; `DecodeError` where one is damaged.

    Their last calls, where these work value by value, run on many images at once.
    """
    most = max(1, _BYTES_AT_ONCE // (out.shape[1:].numel() * out.itemsize))

    def alike(each: tuple[int, tuple[Any, tuple[Op, ...]]]) -> tuple[Any, ...]:
        row, (pixels, last_calls) = each
        return last_calls, getattr(pixels, "dtype", None), row // most

    with executing():
        begin = 0
        for (last_calls, *_), group in itertools.groupby(enumerate(itertools.starmap(_begun, images)), alike):
            pixels = [each for _, (each, _) in group]
            _finish(pixels, last_calls, out[begin : begin + len(pixels)])
            begin += len(pixels)


def _begun(source: Source, ops: tuple[Op, ...]) -> tuple[Any, tuple[Op, ...]]:
    """Runs all but the last calls; returns a source of the image or the tensor, and the last calls."""
    count = count_before_values(ops)
    made = source if not count and isinstance(source, PixelSource) else replayed(source, ops[:count])
    return (made if isinstance(made, (torch.Tensor, PixelSource)) else PixelSource(made)), ops[count:]


def _finish(pixels: list[Any], last_calls: tuple[Op, ...], target: torch.Tensor) -> None:
    """Runs the last calls on sources of images, or on tensors of one dtype, into `target` [N, C, H, W]."""
    values = _stacked(pixels, target)
    for op in last_calls:
        is_here = target.dtype == torch.float32 and values.dtype == torch.uint8
        if op.name == "to_tensor":
            values = torch.div(values, 255, out=target) if is_here else values.to(torch.float32).div_(255)
        elif op == _SCALED and is_here:
            values = torch.mul(values, 1 / 255, out=target)
        elif op.name.endswith(".normalize"):
            values = STOCK[op.name](values, *op.args, True)  # in place
        elif op.name not in ("pil_to_tensor", "to_image"):
            values = STOCK[op.name](values, *op.args)
    if values is not target:
        target.copy_(values)


def _stacked(pixels: list[Any], target: torch.Tensor) -> torch.Tensor:
    """Sources of images, or tensors, in the shape of `target`: in `target`, or in a new tensor of their own dtype."""
    if isinstance(pixels[0], torch.Tensor):
        return torch.stack(pixels, out=target if pixels[0].dtype == target.dtype else None)
    count, channels, height, width = target.shape
    data = bytearray().join([image.tobytes() for image in pixels])
    planes = torch.frombuffer(data, dtype=torch.uint8).view(count, height, width, channels).permute(0, 3, 1, 2)
    return target.copy_(planes) if target.dtype == torch.uint8 else planes.contiguous()


def decoded_once(images: Sequence[Recording]) -> list[tuple[Source, tuple[Op, ...]]]:
    """The source of each image, and the calls still to run on it.

    Files with several views are decoded here, once; calls with which several of them begin run here as well.
    """
    found: list[tuple[Source, tuple[Op, ...]]] = [(image.source, image.calls) for image in images]
    of_source: dict[int, list[int]] = {}
    for at, (source, _) in enumerate(found):
        if not isinstance(source, FinishedSource):
            of_source.setdefault(id(source), []).append(at)
    groups = [*of_source.values()]
    while groups:
        if len(group := groups.pop()) > 1:
            source, together = found[group[0]][0], zip(*(found[at][1] for at in group), strict=False)
            common = [calls[0] for calls in itertools.takewhile(lambda calls: len({*calls}) == 1, together)]
            with executing():
                made = source_of(replayed(source, common), source.path)
            by_next_call: dict[tuple[Op, ...], list[int]] = {}
            for at in group:
                found[at] = made, found[at][1][len(common) :]
                by_next_call.setdefault(found[at][1][:1], []).append(at)
            groups += [alike for next_call, alike in by_next_call.items() if next_call]
    return found
