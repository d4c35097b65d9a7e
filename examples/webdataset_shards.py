"""WebDataset: a stream of tar shards, for data beyond one disk.

python examples/webdataset_shards.py DIR      # needs: pip install webdataset; writes two shards of DIR's images
"""

import sys
import tempfile
from pathlib import Path

import torch
import webdataset
from torchvision import datasets, models, transforms

import torch_sink


def write_shards(photos: datasets.ImageFolder, folder: str) -> list[str]:
    """Two tar files, each with half of the images; real shards hold some thousands."""
    names = [str(Path(folder, f"shard-{number}.tar")) for number in range(2)]
    for number, name in enumerate(names):
        with webdataset.TarWriter(name) as writer:
            for index in range(number, len(photos), 2):
                path, label = photos.samples[index]
                writer.write({"__key__": f"{index:06d}", "jpg": Path(path).read_bytes(), "cls": label})
    return names


if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    train = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        stream = webdataset.WebDataset(write_shards(photos, folder), shardshuffle=2, seed=0)
        stream = stream.shuffle(100).decode("pil").to_tuple("jpg", "cls").map_tuple(train, lambda label: label)
        loader = webdataset.WebLoader(stream, batch_size=8, num_workers=2)
        model = models.resnet18(num_classes=len(photos.classes))
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, optimizer)
        with torch_sink.SinkLoader(loader) as batches:
            print(loop.run(batches, epochs=2).losses)
    print(torch_sink.fallback_report())
