"""Where a pass begins, where the consumer stands in it, and how that is written into a checkpoint."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from torch_sink.common.random_state import RandomState, as_bytes, as_tensor

FORMAT_VERSION = 1
COUNTS = ("epoch", "batch_in_epoch", "batches", "pass_number", "batch_in_pass")


@dataclass(frozen=True)
class PassStart:
    """What a pass needs to begin once more with the same draws."""

    number: int
    generators: list[bytes] = field(default_factory=list)  # of the loader and its samplers, before the pass
    # Their states when the workers of this pass were started; persistent workers were started for an earlier pass.
    worker_generators: list[bytes] = field(default_factory=list)
    # Of the global generators before the pass; empty where batches draw nothing from them.
    random_state: RandomState = b""
    kept_workers: bool = False  # those of the last pass went on, so no seed was drawn for new ones


@dataclass
class Position:
    """Counts of consumed batches, and the pass that they come from."""

    epoch: int = 0  # epochs completed
    batch_in_epoch: int = 0  # batches consumed of the epoch that is under way
    batches: int = 0  # batches consumed in all
    pass_number: int = 0  # the loader's pass that the next batch comes from
    batch_in_pass: int = 0  # batches consumed of it
    start: PassStart | None = None  # how that pass began; None before it did
    # Snapshot of each worker after its last consumed batch. Replaced, never changed, for old items refer to it.
    worker_states: dict[int, RandomState] = field(default_factory=dict)
    loader_state: Any = None  # of a loader that keeps its own, after the last consumed batch
    resume: PassStart | None = None  # of a state that was loaded, until its pass is entered behind `batch_in_pass`
    random_state: RandomState = b""  # of the global generators at that checkpoint (batches made in this process)
    loaded_state: dict[str, Any] = field(default_factory=dict)  # the state that `resume` comes from

    def next_pass(self, keeps_workers: bool) -> None:
        """Moves to the beginning of the next pass; snapshots of workers are kept where the workers are."""
        self.pass_number += 1
        self.batch_in_pass = 0
        self.start = None
        if not keeps_workers:
            self.worker_states = {}

    def next_epoch(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch += 1
        self.batch_in_epoch = 0

    def saved(self, start: PassStart, random_state: RandomState) -> dict[str, Any]:
        """Numbers, strings and uint8 tensors, which `torch.load(weights_only=True)` reads; see `read_state`.

        Args:
            start: of the pass under way, or of the next one where none is.
            random_state: of the global generators, where batches draw from them.
        """
        return {
            "version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in COUNTS},
            "pass_has_begun": self.start is not None,
            "generators": [*map(as_tensor, start.generators)],
            "worker_generators": [*map(as_tensor, start.worker_generators)],
            "pass_random_state": as_tensor(start.random_state),
            "kept_workers": start.kept_workers,
            "worker_states": {worker: as_tensor(snapshot) for worker, snapshot in self.worker_states.items()},
            "random_state": as_tensor(random_state),
            "loader_state": self.loader_state,
        }


def read_state(state: dict[str, Any]) -> Position:
    """The position that `Position.saved` has written: the next pass is entered there.

    Raises:
        ValueError: the dictionary was not written by `SinkLoader.state_dict`.
    """
    if not isinstance(state, dict) or state.get("version") != FORMAT_VERSION:
        given = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"not a state of a SinkLoader of format version {FORMAT_VERSION}: got {given}. "
            "Pass what SinkLoader.state_dict() returned."
        )
    has_begun, random_state = state["pass_has_begun"], as_bytes(state["random_state"])
    worker_states = {int(worker): as_bytes(one) for worker, one in state["worker_states"].items()}
    position = Position(worker_states=worker_states, loader_state=state["loader_state"], loaded_state=dict(state))
    for name in COUNTS:
        setattr(position, name, int(state[name]))
    position.resume = PassStart(
        position.pass_number,
        [as_bytes(one) for one in state["generators"]],
        [as_bytes(one) for one in state["worker_generators"]],
        as_bytes(state["pass_random_state"]) if has_begun else random_state,
        bool(state.get("kept_workers", False)),
    )
    if has_begun:  # else the pass draws from the random state on, so it is not set a second time
        position.start, position.random_state = position.resume, random_state
    return position


def check_resumed(state: dict[str, Any], now: dict[str, Any]) -> None:
    """Compares what a state says of its loader with what the loader has now; warns of another number of workers.

    Raises:
        ValueError: a pass is cut into other batches than that of the state, so samples would be lost or come twice.
    """
    then, here = ({name: one[name] for name in ("samples", "batch_size")} for one in (state, now))
    if state["batch_in_pass"] and then != here and None not in (*then.values(), *here.values()):
        raise ValueError(
            f"the state is that of a pass over {then['samples']} samples in batches of {then['batch_size']}, after "
            f"batch {state['batch_in_pass']}; this loader has {here['samples']} samples in batches of "
            f"{here['batch_size']}, so samples would be lost or come twice. Use the dataset and the batch size of that "
            "run, or a state that was taken at the end of a pass."
        )
    if state["num_workers"] != now["num_workers"]:
        warnings.warn(
            f"the state was taken with num_workers={state['num_workers']}, this loader has {now['num_workers']}: "
            "samples of a map-style dataset come in the same order, but the workers' random draws differ. Use the same "
            "number of workers for an exact resume.",
            stacklevel=4,
        )
