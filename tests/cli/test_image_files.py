"""Files that a pipeline meets: broken ones, photographs that a viewer turns, and those of 16 bits."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import datasets

import torch_sink
from torch_sink.cli import image_files, main
from torch_sink.cli.photos import make_photo

pytestmark = pytest.mark.once

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def turned(orientation: int) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    make_photo(90, 60, orientation).save(file, "JPEG", exif=exif)
    return file.getvalue()


def deep(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray((np.arange(4800).reshape(60, 80) * 13).astype(np.uint16)).save(file, kind)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Class folders with files of every kind; the current folder holds "photos"."""
    sound = turned(1)
    scan = sound.index(b"\xff\xda") + 20
    files = {
        **{f"turned{way}.jpg": turned(way) for way in range(1, 9)},
        **{f"deep.{kind}": deep(kind) for kind in ("png", "tiff")},
        "damaged.jpg": sound[:scan] + b"\xff\xd8" + sound[scan:],
        "cut.jpg": sound[:-400],
        "cut.png": deep("png")[:-90],
        "text.jpg": b"no image",
    }
    (tmp_path / "photos" / "one").mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / "photos" / "one" / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def recipe(title: str) -> dict[str, Any]:
    """What the code of a recipe defines."""
    text = RECIPES.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    defined: dict[str, Any] = {"transform": None}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], defined)
    return defined


def test_what_is_found_is_what_stock_pillow_says(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*.*"))
    broken, is_turned, is_deep = [], 0, 0
    for path in paths:
        try:
            image = Image.open(io.BytesIO(path.read_bytes()))
            image.load()
        except OSError:
            broken.append(str(path))
            continue
        is_turned += ImageOps.exif_transpose(image).tobytes() != image.tobytes()
        is_deep += np.asarray(image).max() > 255
    found = image_files.look_at(paths)
    assert [file.path for file in found.broken] == broken
    assert (len(broken), found.turned, found.deep) == (4, 7, 2) == (4, is_turned, is_deep)
    assert (found.looked_at, found.among, len(found.sound)) == (14, 14, 10)


def test_large_folders_are_looked_at_evenly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MOST_LOOKED_AT", 5)
    paths = sorted(folder.rglob("turned*.jpg"))
    found = image_files.look_at(paths)
    assert (found.sound, found.among) == (paths[::2], 8)
    assert "4 of 8 files looked at" in image_files.said_of_files(found)[0]


def test_the_command_explains_a_folder_with_broken_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "photos", "--device", "cuda", "--batch-size", "4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "14 of 14 files looked at 4 x broken, and left out here: " in printed
    assert f"{Path('photos', 'one', 'cut.jpg')}: " in printed
    assert "7 x turned by EXIF data in a viewer" in printed
    assert "2 x 16 bits: " in printed
    assert "and 1 more" in printed
    assert "BytesIO" not in printed
    for path in folder.rglob("*.*"):
        if path.name not in ("cut.jpg", "text.jpg"):
            path.unlink()
    assert main(["explain", "photos"]) == 2
    assert "every image in photos is broken, such as photos/one/cut.jpg: " in capsys.readouterr().err


def test_the_files_of_a_program_s_batch_are_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("damaged.jpg", "cut.jpg", "cut.png", "text.jpg"):
        (folder / "one" / name).unlink()
    transform = recipe("Turn photographs upright")["transform"]
    loader = torch.utils.data.DataLoader(datasets.ImageFolder("photos", transform), 10)
    with torch_sink.explain("cuda"):
        list(loader)
    printed = capsys.readouterr().out
    assert "10 of 10 files looked at" in printed
    assert "7 x turned" in printed


def test_the_recipe_for_photographs_that_lie_is_recorded(folder: Path) -> None:
    transform = recipe("Turn photographs upright")["transform"]
    for name in ("damaged.jpg", "cut.jpg", "cut.png", "text.jpg"):
        (folder / "one" / name).unlink()

    def batch() -> torch.Tensor:
        torch.manual_seed(0)
        (images, _), *_ = torch.utils.data.DataLoader(datasets.ImageFolder("photos", transform), 10)
        return images

    expected = batch()
    with torch_sink.image_backend("device", device="cpu"):
        assert torch.equal(batch(), expected)
        assert not torch_sink.fallback_report()


def test_the_recipe_for_16_bits_keeps_the_high_bits(folder: Path) -> None:
    dataset = recipe("Open files of 16 bits")["dataset"]
    expected = (np.arange(4800).reshape(60, 80) * 13 >> 8).astype(np.uint8)
    opened = {Path(path).name: dataset.loader(path) for path, _ in dataset.samples if "deep" in path}
    assert opened.keys() == {"deep.png", "deep.tiff"}
    with torch_sink.image_backend("device", device="cpu"):
        recorded = [dataset.loader(path) for path, _ in dataset.samples if "deep" in path]
        assert not torch_sink.fallback_report()
        for image in (*opened.values(), *recorded):
            assert np.array_equal(np.asarray(image), np.stack([expected] * 3, axis=2))
