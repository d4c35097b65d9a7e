"""What `torch-sink explain DIR` prints: the plan of a pipeline for the images of a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader

import torch_sink
from torch_sink.cli.pipelines import build_pipeline


def explain_folder(folder: str | Path, pipeline: str = "v1 train", batch_size: int = 32) -> str:
    """Describe what a pipeline would do with the first images of a folder. Records only: no pixel is decoded.

    Args:
        folder: holds images, at any depth.
        pipeline: a key of `torch_sink.cli.pipelines.PIPELINES`.
        batch_size: how many images make the batch that is described.

    Returns:
        Files, plan and fallbacks as text.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: the pipeline is unknown, or `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} images cannot be described; give 1 or more")
    transform = build_pipeline(pipeline)
    files = find_images(folder)
    chosen = files[:batch_size]
    with torch_sink.image_backend("device", device="meta"):
        torch.manual_seed(0)
        batch = default_collate([transform(default_loader(str(path))) for path in chosen])
        fallbacks = torch_sink.fallback_report().counts
    lines = [f"{len(files)} images in {folder}, the first {len(chosen)} of them:", _describe_files(chosen), ""]
    lines += [f'pipeline "{pipeline}", one batch: {tuple(batch.shape)} {str(batch.dtype).removeprefix("torch.")}']
    plan = getattr(batch, "plan", None)
    lines += ["", str(plan) if plan is not None else "No plan: the whole pipeline ran in stock code."]
    lines += ["", "On the device: everything." if not fallbacks else "In stock code, on the CPU:"]
    lines += [f"  {operation}: {reason} ({count} images)" for (operation, reason), count in fallbacks.items()]
    return "\n".join(lines)


def find_images(folder: str | Path) -> list[Path]:
    """Return the image files under a folder, sorted.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give one that holds images")
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not files:
        raise FileNotFoundError(f"no image in {root} or below it; looked for {', '.join(IMG_EXTENSIONS)}")
    return files


def _describe_files(files: list[Path]) -> str:
    kinds: dict[str, int] = {}
    largest = (0, 0)
    for path in files:
        with Image.open(path) as image:
            kind = f"{image.format} {image.mode}" + (", progressive" if image.info.get("progressive") else "")
            largest = max(largest, image.size, key=lambda size: size[0] * size[1])
        kinds[kind] = kinds.get(kind, 0) + 1
    total = sum(path.stat().st_size for path in files)
    listed = "; ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    size = f"{largest[0]} x {largest[1]}"
    return f"  {listed}; largest {size} pixels; {total / 1e6:.2f} MB encoded, mean {total / len(files) / 1e3:.0f} kB"
