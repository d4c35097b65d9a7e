"""What `Image.fromarray` and `Image.frombuffer` return while the backend is on: an ordinary image to programs, bytes to what records."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import functional, v2

import torch_sink
from image.random_pipelines import same_value
from torch_sink.image.decode.source import BytesSource
from torch_sink.image.handles.array import ArrayImage
from torch_sink.image.handles.tensor import LazyTensor

pytestmark = pytest.mark.halved

DEVICES = pytest.mark.parametrize("device", ["meta", "cpu"])
SHAPES = {"L": (9, 7), "RGB": (9, 7, 3)}


def array(mode: str = "RGB") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SHAPES[mode], dtype=np.uint8)


def assert_pillows(call: Callable[[], Any], device: str) -> None:
    """A call returns what Pillow's returns, or raises its error."""

    def made() -> Any:
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    expected = made()
    with torch_sink.image_backend("device", device=device):
        actual = made()
    same_value(actual, expected)


class _Own(Image.Image):
    pass


def _cast(image: Any) -> Any:
    image.__class__ = _Own
    return type(image) is _Own, image.im.size, image.tobytes()


def _closed(image: Any) -> Any:
    image.close()
    with pytest.raises(ValueError, match="closed image"):
        image.getpixel((0, 0))


def _written(image: Any) -> Any:
    image.putpixel((1, 2), 5)
    image.load()[0, 0] = image.load()[3, 3]
    return image


def _with_palette(image: Any) -> Any:
    if image.mode == "L":
        image.putpalette(bytes(range(256)) * 3, "RGB")
        return image, image.convert("RGB")
    return image.getcolors()


def _with_info(image: Any) -> Any:
    image.info["dpi"] = 3
    image.format = "own"
    return image, image.copy().info, image.crop((0, 0, 2, 2)).info


def _unknown(image: Any) -> Any:
    with pytest.raises(AttributeError) as caught:
        image.own  # noqa: B018
    return caught.value.args


def _each_method_twice(image: Any) -> Any:
    load, write, reduce, equals = image.load, image.__setattr__, image.__reduce_ex__, image.__eq__
    return [(load()[1, 2], write("own", 3), reduce(2)[2], equals(image), image.own) for _ in range(2)]


USES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda image: np.asarray(image).tolist(),
    "bytes": lambda image: image.tobytes(),
    "text": lambda image: repr(image).partition(" at ")[0],
    "pixel": lambda image: image.getpixel((3, 4)),
    "readonly": lambda image: (image.readonly, image.load() is not None, image.readonly),
    "attributes": lambda image: (image.load() is not None, sorted(vars(image))),
    "equal": lambda image: (image == image, image == image.copy(), image.copy() == image, image != 3, image == "x"),
    "hash": lambda image: type(image).__hash__,
    "copy": lambda image: (copy.copy(image), copy.deepcopy(image)),
    "pickle": lambda image: [pickle.loads(pickle.dumps(image, protocol)) for protocol in (2, 4, 5)],
    "resize": lambda image: (image.resize((3, 3)), image.transpose(0), image.convert("HSV"), image.rotate(20)),
    "cast": _cast,
    "closed": _closed,
    "written": _written,
    "palette": _with_palette,
    "info": _with_info,
    "alpha": lambda image: image.putalpha(3) or image,
    "thumbnail": lambda image: image.thumbnail((3, 3)) or image,
    "twice": _each_method_twice,
    "load of the class": lambda image: Image.Image.load(image)[1, 2],  # type: ignore[index]
    "pixels of the class": lambda image: Image.Image.im.fget(image).size,  # type: ignore[attr-defined]
    "unknown": _unknown,
    "core": lambda image: setattr(image, "im", image.im.copy()) or image,
}


