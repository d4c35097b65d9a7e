"""Random pipelines on random images, as stock torchvision runs them and as the "device" backend does.

Run as a program, it compares the scenarios of some seeds; with TRITON_INTERPRET=1 in the environment their batches go
through the kernels: `python -m image.random_pipelines FIRST_SEED END_SEED`, in the folder `tests`.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_flatten
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.datasets.folder import default_loader

import torch_sink
from image.check import EXACT, assert_keeps, device_in_use, promise_of_calls, runs_kernels
from image.random_transforms import random_pipeline
from torch_sink.cli.photos import make_photo
from torch_sink.image.handles.tensor import Handle

# mode of the file -> formats that can hold it
_FORMATS = {
    "RGB": ("JPEG", "JPEG", "JPEG", "JPEG", "PNG", "WEBP"),
    "L": ("JPEG", "PNG"),
    "CMYK": ("JPEG",),
    "RGBA": ("PNG", "WEBP"),
    "P": ("PNG",),
    "1": ("PNG",),
    "I;16": ("PNG",),
    "LA": ("PNG",),
}
_SIDES = (1, 2, 3, 9, 16, 17, 31, 33, 40, 47, 64, 80, 300)
_WAYS_TO_OPEN = ("rgb", "rgb", "rgb", "loader", "loader", "as it is", "gray", "array")


class Scenario(NamedTuple):
    """A pipeline and the images it runs on.

    Attributes:
        pipeline: made anew for every run, so that no state stays in it.
        openers: each gives the input of the pipeline, freshly opened.
    """

    pipeline: Callable[[], Callable[[Any], Any]]
    openers: list[Callable[[], Any]]


class Outcome(NamedTuple):
    """What came of one input: a result or an exception, the warnings, the generators' states afterwards."""

    result: Any
    error: BaseException | None
    warned: list[tuple[str, str]]
    states: tuple[Any, ...]


def make_scenario(seed: int, folder: Path) -> Scenario:
    """The scenario of a seed; its files are written to `folder`."""
    chance = random.Random(seed)
    version = chance.choice(("v1", "v2"))
    state = chance.getstate()

    def pipeline() -> Callable[[Any], Any]:
        again = random.Random()
        again.setstate(state)
        return random_pipeline(again, version)

    random_pipeline(chance, version)
    form = "image" if version == "v1" else chance.choice(("image", "image", "tuple", "detection"))
    openers = [_opener(chance, folder / f"{seed}_{number}", form) for number in range(3)]
    return Scenario(pipeline, openers)


def _opener(chance: random.Random, path: Path, form: str) -> Callable[[], Any]:
    width, height = chance.choice(_SIDES), chance.choice(_SIDES)
    mode = chance.choice(("RGB", "RGB", "RGB", "RGB", *_FORMATS))
    way = chance.choice(_WAYS_TO_OPEN)
    photo = make_photo(width, height, chance.randrange(1 << 20))
    kind = chance.choice(_FORMATS[mode])
    options = {"progressive": chance.random() < 0.2, "quality": chance.randrange(60, 96)} if kind == "JPEG" else {}
    path.write_bytes(_encoded(photo, mode, kind, options))

    def opened() -> Image.Image:
        if way == "loader":
            return default_loader(str(path))
        if way == "array":
            return Image.fromarray(np.asarray(photo))
        if way == "as it is":
            return Image.open(io.BytesIO(path.read_bytes()))
        return Image.open(path).convert("L" if way == "gray" else "RGB")

    return lambda: _arranged(opened(), form)


