"""Decoders against each other: images per second, and how far their pixels are from Pillow's.

    python examples/benchmarks/decode.py [--data DIR] [--batches 64 256]

Pillow in this thread, torchvision on the CPU and on CUDA, torchcodec and nvImageCodec where they are installed, and
every provider of `torch_sink.decode_images`. All decode the same files from memory, in turns. Prints a table and
writes JSON.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

import torch_sink
from harness import (
    describe,
    device_here,
    finish,
    in_turns,
    make_parser,
    photographs,
    positive,
    rates,
    read_files,
    save,
)

Decoder = Callable[[Sequence[bytes]], Sequence[torch.Tensor]]


def pillow(files: Sequence[bytes]) -> list[torch.Tensor]:
    """Stock Pillow, one image after the other: uint8 [3, H, W]."""
    images = (np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files)
    return [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in images]


def torchvision_decoder(device: torch.device) -> Decoder:
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode(files: Sequence[bytes]) -> Sequence[torch.Tensor]:
        encoded = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        with warnings.catch_warnings():
            # torchvision recommends torchcodec, which takes its turn of its own here.
            warnings.simplefilter("ignore")
            return decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)

    return decode


def torchcodec_decoder(device: torch.device) -> Decoder:
    from torchcodec.decoders import decode_jpeg

    def decode(files: Sequence[bytes]) -> Sequence[torch.Tensor]:
        return decode_jpeg(list(files), mode="RGB", device=device)

    return decode


def nvimagecodec_decoder(device: torch.device) -> Decoder:
    from nvidia import nvimgcodec

    decoder = nvimgcodec.Decoder(device_id=device.index or 0)

    def decode(files: Sequence[bytes]) -> Sequence[torch.Tensor]:
        return [torch.as_tensor(image, device=device).permute(2, 0, 1) for image in decoder.decode(list(files))]

    return decode


def torch_sink_decoder(provider: str, device: torch.device) -> Decoder:
    return lambda files: torch_sink.decode_images(files, device=device, provider=provider)


def contenders(device: torch.device) -> tuple[dict[str, Decoder], dict[str, str]]:
    """Every decoder that works here, and why the others do not."""
    cpu = torch.device("cpu")
    makers: dict[str, Callable[[], Decoder]] = {
        "Pillow, one thread": lambda: pillow,
        "torchvision, CPU": lambda: torchvision_decoder(cpu),
    }
    if device.type == "cuda":
        makers["torchvision, CUDA"] = lambda: torchvision_decoder(device)
        makers["torchcodec, CUDA"] = lambda: torchcodec_decoder(device)
        makers["nvImageCodec"] = lambda: nvimagecodec_decoder(device)
    for provider in torch_sink.decode_providers():
        makers[f"torch_sink, {provider}"] = lambda provider=provider: torch_sink_decoder(provider, device)
    sample = [sample_file()]
    usable, missing = {}, {}
    for name, make in makers.items():
        try:
            decoder = make()
            decoder(sample)
        except Exception as error:  # what a library raises that is absent, or lacks its decoder, is its own affair
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            usable[name] = decoder
    return usable, missing


def sample_file() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 100, 50)).save(buffer, "JPEG")
    return buffer.getvalue()


def difference(decoder: Decoder, files: Sequence[bytes]) -> dict[str, float]:
    """How far a decoder's pixels are from Pillow's, over all images together."""
    total = equal = largest = count = 0
    for ours, theirs in zip(decoder(files), pillow(files), strict=True):
        distance = (ours.cpu().to(torch.int16) - theirs.to(torch.int16)).abs()
        total += int(distance.sum())
        equal += int((distance == 0).sum())
        largest = max(largest, int(distance.max()))
        count += distance.numel()
    return {"mean_abs": total / count, "largest": largest, "equal_share": equal / count}


def format_table(report: dict[str, Any]) -> str:
    batches = list(next(iter(report["decoders"].values()))["images_per_second"])
    lines = [f"{'images/s (median) at batch':28}" + "".join(f"{batch:>9}" for batch in batches) + "   mean difference"]
    for name, result in report["decoders"].items():
        speeds = "".join(f"{result['images_per_second'][batch]['p50']:>9.0f}" for batch in batches)
        lines.append(f"{name:28}{speeds}{result['difference']['mean_abs']:>18.4f}")
    return "\n".join(lines + [f"{name:28} not measured: {why}" for name, why in report["not_measured"].items()])


def main() -> None:
    parser = make_parser(__doc__, "decode", images=120)
    parser.add_argument("--batches", type=positive, nargs="+", help="images a call (default: 64, on a GPU to 1024)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each decoder")
    arguments = parser.parse_args()
    device = device_here()
    arguments.batches = arguments.batches or ([64, 256, 1024] if device.type == "cuda" else [64])
    usable, missing = contenders(device)
    with photographs(arguments) as folder:
        report = describe(arguments, "decode.py", folder)
        files = read_files(folder, max(arguments.batches))
    report["not_measured"] = missing
    report["decoders"] = results = {
        name: {"difference": difference(decoder, files[: min(len(files), 64)]), "images_per_second": {}}
        for name, decoder in usable.items()
    }
    for batch in arguments.batches:
        work = {name: functools.partial(decoder, files[:batch]) for name, decoder in usable.items()}
        seconds = in_turns(work, arguments.rounds)
        for name, values in seconds.items():
            results[name]["images_per_second"][str(batch)] = rates(batch, values)
        save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
