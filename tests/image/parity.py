"""How close the kernels come to stock torchvision: every operation against each of its references.

There are three families of stock code, whose results differ from each other: what torchvision does on Pillow images,
and the tensor functions of `transforms` (v1) and of `transforms.v2`, the latter two on uint8 and on float32.
"""

from __future__ import annotations

import functools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

from image.examples import REFERENCES, Arguments, Example
from image.trials import examples_of
from torch_sink.cli.photos import make_photo
from torch_sink.image.backend import image_backend
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.tensor import Handle
from torch_sink.image.operations import operations
from torch_sink.image.run.batch import LazyBatch


class ImageKind(NamedTuple):
    """Mode, "RGB" or "L", height and width of an image."""

    mode: str
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width} x {self.height} ({self.mode})"


class Promise(NamedTuple):
    """How close the results of some calls come to stock code's.

    Attributes:
        largest: largest difference of two values: in steps of a byte, or of the range of values for floats.
        equal_share: smallest share of values that are equal, 0 to 1.
    """

    largest: float = 0.0
    equal_share: float = 1.0


EXACT = Promise()


def promise_of(calls: Sequence[Op], is_float: bool) -> Promise:
    """What the operations of recorded calls promise of bytes, or of float32 values."""
    promises = [call.promise for call in calls]
    largest, equal_share = (
        max(promise.largest for promise in promises), min(promise.equal_share for promise in promises)
    )  # fmt: skip
    if is_float and largest < math.inf:
        closeness = max(promise.floats for promise in promises)
        return Promise(closeness, 0.0) if closeness else EXACT
    return Promise(largest, equal_share)


class Measured(NamedTuple):
    """What came of one operation against one reference.

    Attributes:
        operation: its name, and after a comma what is special about the arguments.
        reference: one of `REFERENCES`.
        promise: what it is held to.
        largest: largest difference of two values.
        equal: how many values are equal.
        values: how many were compared.
    """

    operation: str
    reference: str
    promise: Promise
    largest: float
    equal: int
    values: int

    @property
    def share(self) -> float:
        """Share of equal values, 0 to 1."""
        return self.equal / self.values

    @property
    def keeps_its_promise(self) -> bool:
        return self.largest <= self.promise.largest and self.share >= self.promise.equal_share


class Parity(NamedTuple):
    """The table.

    Attributes:
        rows: one for each operation and reference that is recorded.
        fallbacks: (operation, reference) that ran in stock code.
        recorded: names of all operations that were recorded, as `OPERATIONS` knows them.
        planned: {(operation, reference): (its promise, how many values its row is of)} of all that are recorded, also
            where they were not chosen to run.
    """

    rows: list[Measured]
    fallbacks: list[tuple[str, str]]
    recorded: set[str]
    planned: dict[tuple[str, str], tuple[Promise, int]]

    def broken_promises(self) -> list[Measured]:
        return [row for row in self.rows if not row.keeps_its_promise]


def measure(
    images: Sequence[ImageKind],
    *,
    device: str = "cpu",
    references: Iterable[str] = REFERENCES,
    seed: int = 0,
    chosen: Callable[[str, str, Promise], bool] = lambda operation, reference, promise: True,
) -> Parity:
    """Runs every operation on images of every kind, through the backend and in stock code.

    Args:
        images: their modes and sizes.
        device: where batches are executed: an accelerator, or "cpu", which is the kernels under `TRITON_INTERPRET=1`.
        references: some of `REFERENCES`.
        seed: of the arguments and the pixels.
        chosen: of an operation, a reference and what is promised, whether to run it.
    """
    totals: dict[tuple[str, str, Promise], list[float]] = {}
    fallbacks: dict[tuple[str, str], None] = {}
    recorded: dict[tuple[str, str], set[str]] = defaultdict(set)
    planned: dict[tuple[str, str], tuple[Promise, int]] = {}
    for reference in references:
        for kind in images:
            chance = random.Random(f"{seed} {reference} {kind}")
            image = make_photo(kind.width, kind.height, chance.randrange(1 << 20)).convert(kind.mode)
            calls = calls_of(reference, kind, seed)
            expected = _expected(image, reference, calls)
            handles = _handles(image, reference, {name: calls[name] for name in expected}, device)
            promises = {
                name: promise_of(handle.lazy_recording.calls, handle.is_floating_point())
                for name, handle in handles.items()
            }
            fallbacks |= {(operation, reference): None for operation in expected if operation not in handles}
            for name, handle in handles.items():
                recorded[name, reference] |= {op.name for op in handle.lazy_recording.calls}
                before, values = planned.get((name, reference), (promises[name], 0))
                planned[name, reference] = _both(before, promises[name]), values + expected[name].numel()
            handles = {name: each for name, each in handles.items() if chosen(name, reference, promises[name])}
            with image_backend("device", device=device):
                for operation, made in _executed(handles, device):
                    row = operation, reference, promises[operation]
                    _add(totals.setdefault(row, [0.0, 0, 0]), made, expected[operation])
    rows = [Measured(*key, largest, int(equal), int(values)) for key, (largest, equal, values) in totals.items()]
    in_stock_code = [key for key in fallbacks if key not in recorded]
    return Parity(_merged(rows), in_stock_code, set().union(*recorded.values()), planned)


