"""Count what the kernels execute on generated photographs, by the executor of the tests, for kernels.json.

The PTX for sm_90 runs on the CPU, so no GPU is needed. Times beside the counts are those of `torch_sink.cli.machine`.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from kernel_instructions import work_of
from kernel_record import write_record
from torch_sink.cli.machine import DEVICES, describe_machine, microseconds
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import CROP, JITTER, MEAN, STD

ROOT = Path(__file__).resolve().parents[2]


RESULT = ROOT / "examples" / "benchmarks" / "results" / "kernels.json"
PHOTO = (500, 375)  # width and height in pixels, the usual size of ImageNet
LANES = 32


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
    works = [work_of(found.instructions, found.wavefronts.total()) for found in counts]
    times = {name: sum(microseconds(work, device) for work in works) for name, device in DEVICES.items()}
    return {
        "name": name,
        "instructions_a_pixel": LANES * instructions.total() / pixels,
        "wavefronts_a_pixel": sum(found.wavefronts.total() for found in counts) / pixels,
        "sectors_a_request": {kind: sectors[kind] / requests[kind] for kind in loads},
        "microseconds_an_image": {device: time / images for device, time in times.items()},
    }


def count_pipeline(name: str, pipeline: Any, images: int, size: tuple[int, int] = PHOTO) -> dict[str, Any]:
    """The counts of one pipeline on some photographs; the draws are those of a fixed seed."""
    torch.manual_seed(3)
    with counting() as executor, torch_sink.image_backend("device"):
        handles = [pipeline(make_photo(*size, seed)) for seed in range(images)]
        batch = torch.utils.data.default_collate(handles).to("cpu")
    return row_of(name, list(executor.counts.values()), batch.shape[-1] * batch.shape[-2] * images, images)


def count_decoder(images: int, size: tuple[int, int] = PHOTO) -> list[dict[str, Any]]:
    """The counts of each kernel of the JPEG decoder, and of all, on files of quality 90 with subsampling 4:2:0."""
    files = []
    for seed in range(images):
        file = io.BytesIO()
        make_photo(*size, seed).save(file, "JPEG", quality=90, subsampling="4:2:0")
        files.append(file.getvalue())
    with counting() as executor:
        torch_sink.decode_images(files, device="cpu", provider="triton")
    pixels = size[0] * size[1] * images
    rows = [
        row_of(name.removesuffix("_kernel").replace("_", " "), [found], pixels, images)
        for name, found in executor.counts.items()
    ]
    return [*rows, row_of("all", list(executor.counts.values()), pixels, images)]


def count_all(images: int) -> dict[str, Any]:
    """All of them, as they stand in the record."""
    made = [count_pipeline(name, pipeline, images) for name, pipeline in pipelines().items()]
    devices = {name: device._asdict() for name, device in DEVICES.items()}
    machine, command = describe_machine(), "python examples/benchmarks/kernel_counts.py"
    return {"command": command, "machine": machine, "devices": devices, "images": images, "pipelines": made,
            "decoder": count_decoder(images)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=4, help="photographs of a batch (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the record (default: %(default)s)")
    arguments = parser.parse_args()
    counts = count_all(arguments.images)
    record = json.loads(arguments.output.read_text())
    kernels = record.pop("kernels")
    write_record({**record, "counts": counts, "kernels": kernels}, arguments.output)


if __name__ == "__main__":
    main()
