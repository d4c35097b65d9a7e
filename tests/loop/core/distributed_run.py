"""What the tests run on two processes: `torchrun --nproc-per-node 2 --max-restarts 2 distributed_run.py DIRECTORY`.

In its first life the job goes through all cases, then one rank dies; in the second it resumes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn import functional

from torch_sink.amp import DynamicLossScaler
from torch_sink.errors import SinkError
from torch_sink.loop import CheckpointConfig, LambdaCallback, ModelCheckpoint, StepLoop
from torch_sink.loop.core.distributed import forget_shardings

STEPS = 8


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def wrap(model: nn.Module, kind: str) -> nn.Module:
    """Of the kinds "ddp", "fsdp", and "fsdp parts", where the layers are sharded and the whole is not."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    for part in [model[0], model[-1]] if kind == "fsdp parts" else [model]:
        fully_shard(part, mesh=mesh)
    return model


def global_batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.arange(8) % 4) for _ in range(steps)]


def own_part(batches: list[Any]) -> list[Any]:
    half = slice(4 * distributed.get_rank(), 4 * distributed.get_rank() + 4)
    return [tuple(tensor[half] for tensor in batch) for batch in batches]


def flat(model: nn.Module) -> torch.Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train_plain(kind: str, accumulate: int) -> tuple[nn.Module, list[float]]:
    """A plain distributed loop, as the PyTorch tutorials write it."""
    model = wrap(make_model(), kind)
    optimizer, losses = make_optimizer(model), []
    for step, (inputs, targets) in enumerate(own_part(global_batches())):
        last = (step + 1) % accumulate == 0 or step + 1 == STEPS
        if step % accumulate == 0:
            optimizer.zero_grad()
        if kind != "ddp":
            for part in [model[0], model[-1]] if kind == "fsdp parts" else [model]:
                part.set_requires_gradient_sync(last)
        with nullcontext() if last or kind != "ddp" else model.no_sync():
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / accumulate).backward()
        mean = loss.detach().clone() / 2
        distributed.all_reduce(mean)
        losses.append(mean.item())
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model, losses


def compare(kind: str, accumulate: int, *, stream: bool = False) -> dict[str, float]:
    """With a `stream` nobody knows which batch is the last one, for which gradients have to be exchanged."""
    model = wrap(make_model(), kind)
    loop = StepLoop(
        model,
        functional.cross_entropy,
        make_optimizer(model),
        steps_per_sync=3,
        accumulate=accumulate,
        clip_grad_norm=1.0,
    )
    batches = own_part(global_batches())
    history = loop.run((lambda: iter(batches)) if stream else batches)
    plain, losses = train_plain(kind, accumulate)
    single = make_model()
    optimizer = make_optimizer(single)
    for step, (inputs, targets) in enumerate(global_batches()):
        if step % accumulate == 0:
            optimizer.zero_grad()
        (functional.cross_entropy(single(inputs), targets) / accumulate).backward()
        if (step + 1) % accumulate == 0 or step + 1 == STEPS:
            nn.utils.clip_grad_norm_(single.parameters(), 1.0)
            optimizer.step()
    return {
        "parameters": (flat(model) - flat(plain)).abs().max().item(),
        "single": (flat(model) - flat(single)).abs().max().item(),
        "losses": (history.losses - torch.tensor(losses)).abs().max().item(),
        "syncs": history.host_syncs,
    }


def fsdp_averages() -> bool:
    """Whether plain PyTorch averages the gradients of a sharded model here; torch 2.8 adds them up over gloo."""
    whole, sharded = make_model(), wrap(make_model(), "fsdp")
    (inputs, targets), *_ = global_batches()
    functional.cross_entropy(whole(inputs), targets).backward()
    (inputs, targets), *_ = own_part(global_batches())
    functional.cross_entropy(sharded(inputs), targets).backward()
    found, expected = (next(model.parameters()).grad for model in (sharded, whole))
    return torch.allclose(found.full_tensor(), expected, atol=1e-5)