def _merged(rows: Sequence[Measured]) -> list[Measured]:
    """One row for each operation and reference; what is promised may depend on the image."""
    merged: dict[tuple[str, str], Measured] = {}
    for row in rows:
        before = merged.get((row.operation, row.reference))
        if before is None:
            merged[row.operation, row.reference] = row
            continue
        promise = _both(before.promise, row.promise)
        largest, equal, values = max(before.largest, row.largest), before.equal + row.equal, before.values + row.values
        merged[row.operation, row.reference] = Measured(*row[:2], promise, largest, equal, values)
    return list(merged.values())


def _both(one: Promise, other: Promise) -> Promise:
    """What holds where either of two promises is made."""
    return Promise(max(one.largest, other.largest), min(one.equal_share, other.equal_share))


def calls_of(reference: str, kind: ImageKind, seed: int) -> dict[str, Callable[[Any], Any]]:
    """{line of the table: the call, of an image} of all examples for images of one kind.

    Each operation draws its arguments by itself: another one that is added changes none of them.
    """
    calls = {}
    for operation in operations():
        chance = random.Random(f"{seed} {reference} {kind} {operation.name}")
        a = Arguments(chance, reference, kind.height, kind.width, len(kind.mode))
        for example in examples_of(operation, a):
            if (functional := _functional(a, example)) is not None:
                calls[example.title] = functools.partial(example.called, functional)
    return calls


def _functional(a: Arguments, example: Example) -> Any:
    """The module whose function an example calls; Pillow images go to `transforms` where it takes them."""
    modules = [a.functional] if not a.is_pillow else [F2] if example.name == "erase" else [F1, F2]
    return next((module for module in modules if example.run or hasattr(module, example.name)), None)


def converted(image: Any, reference: str) -> Any:
    """A Pillow image as a reference takes it: itself, or the tensor of its family and dtype."""
    if reference == "Pillow":
        return image
    family, dtype = reference.split()
    if family == "v1":
        return F1.pil_to_tensor(image) if dtype == "uint8" else F1.to_tensor(image)
    tensor = F2.to_image(image)
    return tensor if dtype == "uint8" else F2.to_dtype(tensor, torch.float32, scale=True)


def _expected(image: Image.Image, reference: str, calls: dict[str, Callable[[Any], Any]]) -> dict[str, torch.Tensor]:
    """{operation: stock result} of the calls that stock code accepts."""
    results = {}
    for operation, call in calls.items():
        try:
            results[operation] = _tensor(call(converted(image.copy(), reference)))
        except (TypeError, ValueError, RuntimeError):
            continue
    return results


def _handles(image: Image.Image, reference: str, calls: dict[str, Callable[[Any], Any]], device: str) -> dict[str, Any]:
    """{operation: handle} of the calls that the backend records."""
    with image_backend("device", device=device):
        results = {name: _tensor(call(converted(image.copy(), reference))) for name, call in calls.items()}
    return {name: result for name, result in results.items() if isinstance(result, Handle) and result.is_recording}


def _tensor(result: Any) -> Any:
    """A result as a tensor; of several crops one."""
    result = result[-2] if isinstance(result, tuple) else result
    return F1.pil_to_tensor(result) if isinstance(result, Image.Image) else result


def _executed(handles: dict[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Makes the images; those of one shape and type together, as they would be in a batch."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for operation, handle in handles.items():
        groups[handle.shape, handle.dtype].append(operation)
    for group in groups.values():
        batch = default_collate([handles[operation] for operation in group])
        images = batch.to(device).cpu() if type(batch) is LazyBatch else batch
        yield from zip(group, images, strict=True)


def _add(total: list[float], actual: torch.Tensor, expected: torch.Tensor) -> None:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}")
    made, wanted = (tensor.as_subclass(torch.Tensor).double() for tensor in (actual, expected))
    equal = (made == wanted) | (made.isnan() & wanted.isnan())
    difference = (made - wanted).abs().where(~equal, 0.0)
    total[0] = max(total[0], difference.nan_to_num(nan=math.inf).max().item())
    total[1] += int(equal.sum())
    total[2] += equal.numel()


HEADER = (
    "| operation | reference | promise | largest difference | equal values | compared |",
    "|---|---|---|---:|---:|---:|",
)


def lines_of(rows: Iterable[Measured]) -> dict[tuple[str, str], str]:
    """{(operation, reference): the line of the table}."""
    lines = {}
    for row in rows:
        share = "100 %" if row.equal == row.values else f"{100 * row.share:.3f} %"
        cells = (
            row.operation,
            row.reference,
            promise_text(row.promise),
            f"{row.largest:.2g}",
            share,
            f"{row.values:,}",
        )
        lines[row.operation, row.reference] = f"| {' | '.join(cells)} |"
    return lines


def in_order(lines: dict[tuple[str, str], str]) -> list[str]:
    """Lines of the table by operation, then in the order of `REFERENCES`."""
    return [lines[key] for key in sorted(lines, key=lambda key: (key[0], REFERENCES.index(key[1])))]


def promise_text(promise: Promise) -> str:
    if promise == EXACT:
        return "equal bits"
    parts = [] if promise.largest == math.inf else [f"at most {promise.largest:g}"]
    parts += [f"{100 * promise.equal_share:g} % equal"] if promise.equal_share else []
    return ", ".join(parts)
