"""Palette images, as the masks of segmentation datasets are stored: numbers of classes that stay what they are."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.utils.data import DataLoader
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import MEAN, STD, encoded
from image.check import assert_same_bits, check_pipeline
from torch_sink.cli.photos import make_photo
from torch_sink.image.handles.image import LazyImage

pytestmark = pytest.mark.halved

NEAREST = InterpolationMode.NEAREST


def mask_file(width: int, height: int, seed: int = 1, classes: int = 21, kind: str = "PNG", **save: Any) -> bytes:
    """A mask of some classes with a border that is ignored, 255, as VOC's."""
    numbers = np.asarray(make_photo(width, height, seed).convert("L")) % classes
    numbers[: height // 5] = 255
    mask = Image.fromarray(numbers)
    mask.putpalette(np.random.default_rng(seed).integers(0, 256, 768, dtype=np.uint8).tobytes())
    buffer = io.BytesIO()
    mask.save(buffer, kind, **save)
    return buffer.getvalue()


FILES = {
    "PNG": mask_file(37, 29),
    "few colors": encoded(30, 41, 2, "P", "PNG"),
    "transparent": mask_file(33, 20, transparency=4),
    "GIF": mask_file(25, 31, kind="GIF"),
    "BMP": mask_file(31, 27, kind="BMP"),
}


def opened(name: str) -> Image.Image:
    return Image.open(io.BytesIO(FILES[name]))


RECORDED: dict[str, Callable[[Any], Any]] = {
    "crop": lambda mask: F.crop(mask, 3, 2, 15, 17),
    "crop beyond": lambda mask: F.crop(mask, -3, 2, 50, 60),
    "hflip": F.hflip,
    "vflip": F2.vertical_flip,
    "pad": lambda mask: F.pad(mask, (1, 2, 3, 4), fill=255),
    "pad, mirrored": lambda mask: F2.pad(mask, 5, padding_mode="reflect"),
    "resize": lambda mask: F.resize(mask, [19, 50], NEAREST),
    "resize with any filter": lambda mask: F.resize(mask, [40, 20], InterpolationMode.BICUBIC),
    "center crop": lambda mask: F2.center_crop(mask, [50, 12]),
    "resized crop": lambda mask: F2.resized_crop(mask, 2, 1, 15, 16, [20, 20], NEAREST),
    "rotate": lambda mask: F.rotate(mask, 33.0, fill=255),
    "rotate by a quarter": lambda mask: F.rotate(mask, 90, expand=True),
    "affine": lambda mask: F2.affine(mask, 20.0, [2, 3], 1.3, [4.0], InterpolationMode.BILINEAR, fill=7),
    "perspective": lambda mask: F.perspective(
        mask, [[0, 0], [9, 0], [9, 9], [0, 9]], [[1, 1], [8, 0], [9, 7], [0, 9]], NEAREST, fill=3
    ),
    "methods": lambda mask: F.hflip(mask).crop((1, 2, 20, 18)).resize((9, 12)).transpose(Image.Transpose.ROTATE_90),
    "copy": lambda mask: F.hflip(mask).copy(),
    "convert to itself": lambda mask: F.hflip(mask).convert("P"),
    "exif_transpose": lambda mask: ImageOps.exif_transpose(F.vflip(mask)),
}
# Stock code's result, or its error.
IN_STOCK_CODE: dict[str, Callable[[Any], Any]] = {
    "rotate, a filter that it refuses": lambda mask: F.rotate(mask, 30, InterpolationMode.LANCZOS),
    "affine, a filter that it refuses": lambda mask: F2.affine(mask, 9, [1, 2], 1.1, [0], InterpolationMode.BOX),
    "warped, a filter that it refuses": lambda mask: mask.transform((9, 8), 0, (1, 0, 0, 0, 1, 0), Image.LANCZOS),
    "brightness": lambda mask: F.adjust_brightness(mask, 0.5),
    "gamma": lambda mask: F.adjust_gamma(F.hflip(mask), 2.0),
    "invert": lambda mask: F2.invert(F.hflip(mask)),
    "equalize": lambda mask: F.equalize(F.hflip(mask)),
    "gray": lambda mask: F.to_grayscale(F.hflip(mask), 3),
    "blur": lambda mask: F2.gaussian_blur(F.hflip(mask), [3, 3]),
    "filtered": lambda mask: F.gaussian_blur(F.hflip(mask), [3, 3]),
    "point": lambda mask: F.hflip(mask).point(lambda value: value // 2),
    "getchannel": lambda mask: F.hflip(mask).getchannel(0),
    "enhanced": lambda mask: ImageEnhance.Sharpness(F.hflip(mask)).enhance(2.0),
    "convert": lambda mask: F.hflip(mask).convert(),
    "convert to RGB": lambda mask: F.hflip(mask).convert("RGB"),
    "convert to L": lambda mask: F.hflip(mask).convert("L"),
    "colors that change": lambda mask: F.adjust_saturation(F.hflip(mask).convert("RGB"), 2.0),
    "split": lambda mask: F.hflip(mask).split()[0],
    "convert to RGBA": lambda mask: F.hflip(mask).convert("RGBA"),
    "a color as the fill": lambda mask: F.hflip(mask).transform(
        (9, 9), Image.Transform.AFFINE, (1, 0, 20, 0, 1, 0), fillcolor=(1, 2, 3)
    ),
    "another palette": lambda mask: with_palette(F.hflip(mask)),
    "palette of a copy": lambda mask: F.hflip(mask).remap_palette(list(range(20))),
    "array": lambda mask: Image.fromarray(np.array(F.hflip(mask))),
}


def with_palette(mask: Image.Image) -> Image.Image:
    mask.putpalette(bytes(range(96)))
    return mask


def outcome(call: Callable[[Any], Any], name: str) -> tuple[Any, ...]:
    try:
        image = call(opened(name))
    except Exception as error:
        return type(error), str(error)
    palette = image.palette.mode if image.palette else None
    return image.mode, image.size, palette, image.getpalette(), image.info, image.tobytes()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", [*RECORDED, *IN_STOCK_CODE])
@pytest.mark.sampled(100)
def test_images_are_stock_codes(name: str, file: str) -> None:
    call = {**RECORDED, **IN_STOCK_CODE}[name]
    expected = outcome(call, file)
    with torch_sink.image_backend("device", device="cpu"):
        assert outcome(call, file) == expected


@pytest.mark.parametrize("name", RECORDED)
def test_images_record(name: str) -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        for file in FILES:
            image = RECORDED[name](opened(file))
            assert type(image) is LazyImage
            assert image.is_recording


def test_a_mask_in_another_process_keeps_its_palette() -> None:
    expected = outcome(F.hflip, "PNG")
    with torch_sink.image_backend("device", device="cpu"):
        assert outcome(lambda mask: pickle.loads(pickle.dumps(F.hflip(mask))), "PNG") == expected


def tensors(*transforms: Any) -> dict[str, Callable[[Any], Any]]:
    return {
        "v1": v1.Compose([*transforms, v1.PILToTensor()]),
        "v2": v2.Compose([*transforms, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
    }


PIPELINES: dict[str, Callable[[Any], Any]] = {
    **{f"{name} {family}": pipeline for name, call in RECORDED.items() for family, pipeline in tensors(call).items()
       if (family == "v1") == (len(name) % 2 == 0)},
    "normalized": v1.Compose([v1.RandomCrop((20, 24), pad_if_needed=True, fill=255), v1.ToTensor(), v1.Normalize([0.1], [0.5])]),
    "turned": v2.Compose([v2.RandomRotation(30, fill=255), v2.PILToTensor()]),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_tensors(name: str) -> None:
    check_pipeline(PIPELINES[name], [lambda: opened("PNG")])


# --- segmentation, as torchvision's references train it


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """VOC's tree with a few images of several sizes."""
    root = tmp_path_factory.mktemp("voc")
    base = root / "VOCdevkit" / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (base / folder).mkdir(parents=True)
    names = [f"2007_{number:06d}" for number in range(6)]
    for number, name in enumerate(names):
        size = 60 + 7 * number, 70 - 5 * number
        (base / "JPEGImages" / f"{name}.jpg").write_bytes(encoded(*size, number))
        (base / "SegmentationClass" / f"{name}.png").write_bytes(mask_file(*size, number))
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text("\n".join(names))
    return root


def train_v1(image: Any, mask: Any) -> tuple[Any, Any]:
    """What is drawn for an image happens to its mask; functionals, and an array in the end."""
    size = int(torch.randint(30, 90, (1,)))
    image, mask = F.resize(image, [size], antialias=True), F.resize(mask, [size], NEAREST)
    if torch.rand(1) < 0.5:
        image, mask = F.hflip(image), F.hflip(mask)
    missing = max(0, 48 - min(image.size))
    image, mask = F.pad(image, [0, 0, missing, missing], 0), F.pad(mask, [0, 0, missing, missing], 255)
    box = v1.RandomCrop.get_params(image, (48, 48))
    image, mask = F.crop(image, *box), F.crop(mask, *box)
    image = F.normalize(F.convert_image_dtype(F.pil_to_tensor(image), torch.float), MEAN, STD)
    return image, torch.as_tensor(np.array(mask), dtype=torch.int64)


TRAIN_V2 = v2.Compose(
    [
        v2.RandomResize(30, 90),
        v2.RandomHorizontalFlip(0.5),
        v2.RandomCrop(48, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
        v2.PILToTensor(),
        v2.ToDtype({torch.Tensor: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
        v2.Normalize(MEAN, STD),
        v2.ToPureTensor(),
    ]
)


def batches(root: Path, family: str, workers: int) -> list[Any]:
    dataset = datasets.VOCSegmentation(
        str(root), image_set="train", transforms=TRAIN_V2 if family == "v2" else train_v1
    )
    if family == "v2":
        dataset = datasets.wrap_dataset_for_transforms_v2(dataset)
    torch.manual_seed(4)
    return list(DataLoader(dataset, batch_size=3, num_workers=workers))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("family", ["v1", "v2"])
def test_segmentation(voc: Path, family: str, workers: int) -> None:
    expected = batches(voc, family, workers)
    with torch_sink.image_backend("device", device="cpu"):
        made = batches(voc, family, workers)
        rows = list(torch_sink.fallback_report().counts)
    for (images, masks), (stock_images, stock_masks) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert_same_bits(masks, stock_masks)
    operation = {"v1": "pixels of a Pillow image", "v2": "tv_tensors.Mask"}[family]  # the masks', and of no image
    assert [row[0] for row in rows] == [operation]