def _encoded(photo: Image.Image, mode: str, kind: str, options: dict[str, Any]) -> bytes:
    image = photo.convert("L" if mode == "I;16" else mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(photo.convert("L"))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _arranged(image: Image.Image, form: str) -> Any:
    if form == "image":
        return image
    if form == "tuple":
        return image, 7
    size = image.height, image.width
    boxes = torch.tensor(
        [[0, 0, image.width, image.height], [0, 0, max(image.width // 2, 1), max(image.height // 2, 1)]]
    )
    return {
        "image": image,
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),  # type: ignore[arg-type, call-arg]
        "masks": tv_tensors.Mask(torch.arange(2 * size[0] * size[1]).reshape(2, *size) % 2),
        "points": tv_tensors.KeyPoints(torch.tensor([[0, 0]]), canvas_size=size),  # type: ignore[call-arg]
        "labels": torch.tensor([3, 4]),
        "name": "one",
    }


# --- running


def run(scenario: Scenario, seed: int) -> list[Outcome]:
    """Runs every input of a scenario, each from the same seed, one after the other."""
    pipeline = scenario.pipeline()
    outcomes = []
    for number, opener in enumerate(scenario.openers):
        torch.manual_seed(seed + number)
        random.seed(seed + number)
        np.random.seed(seed + number)
        result, error = None, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = pipeline(opener())
            except Exception as raised:
                error = raised
        states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        # When an unclosed file is collected, and that stock code leaves more of them open, is no difference.
        warned = [(w.category.__name__, str(w.message)) for w in caught if w.category is not ResourceWarning]
        outcomes.append(Outcome(result, error, warned, states))
    return outcomes


def compare(seed: int, folder: Path) -> None:
    """Runs the scenario of a seed in stock code and with the backend.

    Raises:
        AssertionError: they differ.
    """
    compare_scenario(make_scenario(seed, folder), seed)


def compare_scenario(scenario: Scenario, seed: int) -> list[Outcome]:
    """Runs a scenario in stock code and with the backend; returns what stock code gave.

    Raises:
        AssertionError: they differ.
    """
    with torch_sink.image_backend("PIL"):
        stock = run(scenario, seed)
    with torch_sink.image_backend("device", device=device_in_use()):
        ours = run(scenario, seed)
        _compare_batches(stock, ours)
        for expected, actual in zip(stock, ours, strict=True):
            _compare_outcomes(expected, actual)
    return stock


def _compare_outcomes(expected: Outcome, actual: Outcome) -> None:
    if type(expected.error) is not type(actual.error):
        raise AssertionError(f"stock: {expected.error!r}, ours: {actual.error!r}") from actual.error
    assert actual.warned == expected.warned
    for name, state, stock_state in zip(("torch", "random", "numpy"), actual.states, expected.states, strict=True):
        assert state == stock_state, f"the generator of {name} was used differently"
    leaves, structure = tree_flatten(actual.result)
    stock_leaves, stock_structure = tree_flatten(expected.result)
    assert structure == stock_structure
    for leaf, stock_leaf in zip(leaves, stock_leaves, strict=True):
        same_value(leaf, stock_leaf)


def same_value(actual: Any, expected: Any) -> None:
    """Equal kind and equal bits."""
    if isinstance(expected, Image.Image):
        assert isinstance(actual, Image.Image)
        assert (actual.mode, actual.size) == (expected.mode, expected.size)
        assert actual.getpalette() == expected.getpalette()
        assert _info(actual) == _info(expected)
        if actual.tobytes() != expected.tobytes():
            _raise_difference(torch.from_numpy(np.array(actual)), torch.from_numpy(np.array(expected)))
        return
    if not isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected)
        assert actual == expected
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert isinstance(actual, type(expected))
    if isinstance(actual, Handle):
        actual = actual.materialize()
    assert type(actual) is type(expected)
    _same_bits(actual, expected)


def _info(image: Image.Image) -> dict[Any, Any]:
    # Pillow adds these two when it decodes a WebP file, which may be before or after a call copies the rest.
    return {key: value for key, value in image.info.items() if key not in ("timestamp", "duration")}


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if not torch.equal(_bits(actual), _bits(expected)):
        _raise_difference(actual, expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _raise_difference(actual: torch.Tensor, expected: torch.Tensor) -> None:
    actual, expected = actual.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor)
    different = actual != expected
    first = tuple(different.nonzero()[0].tolist()) if different.any() else ()
    raise AssertionError(
        f"{int(different.sum())} of {different.numel()} values differ, the first at {first} of {tuple(actual.shape)}: "
        f"{actual[first]} instead of {expected[first]}"
    )


def _compare_batches(stock: list[Outcome], ours: list[Outcome]) -> None:
    """Collates the images of one shape; alone what nothing else has the shape of."""
    groups: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for expected, actual in zip(stock, ours, strict=True):
        for leaf, stock_leaf in zip(tree_flatten(actual.result)[0], tree_flatten(expected.result)[0], strict=False):
            if isinstance(leaf, Handle) and isinstance(stock_leaf, torch.Tensor):
                groups.setdefault((leaf.shape, leaf.dtype, type(leaf)), []).append((leaf, stock_leaf))
    for pairs in groups.values():
        batch = default_collate([leaf for leaf, _ in pairs])
        stock_batch = default_collate([stock_leaf for _, stock_leaf in pairs])
        made = batch.to(device_in_use()).cpu()
        assert type(made) is type(stock_batch)
        promise = promise_of_calls([leaf.lazy_recording.calls for leaf, _ in pairs], stock_batch)
        assert_keeps(promise if runs_kernels() else EXACT, made, stock_batch)


def main() -> int:
    first, end = map(int, sys.argv[1:3])
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, end):
            try:
                compare(seed, Path(folder))
            except Exception:
                failed += 1
                pipeline = make_scenario(seed, Path(folder)).pipeline()
                print(f"seed {seed}: {pipeline}\n{traceback.format_exc()}", flush=True)
    print(f"{failed} of {end - first} scenarios differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
