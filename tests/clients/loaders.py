"""Libraries that own the data."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets, transforms

from .client import BATCH, SIZE, Run, client, fit, network

crop = transforms.Compose(
    [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


@client("Hugging Face `datasets`", "datasets")
def hugging_face_datasets(run: Run) -> list[float]:
    from datasets import load_dataset

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        return {"images": [crop(image.convert("RGB")) for image in rows["image"]], "labels": rows["label"]}

    photos = load_dataset("imagefolder", data_dir=str(run.photos / "train"), split="train", cache_dir=str(run.folder))
    loader = DataLoader(
        photos.with_transform(transform), batch_size=BATCH, shuffle=True, num_workers=2, collate_fn=as_pair
    )
    return fit(network().to(run.device), run.sink(loader), run.device)


def as_pair(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = ([sample[name] for sample in samples] for name in ("images", "labels"))
    return torch.stack(images), torch.tensor(labels)


@client("Hugging Face `datasets` with an image processor of `transformers`", "transformers")
def image_processor(run: Run) -> list[float]:
    from datasets import load_dataset
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": SIZE, "width": SIZE})

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = processor([image.convert("RGB") for image in rows["image"]], return_tensors="pt")
        return {"images": pixels["pixel_values"], "labels": rows["label"]}

    photos = load_dataset("imagefolder", data_dir=str(run.photos / "train"), split="train", cache_dir=str(run.folder))
    loader = DataLoader(photos.with_transform(transform), batch_size=BATCH, shuffle=True, collate_fn=as_pair)
    return fit(network().to(run.device), run.sink(loader), run.device)


@client("diffusers fine-tuning script, text to image", "accelerate")
def diffusers_script(run: Run) -> list[float]:
    accelerate = importlib.import_module("accelerate")
    from datasets import load_dataset

    steps = transforms.Compose(
        [
            transforms.Resize(SIZE, interpolation=transforms.InterpolationMode.BILINEAR),
            transforms.RandomCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )

    def preprocess(rows: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": [steps(image.convert("RGB")) for image in rows["image"]], "labels": rows["label"]}

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        pixels = pixels.to(memory_format=torch.contiguous_format).float()
        return {"pixel_values": pixels, "steps": torch.tensor([sample["labels"] for sample in samples])}

    photos = load_dataset("imagefolder", data_dir=str(run.photos / "train"), split="train", cache_dir=str(run.folder))
    loader = DataLoader(
        photos.with_transform(preprocess), batch_size=BATCH, shuffle=True, num_workers=1, collate_fn=collate
    )
    accelerator = accelerate.Accelerator(cpu=True)
    model: Any = torch.nn.Conv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader, losses = run.sink(loader), []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                clean = batch["pixel_values"]
                noise = torch.randn_like(clean)
                share = torch.rand(len(clean), 1, 1, 1, device=clean.device)
                loss = torch.nn.functional.mse_loss(model(share * clean + (1 - share) * noise), noise)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@client("WebDataset shards", "webdataset")
def webdataset_shards(run: Run) -> list[float]:
    webdataset = importlib.import_module("webdataset")
    files = sorted((run.photos / "train").glob("*/*.jpg"))
    shards = [str(run.folder / f"shard-{number}.tar") for number in range(2)]
    for number, shard in enumerate(shards):
        with webdataset.TarWriter(shard) as writer:
            for index in range(number, len(files), 2):
                label = int(files[index].parent.name[-1])
                writer.write({"__key__": f"{index:06d}", "jpg": files[index].read_bytes(), "cls": label})
    stream = webdataset.WebDataset(shards, shardshuffle=2, seed=0).shuffle(8, seed=1)
    stream = stream.decode("pil").to_tuple("jpg", "cls").map_tuple(crop, lambda label: label)
    loader = webdataset.WebLoader(stream, batch_size=BATCH, num_workers=2)
    return fit(network().to(run.device), run.sink(loader), run.device)


@client("torchdata `StatefulDataLoader`, stopped and resumed", "torchdata")
def stateful_data_loader(run: Run) -> list[float]:
    kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    model = network().to(run.device)

    def make() -> Any:
        photos = datasets.ImageFolder(str(run.photos / "train"), crop)
        generator = torch.Generator().manual_seed(5)
        return run.sink(kind(photos, batch_size=BATCH, shuffle=True, num_workers=1, generator=generator))

    loader = make()
    losses = fit(model, loader, run.device, epochs=1)
    batches = iter(loader)
    losses += fit(model, [next(batches)], run.device, epochs=1)
    state, resumed = loader.state_dict(), make()
    resumed.load_state_dict(state)
    # The order goes on; stock code augments with new draws from here, so that pixels are not compared.
    return [*losses, *(float(label) for _, target in resumed for label in target)]


@client("torchdata `nodes`", "torchdata")
def torchdata_nodes(run: Run) -> list[float]:
    nodes = importlib.import_module("torchdata.nodes")
    photos = datasets.ImageFolder(str(run.photos / "train"), crop)
    sampler = RandomSampler(photos, generator=torch.Generator().manual_seed(7))
    source = nodes.SamplerWrapper(sampler)
    # One thread: with several, who draws first is chance.
    mapped = nodes.ParallelMapper(source, photos.__getitem__, num_workers=1, method="thread", in_order=True)
    batched = nodes.Mapper(nodes.Batcher(mapped, batch_size=BATCH), torch.utils.data.default_collate)
    return fit(network().to(run.device), run.sink(nodes.Loader(nodes.Prefetcher(batched, 2))), run.device)
