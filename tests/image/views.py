"""Several views of an image: samples that hold them, and what their batches are looked at with."""

from __future__ import annotations

import random
from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from image.check import assert_same_bits
from torch_sink.common.containers import flatten
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.program.program import Wanted
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.device import DecodedImages
from torch_sink.sink.slots import ImageFormat, execute_lazy
from torch_sink.triton_kernels.launching import Launcher

META = torch.device("meta")


# --- batches, where kernels do nothing


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel is launched, and files are decoded; kernels do nothing."""
    found: Counter[str] = Counter()
    begin = DecodedImages.__init__
    monkeypatch.setattr(Launcher, "__call__", lambda kernel, *_, **__: found.update([kernel.name]))
    monkeypatch.setattr(
        DecodedImages, "__init__", lambda images, *given: (found.update(["decoding"]), begin(images, *given))[1]
    )
    monkeypatch.setattr("torch_sink.image.run.batch.kernels_make", lambda *_: True)
    return found


def made_there(batches: Sequence[Any]) -> None:
    """As by `to` of the meta device, which is not asked for pixels otherwise."""
    for batch in batches:
        batch.images.shared.make([(batch.images, Wanted(META))])


def in_slots(leaves: list[Any]) -> None:
    """As a SinkLoader makes them."""
    refuse, LazyBatch._refuse_meta = LazyBatch._refuse_meta, lambda batch: None  # type: ignore[method-assign]
    try:
        execute_lazy(flatten(leaves), ImageFormat(META), {})
    finally:
        LazyBatch._refuse_meta = refuse  # type: ignore[method-assign]


def recorded(leaves: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(leaves) if type(leaf) is LazyBatch]


def programs_of(batch: Any) -> list[Any]:
    return list({id(leaf.images.shared): leaf.program for leaf in recorded(batch)}.values())


def assert_shared(batch: Any, views: int, files: int) -> None:
    """One block holds each file once."""
    assert len(recorded(batch)) == views
    (program,) = programs_of(batch)
    sources = program.packed.sources()
    assert len(sources) == files
    data = {source.path: bytes(source.data) for source in sources if isinstance(source, EncodedSource)}
    assert data == {path: Path(path).read_bytes() for path in data}


def on_cpu(batch: Any) -> Any:
    """A batch that was recorded for the meta device, as one for the CPU."""
    for one in recorded(batch):
        one.images.destination = "cpu"
    return batch


def assert_equals(batch: Any, expected: Any, device: str = "cpu") -> None:
    """Equal containers, and equal values, made on a device."""
    leaves, structure = tree_flatten(batch)
    stock_leaves, stock_structure = tree_flatten(expected)
    assert structure == stock_structure
    for leaf, stock in zip(leaves, stock_leaves, strict=True):
        if not isinstance(stock, torch.Tensor):
            assert (type(leaf), leaf) == (type(stock), stock)
            continue
        made = leaf.__torch_sink_execute__(device)[0].cpu() if type(leaf) is LazyBatch else leaf
        assert_same_bits(made, stock)


# --- samples


class Form(NamedTuple):
    """Batches of samples with several views.

    Attributes:
        dataset: over a folder as `ImageFolder` reads it.
        images: sizes of the batches of images in a batch, in the order of its leaves, with `SAMPLES` samples.
        collate: None for torch's own.
    """

    dataset: Callable[[Path], Dataset[Any]]
    images: tuple[int, ...]
    collate: Callable[[list[Any]], Any] | None = None

    def load(self, folder: Path, **options: Any) -> Any:
        """Its first batch."""
        torch.manual_seed(21)
        random.seed(21)
        return next(iter(DataLoader(self.dataset(folder), SAMPLES, collate_fn=self.collate, **options)))


SAMPLES = 3
SIZE = 9
TO_FLOATS = v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True), v2.ToPureTensor()
WITH_TARGETS = [
    v2.Compose([v2.RandomResizedCrop(SIZE, interpolation=v2.InterpolationMode.NEAREST), *TO_FLOATS]),
    v2.Compose([v2.RandomCrop(SIZE), v2.RandomHorizontalFlip(), *TO_FLOATS]),
]
PLAIN = v1.Compose([v1.CenterCrop(SIZE), v1.ToTensor()])
OTHERS = [
    v1.Compose([v1.RandomCrop(SIZE), v1.RandomHorizontalFlip(), v1.ToTensor()]),
    v1.Compose([v1.RandomResizedCrop(6), v1.RandomVerticalFlip(), v1.ToTensor()]),
    v1.Compose([v1.RandomCrop((4, 8)), v1.PILToTensor()]),
]
ALL = [PLAIN, *OTHERS]
Target = namedtuple("Target", ["label", "crop"])


class Views(Dataset[Any]):
    """What `arrange` makes of an image, its number, and the random draws between."""

    def __init__(self, folder: Path, arrange: Callable[[Image.Image, int], Any]) -> None:
        self.images, self.arrange = ImageFolder(str(folder)), arrange

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.arrange(self.images[index][0], index)


def _boxes(image: Image.Image) -> Any:
    corners = [[0, 1, image.width // 2, image.height], [2, 0, image.width, image.height // 2]]
    return tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(image.height, image.width))  # type: ignore[arg-type, call-arg]


def _mask(image: Image.Image, kinds: int = 5) -> Any:
    return tv_tensors.Mask(torch.arange(image.height * image.width).view(image.height, image.width) % kinds)


def _with_boxes(image: Image.Image, index: int) -> Any:
    return [view(image, _boxes(image)) for view in WITH_TARGETS], index


def _with_mask(image: Image.Image, index: int) -> Any:
    return {str(number): view(image, _mask(image)) for number, view in enumerate(WITH_TARGETS)}


def _with_targets(image: Image.Image, index: int) -> Any:
    target = {"boxes": _boxes(image), "masks": _mask(image)[None], "labels": torch.tensor([index, 7]), "id": index}
    return tuple(view(image, target) for view in WITH_TARGETS)


def _collate_detection(samples: list[Any]) -> Any:
    """The targets stay a list: images have different numbers of objects."""
    views = zip(*samples, strict=True)
    return [(torch.stack([image for image, _ in view]), [target for _, target in view]) for view in views]


def _named(image: Image.Image, index: int) -> Any:
    first, *others = (view(image) for view in ALL)
    return {"global": [first, others[0]], "local": {"small": others[1], "bytes": others[2]}, "name": f"image {index}"}


def _nested(image: Image.Image, index: int) -> Any:
    first, *others = (view(image) for view in ALL)
    return (first, (others[0], (others[1],))), Target(index, others[2])


def _with_captions(image: Image.Image, index: int) -> Any:
    return PLAIN(image), OTHERS[0](image), (f"a photo of {index}", f"number {index}, again")


def _collate_strings(samples: list[Any]) -> Any:
    plain, other, captions = zip(*samples, strict=True)
    return {"image": torch.stack(plain), "other": torch.stack(other), "captions": [*map(list, captions)]}


class ReadTwice(Views):
    """An image once as it is and once more with other transforms: the file is opened for each of the two."""

    def __getitem__(self, index: int) -> Any:
        return [PLAIN(self.images[index][0]), OTHERS[0](self.images[index][0])], index


def _collate_tokens(samples: list[Any]) -> Any:
    """One batch with two images and two captions of each sample."""
    images = torch.stack([image for pair, _ in samples for image in pair])
    return images, torch.tensor([[index, caption, 49407] for _, index in samples for caption in range(2)])


class TwoDatasets(Dataset[Any]):
    """Independent ones over the same files, read at other places."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = ImageFolder(str(folder), PLAIN), ImageFolder(str(folder), OTHERS[1])

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Any:
        return self.first[index], self.second[(index + 1) % SAMPLES]