@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize("name", USES)
@DEVICES
def test_every_use_is_that_of_an_ordinary_image(name: str, mode: str, device: str) -> None:
    expected = USES[name](Image.fromarray(array(mode)))
    with torch_sink.image_backend("device", device=device, strict=True):
        image = Image.fromarray(array(mode))
        assert type(image) is ArrayImage
        made = USES[name](image)
        assert not torch_sink.fallback_report()
        assert "nothing was recorded" in str(torch_sink.fallback_report())
        assert type(image) in (Image.Image, _Own) or name in ("text", "hash", "unknown")
    same_value(made, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: array().astype(np.float32)[:, :, 0],
        lambda: array() > 3,
        lambda: array("L")[0],
        lambda: array()[:, :, :1],
        lambda: array()[None],
        lambda: np.zeros((0, 3), np.uint8),
        lambda: np.zeros((4, 4, 4), np.uint8),
        lambda: array("L").view(np.recarray),
        lambda: torch.zeros(3, 3),
        lambda: "no array",
    ],
)
@DEVICES
def test_other_arrays_are_pillows(make: Callable[[], Any], device: str) -> None:
    assert_pillows(lambda: Image.fromarray(make()), device)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Image.frombuffer("L", (2, 2), b"1234", decoder_name="raw"),
        lambda: Image.frombuffer(mode="L", size=(2, 2), data=b"1234"),
        lambda: Image.frombuffer("L", (2, 2), b"1234", "raw", ("L", 0, 1)),
        lambda: Image.frombuffer("L", (2, 2), b"1234", "raw", "L", 0, 1, 2),
        lambda: Image.frombuffer("L", (2, 2), b"1234", "raw", "L", 0, 1, step=2),  # type: ignore[call-arg]
        lambda: Image.frombuffer("L", (2, 2)),  # type: ignore[call-arg]
        lambda: Image.fromarray(obj=array()),
        lambda: Image.fromarray(array("L"), mode=None),
        lambda: Image.fromarray(array(), "RGB", 3),  # type: ignore[call-arg]
        lambda: Image.fromarray(array(), step=3),  # type: ignore[call-arg]
        lambda: Image.fromarray(),  # type: ignore[call-arg]
    ],
)
@DEVICES
def test_arguments_are_pillows(call: Callable[[], Any], device: str) -> None:
    assert_pillows(call, device)


@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize(
    "data",
    [bytes(63), bytes(189), bytes(5), bytearray(63), array("L"), array("L").astype(np.int32)],
    ids=["gray", "color", "short", "bytearray", "array", "integers"],
)
@pytest.mark.parametrize("size", [(7, 9), (9, 7), [7, 9], (-7, -9), (7,), (7.0, 9), (0, 9)])
@pytest.mark.parametrize(
    "args", [("raw", "L", 0, 1), ("raw", "RGB", 0, 1), ("raw", "RGB", 0, -1), ("raw", "L;I", 0, 1)]
)
@DEVICES
@pytest.mark.sampled(160)
def test_buffers_of_any_kind_are_pillows(mode: str, data: Any, size: Any, args: Any, device: str) -> None:
    def made() -> Any:
        try:
            return Image.frombuffer(mode, size, data, *args)
        except Exception as error:
            return type(error), str(error)

    expected = made()
    with torch_sink.image_backend("device", device=device):
        actual = made()
        is_kept = (
            args == ("raw", mode, 0, 1) and str(size) in ("(7, 9)", "(9, 7)") and type(data) in (bytes, np.ndarray)
        )
        assert (type(actual) is ArrayImage) == (is_kept and len(bytes(data)) == 63 * len(mode))
    same_value(actual, expected)


@pytest.mark.parametrize("view", [lambda each: each, lambda each: each[::-1], np.asfortranarray])
@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize("transform", [v1.ToTensor(), v1.Compose([v1.Pad(1), v1.ToTensor()])])
@DEVICES
def test_writes_to_the_array_are_seen_where_pillow_shows_them(
    view: Any, mode: str, transform: Any, device: str
) -> None:
    """Until a transform takes the image: then, as in stock code, they come too late."""

    def samples() -> list[Any]:
        values = view(array(mode))
        image, other = Image.fromarray(values), Image.fromarray(values)
        values[1] = 7
        first = transform(image)
        values[2] = 9
        return [first, transform(image), np.asarray(other).tolist(), values.tolist()]

    expected = samples()
    with torch_sink.image_backend("device", device=device):
        first, second, *others = samples()
        assert type(first) is type(second) is LazyTensor
        first, second = (handle._stock_type(handle._replayed()) for handle in (first, second))
    for made, stock in zip((first, second, *others), expected, strict=True):
        same_value(made, stock)


def test_recording_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[Any] = []
    stock = Image.frombuffer
    monkeypatch.setattr(
        Image, "frombuffer", lambda mode, size, *args: unpacked.append(size) or stock(mode, size, *args)
    )
    with torch_sink.image_backend("device", device="meta"):
        images = [Image.fromarray(array(mode)) for mode in SHAPES for _ in range(2)]
        handles = [v1.Compose([v1.RandomCrop(5), v1.ToTensor()])(image) for image in images]
        torch.utils.data.default_collate(handles[:2]), torch.utils.data.default_collate(handles[2:])
        assert [type(image) for image in images] == [ArrayImage] * 4
    assert (7, 9) not in unpacked


