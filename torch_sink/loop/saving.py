"""Saving and resuming: the state of a training as a dict, and its checkpoints."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torch_sink.common.random_state import Draws, global_draws, twister_state
from torch_sink.common.ranks import warn
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.loop.checkpoints import (
    SHARDS_FOLDER,
    newest_checkpoint,
    read_checkpoint,
    resumed_from,
    write_checkpoint,
)
from torch_sink.loop.core.author import Author
from torch_sink.loop.core.history import Progress, first_line
from torch_sink.loop.outside import Outside, may_be_same
from torch_sink.loop.step.state import TrainState

if TYPE_CHECKING:
    from torch_sink.sink.kept import KeptLoaders

OPTIONAL_PARTS = ("scheduler", "scaler", "average")
LoadPosition = Callable[[ExitStack], Any]


def state_of(training: TrainState, draws: Draws | None = None) -> dict[str, Any]:
    """Everything that the next step depends on, except the position in the data; tensors are not copied.

    `draws` is a snapshot of the global generators, if there is one already.
    """
    model, ranks, outside = training.model, training.ranks, Outside(training)
    state: dict[str, Any] = {
        "step_count": training.step_count,
        "progress": {**vars(training.progress)},
        "accumulate": training.accumulate,
        "random": random_state(draws or global_draws()),
        "made_of": _made_of(training, outside),
        **outside.state_dict(),
    }
    if not ranks.sharded:
        state["model"] = model.state_dict()
        if training.optimizer is not None:
            state["optimizer"] = optimizer = training.optimizer.state_dict()
            optimizer["param_groups"] = _plain_numbers(optimizer["param_groups"])
    # Buffers that state_dict() leaves out may change in a step, and all buffers may differ from rank to rank.
    saved = {} if ranks.size > 1 else state.get("model", {})
    hidden = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
    state["other_buffers"] = {name: buffer.detach() for name, buffer in hidden.items()}
    for name in OPTIONAL_PARTS:
        if (part := getattr(training, name)) is not None:
            state[name] = _plain_numbers(part.state_dict())
    if training.progress.window:
        if ranks.sharded:
            raise SinkError(
                f"step {training.step_count} is inside an accumulation of {training.accumulate}, whose gradients a "
                f"sharded model keeps to itself; save {training.accumulate - training.progress.window} steps later, or "
                "at an epoch's end"
            )
        named = model.named_parameters()
        state["gradients"] = {name: p.grad.detach() for name, p in named if p.grad is not None}
        state["other_gradients"] = outside.gradients()
    return state


def _plain_numbers(value: Any) -> Any:
    """Replaces NumPy's numbers, as a schedule with `np.cos` makes them, by Python's: weights_only loads no others."""
    return torch.utils._pytree.tree_map_only(np.generic, np.generic.item, value)


def _made_of(training: TrainState, outside: Outside) -> dict[str, Any]:
    """What a training is made of, by name, so that a state is not loaded into another one."""
    precision = training.precision
    made: dict[str, Any] = {"precision": precision.level}
    if precision.level != "O0":
        made["precision"] += f" {str(precision.dtype).removeprefix('torch.')}"
    for part in ("optimizer", "scheduler", "scaler"):
        one = getattr(training, part)
        made[part] = type(one).__name__ if one is not None else None
        if inner := getattr(one, "_schedulers", None):
            made[part] += f"({', '.join(type(member).__name__ for member in inner)})"
    names = {id(parameter): name for name, parameter in training.model.named_parameters()} | outside.names
    groups = training.optimizer.param_groups if training.optimizer is not None else []
    made["groups"] = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in groups]
    return made


def _differences(training: TrainState, state: dict[str, Any]) -> Iterator[str]:
    """What keeps a state from being loaded, for each difference: "saved with ..., and this loop has ..."."""
    trains, sharded = training.optimizer is not None, training.ranks.sharded
    if sharded == ("model" in state):
        kinds = "whole parameters", "a model sharded by fully_shard"
        yield f"saved with {kinds[not sharded]}, and this loop has {kinds[sharded]}"
    for name in OPTIONAL_PARTS:
        part, is_there = getattr(training, name), name in state
        if (part is not None) != is_there and (trains or part is not None):
            yield f"saved with{'' if is_there else 'out'} {name!r}, and this loop has {'none' if is_there else 'one'}"
    if "average" in state and training.average is not None:
        yield from training.average.differences(state["average"]["weights"])
    buffers = dict(training.model.named_buffers())
    for name, saved in state.get("other_buffers", {}).items():
        own = buffers.get(name)
        if own is not None and not is_lazy(own) and own.shape != saved.shape:
            yield f"saved with the buffer {name} {list(saved.shape)}, and this loop has {list(own.shape)}"
    if not trains:
        return
    outside = Outside(training)
    yield from outside.differences(state)
    if state["accumulate"] != training.accumulate:
        yield f"saved with accumulate={state['accumulate']}, and this loop has {training.accumulate}"
    then, now = state.get("made_of", {}), _made_of(training, outside)
    for name in ("optimizer", "scheduler", "scaler", "precision"):
        one, other = then.get(name), now[name]
        if one is not None and other is not None and one != other:
            yield f"saved with the {name} {one}, and this loop has {other}"
    if not sharded and "optimizer" not in state:
        yield "saved by a loop without an optimizer, which trains nothing"
        return
    if then:
        yield from _group_differences(then["groups"], now["groups"])
    elif not sharded:  # an earlier version has not kept the names
        sizes = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
        if sizes != [len(names) for names in now["groups"]]:
            here = [len(names) for names in now["groups"]]
            yield f"saved with parameter groups of {sizes} parameters, and this loop has {here}"


def _group_differences(then: list[list[str]], now: list[list[str]]) -> Iterator[str]:
    if len(then) != len(now):
        yield f"saved with {len(then)} parameter groups, and this loop has {len(now)}"
        return
    for number, (saved, own) in enumerate(zip(then, now, strict=True)):
        if len(saved) != len(own):
            yield f"saved with {len(saved)} parameters in group {number}, and this loop has {len(own)}"
        elif different := [pair for pair in zip(saved, own, strict=True) if not may_be_same(*pair)]:
            yield f"saved with the parameter {different[0][0]} in group {number}, where this loop has {different[0][1]}"


def check_state(training: TrainState, state: Any) -> None:
    """Raise ValueError unless a state is that of a training like this one; a loop that does not train needs less."""
    if not isinstance(state, dict) or not {"accumulate", "progress", "random"} <= state.keys():
        raise ValueError(
            "this is no state of a StepLoop; pass what StepLoop.state_dict() returned, or use resume(folder)"
        )
    if found := [*_differences(training, state)]:
        raise ValueError(
            f"the state is of another training, and nothing of it was loaded: {'; '.join(found)}; make the loop as it "
            "was made then, or begin with the weights alone: model.load_state_dict(state['model'])"
        )


@torch.no_grad()
def load_state(training: TrainState, state: dict[str, Any], load_position: LoadPosition = lambda undo: None) -> None:
    """Load a state, in place for existing tensors, or raise and leave everything as it was.

    A loop without an optimizer loads the states of model, loss function and average only. `load_position(undo)` loads
    the position in the data, and registers how to undo that.
    """
    check_state(training, state)
    model, optimizer, trains = training.model, training.optimizer, training.optimizer is not None
    outside = Outside(training)
    with ExitStack() as undo:
        load_position(undo)
        if trains:
            undo.callback(set_random_state, random_state(global_draws()))
            set_random_state(state["random"])
            undo.callback(training.schedule.take_place)
            _undoable(undo, training.scheduler)
            _undoable(undo, training.scaler)
            if not training.ranks.sharded:
                _load_optimizer(optimizer, state["optimizer"], undo)
            for name in ("scheduler", "scaler"):
                if (part := getattr(training, name)) is not None:
                    part.load_state_dict(state[name])
        outside.load(state, undo)
        if not training.ranks.sharded:
            _load_model(model, state["model"])
        undo.pop_all()  # nothing below fails
    buffers = dict(model.named_buffers())
    for name in buffers.keys() & state["other_buffers"].keys():
        buffers[name].copy_(state["other_buffers"][name])
    if training.average is not None:
        training.average.load_state_dict(state["average"])
    if trains:
        training.schedule.take_place()
    gradients = state.get("gradients", {}) if trains else {}
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
    training.step_count, training.is_resumed = state["step_count"], True
    training.author = Author()
    progress = state["progress"]  # an earlier version may lack fields
    training.progress = Progress(**{one.name: progress[one.name] for one in fields(Progress) if one.name in progress})
    if "window" not in progress:
        training.progress.window = state["step_count"] % training.accumulate
    if trains:
        set_random_state(state["random"])  # what was loaded meanwhile may have drawn


def _undoable(undo: ExitStack, part: Any) -> None:
    """Register that a scheduler or a scaler gets its present state back."""
    if part is not None:
        undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))


def _load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load a state, or raise and leave the model as it was: torch loads what fits before it raises."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = {name: value.shape for name, value in own.items() if not is_lazy(value)}
    fits = all(name in state and state[name].shape == shape for name, shape in shapes.items())
    is_sure = fits and len(own) == len(shapes) == len(state)
    # The copies are on the host, because the device may have no room for them.
    before = {} if is_sure else {name: own[name].detach().to("cpu", copy=True) for name in shapes}
    try:
        model.load_state_dict(state)
    except BaseException:
        for name, value in before.items():
            own[name].copy_(value)
        raise


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], undo: ExitStack) -> None:
    """Load a state, but keep the flags for this device: the state may come from another kind of device."""
    flags = ("capturable", "foreach", "fused", "differentiable")
    kept = [{name: group[name] for name in flags if name in group} for group in optimizer.param_groups]
    undo.callback(vars(optimizer).update, dict(vars(optimizer)))  # loading replaces state and groups as a whole
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        raise ValueError(
            f"the state is of another optimizer than {type(optimizer).__name__}, which cannot load it "
            f"({first_line(error)}); make the loop with the optimizer of the run that saved it"
        ) from error
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)
        if lacking := optimizer.defaults.keys() - group.keys():
            raise ValueError(
                f"the state is of another optimizer than {type(optimizer).__name__}: it has no "
                f"{', '.join(sorted(lacking))}; make the loop with the optimizer of the run that saved it"
            )
        group["lr"] = float(group["lr"]) if not isinstance(group["lr"], torch.Tensor) else group["lr"]


def save(
    training: TrainState,
    loaders: KeptLoaders,
    directory: Path,
    loader: Any,
    prefix: str,
    about: dict[str, Any] | None,
) -> Path:
    """Write a checkpoint; see `StepLoop.save`."""
    draws = global_draws()
    position = {} if loader is None else {"loader": loaders.position(loader, draws)}
    shards = partial(_copy_shards, training, load=False) if training.ranks.sharded else None
    state, step = {**state_of(training, draws), **position}, training.step_count
    ranks, author = training.ranks, training.author
    return write_checkpoint(
        directory, prefix, step, state, ranks=ranks, author=author, write_shards=shards, about=about
    )


def save_in_run(arguments: dict[str, Any], directory: str | Path, prefix: str, **about: Any) -> Path:
    """Save a checkpoint from a callback, and note its step and path in the callback's context."""
    loop = arguments["loop"]
    path = save(loop.state, loop.loaders, Path(directory), arguments["train_dataset"], prefix, about)
    arguments.update(last_save_ckpt_step=loop.state.step_count, latest_ckpt_file=str(path))
    return path


