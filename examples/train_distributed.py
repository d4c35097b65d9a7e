"""Train on several processes, with DistributedDataParallel or fully_shard (FSDP2).

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --steps 100 --wrap ddp

Uses NCCL on GPUs and gloo on CPUs. With --directory, checkpoints are written there and a restarted job resumes from
the newest complete one: `torchrun --max-restarts 3 ...` survives a rank that dies.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torch_sink


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--wrap", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--amp", default="O0", choices=("O0", "O1", "O2", "O3", "auto"))
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--sink-size", type=int, default=10)
    parser.add_argument("--directory", help="where checkpoints go")
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


def make_model(wrap: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = distributed.device_mesh.init_device_mesh(device.type, (distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2048, 32, generator=generator)
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    return DataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator().manual_seed(2))


def main() -> None:
    arguments = parse_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    join("nccl" if cuda else "gloo")
    model = make_model(arguments.wrap, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = torch_sink.StepLoop(
        model,
        cross_entropy,
        optimizer,
        sink_size=arguments.sink_size,
        amp=arguments.amp,
        accumulate=arguments.accumulate,
        clip_grad_norm=1.0,
    )
    loader = make_loader()
    callbacks: list[torch_sink.Callback] = [torch_sink.LossMonitor()] if distributed.get_rank() == 0 else []
    if arguments.directory:
        resumed = loop.resume(arguments.directory, loader)
        config = torch_sink.CheckpointConfig(save_checkpoint_steps=20)
        callbacks.append(torch_sink.ModelCheckpoint(directory=arguments.directory, config=config))
        if resumed and distributed.get_rank() == 0:
            print(f"resumed at step {resumed}", flush=True)
    history = loop.run(loader, epochs=1000, callbacks=callbacks, max_steps=arguments.steps)
    if distributed.get_rank() == 0 and history.steps:
        print(f"{history.steps} steps on {distributed.get_world_size()} processes, loss {history.losses[-1]:.4f}")
    # Captured graphs hold NCCL communicators: they must go before the process group does.
    loop.close()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
