"""Handles behave as the Pillow images and tensors they stand for, in code that knows nothing of them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from odd_photos import EXIF_ORIENTATION_TAG
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter, ImageOps, ImageStat
from torchvision import tv_tensors
from torchvision.datasets.folder import default_loader
from torchvision.transforms import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F2
from torchvision.utils import make_grid

import torch_sink
from image.random_pipelines import same_value
from torch_sink.cli.photos import make_photo

pytestmark = pytest.mark.halved

Use = Callable[[Any], Any]


def _then(change: Use, use: Use = lambda image: image) -> Use:
    """Changes an image in place, then uses it."""

    def run(image: Any) -> Any:
        change(image)
        return use(image)

    return run


def _kept(image: Any) -> Any:
    """Whether v2 returns the image where nothing is to be done."""
    size = [image.height, image.width]
    return v2.functional.resize(image, size) is image, v2.Resize(min(size))(image) is image


def _written_later(image: Any) -> Any:
    crop = image.crop((0, 0, 20, 20))
    ImageDraw.Draw(image).rectangle((0, 0, 30, 30), fill=0)
    return [image, crop]


def _saved(image: Any, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


AFFINE = (1, 0.2, 0, 0.1, 1, 0)
BLACK = (0, 0, 30, 30)

PILLOW_USES: dict[str, Use] = {
    "asarray": np.asarray,
    "getpixel": lambda image: image.getpixel((3, 4)),
    "getextrema": lambda image: image.getextrema(),
    "histogram": lambda image: image.histogram(),
    "split": lambda image: list(image.split()),
    "tobytes": lambda image: image.tobytes(),
    "attributes": lambda image: [image.size, image.mode, image.getbands(), sorted(map(str, image.info)), image.format],
    "exif": lambda image: dict(image.getexif()),
    "exif_transpose": ImageOps.exif_transpose,
    "fit": lambda image: ImageOps.fit(image, (20, 10)),
    "mirror": ImageOps.mirror,
    "pad": lambda image: ImageOps.pad(image, (20, 10)),
    "autocontrast": lambda image: ImageOps.autocontrast(image, cutoff=2),
    "invert": ImageChops.invert,
    "blur": lambda image: image.filter(ImageFilter.BLUR),
    "mean": lambda image: ImageStat.Stat(image).mean,
    "enhance": lambda image: ImageEnhance.Color(image).enhance(0.3),
    "blend": lambda image: Image.blend(image, image.transpose(Image.Transpose.ROTATE_180), 0.3),
    "merge": lambda image: Image.merge(image.mode, image.split()),
    "rotate": lambda image: image.rotate(30),
    "rotate, larger": lambda image: image.rotate(45, resample=Image.Resampling.BICUBIC, expand=True, fillcolor=3),
    "convert to HSV": lambda image: image.convert("HSV"),
    "convert to P": lambda image: image.convert("P", palette=Image.Palette.ADAPTIVE, colors=9),
    "convert by a matrix": lambda image: image.convert("L", (0.3, 0.3, 0.3, 0)),
    "point": lambda image: image.point(lambda value: value // 2),
    "point by a table": lambda image: image.point([value * 1.3 - 20 for value in range(256)] * len(image.getbands())),
    "point by a short table": lambda image: image.point(list(range(255))),
    "point to another mode": lambda image: image.convert("L").point([value // 200 for value in range(256)], "1"),
    "reduce": lambda image: image.reduce(2),
    "resize": lambda image: image.resize((20, 20)),
    "resize a box": lambda image: image.resize((20, 20), box=(1.5, 2, 30, 30)),
    "resize in two steps": lambda image: image.resize((20, 20), Image.Resampling.BILINEAR, reducing_gap=2.0),
    "resize to nothing": lambda image: image.resize((0, 4)),
    "resize to a float": lambda image: image.resize((20.0, 20)),
    "resize to one number": lambda image: image.resize((20,)),
    "resize to an array": lambda image: image.resize(np.array([20, 20])),
    "resize by an unknown filter": lambda image: image.resize((20, 20), 99),
    "crop, inverted": lambda image: image.crop((5, 5, 3, 3)),
    "crop, empty": lambda image: image.crop((5, 5, 5, 9)),
    "crop beyond": lambda image: image.crop((-5, -5, 60, 60)),
    "crop of floats": lambda image: image.crop((1.5, 2.5, 9.5, 9.4)),
    "crop of three": lambda image: image.crop((1, 2, 3)),
    "transpose": lambda image: image.transpose(Image.Transpose.TRANSVERSE),
    "transpose, unknown": lambda image: image.transpose(9),
    "extent": lambda image: image.transform((20, 20), Image.Transform.EXTENT, (0, 0, 30, 30)),
    "affine": lambda image: image.transform((20, 20), Image.Transform.AFFINE, AFFINE),
    "affine of three": lambda image: image.transform((20, 20), Image.Transform.AFFINE, (1, 0, 0)),
    "affine, red": lambda image: image.transform((20, 20), Image.Transform.AFFINE, AFFINE, fillcolor="red"),
    "affine, one value": lambda image: image.transform((20, 20), Image.Transform.AFFINE, AFFINE, fillcolor=7),
    "affine, beyond a byte": lambda image: image.transform((20, 20), Image.Transform.AFFINE, AFFINE, fillcolor=300),
    "affine, unfilled": lambda image: image.transform((20, 20), Image.Transform.AFFINE, AFFINE, fill=0),
    "affine, smooth": lambda image: image.transform((20, 20), Image.Transform.AFFINE, AFFINE, Image.Resampling.BICUBIC),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of recorded": lambda image: copy.deepcopy(image.resize((9, 9))),
    "deepcopy of read": _then(lambda image: image.getpixel((0, 0)), copy.deepcopy),
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "pickle of recorded": lambda image: pickle.loads(pickle.dumps(image.resize((9, 9)))),
    "pickle of read": _then(lambda image: image.getpixel((0, 0)), lambda image: pickle.loads(pickle.dumps(image))),
    "equality": lambda image: [image == image.copy(), image.copy() == image, image == image.resize((9, 9)), image == 1],
    "draw": _then(lambda image: ImageDraw.Draw(image).rectangle(BLACK, fill=0)),
    "draw, then crop": _then(
        lambda image: ImageDraw.Draw(image).rectangle(BLACK, fill=0), lambda image: image.crop((1, 1, 40, 36))
    ),
    "written later": _written_later,
    "paste": _then(lambda image: image.paste(0, (1, 1, 5, 5))),
    "thumbnail": _then(lambda image: image.thumbnail((20, 20))),
    "putpixel": _then(lambda image: image.putpixel((0, 0), 0), lambda image: image.transpose(0)),
    "putalpha": _then(lambda image: image.putalpha(3)),
    "array written": _then(lambda image: np.array(image).fill(0)),
    "draft": _then(lambda image: image.draft("L", (10, 10))),
    "load": _then(lambda image: image.load()),
    "close": _then(lambda image: image.close(), lambda image: image.size),
    "seek": _then(lambda image: image.seek(0), lambda image: image.tell()),
    "save as PNG": lambda image: _saved(image, "PNG"),
    "save as JPEG": lambda image: _saved(image, "JPEG"),
    "same objects": lambda image: [
        F.resize(image, [image.height, image.width]) is image, F.resize(image, min(image.size)) is image,
        F.pad(image, 0) is image, F.rotate(image, 0) is image, image.convert(image.mode) is image,
        F.center_crop(image, [image.height, image.width]) is image,
        *(_kept(each) for each in (image, Image.frombytes(image.mode, image.size, image.tobytes()))),
    ],
}  # fmt: skip


def _with_gradient(image: Any) -> Any:
    tensor = F.to_tensor(image)
    tensor.requires_grad_()
    (tensor * 2).sum().backward()
    return [tensor.grad, tensor.requires_grad]


def _in_place(image: Any) -> Any:
    tensor = F.to_tensor(image)
    alias = tensor
    tensor.mul_(2)
    tensor[0] = 0
    tensor += 1
    return [tensor, alias, alias is tensor]


def _normalized_in_place(image: Any) -> Any:
    tensor = F.to_tensor(image)
    channels = tensor.shape[0]
    result = F.normalize(tensor, [0.5] * channels, [0.5] * channels, inplace=True)
    return [tensor, result, result is tensor]


def _saved_and_loaded(image: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(F.to_tensor(image), buffer)
    buffer.seek(0)
    return torch.load(buffer)


def _copied_into(image: Any) -> Any:
    tensor = F.to_tensor(image)
    target = torch.empty(1, *tensor.shape)
    target[0] = tensor
    return [target, torch.zeros_like(tensor).copy_(tensor)]


TENSOR_USES: dict[str, Use] = {
    "arithmetic": lambda image: F.pil_to_tensor(image) + 1,
    "reduction": lambda image: F.pil_to_tensor(image).float().mean(),
    "index": lambda image: [F.pil_to_tensor(image)[0], F.pil_to_tensor(image)[..., 1:4, ::2]],
    "iteration": lambda image: list(F.pil_to_tensor(image)),
    "numpy": lambda image: F.pil_to_tensor(image).numpy(),
    "list": lambda image: F.pil_to_tensor(image).tolist(),
    "cat and stack": lambda image: [
        torch.cat([F.to_tensor(image)] * 2), torch.stack([F.to_tensor(image)] * 2, 1), torch.stack([F.to_tensor(image)])
    ],
    "layout": lambda image: [
        F.to_tensor(image).stride(), F.to_tensor(image).is_contiguous(), F.to_tensor(image).type()
    ],
    "metadata": lambda image: [F.to_tensor(image).device, len(F.to_tensor(image)), F.to_tensor(image).nbytes],
    "in place": _in_place,
    "gradient": _with_gradient,
    "normalize in place": _normalized_in_place,
    "torch.save": _saved_and_loaded,
    "copied into": _copied_into,
    "deepcopy": lambda image: copy.deepcopy(F.to_tensor(image)),
    "pickle": lambda image: pickle.loads(pickle.dumps(F.to_tensor(image))),
    "conv2d": lambda image: torch.nn.functional.conv2d(
        F.to_tensor(image)[None], torch.full((2, len(image.getbands()), 3, 3), 0.25)
    ),
    "make_grid": lambda image: make_grid([F.to_tensor(image)] * 2),
    "to_pil_image": lambda image: [F.to_pil_image(F.to_tensor(image)), F.to_pil_image(F.pil_to_tensor(image))],
    "tv image": lambda image: [
        use(F2.to_image(image))
        for use in (
            torch.clone, torch.detach, copy.deepcopy, tv_tensors.Image, lambda t: t + 1, lambda t: t[0],
            lambda t: t.to(torch.float32), lambda t: tv_tensors.wrap(t + 1, like=t), lambda t: t.requires_grad,
            lambda t: t.as_subclass(torch.Tensor), lambda t: pickle.loads(pickle.dumps(t)), lambda t: repr(t),
        )
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def openers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Image.Image]]:
    folder = tmp_path_factory.mktemp("stock_behavior")
    photo = make_photo(50, 37, 3)
    exif = photo.getexif()
    exif[EXIF_ORIENTATION_TAG] = 6
    files = {"color.jpg": photo, "gray.jpg": photo.convert("L"), "cmyk.jpg": photo.convert("CMYK"), "photo.png": photo}
    for name, image in files.items():
        image.save(folder / name, **({"exif": exif, "dpi": (72, 72)} if name == "color.jpg" else {}))
    data = {name: (folder / name).read_bytes() for name in files}
    return {
        "file": lambda: Image.open(io.BytesIO(data["color.jpg"])),
        "gray file": lambda: Image.open(io.BytesIO(data["gray.jpg"])),
        "CMYK file": lambda: Image.open(io.BytesIO(data["cmyk.jpg"])),
        "PNG file": lambda: Image.open(io.BytesIO(data["photo.png"])),
        "converted": lambda: Image.open(folder / "color.jpg").convert("RGB"),
        "converted to gray": lambda: Image.open(folder / "color.jpg").convert("L"),
        "loaded": lambda: default_loader(str(folder / "color.jpg")),
        "resized": lambda: Image.open(folder / "color.jpg").convert("RGB").resize((33, 21)),
    }


def _attempt(use: Use, opener: Callable[[], Image.Image]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = use(opener())
        except Exception as error:
            result = error
    return result, [str(w.message) for w in caught if w.category is not ResourceWarning]


def _check(actual: Any, expected: Any) -> None:
    if isinstance(expected, Exception):
        assert type(actual) is type(expected)
        assert str(actual) == str(expected)
    elif isinstance(actual, Exception):
        raise AssertionError(f"stock gives {expected!r}") from actual
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, stock_one in zip(actual, expected, strict=True):
            _check(one, stock_one)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(actual, expected)
    else:
        same_value(actual, expected)


@pytest.mark.parametrize("name", [*PILLOW_USES, *(f"tensor: {name}" for name in TENSOR_USES)])
@pytest.mark.sampled(48)
def test_a_handle_behaves_as_what_it_stands_for(openers: dict[str, Callable[[], Image.Image]], name: str) -> None:
    use = TENSOR_USES[name.removeprefix("tensor: ")] if name.startswith("tensor: ") else PILLOW_USES[name]
    for kind, opener in openers.items():
        expected, stock_warnings = _attempt(use, opener)
        with torch_sink.image_backend("device", device="cpu"):
            actual, our_warnings = _attempt(use, opener)
            try:
                _check(actual, expected)
                assert our_warnings == stock_warnings
            except AssertionError as error:
                raise AssertionError(f"{kind}: {error}") from error


def _detection_sample(opener: Callable[[], Image.Image]) -> dict[str, Any]:
    image = opener()
    boxes = [[2, 3, 30, 20], [10, 5, image.width - 1, image.height - 1]]
    return {
        "image": image,
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(image.height, image.width)),  # type: ignore[arg-type, call-arg]
        "masks": tv_tensors.Mask(torch.ones(2, image.height, image.width, dtype=torch.uint8)),
        "labels": torch.tensor([1, 2]),
    }


MEANS = {tv_tensors.Image: (123.0, 117.0, 104.0), tv_tensors.Mask: 0, Image.Image: (1, 2, 3), "others": 9}
DETECTION: dict[str, Callable[[], list[Any]]] = {
    "flip": lambda: [v2.RandomHorizontalFlip()],
    "large-scale jitter": lambda: [
        v2.ScaleJitter((64, 64)), v2.RandomCrop((64, 64), pad_if_needed=True, fill=MEANS), v2.RandomHorizontalFlip()
    ],
    "several scales": lambda: [v2.RandomShortestSize((24, 48), max_size=90), v2.RandomHorizontalFlip()],
    "SSD": lambda: [
        v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=MEANS), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()
    ],
}  # fmt: skip


@pytest.mark.parametrize("first", [[], [v2.PILToTensor()], [v2.ToImage()]], ids=["Pillow", "tensor", "tv image"])
@pytest.mark.parametrize("name", list(DETECTION))
@pytest.mark.sampled(6)
def test_detection_pipelines(openers: dict[str, Callable[[], Image.Image]], name: str, first: list[Any]) -> None:
    by_type = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    for dtype in (torch.float32, by_type):
        tail = [v2.ToImage(), v2.ToDtype(dtype, scale=True), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
        pipeline = v2.Compose([*first, *DETECTION[name](), *tail])
        for seed in range(4):
            torch.manual_seed(seed)
            expected = pipeline(_detection_sample(openers["loaded"]))
            with torch_sink.image_backend("device", device="cpu"):
                torch.manual_seed(seed)
                actual = pipeline(_detection_sample(openers["loaded"]))
                assert list(actual) == list(expected)
                for key in expected:
                    same_value(actual[key], expected[key])


@dataclass  # which has no hash
class _Counted:
    """Stands for a functional, and counts its calls."""

    function: Use
    calls: int = 0

    def __call__(self, image: Any) -> Any:
        self.calls += 1
        return self.function(image)


def test_a_functional_that_a_program_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be any object: it need not have a hash, and is not kept alive."""
    counted = _Counted(F.rgb_to_grayscale)
    monkeypatch.setattr(F, "rgb_to_grayscale", counted)
    image, gone = torch.arange(12.0).view(3, 2, 2), weakref.ref(counted)
    expected = F.rgb_to_grayscale(image)
    with torch_sink.image_backend("device", device="cpu"):
        assert torch.equal(F.rgb_to_grayscale(image), expected)
        assert counted.calls == 2
        monkeypatch.undo()
        del counted
        assert gone() is None