@pytest.mark.parametrize("mode", SHAPES)
@DEVICES
def test_fills_by_type_are_found(mode: str, device: str) -> None:
    pad = v2.Pad(1, fill={Image.Image: 255, "others": 0})
    expected = pad(Image.fromarray(array(mode)))
    with torch_sink.image_backend("device", device=device):
        image = Image.fromarray(array(mode))
        made = pad(image)
        assert type(image) is ArrayImage
    same_value(made, expected)


@pytest.mark.parametrize(
    "transform",
    [
        v2.Resize(2),
        v2.Compose([v2.CenterCrop(4), v2.RandomHorizontalFlip(1)]),
        v1.Compose([v1.CenterCrop(4), v1.RandomHorizontalFlip(1)]),
        v1.RandomVerticalFlip(1),
        v1.Grayscale(),
        functional.hflip,
        Image.Image.copy,
    ],
)
@DEVICES
def test_info_is_kept(transform: Callable[[Any], Any], device: str) -> None:
    def info() -> Any:
        image = Image.fromarray(array())
        image.info["dpi"] = 3
        made = transform(image)
        image.info["later"] = 4
        return made.info, made

    expected = info()
    with torch_sink.image_backend("device", device=device):
        actual = info()
    assert actual[0] == expected[0]
    same_value(actual[1], expected[1])


@DEVICES
def test_a_write_while_another_thread_reads_is_kept(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    with torch_sink.image_backend("device", device=device):
        image = Image.fromarray(array())
        stock, reads, written = Image.frombuffer, threading.Event(), threading.Event()

        def slow(*args: Any) -> Any:
            made = stock(*args)
            if not reads.is_set():
                reads.set()
                written.wait(0.2)
            return made

        monkeypatch.setattr(Image, "frombuffer", slow)
        reader = threading.Thread(target=image.getpixel, args=((1, 1),))
        reader.start()
        assert reads.wait(60)
        image.putpixel((0, 0), (7, 8, 9))
        written.set()
        reader.join()
        assert image.getpixel((0, 0)) == (7, 8, 9)


def test_a_batch_without_a_device_takes_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = v1.Compose([v1.ToTensor(), v1.Normalize((0.4, 0.5, 0.6), (0.3, 0.2, 0.1))])

    def batch() -> torch.Tensor:
        return torch.utils.data.default_collate([transform(Image.fromarray(array(mode))) for mode in ("RGB", "RGB")])

    expected = batch()
    with torch_sink.image_backend("device", device="cpu"):
        monkeypatch.setattr(Image, "frombytes", lambda *_: pytest.fail("it was unpacked"))
        monkeypatch.setattr("torch_sink.image.handles.array._ordinary", lambda image: pytest.fail("it was unpacked"))
        same_value(batch(), expected)


def test_views_of_one_image_are_sent_once() -> None:
    crop = v1.Compose([v1.RandomCrop(5), v1.ToTensor()])
    with torch_sink.image_backend("device", device="meta"):
        image = Image.fromarray(array())
        batch = torch.utils.data.default_collate([crop(image), crop(image)])
        assert len(batch.program.packed.contents.entries) == 1


def _made(kind: Any, transform: Any) -> Any:
    """One of torchvision's datasets, of made images."""
    dataset, chance = kind.__new__(kind), np.random.default_rng(0)
    shape = (8, 32, 32, 3) if kind is datasets.CIFAR10 else (8, 28, 28)
    images = chance.integers(0, 256, shape, dtype=np.uint8)
    dataset.data = images if kind is datasets.CIFAR10 else torch.from_numpy(images)
    dataset.targets, dataset.transform, dataset.target_transform = torch.arange(8), transform, None
    return dataset


@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.MNIST, datasets.FashionMNIST])
@DEVICES
def test_torchvisions_own_datasets_unpack_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    dataset = _made(kind, v1.Compose([v1.RandomCrop(28, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor()]))
    torch.manual_seed(3)
    expected = [dataset[at] for at in range(8)]
    with torch_sink.image_backend("device", device=device):
        monkeypatch.setattr("torch_sink.image.handles.array._ordinary", lambda image: pytest.fail("it was unpacked"))
        torch.manual_seed(3)
        for at, (image, label) in enumerate(expected):
            made, made_label = dataset[at]
            assert type(made) is LazyTensor
            assert type(made.lazy_recording.source) is BytesSource
            same_value(made._stock_type(made._replayed()), image)
            assert made_label == label
