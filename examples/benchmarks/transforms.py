"""Transforms alone: from decoded uint8 images to the finished batch on the device.

    python examples/benchmarks/transforms.py [--data DIR] [--batches 64 512]

Contenders: torch_sink; torchvision v2 on tensors that lie on the device, image by image, as ragged sizes and draws of
their own require; Kornia where it is installed, on images brought to one size before; torchvision on Pillow images,
one thread. First a gate: torch_sink's batch must equal stock torchvision's on Pillow images, bit for bit. Beside
images per second stand launches per batch and the share of the bandwidth that a copy on the device reaches in the same
run. Prints a table and writes JSON. Without a GPU the kernels run in Triton's interpreter, to try the commands.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import torch_sink
from harness import (
    describe,
    device_here,
    device_spans,
    finish,
    in_turns,
    make_parser,
    photographs,
    positive,
    rates,
    save,
)
from torch_sink.cli.pipelines import CROP, JITTER, MEAN, STD, build_pipeline

GPU = torch.cuda.is_available()
Work = Callable[[], torch.Tensor]
PIPELINES = ("v1 train", "v1 eval", "v1 train + ColorJitter", "v1 train + RandAugment")
COPY_BYTES = 2**30 if GPU else 2**24


class Images:
    """One batch of a folder's images: recorded, decoded on the device, and as Pillow images."""

    def __init__(self, folder: Path, pipeline: str, batch: int, device: torch.device) -> None:
        from torch_sink.image.decode.source import Decoded
        from torch_sink.image.run.device import places_of

        self.pipeline, self.device, self.batch = pipeline, device, batch
        with torch_sink.image_backend("device", device="meta"):
            torch.manual_seed(0)
            dataset = ImageFolder(str(folder), build_pipeline(pipeline))
            recorded = default_collate([dataset[index % len(dataset)][0] for index in range(batch)])
        self.program = recorded.program
        sources, entries = self.program.packed.sources(), self.program.packed.entry_of_image
        files = [sources[entry].data for entry in entries]
        pixels = [image.to(device) for image in torch_sink.decode_images(files, device="cpu", provider="pillow")]
        self.tensors = pixels
        self.memory = torch.empty(self.program.workspace_bytes, dtype=torch.uint8, device=device)
        of_source = dict(zip(entries, pixels, strict=True))
        decoded = [Decoded(of_source[entry]) for entry in range(len(sources))]
        self.places, self.owners = places_of(decoded, self.memory)
        self.pillow = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        self.out = torch.empty(tuple(recorded.shape), device=device)

    def torch_sink(self) -> torch.Tensor:
        from torch_sink.image.run.device import Launches

        Launches(self.program, self.memory, places=self.places).run(self.program.batches, [self.out])
        return self.out

    def torchvision_cpu(self) -> torch.Tensor:
        pipeline = build_pipeline(self.pipeline)
        return torch.stack([pipeline(image) for image in self.pillow])

    def torchvision_on_device(self) -> torch.Tensor:
        pipeline = tensor_pipeline(self.pipeline)
        return torch.stack([pipeline(image) for image in self.tensors])

    def kornia(self) -> Work:
        """Kornia's augmentations; every image is brought to one size before, and not in the measured time."""
        from kornia import augmentation

        steps = {
            "v1 train": [],
            "v1 train + ColorJitter": [augmentation.ColorJitter(*JITTER)],
            "v1 train + RandAugment": [augmentation.auto.RandAugment(n=2, m=9)],
        }
        if self.pipeline not in steps:
            raise ValueError("no counterpart of this pipeline")
        chain = torch.nn.Sequential(
            augmentation.RandomResizedCrop((CROP, CROP)),
            augmentation.RandomHorizontalFlip(),
            *steps[self.pipeline],
            augmentation.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        same_size = torch.stack([v2.functional.resize(image, [375, 500]) for image in self.tensors]).float() / 255
        return lambda: chain(same_size)


def tensor_pipeline(name: str) -> v2.Compose:
    """The same pipeline for uint8 tensors."""
    augmentations = {"v1 train + ColorJitter": [v2.ColorJitter(*JITTER)], "v1 train + RandAugment": [v2.RandAugment()]}
    head = [v2.RandomResizedCrop(CROP, antialias=True), v2.RandomHorizontalFlip(), *augmentations.get(name, [])]
    if name == "v1 eval":
        head = [v2.Resize(256, antialias=True), v2.CenterCrop(CROP)]
    return v2.Compose([*head, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def check_equal(folder: Path, batch: int, device: torch.device) -> None:
    """Compare one batch of every pipeline with stock torchvision on Pillow images.

    Raises:
        SystemExit: a bit differs.
    """
    for name in PIPELINES:
        images = Images(folder, name, batch, device)
        torch.manual_seed(0)
        if not torch.equal(images.torch_sink().cpu(), images.torchvision_cpu()):
            sys.exit(f"{name}: the batch differs from stock torchvision's; nothing was measured")


def copy_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rates(2 * COPY_BYTES, in_turns({"copy": lambda: target.copy_(source)}, 9)["copy"])


def contenders(images: Images, *, with_cpu: bool) -> dict[str, Work]:
    found: dict[str, Work] = {"torch_sink": images.torch_sink}
    if images.device.type == "cuda":
        found["torchvision v2, CUDA tensors"] = images.torchvision_on_device
        try:
            found["Kornia, images of one size"] = images.kornia()
        except (ImportError, ValueError) as error:
            print(f"Kornia, {images.pipeline}: not measured ({error})")
    if with_cpu:
        found["torchvision, CPU, one thread"] = images.torchvision_cpu
    return found


def on_device(images: Images, bandwidth: float, rounds: int) -> dict[str, Any] | None:
    """What the kernels of one batch take on the device: their number, images per second, share of a copy's bandwidth.

    None where the profiler sees none of them. Every byte of the decoded images is counted once, and every byte of the
    result; what lies between is not.
    """
    turns = [
        [end - begin for name, begin, end in device_spans(images.torch_sink) if name.endswith("_kernel")]
        for _ in range(rounds)
    ]
    if not all(turns):
        return None
    moved = sum(image.numel() for image in images.tensors) + images.out.numel() * images.out.element_size()
    seconds = [sum(spans) / 1e9 for spans in turns]
    return {
        "launches": len(turns[0]),
        "images_per_second": rates(images.batch, seconds),
        "bandwidth_share": rates(moved / bandwidth, seconds),
    }


def measure(
    name: str, folder: Path, batches: Sequence[int], rounds: int, device: torch.device, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """The results after each batch size."""
    results: dict[str, Any] = {}
    for batch in batches:
        images = Images(folder, name, batch, device)
        # An image on the CPU takes as long in any batch.
        work = contenders(images, with_cpu=batch == min(batches))
        for contender, seconds in in_turns(work, rounds).items():
            entry = results.setdefault(contender, {"images_per_second": {}, "launches": None})
            entry["images_per_second"][str(batch)] = rates(batch, seconds)
            if device.type == "cuda" and contender != "torchvision, CPU, one thread":
                entry["launches"] = len(device_spans(work[contender]))
        kernels = on_device(images, bandwidth, rounds) if device.type == "cuda" else None
        if kernels is not None:
            alone = results.setdefault("torch_sink, kernels alone", {"images_per_second": {}, "bandwidth_share": {}})
            alone["launches"] = kernels["launches"]
            alone["images_per_second"][str(batch)] = kernels["images_per_second"]
            alone["bandwidth_share"][str(batch)] = kernels["bandwidth_share"]
        yield results


def format_table(report: dict[str, Any]) -> str:
    lines = [f"a copy on the device: {report['copy_bytes_per_second']['p50'] / 1e9:.0f} GB/s read and written"]
    for name, results in report["pipelines"].items():
        batches = list(results["torch_sink"]["images_per_second"])
        lines.append(f"\n{name + ', images/s at':32}" + "".join(f"{batch:>10}" for batch in batches) + "  launches")
        for contender, entry in results.items():
            speeds = "".join(f"{value['p50']:>10.0f}" for value in entry["images_per_second"].values())
            lines.append(f"{contender:32}{speeds}{entry['launches'] or '-':>10}")
            if "bandwidth_share" in entry:
                shares = "".join(f"{value['p50']:>10.1%}" for value in entry["bandwidth_share"].values())
                lines.append(f"{'  of the bandwidth of a copy':32}{shares}")
    return "\n".join(lines)


def main() -> None:
    if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
        # Read when Triton is imported, and torchvision imports it.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    parser = make_parser(__doc__, "transforms", images=120 if GPU else 4)
    parser.add_argument("--batches", type=positive, nargs="+", default=[64, 256, 512, 1024] if GPU else [2])
    parser.add_argument("--rounds", type=positive, default=5 if GPU else 1, help="turns of each contender")
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=PIPELINES, metavar="NAME")
    arguments = parser.parse_args()
    device = device_here()
    with photographs(arguments) as folder:
        check_equal(folder, 64 if GPU else 2, device)
        report = describe(arguments, "transforms.py", folder)
        report["copy_bytes_per_second"] = copy_bandwidth(device)
        bandwidth = report["copy_bytes_per_second"]["p50"]
        report["pipelines"] = {}
        for name in arguments.pipelines:
            for results in measure(name, folder, arguments.batches, arguments.rounds, device, bandwidth):
                report["pipelines"][name] = results
                save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
