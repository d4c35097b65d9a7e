"""Count what each operation of the kernels executes, for torch_sink/cli/kernel_costs.json: the model of `explain`.

    python examples/benchmarks/kernel_costs.py

The PTX for sm_90 runs on the CPU, so no GPU is needed. Small chains of transforms, each operation in one at least, run
through the executor of the tests; least squares give the work of each operation for a pixel, of the decoder for an
encoded byte and a decoded pixel. The host's cost is that of host_cost.json.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
import torch_sink.cli
from kernel_counts import RESULT, counting, lanes_of_shape
from kernel_instructions import ARITHMETIC, work_of
from report_tables import host_of
from torch_sink.cli.machine import describe_machine, features_of_batch
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.providers import set_decode_provider
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LEAST_BYTES, STAGE_TILE

COSTS = Path(torch_sink.cli.__file__).with_name("kernel_costs.json")
HOST_COST = RESULT.with_name("host_cost.json")
STAGE_KERNELS = ("prologue_kernel", "stage_kernel", "statistics_kernel")
UNITS = ("issue", *ARITHMETIC, "load-store")
PHOTO, USUAL = (250, 188), (500, 375)  # width and height in pixels; the usual size of ImageNet
NEAREST, BILINEAR, BICUBIC = map(v1.InterpolationMode, ("nearest", "bilinear", "bicubic"))
RESIZE = v1.Resize((112, 112))
FLOATS = (v2.ToImage(), v2.ToDtype(torch.float32, scale=True))
Features = Work = Counter[str]
Cost = dict[str, dict[str, float]]


def chains() -> list[Any]:
    """Chains of transforms in which each kind of kernel work occurs."""
    blur = v2.GaussianBlur(5)
    on_images = [
        v1.RandomHorizontalFlip(1), v1.Pad(8), v1.Pad(8, padding_mode="edge"), v1.Pad(8, padding_mode="reflect"),
        v1.Pad(8, padding_mode="symmetric"), v1.ColorJitter(brightness=(1.3, 1.3)), v1.ColorJitter(contrast=(1.3, 1.3)),
        v1.ColorJitter(saturation=(1.3, 1.3)), v1.ColorJitter(hue=(0.1, 0.1)), v1.RandomInvert(1),
        v1.RandomPosterize(3, 1), v1.RandomSolarize(99, 1), v1.Grayscale(3), v1.RandomAutocontrast(1),
        v1.RandomEqualize(1), v1.RandomAdjustSharpness(1.5, 1), v2.RandomChannelPermutation(), v2.AugMix(),
        v1.RandomRotation((15, 15)), v1.RandomRotation((15, 15), BILINEAR), v1.RandomRotation((15, 15), BICUBIC),
        v1.GaussianBlur(5), v1.RandomPerspective(p=1), v1.ElasticTransform(), v1.CenterCrop(96), v1.Resize(60),
        v1.RandomResizedCrop(112), v1.Resize((160, 160)), v1.Resize((64, 64)), v1.Resize((192, 64)),
        v1.Resize((64, 192)), v1.Resize((96, 96), BICUBIC), v1.Resize((96, 96), NEAREST),
        partial(F.adjust_gamma, gamma=2),
        methodcaller("filter", ImageFilter.GaussianBlur(2)), methodcaller("filter", ImageFilter.GaussianBlur(9)),
        methodcaller("filter", ImageFilter.SHARPEN), methodcaller("filter", ImageFilter.SMOOTH_MORE),
    ]  # fmt: skip
    on_floats = [
        [v1.RandomErasing(1)], [v2.RandomErasing(1, value="random")], [v2.RandomHorizontalFlip(1)],
        [v2.ColorJitter(brightness=(1.3, 1.3))], [v2.ColorJitter(contrast=(1.3, 1.3))],
        [v2.ColorJitter(hue=(0.1, 0.1))], [v2.RandomResizedCrop(112)], [v2.Resize((60, 60))], [blur],
        [v2.GaussianBlur(23)], [v2.RandomRotation((15, 15), BILINEAR)], [v2.RandomRotation((15, 15))],
        [v2.RandomPerspective(p=1)], [v2.RandomAdjustSharpness(1.5, 1)],
        [blur, v2.Normalize((0.5,) * 3, (0.5,) * 3)],
    ]  # fmt: skip
    images = [v1.Compose([*head, each, v1.ToTensor()]) for each in on_images for head in ((RESIZE,), ())]
    return images + [v2.Compose([*head, *FLOATS, *each]) for each in on_floats for head in ((RESIZE,), ())]


def count_chain(chain: Any, images: Sequence[Any]) -> tuple[list[Features], dict[str, Work]]:
    """Features of each launch of a chain on some images, the decoder's first, and what each kernel executed."""
    torch.manual_seed(3)
    with counting() as executor, torch_sink.image_backend("device", strict=True):
        batch: Any = default_collate([chain(image) for image in images])
        features = features_of_batch(batch)
        set_decode_provider("triton")
        try:
            batch.to("cpu")
        finally:
            set_decode_provider(None)
    counts = executor.counts.items()
    return features, {name: work_of(found.instructions, found.wavefronts.total()) for name, found in counts}


