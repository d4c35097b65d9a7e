"""How close the kernels come to stock torchvision: every operation against each of its references.

There are three families of stock code, whose results differ from each other: what torchvision does on Pillow images,
and the tensor functions of `transforms` (v1) and of `transforms.v2`, the latter two on uint8 and on float32.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import functional

from torch_sink.cli.parity_calls import REFERENCES, Call, converted, random_calls
from torch_sink.cli.photos import make_photo
from torch_sink.image.backend import image_backend
from torch_sink.image.execute.batch import LazyBatch
from torch_sink.image.handles.tensor import HANDLES

_WARPS = ("rotate", "affine", "perspective", "elastic")


class ImageKind(NamedTuple):
    """Mode, "RGB" or "L", height and width of an image."""

    mode: str
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width} x {self.height} ({self.mode})"


class Promise(NamedTuple):
    """How close an operation comes to its reference.

    Attributes:
        largest: largest difference of two values: in steps of a byte, or of the range of values for floats.
        equal_share: smallest share of values that are equal, 0 to 1.
    """

    largest: float = 0.0
    equal_share: float = 1.0


EXACT = Promise()


def promise_of(operation: str, reference: str) -> Promise:
    """What is promised for an operation (as `Call.operation` names it) against a reference.

    Pillow computes in integers, or rounds the same way everywhere, so its bits are promised. torch's own float kernels
    give other bits on other processors: what goes through them is promised to within a rounding.
    """
    name, _, special = operation.partition(", ")
    through_torch = name in ("gaussian_blur", "elastic", "augmix")  # Pillow images become tensors first
    if reference == "Pillow" and not through_torch:
        return EXACT
    if name == "augmix" or (name in _WARPS and special.startswith("NEAREST")):
        # AugMix may put a threshold behind a warp; the nearest pixel of a position between two may be either.
        return Promise(math.inf, 0.99)
    if reference.endswith("float32"):
        return Promise(1e-4 if name in _WARPS or "antialias=False" in special else 4e-6, 0.0)
    resized = name in ("resize", "resized_crop") and "NEAREST" not in special
    if name in (*_WARPS, "gaussian_blur") or (reference == "v1 uint8" and resized):
        return Promise(1, 0.99)
    # The mean of gray values is a float32 sum in torch, and hues are floats.
    return Promise(1, 0.999) if name in ("adjust_contrast", "adjust_saturation", "adjust_hue") else EXACT


class Measured(NamedTuple):
    """What came of one operation against one reference.

    Attributes:
        operation: its name, and after a comma what is special about the arguments.
        reference: one of `REFERENCES`.
        largest: largest difference of two values.
        equal: how many values are equal.
        values: how many were compared.
    """

    operation: str
    reference: str
    largest: float
    equal: int
    values: int

    @property
    def share(self) -> float:
        """Share of equal values, 0 to 1."""
        return self.equal / self.values

    @property
    def keeps_its_promise(self) -> bool:
        promise = promise_of(self.operation, self.reference)
        return self.largest <= promise.largest and self.share >= promise.equal_share


class Parity(NamedTuple):
    """The table.

    Attributes:
        rows: one for each operation and reference that is recorded.
        fallbacks: (operation, reference) that ran in stock code.
        recorded: names of all operations that were recorded, as `torch_sink.image.core.ops.STOCK` knows them.
    """

    rows: list[Measured]
    fallbacks: list[tuple[str, str]]
    recorded: set[str]

    def broken_promises(self) -> list[Measured]:
        return [row for row in self.rows if not row.keeps_its_promise]


def measure(
    images: Sequence[ImageKind],
    *,
    device: str = "cpu",
    references: Iterable[str] = REFERENCES,
    seed: int = 0,
    chosen: Callable[[str, str], bool] = lambda operation, reference: True,
) -> Parity:
    """Runs every operation on images of every kind, through the backend and in stock code.

    Args:
        images: their modes and sizes.
        device: where batches are executed: an accelerator, or "cpu", which is the kernels under `TRITON_INTERPRET=1`.
        references: some of `REFERENCES`.
        seed: of the arguments and the pixels.
        chosen: of an operation and a reference, whether to run it.
    """
    totals: dict[tuple[str, str], list[float]] = {}
    fallbacks: dict[tuple[str, str], None] = {}
    recorded: set[str] = set()
    for reference in references:
        for kind in images:
            chance = random.Random(f"{seed} {reference} {kind}")
            image = make_photo(kind.width, kind.height, chance.randrange(1 << 20)).convert(kind.mode)
            calls = list(random_calls(chance, reference, kind.height, kind.width, len(kind.mode)))
            calls = [call for call in calls if chosen(call.operation, reference)]
            expected = _expected(image, reference, calls)
            handles = _handles(image, reference, [call for call in calls if call.operation in expected], device)
            recorded |= {op.name for handle in handles.values() for op in handle.sink_ops}
            fallbacks |= {(operation, reference): None for operation in expected if operation not in handles}
            with image_backend("device", device=device):
                for operation, made in _executed(handles, device):
                    _add(totals.setdefault((operation, reference), [0.0, 0, 0]), made, expected[operation])
    rows = [Measured(*key, largest, int(equal), int(values)) for key, (largest, equal, values) in totals.items()]
    return Parity(rows, [key for key in fallbacks if key not in totals], recorded)


def _expected(image: Image.Image, reference: str, calls: Sequence[Call]) -> dict[str, torch.Tensor]:
    """{operation: stock result} of the calls that stock code accepts."""
    results = {}
    for call in calls:
        try:
            results[call.operation] = _tensor(call.run(converted(image.copy(), reference)))
        except (TypeError, ValueError, RuntimeError):
            continue
    return results


def _handles(image: Image.Image, reference: str, calls: Sequence[Call], device: str) -> dict[str, Any]:
    """{operation: handle} of the calls that the backend records."""
    with image_backend("device", device=device):
        results = {call.operation: _tensor(call.run(converted(image.copy(), reference))) for call in calls}
    return {name: result for name, result in results.items() if isinstance(result, HANDLES) and result.is_recording}


def _tensor(result: Any) -> Any:
    return functional.pil_to_tensor(result) if isinstance(result, Image.Image) else result


def _executed(handles: dict[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Makes the images; those of one shape and type together, as they would be in a batch."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for operation, handle in handles.items():
        groups[handle.shape, handle.dtype].append(operation)
    for operations in groups.values():
        batch = default_collate([handles[operation] for operation in operations])
        images = batch.to(device).cpu() if isinstance(batch, LazyBatch) else batch
        yield from zip(operations, images, strict=True)


def _add(total: list[float], actual: torch.Tensor, expected: torch.Tensor) -> None:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}")
    made, wanted = (tensor.as_subclass(torch.Tensor).double() for tensor in (actual, expected))
    equal = (made == wanted) | (made.isnan() & wanted.isnan())
    difference = (made - wanted).abs().where(~equal, 0.0)
    total[0] = max(total[0], difference.nan_to_num(nan=math.inf).max().item())
    total[1] += int(equal.sum())
    total[2] += equal.numel()


def markdown(parity: Parity) -> str:
    """The table, one line for each operation and reference."""
    lines = [
        "| operation | reference | promise | largest difference | equal values | compared |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in sorted(parity.rows, key=lambda row: (row.operation, REFERENCES.index(row.reference))):
        promise = _promise_text(promise_of(row.operation, row.reference))
        share = "100 %" if row.equal == row.values else f"{100 * row.share:.3f} %"
        cells = (row.operation, row.reference, promise, f"{row.largest:.2g}", share, f"{row.values:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _promise_text(promise: Promise) -> str:
    if promise == Promise():
        return "equal bits"
    parts = [] if promise.largest == math.inf else [f"at most {promise.largest:g}"]
    parts += [f"{100 * promise.equal_share:g} % equal"] if promise.equal_share else []
    return ", ".join(parts)
