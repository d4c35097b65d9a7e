"""Where nothing is recorded, the report says what the samples were made by, and what to open images with instead."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import DatasetFolder
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from torch_sink.image.core.first_batch import _MOST_EVENTS
from torch_sink.image.core.origins import INSTEAD, NO_IMAGES, NOTHING_RECORDED

pytestmark = pytest.mark.halved

COUNT, SIDE = 4, 12
ADVICE = "-> open them with Pillow (from PIL import Image), and give them to torchvision's transforms:"
GOT = "transforms.ToTensor got a numpy uint8 array"


class Samples(Dataset[Any]):
    """`make` gets the number of a sample."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.load(self.path / "0.pt") for _ in range(COUNT))


class OwnImage(Image.Image):
    """Keeps its class."""


def array(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def pixels(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(array(seed)).permute(2, 0, 1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images that were decoded before: arrays and tensors, and the same in a folder for each class."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "classes" / "one").mkdir(parents=True)
    for index in range(COUNT):
        np.save(folder / "classes" / "one" / f"{index}.npy", array(index))
        torch.save(pixels(index), folder / f"{index}.pt")
    return folder


def report_on(dataset: Any, **options: Any) -> list[str]:
    """The lines of the report after a pass over the dataset, whose batches are stock's."""
    torch.manual_seed(0)
    stock = list(DataLoader(dataset, COUNT, **options))
    with torch_sink.image_backend("device", device="cpu"):
        torch.manual_seed(0)
        made = list(DataLoader(dataset, COUNT, **options))
        report = torch_sink.fallback_report()
    assert repr(made) == repr(stock)
    assert not report
    assert report.has_recorded is (str(report).startswith("no fallbacks"))
    return str(report).splitlines()


to_tensor = v1.Compose([v1.ToTensor(), v1.RandomCrop(8)])
to_image = v2.Compose([v2.ToImage(), v2.RandomCrop(8)])
# What makes the samples; what the report says of them: what they are and what made them, and what a transform got.
KINDS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "arrays, v1": (lambda _: Samples(lambda index: (to_tensor(array(index)), index)), "test_origins.Samples gave float32 [4, 3, 8, 8], int64 [4]", GOT),
    "arrays, v2": (lambda _: Samples(lambda index: to_image(array(index))), "Samples gave uint8 [4, 3, 8, 8]", "transforms.v2.ToImage got a numpy uint8 array"),
    "arrays, functional": (lambda _: Samples(lambda index: v1.functional.to_tensor(array(index))), "Samples gave float32", "transforms.functional.to_tensor got a numpy uint8 array"),
    "arrays of floats": (lambda _: Samples(lambda index: v1.ToTensor()(array(index) / np.float32(255))), "Samples gave float32", "transforms.ToTensor got a numpy float32 array"),
    "np.load": (lambda kept: Samples(lambda index: v1.ToTensor()(np.load(kept / "classes" / "one" / f"{index}.npy"))), "made by numpy.load", GOT),
    "a loader of DatasetFolder": (lambda kept: DatasetFolder(str(kept / "classes"), np.load, ("npy",), v1.ToTensor()), "torchvision.datasets.folder.DatasetFolder gave float32 [4, 3, 12, 12], int64 [4], made by numpy.load", GOT),
    "torch.load": (lambda kept: Samples(lambda index: v2.RandomCrop(8)(torch.load(kept / f"{index}.pt"))), "Samples gave uint8 [4, 3, 8, 8], made by torch.load", ""),
    "a stream": (Stream, "test_origins.Stream gave uint8 [4, 3, 12, 12], made by torch.load", ""),
    "a subset": (lambda kept: Subset(Subset(Samples(lambda index: torch.load(kept / f"{index}.pt")), range(4)), range(4)), "test_origins.Samples gave uint8 [4, 3, 12, 12], made by torch.load", ""),
    "tensors in memory": (lambda _: TensorDataset(torch.rand(COUNT, 3, 8, 8), torch.arange(COUNT)), "torch.utils.data.dataset.TensorDataset gave float32 [4, 3, 8, 8], int64 [4]", ""),
    "in a dict": (lambda kept: Samples(lambda index: {"image": torch.load(kept / f"{index}.pt"), "id": str(index)}), "Samples gave uint8 [4, 3, 12, 12], str, made by torch.load", ""),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_what_made_the_samples(kind: str, kept: Path) -> None:
    make, gave, got = KINDS[kind]
    first, said, *others = report_on(make(kept))
    assert first == NOTHING_RECORDED
    assert gave in said
    advice = [ADVICE if got else ADVICE.replace("open", "if these are images, open"), *INSTEAD[1:]]
    assert others == [got, *advice] if got else others == advice


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_data_workers_say_it_too(method: str) -> None:
    in_one_process = report_on(Arrays())
    assert report_on(Arrays(), num_workers=2, multiprocessing_context=method) == in_one_process
    assert GOT in in_one_process


class Arrays(Samples):
    """Can be pickled."""

    def __init__(self) -> None:
        super().__init__(arrays_to_tensors)


def arrays_to_tensors(index: int) -> torch.Tensor:
    return to_tensor(array(index))


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "gave"),
    [
        (lambda index: (torch.arange(5), "a sentence", index), "int64 [4, 5], str, int64 [4]"),
        (lambda index: "a sentence", "str"),
        (lambda index: torch.tensor(0.5), "float32 [4]"),
        (lambda index: torch.ones(5, dtype=torch.bool), "bool [4, 5]"),
    ],
    ids=["tokens", "text", "a target", "a mask of tokens"],
)
def test_nothing_is_said_of_images_where_there_are_none(make: Callable[[int], Any], gave: str) -> None:
    first, said = report_on(Samples(make))
    assert first == NO_IMAGES
    assert said.partition(", made by")[0] == f"image.core.test_origins.Samples gave {gave}"


@pytest.mark.once
def test_before_anything_was_read() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        assert str(torch_sink.fallback_report()) == NOTHING_RECORDED
        v1.ToTensor()(array())  # in no loader
        assert str(torch_sink.fallback_report()).splitlines() == [NOTHING_RECORDED, GOT, ADVICE, *INSTEAD[1:]]
    with torch_sink.image_backend("device", device="cpu"):
        assert str(torch_sink.fallback_report()) == NOTHING_RECORDED


@pytest.mark.once
def test_what_the_advice_names_is_recorded() -> None:
    data = encoded(SIDE, SIDE)
    namespace = {
        "io": io, "Image": Image, "torchvision": sys.modules["torchvision"], "path": io.BytesIO(data), "data": data,
        "array": array(), "tensor": pixels(),
    }  # fmt: skip
    lines = [line.split(":", 1)[1].strip() for line in INSTEAD if line.startswith("     ")]
    assert len(lines) == 4
    for line in lines:
        with torch_sink.image_backend("device", device="cpu"):
            assert v1.ToTensor()(eval(line, dict(namespace))).is_recording
            assert str(torch_sink.fallback_report()) == "no fallbacks"


@pytest.mark.once
def test_arrays_beside_recorded_images() -> None:
    """A dataset of arrays and of Pillow's masks: not all is well."""

    def both(index: int) -> Any:
        return v1.functional.to_tensor(array(index)), v1.functional.pil_to_tensor(opener(encoded(SIDE, SIDE))())

    first, said = report_on(Samples(both))
    assert first == "no fallbacks"
    assert said.startswith("not recorded: transforms.functional.to_tensor got a numpy uint8 array")

    def with_depth(index: int) -> Any:
        image, depth = v1.functional.pil_to_tensor(opener(encoded(SIDE, SIDE))()), np.zeros((SIDE, SIDE), np.float32)
        return image, v1.functional.to_tensor(depth)

    assert report_on(Samples(with_depth)) == ["no fallbacks"]


@pytest.mark.once
def test_arrays_that_become_images_are_recorded() -> None:
    transform = v1.Compose([v1.ToPILImage(), v1.RandomCrop(8), v1.ToTensor()])
    assert report_on(Samples(lambda index: transform(array(index)))) == ["no fallbacks"]


@pytest.mark.once
def test_an_image_class_of_its_own_has_a_reason() -> None:
    image = Image.fromarray(array())
    image.__class__ = OwnImage
    with torch_sink.image_backend("device", device="cpu"):
        list(DataLoader(Samples(lambda index: v1.ToTensor()(image)), COUNT))
        (line,) = str(torch_sink.fallback_report()).splitlines()[1:]
    assert "OwnImage is a class of its own" in line


@pytest.mark.once
def test_a_profiler_of_the_users_stays() -> None:
    seen: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        seen.append(frame.f_code.co_name)

    with torch_sink.image_backend("device", device="cpu"):
        sys.setprofile(profile)
        try:
            list(DataLoader(Arrays(), COUNT))
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(None)
        assert "arrays_to_tensors" in seen
        lines = str(torch_sink.fallback_report()).splitlines()
    assert lines[1] == "image.core.test_origins.Arrays gave float32 [4, 3, 8, 8]"
    assert sys.getprofile() is None


@pytest.mark.once
def test_the_look_ends_with_the_first_image_the_first_batch_or_after_many_calls() -> None:
    profiles: list[Any] = []

    def opened(index: int) -> Any:
        image = opener(encoded(SIDE, SIDE))()
        len(str(index))  # an event
        profiles.append(sys.getprofile())
        return v1.functional.pil_to_tensor(image)

    def busy(index: int) -> Any:
        for _ in range(_MOST_EVENTS // 5 if index else 0):
            len("")  # two events: the call and the return
        profiles.append(sys.getprofile())
        return pixels(index)

    for make, ended in ((opened, [True] * 4), (busy, [False, False, False, True])):
        profiles.clear()
        report_on(Samples(make))
        assert [each is None for each in profiles[COUNT:]] == ended
    profiles.clear()
    with torch_sink.image_backend("device", device="cpu"):
        list(DataLoader(Samples(busy), 1))
    assert [each is None for each in profiles] == [False, True, True, True]


@pytest.mark.once
def test_errors_and_odd_batches_reach_the_program_as_they_are() -> None:
    class Odd:
        """No batch that anybody can look through."""

        @property
        def __class__(self) -> Any:
            raise ZeroDivisionError

    odd = Odd()
    with torch_sink.image_backend("device", device="cpu"):
        (batch,) = DataLoader(Samples(pixels), COUNT, collate_fn=lambda samples: odd)
        assert batch is odd
        with pytest.raises(ZeroDivisionError):
            list(DataLoader(Samples(lambda index: 1 // 0), COUNT, collate_fn=default_collate))
        assert sys.getprofile() is None
