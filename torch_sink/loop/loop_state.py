"""The state of a StepLoop as one dict of tensors and plain containers, and as a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_sink.common.random_state import global_draws, twister_state
from torch_sink.common.references import reference
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.loop.checkpoints import SHARDS_FOLDER, newest_checkpoint, read_checkpoint, write_checkpoint
from torch_sink.loop.core.history import Progress
from torch_sink.loop.core.loaders import Wrappers

if TYPE_CHECKING:
    from torch_sink.loop.step_loop import StepLoop


def loop_state(loop: StepLoop) -> dict[str, Any]:
    """Everything that the next step depends on, but the loader's position."""
    state: dict[str, Any] = {
        "step_count": loop.step_count,
        "progress": asdict(loop.progress),
        "accumulate": loop.accumulate,
        "random": random_state(),
    }
    if not loop.ranks.sharded:
        state["model"] = loop.model.state_dict()
        state["optimizer"] = optimizer = loop.optimizer.state_dict()
        optimizer["param_groups"] = _plain_numbers(optimizer["param_groups"])
    # Buffers that state_dict() leaves out can still change from step to step, and all can differ from rank to rank.
    saved = {} if loop.ranks.many else state.get("model", {})
    hidden = {name: buffer for name, buffer in loop.model.named_buffers() if name not in saved}
    state["other_buffers"] = {name: buffer.detach() for name, buffer in hidden.items()}
    state.update((name, part.state_dict()) for name, part in _optional_parts(loop).items() if part is not None)
    if "scheduler" in state:
        state["scheduler"] = _plain_numbers(state["scheduler"])
    if loop.step_count % loop.accumulate:
        if loop.ranks.sharded:
            raise SinkError(
                f"step {loop.step_count} is inside an accumulation of {loop.accumulate}, whose gradients a sharded "
                "model keeps to itself; save at a multiple of accumulate"
            )
        named = loop.model.named_parameters()
        state["gradients"] = {name: p.grad.detach() for name, p in named if p.grad is not None}
    return state


def _optional_parts(loop: StepLoop) -> dict[str, Any]:
    return {"scheduler": loop.scheduler, "scaler": loop.scaler, "average": loop.average}


def _plain_numbers(value: Any) -> Any:
    """Python numbers for NumPy's, which weights_only refuses: a schedule with `np.cos` makes all rates such."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, value)


@torch.no_grad()
def load_loop_state(loop: StepLoop, state: dict[str, Any]) -> None:
    """Put a state back, in place wherever a tensor exists."""
    if not isinstance(state, dict) or not {"accumulate", "progress", "random"} <= state.keys():
        raise ValueError(
            "this is no state of a StepLoop; pass what StepLoop.state_dict() returned, or use resume(folder)"
        )
    if state["accumulate"] != loop.accumulate:
        raise ValueError(
            f"the state was taken with accumulate={state['accumulate']}, this loop has {loop.accumulate}; "
            "make the loop with the same accumulate"
        )
    parts = _optional_parts(loop)
    for name, part in parts.items():
        if (part is not None) != (name in state):
            holds = "lacks" if part is not None else "holds"
            raise ValueError(f"the state {holds} {name!r}, unlike this loop; make the loop as it was made then")
    if not loop.ranks.sharded:
        loop.model.load_state_dict(state["model"])
        _load_optimizer(loop.optimizer, state["optimizer"])
    buffers = dict(loop.model.named_buffers())
    for name in buffers.keys() & state["other_buffers"].keys():
        buffers[name].copy_(state["other_buffers"][name])
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(state[name])
    gradients = state.get("gradients", {})
    for name, parameter in loop.model.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
    loop.step_count = state["step_count"]
    loop.progress = Progress(**{field.name: state["progress"][field.name] for field in fields(Progress)})
    set_random_state(state["random"])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, but keep the flags that say how this device computes: the state may come from another one."""
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


def save_loop(
    loop: StepLoop, directory: Path, prefix: str, further: dict[str, Any], about: dict[str, Any] | None
) -> Path:
    """Write the loop's state and `further` entries as a checkpoint; see `StepLoop.save`."""
    shards = partial(_copy_shards, loop, load=False) if loop.ranks.sharded else None
    state = {**loop.state_dict(), **further}
    return write_checkpoint(
        directory, prefix, loop.step_count, state, ranks=loop.ranks, write_shards=shards, about=about
    )


def resume_loop(loop: StepLoop, directory: Path) -> dict[str, Any] | None:
    """Load the newest complete checkpoint into the loop; returns its state, None if there is none."""
    newest = newest_checkpoint(directory)
    if newest is None:
        return None
    state = read_checkpoint(newest, loop.ranks)
    if loop.ranks.sharded:
        _copy_shards(loop, str(newest / SHARDS_FOLDER), load=True)
    try:
        loop.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        add_note(error, f"while loading {newest}")
        add_hints(error)
        raise
    return state


def _copy_shards(loop: StepLoop, path: str, *, load: bool) -> None:
    """Write the sharded model and optimizer, each rank its part, or read them, also as another number of ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as read
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if not load:
        save(state, checkpoint_id=path)
        return
    read(state, checkpoint_id=path)
    set_state_dict(loop.model, loop.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def random_state() -> dict[str, Any]:
    """States of torch's, numpy's and Python's global generators, as tensors and plain containers."""
    torch_state, numpy_state, python_state = global_draws()
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
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


class LoaderPositions:
    """Remembers the plain loader of a run, so that `save` and `resume` may be given what `run` was given.

    `run` wraps it in a SinkLoader of the loop's; the position is that of the wrapper.
    """

    def __init__(self) -> None:
        self._given: Callable[[], Any] = lambda: None
        self._wrapper: Any = None  # while a run goes on
        self._state: Any = None
        self._was_loaded = False

    @contextmanager
    def opened(self, given: Any, wrappers: Wrappers) -> Iterator[Any]:
        """The SinkLoader of a run: the given one, or a wrapper, which gets the state that was loaded for `given`."""
        with wrappers.over(given) as sink:
            if sink is not given and given is self._given() and self._was_loaded:
                sink.load_state_dict(self._state)
            self._given, self._wrapper, self._was_loaded = reference(given), sink, False
            try:
                yield sink
            finally:
                # The wrapper will start over; its position is for a later `save`, but not over one loaded meanwhile.
                if sink is not given and self._wrapper is sink:
                    self._wrapper = self._state = None
                    with suppress(Exception):  # a loader that failed may have none; the run's own error is what counts
                        self._state = sink.state_dict()

    def state(self, loader: Any) -> Any:
        """Position of `loader`, None if it has none yet."""
        if hasattr(loader, "slot_index"):  # a SinkLoader
            return loader.state_dict()
        if loader is not self._given():
            return None
        return self._wrapper.state_dict() if self._wrapper is not None else self._state

    def keep(self, loader: Any) -> None:
        """A run that got nowhere ends: the next one begins where it began."""
        with suppress(Exception):  # as above
            self.load(loader, self.state(loader))

    def load(self, loader: Any, state: Any) -> None:
        """Put a position back, now or when a run wraps the loader."""
        if hasattr(loader, "slot_index"):
            loader.load_state_dict(state)
        else:
            self._given, self._wrapper, self._state, self._was_loaded = reference(loader), None, state, True