def overflow_on_one_rank(kind: str) -> dict[str, Any]:
    """An infinity in rank 1's data at steps 0 and 4: both ranks must skip, and agree."""
    batches = own_part(global_batches())
    if distributed.get_rank() == 1:
        for step in (0, 4):
            batches[step][0].fill_(math.inf)
    model = wrap(make_model(), kind)
    scaler = DynamicLossScaler(16.0, 2, 100)
    history = StepLoop(model, functional.cross_entropy, make_optimizer(model), loss_scaler=scaler).run(batches)
    mine = flat(model).sum().reshape(1)
    others = [torch.zeros(1) for _ in range(2)]
    distributed.all_gather(others, mine)
    return {
        "overflows": history.overflows.nonzero().flatten().tolist(),
        "finite": bool(flat(model).isfinite().all()),
        "equal": others[0].item() == others[1].item(),
        "scale": scaler.scale_value.item(),
    }


def signal_on_one_rank() -> dict[str, Any]:
    model = wrap(make_model(), "ddp")
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), steps_per_sync=2)

    def interrupt(context: Any) -> None:
        if distributed.get_rank() == 1 and loop.step_count == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        loop.run(own_part(global_batches()), callbacks=[LambdaCallback(on_train_step_begin=interrupt)])
    except SinkError as error:
        return {"steps": loop.step_count, "raised": str(error)}
    return {"steps": loop.step_count, "handled": seen}


def resume(kind: str, directory: Path) -> dict[str, Any]:
    whole = wrap(with_norm(make_model()), kind)
    expected = StepLoop(whole, functional.cross_entropy, make_optimizer(whole), accumulate=2)
    expected_history = expected.run(own_part(global_batches()), epochs=2)
    part = wrap(with_norm(make_model()), kind)
    batches = own_part(global_batches())
    loop = StepLoop(part, functional.cross_entropy, make_optimizer(part), accumulate=2)
    loop.run(batches, epochs=2, max_steps=6)
    path = loop.save(directory / kind, batches)
    again = wrap(with_norm(make_model()), kind)
    restored = StepLoop(again, functional.cross_entropy, make_optimizer(again), accumulate=2)
    step = restored.resume(directory / kind, batches)
    history = restored.run(batches, epochs=2)
    return {
        "step": step,
        "name": path.name,
        "losses": torch.equal(history.losses, expected_history.losses[6:]),
        "parameters": torch.equal(flat(again), flat(whole)),
        "buffers": all(torch.equal(mine, other) for mine, other in zip(again.buffers(), whole.buffers(), strict=True)),
    }


def ends_inside_a_window(kind: str, directory: Path) -> list[str]:
    """The checkpoints of two trainings of 3 steps, 2 for each update."""
    for _ in range(2):
        model = wrap(make_model(), kind)
        loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), accumulate=2)
        when = CheckpointConfig(save_checkpoint_steps=2)
        saving = ModelCheckpoint(f"cut {kind}", directory / "cut", when)
        loop.run(own_part(global_batches()), max_steps=3, callbacks=[saving])
    return sorted(path.name for path in (directory / "cut").glob(f"cut {kind}-*"))


def with_norm(model: nn.Sequential) -> nn.Sequential:
    """The model with BatchNorm, whose statistics differ from rank to rank."""
    return model.insert(1, nn.BatchNorm1d(16))


def uneven() -> str:
    """Rank 1 has a batch less."""
    model = wrap(make_model(), "ddp")
    batches = own_part(global_batches())[: 4 - distributed.get_rank()]
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), steps_per_sync=2)
    assert loop.run(batches, max_steps=3).steps == 3
    try:
        loop.run(batches)
    except ValueError as error:
        return str(error)
    return "ran"


class Announced(list[Any]):
    """Batches that announce more than there are."""

    def __len__(self) -> int:
        return super().__len__() + 2


