"""Count what the kernels execute on photographs, by the executor of the tests, for kernels.json.

    python examples/benchmarks/kernel_counts.py [--data FOLDER]

The PTX for sm_90 runs on the CPU, so no GPU is needed. Instructions are counted; times are not, and do not follow from
them: a kernel also waits for memory, for what it depends on, and for its longest lane.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from jpeg import covered_files
from jpeg_rounds import opened
from kernel_record import write_record
from torch_sink.cli.machine import describe_machine
from torch_sink.cli.photos import make_photo, photo_file
from torch_sink.cli.pipelines import CROP, JITTER, MEAN, STD, find_images
from torch_sink.image.decode.jpeg_decoder import decode_jpegs
from torch_sink.image.decode.source import Box
from torch_sink.triton_kernels import shapes

ROOT = Path(__file__).resolve().parents[2]


RESULT = ROOT / "examples" / "benchmarks" / "results" / "kernels.json"
PHOTO = (500, 375)  # width and height in pixels, the usual size of ImageNet
LANES = 32
FILES = 32  # through the decoder
BATCHES = 32, 64, 256, 1024


def pipelines() -> dict[str, Any]:
    """Those that train on ImageNet; each gives [3, 224, 224]."""
    crop, flip = v1.RandomResizedCrop(CROP), v1.RandomHorizontalFlip()
    values = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return {
        "resized crop + flip": v1.Compose([crop, flip, *values]),
        "+ ColorJitter": v1.Compose([crop, flip, v1.ColorJitter(*JITTER), *values]),
        "+ RandAugment + RandomErasing": v1.Compose([crop, flip, v1.RandAugment(), *values, v1.RandomErasing(p=1)]),
        "v2, floats first": v2.Compose(
            [*floats, v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip(), v2.Normalize(MEAN, STD)]
        ),
    }


def counting() -> Any:
    """A context in which kernels run on the CPU and are counted."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from simulators.executor.project import compiled_on_cpu
        from simulators.executor.ptx.machine import Options
    finally:
        sys.path.remove(str(ROOT / "tests"))
    return compiled_on_cpu(Options(random_order=False, races=False, counts=True, warps=8192))


def row_of(name: str, counts: list[Any], pixels: int, images: int) -> dict[str, Any]:
    """What some launches executed, for an output pixel and for an image."""
    instructions: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    sectors: Counter[str] = Counter()
    for found in counts:
        instructions += found.instructions
        requests += found.requests
        sectors += found.sectors
    loads = [kind for kind in ("ld.global", "st.global") if requests[kind]]
    return {
        "name": name,
        "instructions_a_pixel": LANES * instructions.total() / pixels,
        "wavefronts_a_pixel": sum(found.wavefronts.total() for found in counts) / pixels,
        "sectors_a_request": {kind: sectors[kind] / requests[kind] for kind in loads},
        "instructions_an_image": LANES * instructions.total() / images,
    }


def count_pipeline(name: str, pipeline: Any, images: int, size: tuple[int, int] = PHOTO) -> dict[str, Any]:
    """The counts of one pipeline on some photographs; the draws are those of a fixed seed."""
    torch.manual_seed(3)
    with counting() as executor, torch_sink.image_backend("device"):
        handles = [pipeline(make_photo(*size, seed)) for seed in range(images)]
        batch = torch.utils.data.default_collate(handles).to("cpu")
    return row_of(name, list(executor.counts.values()), batch.shape[-1] * batch.shape[-2] * images, images)


def photographs(count: int, folder: Path | None) -> list[bytes]:
    """JPEG files of a folder that the kernels decode, evenly spread over it; generated ones if there is no folder."""
    if folder is None:
        return [photo_file(seed) for seed in range(count)]
    paths = find_images(folder)
    found = [data for path in paths if opened(data := path.read_bytes()) is not None]
    return [found[place * len(found) // count] for place in range(count)]


def training_crops(files: list[bytes]) -> list[Box]:
    """The part of each file that `RandomResizedCrop` reads; the draws are those of a fixed seed."""
    torch.manual_seed(3)
    transform = v1.RandomResizedCrop(CROP)
    crops = [transform.get_params(Image.open(io.BytesIO(file)), transform.scale, transform.ratio) for file in files]
    return [Box(left, top, width, height) for top, left, height, width in crops]


def count_decoder(files: list[bytes], lanes: int) -> list[dict[str, Any]]:
    """The counts of each kernel of the JPEG decoder, and of all, with the lanes that a batch of some size has.

    Args:
        files: JPEG files, of which the crops of training are decoded.
        lanes: the number of their shape, in `LANE_SHAPES`.
    """
    sources = covered_files(files)
    with lanes_of_shape(lanes), counting() as executor:
        decode_jpegs(sources, training_crops(files), torch.device("cpu"))
    pixels = pixels_of(files)
    rows = [
        row_of(name.removesuffix("_kernel").replace("_", " "), [found], pixels, len(files))
        for name, found in executor.counts.items()
    ]
    return [*rows, row_of("all", list(executor.counts.values()), pixels, len(files))]


def pixels_of(files: list[bytes]) -> int:
    """The pixels of all of them."""
    return sum(math.prod(Image.open(io.BytesIO(file)).size) for file in files)


@contextmanager
def lanes_of_shape(number: int) -> Iterator[None]:
    """Cuts every batch into lanes of one shape in `LANE_SHAPES`, as large batches are cut."""
    least = shapes.LEAST_BYTES
    shapes.LEAST_BYTES = tuple(0 if each <= number else sys.maxsize for each in range(len(least)))
    try:
        yield
    finally:
        shapes.LEAST_BYTES = least


def lanes_of_batch(files: list[bytes], batch: int) -> int:
    """The number of the shape of lanes for a batch of so many such files."""
    shape = shapes.choose_lane_shape(batch * sum(map(len, files)) // len(files))
    return shapes.LANE_SHAPES.index(shape)


def count_all(images: int, folder: Path | None) -> dict[str, Any]:
    """All of them, as they stand in the record."""
    made = [count_pipeline(name, pipeline, images) for name, pipeline in pipelines().items()]
    machine, command = describe_machine(), "python examples/benchmarks/kernel_counts.py"
    files = photographs(FILES, folder)
    decoder = [count_decoder(files, lanes) for lanes in range(len(shapes.LANE_SHAPES))]
    return {
        "command": command + (" --data FOLDER" if folder else ""),
        "machine": machine,
        "images": images,
        "pipelines": made,
        "files": {
            "count": len(files),
            "given": folder is not None,
            "mean_bytes": sum(map(len, files)) / len(files),
            "share_of_crops": sum(crop.width * crop.height for crop in training_crops(files)) / pixels_of(files),
        },
        "lanes": {str(batch): lanes_of_batch(files, batch) for batch in BATCHES},
        "decoder": decoder,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=4, help="images for each pipeline (default: %(default)s)")
    named = os.environ.get("TORCH_SINK_PHOTOS") or None
    parser.add_argument("--data", type=Path, default=named, help="photographs (default: TORCH_SINK_PHOTOS)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the record (default: %(default)s)")
    arguments = parser.parse_args()
    counts = count_all(arguments.images, arguments.data)
    record = json.loads(arguments.output.read_text())
    kernels = record.pop("kernels")
    write_record({**record, "counts": counts, "kernels": kernels}, arguments.output)


if __name__ == "__main__":
    main()
