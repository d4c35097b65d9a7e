"""Saving and resuming: the state of a training as a dict, its checkpoints, and its position in the data."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_sink.common import reference
from torch_sink.common.random_state import Draws, global_draws, twister_state
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.loop.checkpoints import SHARDS_FOLDER, newest_checkpoint, read_checkpoint, write_checkpoint
from torch_sink.loop.core.batches import Wrappers, is_sink
from torch_sink.loop.core.history import Progress
from torch_sink.loop.step.state import TrainState

if TYPE_CHECKING:
    from torch_sink.sink import SinkLoader

_log = logging.getLogger("torch_sink")
OPTIONAL_PARTS = ("scheduler", "scaler", "average")


def state_of(training: TrainState, draws: Draws | None = None) -> dict[str, Any]:
    """Everything that the next step depends on, except the position in the data; tensors are not copied.

    `draws` is a snapshot of the global generators, if there is one already.
    """
    model, ranks = training.model, training.ranks
    state: dict[str, Any] = {
        "step_count": training.step_count,
        "progress": {**vars(training.progress)},
        "accumulate": training.accumulate,
        "random": random_state(draws or global_draws()),
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
    if training.step_count % training.accumulate:
        if ranks.sharded:
            raise SinkError(
                f"step {training.step_count} is inside an accumulation of {training.accumulate}, whose gradients a "
                "sharded model keeps to itself; save at a multiple of accumulate"
            )
        named = model.named_parameters()
        state["gradients"] = {name: p.grad.detach() for name, p in named if p.grad is not None}
    return state


def _plain_numbers(value: Any) -> Any:
    """Replaces NumPy's numbers, as a schedule with `np.cos` makes them, by Python's: weights_only loads no others."""
    return torch.utils._pytree.tree_map_only(np.generic, np.generic.item, value)


@torch.no_grad()
def load_state(training: TrainState, state: dict[str, Any]) -> None:
    """Load a state, in place for existing tensors; one with another `accumulate`, or other parts, raises ValueError.

    A loop without an optimizer loads the states of model and average only.
    """
    if not isinstance(state, dict) or not {"accumulate", "progress", "random"} <= state.keys():
        raise ValueError(
            "this is no state of a StepLoop; pass what StepLoop.state_dict() returned, or use resume(folder)"
        )
    trains = training.optimizer is not None
    if trains and state["accumulate"] != training.accumulate:
        raise ValueError(
            f"the state was taken with accumulate={state['accumulate']}, this loop has {training.accumulate}; "
            "make the loop with the same accumulate"
        )
    for name in OPTIONAL_PARTS:
        part, is_there = getattr(training, name), name in state
        if (part is not None) != is_there and (trains or part is not None):
            holds = "holds" if is_there else "lacks"
            raise ValueError(f"the state {holds} {name!r}, unlike this loop; make the loop as it was made then")
    if trains and not training.ranks.sharded and "optimizer" not in state:
        raise ValueError("the state is that of a loop without an optimizer, which trains nothing")
    if not training.ranks.sharded:
        training.model.load_state_dict(state["model"])
        if trains:
            _load_optimizer(training.optimizer, state["optimizer"])
    buffers = dict(training.model.named_buffers())
    for name in buffers.keys() & state["other_buffers"].keys():
        buffers[name].copy_(state["other_buffers"][name])
    for name in OPTIONAL_PARTS:
        if (part := getattr(training, name)) is not None:
            part.load_state_dict(state[name])
    gradients = state.get("gradients", {}) if trains else {}
    for name, parameter in training.model.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
    training.step_count, training.is_resumed = state["step_count"], True
    training.progress = Progress(**{field.name: state["progress"][field.name] for field in fields(Progress)})
    if trains:
        set_random_state(state["random"])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, but keep the flags for this device: the state may come from another kind of device."""
    flags = ("capturable", "foreach", "fused", "differentiable")
    kept = [{name: group[name] for name in flags if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
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
    positions: LoaderPositions,
    directory: Path,
    loader: Any = None,
    prefix: str = "CKP",
    about: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint; see `StepLoop.save`."""
    draws = global_draws()
    position = {} if loader is None else {"loader": positions.state(loader, draws)}
    shards = partial(_copy_shards, training, load=False) if training.ranks.sharded else None
    state, step = {**state_of(training, draws), **position}, training.step_count
    return write_checkpoint(directory, prefix, step, state, ranks=training.ranks, write_shards=shards, about=about)


def save_in_run(arguments: dict[str, Any], directory: str | Path, prefix: str, **about: Any) -> Path:
    """Save a checkpoint from a callback, and note its step and path in the callback's context."""
    runner = arguments["loop"].runner
    path = save(runner.state, runner.positions, Path(directory), arguments["train_dataset"], prefix, about)
    arguments.update(last_save_ckpt_step=runner.state.step_count, latest_ckpt_file=str(path))
    return path


def resume(training: TrainState, positions: LoaderPositions, directory: Path, loader: Any, *, must_exist: bool) -> bool:
    """Load the newest complete checkpoint; returns False if there is none. See `StepLoop.resume`."""
    newest = newest_checkpoint(directory)
    if newest is None:
        problem = f"there is no complete checkpoint in {directory.absolute()}"
        if must_exist:
            raise FileNotFoundError(f"{problem}; check the path, or resume(..., must_exist=False) to begin anew")
        _log.warning("%s: training begins at step 0; resume(..., must_exist=True) makes this an error", problem)
        return False
    state = read_checkpoint(newest, training.ranks)
    try:
        if training.ranks.sharded:
            _copy_shards(training, str(newest / SHARDS_FOLDER), load=True)
        load_state(training, state)
    except (RuntimeError, ValueError) as error:
        add_note(error, f"while loading {newest}")
        add_hints(error)
        raise
    if loader is not None and state.get("loader") is not None:
        positions.load(loader, state["loader"])
    elif training.optimizer is not None and training.progress.epoch_steps:
        _log.warning(
            "the checkpoint was taken after %d steps of an epoch, whose batches come again from the first: for the "
            "others alone, save(directory, loader) and resume(directory, loader) take the loader",
            training.progress.epoch_steps,
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


class LoaderPositions:
    """The positions of loaders, so that `save` and `resume` take the same loader as `run`.

    A run wraps a plain loader in a SinkLoader; its position is that of the wrapper.
    """

    def __init__(self) -> None:
        self._given: Callable[[], Any] = lambda: None
        self._sink: SinkLoader | None = None  # during a run
        self._state: Any = None
        self._was_loaded = False

    @contextmanager
    def opened(self, given: Any, wrappers: Wrappers) -> Iterator[SinkLoader]:
        """A context with the SinkLoader of a run: `given` itself, or a wrapper with the position loaded for `given`."""
        with wrappers.over(given) as sink:
            if sink is not given and given is self._given() and self._was_loaded:
                sink.load_state_dict(self._state)
            self._given, self._sink, self._was_loaded = reference(given), sink, False
            try:
                yield sink
            finally:
                # The wrapper will start over, so its position is kept for `save`, unless one was loaded meanwhile.
                if self._sink is sink:
                    self._sink = self._state = None
                    if sink is not given:
                        with suppress(Exception):  # a loader that failed may have no position
                            self._state = sink.state_dict()

    def state(self, loader: Any, draws: Draws | None = None) -> Any:
        """The position of `loader`; None if it has none yet."""
        is_wrapped = self._sink is not None and loader is self._given()
        sink: Any = self._sink if is_wrapped else loader
        if not (is_wrapped or loader is self._sink or is_sink(loader)):
            return self._state if loader is self._given() else None
        vars(sink).update(_draws_at_save=draws)  # not an argument: a subclass may have a `state_dict` of its own
        try:
            return sink.state_dict()
        finally:
            vars(sink).update(_draws_at_save=None)

    def load(self, loader: Any, state: Any) -> None:
        """Load a position, now or when a run wraps the loader."""
        if is_sink(loader):
            loader.load_state_dict(state)
        else:
            self._given, self._sink, self._state, self._was_loaded = reference(loader), None, state, True
