"""Where the consumer stands, and how that is written into a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_sink.common.random_state import RandomState, as_bytes, as_tensor
from torch_sink.sink.sources.base import PassStart, ResumePoint, Sampling

FORMAT_VERSION = 1


@dataclass
class Position:
    """Counts of consumed batches, and the pass that they come from.

    Attributes:
        epoch: epochs completed.
        batch_in_epoch: batches consumed of the epoch that is under way.
        batches: batches consumed in all.
        pass_number: the source's pass that the next batch comes from.
        batch_in_pass: batches consumed of it.
        start: how that pass began; None before it did.
        worker_states: generator states of the workers after their last consumed batch.
        loader_state: state of a loader that keeps its own, after the last consumed batch.
    """

    epoch: int = 0
    batch_in_epoch: int = 0
    batches: int = 0
    pass_number: int = 0
    batch_in_pass: int = 0
    start: PassStart | None = None
    worker_states: dict[int, RandomState] = field(default_factory=dict)
    loader_state: Any = None

    def next_pass(self, keeps_workers: bool) -> None:
        """The pass is over; workers that are started anew for the next one have no state to remember."""
        self.pass_number += 1
        self.batch_in_pass = 0
        self.start = None
        if not keeps_workers:
            self.worker_states = {}

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.epoch += 1
        self.batch_in_epoch = 0

    def counts(self) -> dict[str, int]:
        """The plain numbers of a checkpoint."""
        names = ("epoch", "batch_in_epoch", "batches", "pass_number", "batch_in_pass")
        return {name: getattr(self, name) for name in names}


def write_state(
    position: Position,
    next_start: PassStart,
    random_state: RandomState,
    num_workers: int,
    sampling: Sampling,
    not_covered: list[str],
) -> dict[str, Any]:
    """A state dict of numbers, strings and uint8 tensors: `torch.load(weights_only=True)` reads it.

    Args:
        position: where the consumer stands.
        next_start: how the next pass would begin if it began now; used when none is under way.
        random_state: global generator states now, where batches draw from them.
        num_workers: workers of the wrapped loader.
        sampling: how its passes are cut into batches.
        not_covered: what a resumed run could draw differently.
    """
    start = position.start or next_start
    return {
        "version": FORMAT_VERSION,
        **position.counts(),
        "pass_has_begun": position.start is not None,
        "generators": _tensors(start.generators),
        "worker_generators": _tensors(start.worker_generators),
        "pass_random_state": as_tensor(start.random_state),
        "kept_workers": start.kept_workers,
        "worker_states": {worker: as_tensor(state) for worker, state in position.worker_states.items()},
        "random_state": as_tensor(random_state),
        "loader_state": position.loader_state,
        "num_workers": num_workers,
        **sampling._asdict(),
        "not_covered": list(not_covered),
    }


def read_state(state: dict[str, Any]) -> tuple[Position, ResumePoint]:
    """The inverse of `write_state`.

    Raises:
        ValueError: the dictionary was not written by `SinkLoader.state_dict`.
    """
    if not isinstance(state, dict) or state.get("version") != FORMAT_VERSION:
        given = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"not a state of a SinkLoader of format version {FORMAT_VERSION}: got {given}. "
            "Pass what SinkLoader.state_dict() returned."
        )
    position = Position()
    for name in position.counts():
        setattr(position, name, int(state[name]))
    position.loader_state = state["loader_state"]
    position.worker_states = {int(worker): as_bytes(one) for worker, one in state["worker_states"].items()}
    random_state = as_bytes(state["random_state"])
    start = PassStart(
        position.pass_number,
        [as_bytes(one) for one in state["generators"]],
        [as_bytes(one) for one in state["worker_generators"]],
        as_bytes(state["pass_random_state"]) if state["pass_has_begun"] else random_state,
        bool(state.get("kept_workers", False)),
    )
    if state["pass_has_begun"]:
        position.start = start
    else:
        random_state = b""  # the pass draws from it on, so it is not set a second time
    resume = ResumePoint(
        start, position.batch_in_pass, dict(position.worker_states), random_state, position.loader_state
    )
    return position, resume


def check_sampling(state: dict[str, Any], sampling: Sampling) -> None:
    """Compares what a position in the middle of a pass refers to with what the loader has now.

    Raises:
        ValueError: they differ, so samples would be lost or come twice.
    """
    then = Sampling(state["samples"], state["batch_size"])
    if not state["batch_in_pass"] or then == sampling or None in (*then, *sampling):
        return
    raise ValueError(
        f"the state is that of a pass over {then.samples} samples in batches of {then.batch_size}, after batch "
        f"{state['batch_in_pass']}; this loader has {sampling.samples} samples in batches of {sampling.batch_size}, so "
        "samples would be lost or come twice. Use the dataset and the batch size of that run, or a state that was "
        "taken at the end of a pass."
    )


def _tensors(states: list[bytes]) -> list[Any]:
    return [as_tensor(state) for state in states]
