"""Train on several processes, with DistributedDataParallel or fully_shard (FSDP2).

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py DIR --steps 100 --wrap ddp

DIR holds one folder of images for each class. Uses NCCL on GPUs and gloo on CPUs. With --directory, a checkpoint is
written there every --checkpoint-steps steps, and a restarted job resumes from the newest complete one:
`torchrun --max-restarts 3 ...` survives a rank that dies.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

import torch_sink


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DIR", help="one folder of images for each class")
    parser.add_argument("--batch-size", type=int, default=32, help="of one process")
    parser.add_argument("--workers", type=int, default=2, help="of one process")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--wrap", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--amp", default="O0", choices=("O0", "O1", "O2", "O3", "auto"))
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps-per-sync", type=int, default=10)
    parser.add_argument("--directory", help="where checkpoints go")
    parser.add_argument("--checkpoint-steps", type=int, default=20)
    return parser.parse_args()


def join(backend: str) -> None:
    """init_process_group() for a job that may be restarted: with keys of this life.

    torchrun keeps one store for all lives of a job, so a rank could find the address of one that died there, and wait
    for it (github.com/pytorch/pytorch/issues/135712).
    """
    store, rank, size = next(rendezvous("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    distributed.init_process_group(
        backend, store=distributed.PrefixStore(f"life-{life}", store), rank=rank, world_size=size
    )


def make_model(classes: int, wrap: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)).to(device)
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = distributed.device_mesh.init_device_mesh(device.type, (distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def make_loader(data: ImageFolder, batch_size: int, workers: int) -> torch_sink.SinkLoader:
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    generator = torch.Generator().manual_seed(2)
    return torch_sink.SinkLoader(
        DataLoader(data, batch_size, sampler=sampler, num_workers=workers, generator=generator)
    )


def main() -> None:
    arguments = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    join("nccl" if cuda else "gloo")
    torch_sink.set_image_backend("device")
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    augment = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor(), normalize])
    data = ImageFolder(arguments.data, augment)
    model = make_model(len(data.classes), arguments.wrap, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = torch_sink.StepLoop(
        model,
        cross_entropy,
        optimizer,
        steps_per_sync=arguments.steps_per_sync,
        amp=arguments.amp,
        accumulate=arguments.accumulate,
        clip_grad_norm=1.0,
    )
    loader = make_loader(data, arguments.batch_size, arguments.workers)
    callbacks: list[torch_sink.Callback] = [torch_sink.LossMonitor()]  # on every rank; rank 0 prints
    if arguments.directory:
        resumed = loop.resume(arguments.directory, loader)
        config = torch_sink.CheckpointConfig(save_checkpoint_steps=arguments.checkpoint_steps)
        callbacks.append(torch_sink.ModelCheckpoint(directory=arguments.directory, config=config))
        if resumed and distributed.get_rank() == 0:
            print(f"resumed at step {resumed}", flush=True)
    history = loop.run(loader, epochs=1000, callbacks=callbacks, max_steps=arguments.steps)
    if distributed.get_rank() == 0 and history.steps:
        print(f"{history.steps} steps on {distributed.get_world_size()} processes, loss {history.losses[-1]:.4f}")
    loader.close()
    # Captured graphs hold NCCL communicators: they must go before the process group does.
    loop.close()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
