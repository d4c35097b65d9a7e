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
