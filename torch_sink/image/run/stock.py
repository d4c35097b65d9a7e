"""A batch, or one image of it, in stock code on the CPU: the definition of what a handle stands for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.core.transfer import transfer
from torch_sink.image.decode.source import EncodedSource, FinishedSource, PixelSource, Source
from torch_sink.image.program.program import Made, Program, Wanted, survivors


def make_in_stock_code(program: Program, wanted: Wanted) -> Made:
    """Makes a batch.

    Raises:
        DecodeError: as `survivors` says.
    """
    results, calls = [_try_decode(source) for source in program.packed.sources()], program.packed.calls()
    images = [results[at] for at in program.packed.entry_of_image]
    errors = {row: image for row, image in enumerate(images) if isinstance(image, DecodeError)}
    shown, broken_files = survivors(errors, len(images), len(program.mixes), wanted.on_decode_error)
    rows = list(range(len(images))) if shown is None else shown
    result = wanted.result(program, len(rows))
    if program.mixes:
        whole = torch.zeros(program.shape, dtype=program.dtype, device="cpu")
        for row, image in enumerate(images):
            if not isinstance(image, DecodeError):
                run_image_on_cpu(image, calls[row], whole[row])
        mixed = replay(whole, program.mixes)
        result.copy_(mixed if shown is None else mixed[rows])
    else:
        for place, row in enumerate(rows):
            run_image_on_cpu(images[row], calls[row], result[place])  # type: ignore[arg-type]
    return Made(result, shown, broken_files)


def make_for_device(program: Program, wanted: Wanted) -> Made:
    """Makes a batch as `make_in_stock_code` does, then moves it to the device, in the order of its current stream.

    Raises:
        DecodeError: as `survivors` says.
    """
    on_host = wanted._replace(device=torch.device("cpu"), dtype=wanted.dtype_of_result(program), out=None)
    made = make_in_stock_code(program, on_host)
    result = wanted.result(program, len(made.tensor))
    transfer(made.tensor, result)
    return made._replace(tensor=result)


def _try_decode(source: Source) -> Source | DecodeError:
    """The source with its pixels made, or the error."""
    if not isinstance(source, EncodedSource):
        return source
    try:
        return PixelSource(source.decode(), source.path)
    except DecodeError as error:
        return error


def run_image_on_cpu(source: Source, ops: tuple[Op, ...], target: torch.Tensor) -> None:
    """Makes one image of a batch.

    Args:
        source: where its pixels come from.
        ops: calls recorded on it.
        target: [C, H, W], written to.

    Raises:
        DecodeError: the file is damaged.
    """
    with executing():
        if target.dtype == torch.float32 and [op.name for op in ops[-2:]] == ["to_tensor", "v1.normalize"]:
            # The arithmetic of these calls on the same values, without their three temporary tensors.
            torch.div(replay(source.decode(), (*ops[:-2], Op("pil_to_tensor"))), 255, out=target)
            mean, std = (torch.tensor(each, dtype=target.dtype, device="cpu") for each in ops[-1].args)
            target.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
        else:
            target.copy_(replay(source.decode(), ops))


def decoded_once(images: Sequence[Any]) -> list[tuple[Source, tuple[Op, ...]]]:
    """The source of each image and the calls to make of it, for a batch with several views of one file.

    Such a file is decoded here, and the calls with which all of its views begin are made.

    Args:
        images: handles.

    Raises:
        DecodeError: a file with several views is damaged.
    """
    views: dict[int, list[Any]] = {}
    for image in images:
        views.setdefault(id(image.lazy_source), []).append(image)
    begun: dict[int, tuple[Source, int]] = {}
    for key, alike in views.items():
        source = alike[0].lazy_source
        begun[key] = source, 0
        if len(alike) > 1 and not isinstance(source, FinishedSource):
            common = _common([image.lazy_ops for image in alike])
            with executing():
                made = replay(source.decode(), common)
            kind = FinishedSource if isinstance(made, torch.Tensor) else PixelSource
            begun[key] = kind(made, source.path), len(common)
    found = [(*begun[id(image.lazy_source)], image.lazy_ops) for image in images]
    return [(source, ops[done:]) for source, done, ops in found]


def _common(programs: Sequence[tuple[Op, ...]]) -> list[Op]:
    """The calls with which all programs begin."""
    together = zip(*programs, strict=False)
    return [calls[0] for calls in itertools.takewhile(lambda calls: all(op == calls[0] for op in calls), together)]