def _collate_uneven(samples: list[Any]) -> Any:
    """As for a GAN whose discriminator sees more images than its generator."""
    real, other = zip(*samples, strict=True)
    return {"real": default_collate(list(real)), "other": default_collate(list(other[: SAMPLES - 1]))}


class OneOfTwo(TwoDatasets):
    """As `RandomChoice`, of datasets whose images are of one size, and then of transforms."""

    choice = v1.RandomChoice([PLAIN, OTHERS[0]])

    def __getitem__(self, index: int) -> Any:
        images = self.first if torch.rand(()) < 0.5 else ImageFolder(self.first.root, OTHERS[0])
        image = images.loader(images.imgs[index][0])
        return images[index][0], self.choice(image), index


FORMS = {
    "boxes": Form(lambda folder: Views(folder, _with_boxes), (SAMPLES,) * 2),
    "masks": Form(lambda folder: Views(folder, _with_mask), (SAMPLES,) * 2),
    "targets": Form(lambda folder: Views(folder, _with_targets), (SAMPLES,) * 2, _collate_detection),
    "dict": Form(lambda folder: Views(folder, _named), (SAMPLES,) * 4),
    "nested tuples": Form(lambda folder: Views(folder, _nested), (SAMPLES,) * 4),
    "captions": Form(lambda folder: Views(folder, _with_captions), (SAMPLES,) * 2, _collate_strings),
    "tokens": Form(lambda folder: ReadTwice(folder, _nested), (2 * SAMPLES,), _collate_tokens),
    "two datasets": Form(TwoDatasets, (SAMPLES, SAMPLES - 1), _collate_uneven),
    "one of two datasets": Form(OneOfTwo, (SAMPLES,) * 2),
}
