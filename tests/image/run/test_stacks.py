"""`FiveCrop` and `TenCrop` with their views stacked: samples [k, C, H, W] and batches [N, k, C, H, W]."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener, write_classes
from image.check import assert_same_bits, device_in_use, runs_kernels
from image.decode.test_bad_input import corrupt
from image.run.test_collate import assert_same_structure, stock_and_lazy
from torch_sink.image.core import settings
from torch_sink.image.run.batch import LazyBatch

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]

NORMALIZES = F.normalize, F_tensor.normalize, v2.functional.normalize
TO_TENSOR, NORMALIZE = v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
Transform = Callable[[Any], Any]

TRANSFORMS: dict[str, Transform] = {
    "as torchvision's docs write it": v1.Compose(
        [v1.FiveCrop(12), v1.Lambda(lambda crops: torch.stack([TO_TENSOR(crop) for crop in crops]))]
    ),
    "resized, each normalized": v1.Compose(
        [
            v1.Resize(18),
            v1.FiveCrop(12),
            v1.Lambda(lambda crops: torch.stack([NORMALIZE(TO_TENSOR(crop)) for crop in crops])),
        ]
    ),
    "normalized in a step of its own": v1.Compose(
        [
            v1.TenCrop(12, vertical_flip=True),
            v1.Lambda(lambda crops: torch.stack([TO_TENSOR(crop) for crop in crops])),
            v1.Lambda(lambda crops: torch.stack([NORMALIZE(crop) for crop in crops])),
        ]
    ),
    "normalized whole": v1.Compose(
        [
            v1.FiveCrop(12),
            v1.Lambda(lambda crops: torch.stack([v1.PILToTensor()(crop) for crop in crops])),
            v1.ConvertImageDtype(torch.float32),
            v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
            v1.RandomHorizontalFlip(1.0),
        ]
    ),
    "normalized whole, v2": v1.Compose(
        [
            v2.ToImage(),
            v2.FiveCrop(12),
            v1.Lambda(lambda crops: torch.stack(crops)),
            v2.ToDtype(torch.float32, scale=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
            v2.RandomVerticalFlip(1.0),
        ]
    ),
    "crops of a tensor": v1.Compose(
        [TO_TENSOR, NORMALIZE, v1.FiveCrop(12), v1.Lambda(lambda crops: torch.stack(list(crops)))]
    ),
    "cat": v1.Compose(
        [v1.FiveCrop(12), v1.Lambda(lambda crops: torch.cat([TO_TENSOR(crop).unsqueeze(0) for crop in crops]))]
    ),
    "cat of stacks": v1.Compose(
        [
            TO_TENSOR,
            lambda image: torch.cat([torch.stack(F.five_crop(image, [12, 12])), F.center_crop(image, [12, 12])[None]]),
        ]
    ),
    "v2": v1.Compose(
        [
            v2.ToImage(),
            v2.TenCrop(12),
            v1.Lambda(lambda crops: torch.stack([v2.functional.to_dtype(crop, scale=True) for crop in crops])),
        ]
    ),
    "uint8": v1.Compose([v2.FiveCrop(12), v1.Lambda(lambda crops: torch.stack([F.pil_to_tensor(c) for c in crops]))]),
}
LISTS: dict[str, Transform] = {
    "of views of one size": lambda image: [TO_TENSOR(crop) for crop in F.five_crop(image, [12, 12])],
    "of views of two sizes": lambda image: [
        TO_TENSOR(F.resized_crop(image, 1, number, 20, 20, [16 - 2 * (number // 2)] * 2)) for number in range(6)
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("images"), 3)


def loader(folder: Path, transform: Transform, workers: int = 0, **options: Any) -> DataLoader[Any]:
    context = "fork" if workers else None
    options = {"batch_size": 2, "num_workers": workers, "multiprocessing_context": context, **options}
    return DataLoader(ImageFolder(str(folder), transform), **options)


def moved(batches: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As a loop over them uses them: on the device, flat, and back."""
    made = []
    for images, target in batches:
        on_device = images.to(device_in_use())
        count, views, channels, height, width = on_device.size()
        made.append((on_device.view(-1, channels, height, width).view(count, views, -1).cpu(), target))
    return made