def resume(training: TrainState, loaders: KeptLoaders, directory: Path, loader: Any, *, must_exist: bool) -> bool:
    """Load the newest complete checkpoint; returns False if there is none. See `StepLoop.resume`."""
    newest = newest_checkpoint(directory)
    found = training.ranks.gather(newest.name if newest is not None else "none")
    if any(name != found[0] for name in found):
        names = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(found))
        raise SinkError(
            f"the ranks found different newest checkpoints in {directory.absolute()}: {names}; give all of them the "
            "same directory, on a file system that they share"
        )
    if newest is None:
        problem = f"there is no complete checkpoint in {directory.absolute()}"
        if must_exist:
            raise FileNotFoundError(f"{problem}; check the path, or resume(..., must_exist=False) to begin anew")
        warn("%s: training begins at step 0; resume(..., must_exist=True) makes this an error", problem)
        return False
    state, author = read_checkpoint(newest, training.ranks), resumed_from(newest)
    position = state.get("loader") if loader is not None else None
    try:
        if training.ranks.sharded:
            check_state(training, state)
            _copy_shards(training, str(newest / SHARDS_FOLDER), load=True)
        load_state(training, state, lambda undo: loaders.load(loader, position, undo) if position else None)
        training.author = author
    except Exception as error:
        add_note(error, f"while loading {newest}")
        add_hints(error)
        raise
    progress = training.progress
    if not position and training.optimizer is not None and progress.epoch_steps and not progress.epoch_ended:
        warn(
            "the checkpoint was taken after %d steps of an epoch, whose batches come again from the first: for the "
            "others alone, save(directory, loader) and resume(directory, loader) take the loader",
            progress.epoch_steps,
        )
    return True


def _copy_shards(training: TrainState, path: str, *, load: bool) -> None:
    """Write the shards of model and optimizer that this rank has, or read them, also with another number of ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as read
    from torch.distributed.checkpoint.state_dict_saver import save

    optimizers = () if training.optimizer is None else training.optimizer
    model, optimizer = get_state_dict(training.model, optimizers)
    state: dict[str, Any] = {"model": model} if training.optimizer is None else {"model": model, "optimizer": optimizer}
    if not load:
        save(state, checkpoint_id=path)
        return
    read(state, checkpoint_id=path)
    set_state_dict(
        training.model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {})
    )


def random_state(draws: Draws) -> dict[str, Any]:
    """A snapshot of the global generators of torch, numpy and random, as tensors and plain containers."""
    torch_state, numpy_state, python_state = draws
    words, *rest = twister_state(numpy_state)
    state: dict[str, Any] = {
        "torch": torch_state,
        "numpy": ("MT19937", torch.from_numpy(words.astype(np.int64)), *rest),
        "python": python_state,
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the global generators back to a snapshot of `random_state`."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)