def count_stages() -> Cost:
    """The work of what a plan launches."""
    kernels: dict[str, list[tuple[Features, Work]]] = {"prologue": [], "statistics": [], "stage": []}
    for chain in chains():
        (_, prologue, *launches), works = count_chain(chain, [make_photo(*PHOTO, seed=0)])
        statistics = [launch for launch in launches if "measured" in launch]
        stages = [launch for launch in launches if "measured" not in launch]
        for name, features in (("prologue", [prologue]), ("statistics", statistics), ("stage", stages)):
            if features:
                kernels[name].append((sum(features, Counter()), works[f"{name}_kernel"]))
    return {name: cost for rows in kernels.values() for name, cost in fit(rows).items()}


def count_decoder() -> Cost:
    """The work of the decoder for an encoded byte and a decoded pixel, in batches of some hundred files."""
    rows = []
    (width, height), count = USUAL, 4
    for quality, subsampling, part in itertools.product((75, 92), ("4:4:4", "4:2:0"), (1, 2)):
        files = [io.BytesIO() for _ in range(count)]
        for seed, file in enumerate(files):
            make_photo(width, height, seed).save(file, "JPEG", quality=quality, subsampling=subsampling)
        chain = v1.Compose([Image.open, v1.CenterCrop((height // part, width // part)), v1.ToTensor()])
        with lanes_of_shape(1):
            (decoder, *_), works = count_chain(chain, files)
        others = (work for name, work in works.items() if name not in STAGE_KERNELS)
        rows.append((decoder, sum(others, Counter())))
    return fit(rows)


def count_decoder_launches() -> list[tuple[int, int]]:
    """How often a batch launches kernels of the decoder: (encoded bytes, launches from so many on)."""
    file = io.BytesIO()
    make_photo(*PHOTO, seed=0).save(file, "JPEG")
    with counting() as executor:
        torch_sink.decode_images([file.getvalue()], device="cpu", provider="triton")
    others = executor.launches.total() - executor.launches["round_kernel"]
    return [(least, others + shape.rounds) for least, shape in zip(LEAST_BYTES, LANE_SHAPES, strict=True)]


def fit(rows: Sequence[tuple[Features, Work]]) -> Cost:
    """The work of one of each feature: least squares of the relative differences, nothing below 0."""
    names = sorted({name for features, _ in rows for name in features})
    scale = np.array([work["issue"] for _, work in rows])
    amounts = np.array([[features[name] for name in names] for features, _ in rows]) / scale[:, None]
    found = {unit: _solved(amounts, np.array([work[unit] for _, work in rows]) / scale) for unit in UNITS}
    return {
        name: {unit: float(f"{values[at]:.4g}") for unit, values in found.items() if values[at] > 0}
        for at, name in enumerate(names)
    }


def _solved(amounts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares without negative values: columns that become negative are left out."""
    used = np.ones(amounts.shape[1], dtype=bool)
    while True:
        values = np.zeros(len(used))
        values[used] = np.linalg.lstsq(amounts[:, used], wanted, rcond=None)[0]
        if (values >= 0).all():
            return values
        used &= values > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=COSTS, help="the record (default: %(default)s)")
    arguments = parser.parse_args()
    machine = describe_machine()
    record: dict[str, Any] = {
        "command": "python examples/benchmarks/kernel_costs.py",
        **{name: machine[name] for name in ("date", "releases", "commit")},
        "tile": STAGE_TILE,
        "host": host_of(json.loads(HOST_COST.read_text())),
        "decoder_launches": count_decoder_launches(),
        "features": {**count_decoder(), **count_stages()},
    }
    features = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in record.pop("features").items())
    head = ",\n ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    arguments.output.write_text(f'{{\n {head},\n "features": {{\n  {features}\n }}\n}}\n')


if __name__ == "__main__":
    main()