def check_transform(folder: Path, name: str, workers: int) -> None:
    def batches() -> list[Any]:
        found = list(loader(folder, TRANSFORMS[name], workers))
        assert torch_sink.get_image_backend() == "PIL" or not torch_sink.fallback_report()
        return found

    expected, made = stock_and_lazy(batches)
    assert all((type(images) is LazyBatch) == runs_kernels() for images, _ in made)
    for (images, target), (stock_images, stock_target) in zip(moved(made), moved(expected), strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(target, stock_target)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.sampled(10)
def test_transforms(folder: Path, name: str, workers: int) -> None:
    check_transform(folder, name, workers)


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_views_stay_lists(folder: Path, name: str) -> None:
    expected, made = stock_and_lazy(lambda: list(loader(folder, LISTS[name])))
    assert_same_structure(made, expected)


def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks wait, and are then used on the CPU, without Triton's interpreter too."""
    settled = settings.settled()
    assert settled is not None
    monkeypatch.setattr(type(settled), "executes_at_once", False)


def crops(count: int = 3) -> list[torch.Tensor]:
    """Of one file."""
    views = F.five_crop(opener(encoded(40, 30, 1))(), [12, 14])
    return [F.to_tensor(view) for view in views[:count]]


def batch_of(samples: int = 2) -> torch.Tensor:
    return default_collate([torch.stack(crops()) for _ in range(samples)])


def used(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    expected = function()
    with torch_sink.image_backend("device", device="cpu"):
        waiting(monkeypatch)
        return expected, function()


def written(image: torch.Tensor) -> torch.Tensor:
    image[:, 2:5, 3:6] = torch.zeros(1)
    return image


USES: dict[str, Callable[[], Any]] = {
    "shape": lambda: [(*each.shape, each.ndim, len(each)) for each in (torch.stack(crops()), batch_of())],
    "arithmetic": lambda: [batch_of() + 1, torch.stack(crops()) * 2],
    "parts": lambda: [torch.stack(crops())[1], torch.stack(crops())[-1], batch_of()[1], batch_of()[0, 2]],
    "slices": lambda: [torch.stack(crops())[1:], torch.stack(crops())[:, 0], batch_of()[:, 0]],
    "iteration": lambda: [*torch.stack(crops()), *batch_of()],
    "unbind": lambda: [*torch.stack(crops()).unbind(), *batch_of().unbind(1), *torch.unbind(batch_of(), dim=1)],
    "views": lambda: [
        batch_of().view(-1, 3, 12, 14),
        batch_of().view(6, 3, 12, 14),
        batch_of().view((3, 2, 3, 12, 14)),
        batch_of().reshape(-1, 3, 12, 14),
        torch.reshape(batch_of(), (-1, 3, 12, 14)),
        batch_of().flatten(0, 1),
        torch.flatten(batch_of(), end_dim=1),
        torch.stack(crops(1)).view(3, 12, 14),
        batch_of().view(2, -1),
        batch_of().view(2, 9, 12, 14),
        batch_of().flatten(1),
        batch_of().flatten(),
        batch_of().view(torch.int32),
    ],
    "views of a batch of images": lambda: [
        default_collate(crops(4)).view(2, 2, 3, 12, 14),
        default_collate(crops(4)).flatten(0, 0),
        default_collate([crop.unsqueeze(0) for crop in crops()]),
        crops()[0].unsqueeze(0).view(1, 1, 3, 12, 14),
        [[batch.view(2, 2, 3, 12, 14).mul_(2), batch] for batch in [default_collate(crops(4))]],
        [[batch.mul_(2), batch.view(4, 1, 3, 12, 14)] for batch in [default_collate(crops(4))]],
        [[image, batch.view(1, 1, 3, 12, 14).mul_(2)] for image in crops(1) for batch in [image.unsqueeze(0)]],
    ],
    "a view that is written to": lambda: (
        [[stack.view(-1, 3, 12, 14).mul_(2), stack] for stack in [batch_of()]]
        + [[stack.mul_(2), stack.view(-1, 3, 12, 14)] for stack in [batch_of()]]
    ),
    "a stack that is written to after a view": lambda: [
        [view, stack.mul_(2), view + 0] for stack in [batch_of()] for view in [stack.flatten(0, 1)]
    ],
    "a part that is written to": lambda: [
        [part.mul_(2), stack, part] for stack in [torch.stack(crops())] for part in [stack[1]]
    ],
    "a box of a part that is written to": lambda: [
        [written(part), stack, part] for stack in [torch.stack(crops())] for part in [stack[1]]
    ],
    "a part normalized in place": lambda: [
        [F.normalize(part, [0.5], [0.2], inplace=True), stack]
        for stack in [torch.stack(crops())]
        for part in [stack[1]]
    ],
    "a part of a part": lambda: [
        [F.crop(part, 1, 1, 5, 5).add_(1), stack, part] for stack in [torch.stack(crops())] for part in [stack[1]]
    ],
    "a stack that is written to after its part": lambda: [
        [stack.add_(1), part, F.crop(part, 1, 1, 5, 5)] for stack in [torch.stack(crops())] for part in [stack[0]]
    ],
    "an image that is written to after it was stacked": lambda: [
        [images[0].mul_(2), stack] for images in [crops()] for stack in [torch.stack(images)]
    ],
    "cat of all sorts": lambda: [
        torch.cat([torch.stack(crops()), torch.stack(crops())]),
        torch.cat([torch.stack(crops()), torch.stack(crops())], dim=1),
        torch.cat([torch.stack(crops()), torch.zeros(1, 3, 12, 14)]),
        torch.cat((crops()[0][None], crops()[1][None])),
        torch.cat(crops()),
        torch.cat([batch_of(), batch_of()]),
    ],
    "stacks of all sorts": lambda: [
        torch.stack([torch.stack(crops()), torch.stack(crops())], 1),
        torch.stack([torch.stack(crops()), torch.zeros(3, 3, 12, 14)]),
        torch.stack([batch_of(), batch_of()]),
        torch.stack([torch.stack(crops()), torch.stack(crops())], out=torch.empty(2, 3, 3, 12, 14)),
    ],
    "moves": lambda: [batch_of().to("cpu"), batch_of().to(torch.float16), batch_of().cpu(), batch_of().clone()],
    "copies": lambda: [copy.deepcopy(batch_of()), pickle.loads(pickle.dumps(batch_of())) + 0],
    "printing": lambda: [repr(batch_of()), str(torch.stack(crops()))],
    "normalized whole": lambda: [F.normalize(torch.stack(crops()), [0.5], [0.2]), F.hflip(torch.stack(crops()))],
    "normalized whole, in place": lambda: [
        [normalize(stack, [0.5], [0.2], True), stack] for stack in [torch.stack(crops())] for normalize in NORMALIZES
    ],
    "normalized whole, into another": lambda: [
        [normalize(stack, [0.5], [0.2], False), stack] for stack in [torch.stack(crops())] for normalize in NORMALIZES
    ],
    "attributes": lambda: [
        getattr(each(stack), "path", None)
        for each in (copy.copy, copy.deepcopy, lambda stack: pickle.loads(pickle.dumps(stack)))
        for stack in [torch.stack(crops())]
        for stack.path in ["a.jpg"]
    ],
    "other calls on the whole": lambda: [F.resize(torch.stack(crops()), [6, 5]), v2.functional.invert(batch_of())],
    "of another type": lambda: [
        type(each.as_subclass(tv_tensors.Image)) for each in (torch.stack(crops()), default_collate(crops()))
    ],
    "wrapped": lambda: list(map(type, [tv_tensors.wrap(torch.stack(crops()), like=tv_tensors.Image(crops()[0]))])),
}


@pytest.mark.parametrize("name", USES)
def test_uses_give_what_they_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*used(USES[name], monkeypatch))


def assert_same(expected: Any, made: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert made.shape == expected.shape
        assert_same_bits(getattr(made, "materialize", made.clone)().clone(), expected.clone())
    elif isinstance(expected, (list, tuple)):
        assert len(made) == len(expected)
        for one, other in zip(expected, made, strict=True):
            assert_same(one, other)
    else:
        assert made == expected


ERRORS: dict[str, Callable[[], Any]] = {
    "stacks of other sizes": lambda: torch.stack([torch.stack(crops(2)), torch.stack(crops(3))]),
    "collated stacks of other sizes": lambda: default_collate([torch.stack(crops(2)), torch.stack(crops(3))]),
    "a view that does not fit": lambda: batch_of().view(-1, 5, 12, 14),
    "an index beyond": lambda: torch.stack(crops())[3],
    "memory format": lambda: batch_of().to("cpu", memory_format=torch.channels_last),
    "nothing": lambda: torch.stack([]),
    "normalized wrongly": lambda: F.normalize(batch_of(), [0.5, 0.5], [0.2, 0.2]),
    "mixed": lambda: v2.MixUp(num_classes=2)(batch_of(), torch.tensor([0, 1])),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for _ in range(2):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as raised:
            ERRORS[name]()
        outcomes.append((raised.type, str(raised.value)))
        if len(outcomes) == 1:
            torch_sink.set_image_backend("device", device="cpu")
            waiting(monkeypatch)
    torch_sink.set_image_backend("PIL")
    assert outcomes[0] == outcomes[1]


def test_views_share_their_file() -> None:
    with torch_sink.image_backend("device", device="meta"):
        batch = pickle.loads(pickle.dumps(batch_of(4)))
        assert type(batch) is LazyBatch
        assert len(batch.program.packed.contents.entries) == 1
        assert batch.program.packed.entry_of_image == [0] * 12
        assert batch.plan.decoders.total() == 12


def test_without_a_device_a_file_is_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    stock = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda *args, **kwargs: decoded.append(args) or stock(*args, **kwargs))
    with torch_sink.image_backend("device", device="cpu"):
        list(loader(folder, TRANSFORMS["resized, each normalized"]))
    assert len(decoded) == 3


class Damaged(Dataset[torch.Tensor]):
    """Samples of three views; the files of some of them are damaged."""

    def __init__(self, damaged: Sequence[int]) -> None:
        self.damaged = damaged

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        good = crops_of(encoded(40, 30, index))
        return torch.stack([good[0], crops_of(corrupt())[0], good[2]] if index in self.damaged else good)


def crops_of(data: bytes) -> list[torch.Tensor]:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return [F.to_tensor(F.resize(view, [8, 8])) for view in F.five_crop(image, [20, 20])[:3]]


@pytest.mark.parametrize("is_given_memory", [False, True])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_damaged_view_loses_its_sample(policy: str, is_given_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [torch.stack(crops_of(encoded(40, 30, index))) for index in range(4)]
    with torch_sink.image_backend("device", device="cpu"):
        waiting(monkeypatch)
        batch = default_collate([Damaged((0, 2))[index] for index in range(4)])
        assert type(batch) is LazyBatch
        out = torch.zeros(batch.shape) if is_given_memory else None
        made, rows = batch.__torch_sink_execute__("cpu", out=out, on_decode_error=policy)
        assert rows == ([1, 3] if policy == "skip" else [1, 1, 3, 3])
        assert_same_bits(made, torch.stack([good[row] for row in rows]))
        assert out is None or made.data_ptr() == out.data_ptr()
        assert len(batch.broken_files) == 2
        with pytest.raises(torch_sink.DecodeError, match="an image in memory"):
            batch.__torch_sink_execute__("cpu")
        lost = default_collate([Damaged(range(4))[index] for index in range(4)])
        with pytest.raises(torch_sink.DecodeError):
            lost.__torch_sink_execute__("cpu", on_decode_error=policy)


def test_what_was_made_outlives_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batch_of()
    with torch_sink.image_backend("device", device="cpu"):
        waiting(monkeypatch)
        made = batch_of()
    assert type(made) is LazyBatch
    assert_same_bits(made.to("cpu"), expected)


def test_samples_of_views_keep_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a loader of ordinary tensors: the layout is one of four dimensions."""

    def through_slots(batch: torch.Tensor) -> Any:
        return next(iter(torch_sink.SinkLoader([batch], device="cpu", memory_format=torch.channels_last)))

    expected = through_slots(batch_of())
    with torch_sink.image_backend("device", device="cpu"):
        waiting(monkeypatch)
        made = through_slots(batch_of())
    assert made.ndim == 5
    assert_same_bits(made, expected)


def test_a_single_stack_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collate function that stacks images cannot be told from a sample of several views."""
    expected = torch.stack(crops())
    with torch_sink.image_backend("device", device="cpu"):
        waiting(monkeypatch)
        stack = torch.stack(crops())
        assert type(stack) is LazyBatch
        assert len(stack.program.packed.calls()) == 3
        made, _ = stack.__torch_sink_execute__("cpu", memory_format=torch.channels_last)
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(made, expected)