def shorter_than_announced() -> str:
    """The last step of the epoch was not taken for one, so its gradients were not exchanged."""
    model = wrap(make_model(), "ddp")
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), accumulate=3)
    try:
        loop.run(Announced(own_part(global_batches())))
    except SinkError as error:
        return str(error)
    return "ran"


def refusal() -> str:
    """What needs whole parameters says so for a sharded model."""
    model = wrap(make_model(), "fsdp")
    try:
        StepLoop(model, functional.cross_entropy, make_optimizer(model), ema=0.9)
    except ValueError as error:
        return str(error)
    return "ran"


def low_precision(level: str) -> dict[str, Any]:
    """The same training with whole and with sharded parameters."""
    weights, losses = [], []
    for kind in ("ddp", "fsdp"):
        model = wrap(make_model(), kind)
        loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), amp=level)
        losses.append(loop.run(own_part(global_batches())).losses)
        weights.append(flat(model))
    exact = wrap(make_model(), "ddp")
    loop = StepLoop(exact, functional.cross_entropy, torch.optim.SGD(exact.parameters(), lr=0.1))
    rounding = (loop.run(own_part(global_batches())).losses - losses[0]).abs().max().item()
    return {
        "losses": (losses[0] - losses[1]).abs().max().item(),
        "parameters": (weights[0] - weights[1]).abs().max().item(),
        "rounding": rounding,
    }


def cases(directory: Path) -> None:
    results: dict[str, Any] = {"fsdp averages": fsdp_averages()}
    for kind in ("ddp", "fsdp"):
        for accumulate in (1, 2):
            results[f"{kind} {accumulate}"] = compare(kind, accumulate)
        results[f"{kind} overflow"] = overflow_on_one_rank(kind)
        results[f"{kind} resume"] = resume(kind, directory)
        results[f"{kind} cut"] = ends_inside_a_window(kind, directory)
        results[f"{kind} 3"] = compare(kind, 3)
        results[f"{kind} 3 stream"] = compare(kind, 3, stream=True)
    results["fsdp parts 2"] = compare("fsdp parts", 2)
    results["shorter"] = shorter_than_announced()
    results["uneven"] = uneven()
    results["refusal"] = refusal()
    results |= {level: low_precision(level) for level in ("O2", "O3")}
    results["signal"] = signal_on_one_rank()
    (directory / f"rank-{distributed.get_rank()}.json").write_text(json.dumps(results))


def crash(directory: Path) -> None:
    """Rank 1 dies at step 5 of its first life."""
    directory.mkdir(exist_ok=True)
    model = wrap(make_model(), "ddp")
    batches = own_part(global_batches())
    loop = StepLoop(model, functional.cross_entropy, make_optimizer(model), steps_per_sync=2)
    resumed = loop.resume(directory / "checkpoints", batches)

    def die(context: Any) -> None:
        if distributed.get_rank() == 1 and loop.step_count == 4 and not resumed:
            raise RuntimeError("rank 1 was told to die")

    config = CheckpointConfig(save_checkpoint_steps=2)
    callbacks = [
        ModelCheckpoint(directory=directory / "checkpoints", config=config),
        LambdaCallback(on_train_step_begin=die),
    ]
    loop.run(batches, callbacks=callbacks)
    result = {"resumed": resumed, "parameters": flat(model).tolist(), "steps": loop.step_count}
    (directory / f"crash-{distributed.get_rank()}.json").write_text(json.dumps(result))


def join() -> None:
    """init_process_group() for a job that may be restarted: with keys of this life.

    torchrun keeps one store for all lives of a job, so a rank can find the address of one that died there, and wait
    for it (github.com/pytorch/pytorch/issues/135712).
    """
    store, rank, size = next(rendezvous("env://"))
    store = distributed.PrefixStore(f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def main() -> None:
    join()
    directory = Path(sys.argv[1])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        cases(directory)
    crash(directory / "crash")
    forget_shardings()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
