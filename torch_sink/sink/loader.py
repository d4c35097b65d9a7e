"""SinkLoader: batches of an unmodified DataLoader, waiting on the device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NoReturn

import torch
from typing_extensions import TypeVar  # torch needs it too; typing's own takes no default before Python 3.13

from torch_sink.common import reference
from torch_sink.common.arguments import check_above_zero, check_bool, check_count, explains_wrong_calls
from torch_sink.common.integrations import is_only_checked, warn_if_unsharded
from torch_sink.common.random_state import Draws
from torch_sink.damage.report import Policy
from torch_sink.errors import SinkError
from torch_sink.sink.producer import Producer
from torch_sink.sink.resuming import open_loader
from torch_sink.sink.ring import make_slots
from torch_sink.sink.slots import ImageFormat, resolve_device
from torch_sink.sink.stats import QueueStats
from torch_sink.sink.traversal import Batches, Traversal
from torch_sink.sink.workers import Life
from torch_sink.thread_waits import here, host_sync_allowed

Batch = TypeVar("Batch", default=Any)  # what the wrapped loader gives; of a DataLoader torch says no more than Any


class SinkLoader(Generic[Batch]):
    """Wraps a loader; iterating gives one epoch of batches on the device.

    Iterates as the wrapped loader does: each `iter()` is a new pass of it, also after `break` or `next(iter(loader))`.
    With `batches_per_epoch` the traversal is endless: each `iter()` gives the rest of an unfinished epoch, else the
    next `batches_per_epoch` batches, and the loader is restarted when it ends. After `load_state_dict` the first
    `iter()` gives the rest of the saved epoch. One iterator is in use at a time, and an older one raises `SinkError`.
    A batch stays valid until the next one is asked for; `.clone()` keeps it.

    With `num_workers > 0` a thread receives the workers' batches ahead of the consumer and brings them to the device.
    Otherwise batches are made in the calling thread, when they are asked for, so that every draw from a global random
    generator comes in the order of the plain loop, and modes such as `torch.no_grad()` are the caller's. So are those
    of other iterables and of functions, and of loaders that make iterators of their own (as timm's do). Samplers that
    draw from a global generator in the middle of a pass are the exception: with workers their draws happen in the
    thread.

    A pass begins when it is asked for: what the program changes between two passes (the dataset, its transforms, a
    sampler, weights) is seen in the next one, as without a SinkLoader. Other public attributes (`dataset`,
    `collate_fn`, `num_workers`, …) are those of the wrapped loader, and may be set here or there. Of a sampler or
    dataset with `set_epoch` the program calls it, as for a DataLoader; `StepLoop` and `Model` call it for the program.

    To a type checker it is a `SinkLoader[Batch]`: a `SinkLoader[Tensor]` over a list of tensors, for instance. What a
    DataLoader gives is Any to torch, so name it: `loader: SinkLoader[tuple[Tensor, Tensor]] = SinkLoader(...)`.

    Args:
        loader: any iterable of batches: a `DataLoader`, a `torchdata.StatefulDataLoader`, a list, or a function that
            returns an iterator and is called once a pass. An iterator is read once, and never closed. A batch is a
            tensor, or dicts, lists, tuples or dataclasses of tensors; numbers and strings pass through on the host;
            other objects that have a method `to(device)` are moved by it.
        batches_per_epoch: batches in an epoch; None for one pass of the loader.
        device: where batches are delivered; default the current accelerator, else the CPU.
        slots: batches that may exist at a time, the one in use included; default 3. On an accelerator they are
            preallocated, on the CPU a slot refers to the loader's own tensors.
        max_bytes: bound for the memory of the slots on an accelerator; fewer slots are used to keep it.
        dtype: dtype of image batches; default what the pipeline says. Image batches are lazy ones and floating-point
            tensors of four dimensions.
        memory_format: layout of image batches.
        on_decode_error: what becomes of samples whose files stock code cannot open or decode, with or without the
            image backend. Loaders that make iterators of their own need the backend for it, and then `decode_report()`
            counts these samples, not `stats()`. None leaves it to `set_image_backend`; "raise" raises the error of the
            file. "skip" drops the sample, and leaves out a batch of which nothing is left, so that a pass may have
            fewer batches than `len()`. "replace" puts the next good sample of the batch in its place, and where there
            is none, the next good one of the dataset. `stats()` counts them and lists path and reason. An
            `IterableDataset` raises under each of them: an error ends its generator.
        timeout_seconds: longest wait for a batch of a worker.
        prefetch_next_epoch: begin the next pass while the last batches of this one are used, so that its first batches
            are ready in time. What the program changes between two passes then arrives one pass late. For loaders with
            workers and a seeded generator, and without `set_epoch`; passes of others begin when they are asked for,
            which is said in a warning.

    Attributes:
        slot_index: static slot of the batch delivered last; None when it is in none (on the CPU, or an odd shape).

    Raises:
        ValueError: an argument is out of range, or the device is not there.
        TypeError: an argument has the wrong type.

    Examples:
        >>> loader = SinkLoader([torch.zeros(2, 3), torch.ones(2, 3)])
        >>> [float(batch.sum()) for batch in loader]
        [0.0, 6.0]
    """

    @explains_wrong_calls(of_a_loader="it belongs to the loader: SinkLoader(DataLoader(dataset, {name}=...))")
    @host_sync_allowed()
    def __init__(
        self,
        loader: Iterable[Batch] | Callable[[], Iterable[Batch]],
        *,
        batches_per_epoch: int | None = None,
        device: torch.device | str | None = None,
        slots: int | None = None,
        max_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        on_decode_error: Policy | None = None,
        timeout_seconds: float = 300.0,
        prefetch_next_epoch: bool = False,
    ) -> None:
        self.batches_per_epoch = batches_per_epoch
        check_above_zero("timeout_seconds", timeout_seconds, "leave it out")
        check_bool("prefetch_next_epoch", prefetch_next_epoch)
        self._form = ImageFormat(resolve_device(device), dtype, memory_format, on_decode_error)
        self._resuming = open_loader(loader, on_decode_error)
        self._opener = opener = self._resuming.opener
        self._slots = make_slots(self._form, slots, max_bytes)
        self._slots.share(opener.make_pool)
        self._resuming.reads_ahead = self._slots.count
        self._producer = Producer(self._slots)
        self._traversal = Traversal(self._resuming, self._producer, timeout_seconds, begins_early=prefetch_next_epoch)
        self._is_checked = False
        self._options_of_iter: dict[str, bool] = {}
        self._life = Life(self, self._producer, opener, self._slots)

    @property
    def loader(self) -> Any:
        """The wrapped loader."""
        return self._opener.loader

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in an epoch; None for one pass of the loader. May be set: the next `iter()` goes by it."""
        return self._batches_per_epoch

    @batches_per_epoch.setter
    def batches_per_epoch(self, batches: int | None) -> None:
        check_count("batches_per_epoch", batches, minimum=1, meaning="one pass of the loader")
        self._batches_per_epoch = batches

    @property
    def device(self) -> torch.device:
        """Where batches are delivered."""
        return self._form.device

    @property
    def ring_slots(self) -> int:
        """Number of slots."""
        return self._slots.count

    @property
    def batch_in_epoch(self) -> int:
        """Batches consumed of the epoch that is under way; 0 again when its end was seen."""
        return self._traversal.position.batch_in_epoch

    @property
    def slot_index(self) -> int | None:
        """Static slot of the batch delivered last, None when it is in none."""
        held = self._producer.held
        return None if held is None else self._slots.static_index(held.slot)

    def _static_batches(self, batch: Any) -> dict[int, Any]:
        """For each slot, the batch delivered last as it would lie there, with any values; {} if it lies in none."""
        return {} if self.slot_index is None else self._slots.static_batches(batch)

    def __len__(self) -> int:
        if self._batches_per_epoch is not None:
            return self._batches_per_epoch
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            raise TypeError(
                f"the length of an epoch is not known: {type(self.loader).__name__} has no len(). "
                "Pass batches_per_epoch=n for epochs of n batches."
            ) from None

    def __repr__(self) -> str:
        return (
            f"SinkLoader({type(self.loader).__name__}, batches_per_epoch={self.batches_per_epoch}, "
            f"device={str(self.device)!r}, {self._slots.describe()})"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"SinkLoader has no attribute {name!r}")
        return getattr(self._opener.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets attributes such as `worker_init_fn`, which the wrapped loader has and this one has not, there."""
        opener = vars(self).get("_opener")
        if opener is None or name.startswith("_") or hasattr(type(self), name) or not hasattr(opener.loader, name):
            super().__setattr__(name, value)
        else:
            setattr(opener.loader, name, value)

    def __iter__(self) -> Iterator[Batch]:
        if is_only_checked(sys._getframe(1)):
            return iter(())
        options, self._options_of_iter = self._options_of_iter, {}
        return self._begin(self._batches_per_epoch, **{"goes_on": self._batches_per_epoch is not None, **options})

    def _epoch(self, batches: int | None, **options: bool) -> Iterator[Batch]:
        """Iterates over one epoch as if `batches_per_epoch` were `batches`; `options` as `Traversal.begin_epoch`'s."""
        options = {"goes_on": batches is not None, **options}
        if batches != self._batches_per_epoch:
            return self._begin(batches, **options)
        self._options_of_iter = options  # not an argument: a subclass may have an `__iter__` of its own
        return iter(self)

    def rest(self) -> Iterator[Batch]:
        """Iterates over the rest of an unfinished epoch (after `break` or an error), or else over a new one."""
        return self._begin(self._batches_per_epoch, goes_on=True)

    @host_sync_allowed()
    def _begin(self, batches: int | None, **options: bool) -> Iterator[Batch]:
        self._check_usable()
        if not self._is_checked:
            self._is_checked = True
            warn_if_unsharded(self.loader)
        iteration = self._traversal.begin_epoch(batches, **options)
        return Batches(self, self._life, self._traversal, self._slots, iteration)

    @contextlib.contextmanager
    def _whole_pass(self) -> Iterator[None]:
        """Inside, `_epoch(None)` is one whole pass of the loader; afterwards the traversal goes on where it stood."""
        self._check_usable()
        is_loaded = self._traversal.is_loaded
        position = self.state_dict() if is_loaded or self._traversal.is_inside_pass else None
        if position is not None:
            self.restart()
        try:
            yield
        finally:
            if position is not None and self._life.ended is None:
                self.load_state_dict(position)
                self._traversal.is_loaded = is_loaded

    @contextlib.contextmanager
    def _rehearsal(self) -> Iterator[Iterator[Batch]]:
        """Gives a new pass to try code on; afterwards the position and all random generators are put back.

        Raises:
            ValueError: the loader is a generator object, which cannot be traversed twice.
        """
        self._check_usable()
        with self._traversal.rehearsing():
            yield iter(self)

    def _number_next_pass(self) -> None:
        """Calls `set_epoch` for the pass after the one that a training leaves, unless the program did."""
        self._traversal.number_next_pass()

    @staticmethod
    def _known_of_latest(batches: Iterator[Any], batch: Any) -> tuple[list[Any] | None, int | None]:
        """Leaves of the latest batch of an iterator, and its samples as the sampler has counted; None if not known.

        Only a SinkLoader's own iterator gives a batch as it was in the slot, where its leaves were found.
        """
        if type(batches) is not Batches:
            return None, None
        given, leaves, samples = batches.given
        return (leaves, samples) if given is batch else (None, None)

    @host_sync_allowed()
    def _give_back(self) -> None:
        """Takes the batch back that was delivered last and not used: it comes again, and only then counts.

        If it was made in the calling thread, a run that resumes from a state taken now makes it with other draws.
        """
        self._traversal.give_back()

    @host_sync_allowed()
    def restart(self) -> None:
        """Drops the rest of the epoch: the next `iter()` begins a new pass of the loader."""
        self._check_usable()
        self._traversal.restart()

    def stats(self) -> QueueStats:
        """What the queue saw so far."""
        if self._life.is_foreign:
            raise SinkError(self._life.ended)
        planned = self._slots.bytes_planned()
        return self._producer.stats.collected(self._producer.bytes_held() if planned is None else planned)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Parks the producer between batches: inside, it pins, allocates and queries nothing (for a graph capture)."""
        if self._life.is_foreign:
            raise SinkError(self._life.ended)
        with self._producer.gate:
            yield

    def state_dict(self) -> dict[str, Any]:
        """Counts of consumed batches and all that is needed to go on after them.

        A resumed run gives exactly the batches that would have come, for a map-style `DataLoader` with a seeded
        generator whose dataset draws from the global generators of torch, numpy or random. The key "not_covered" names
        what could differ. With `num_workers=0` the dataset shares the process's global generators: their states are
        part of the state, and are set again at the first `iter()` after `load_state_dict`.
        """
        if self._life.ended is not None:
            raise SinkError(self._life.ended)
        with host_sync_allowed() if here.watches and not here.allowances else contextlib.nullcontext():
            return self._resuming.state_dict(self._traversal.position)

    def _position(self, draws: Draws | None) -> dict[str, Any]:
        """`state_dict()`, also that of a subclass, with a snapshot of the global generators if one was taken."""
        self._resuming.draws = draws
        try:
            return self.state_dict()
        finally:
            self._resuming.draws = None

    @host_sync_allowed()
    @explains_wrong_calls()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where the state was taken; the next `iter()` gives the rest of that epoch.

        Raises:
            ValueError: not a state of a `SinkLoader`, or one from the middle of a pass over another number of samples
                or in batches of another size.
        """
        self._check_usable()
        self._traversal.load_state_dict(state_dict)

    @host_sync_allowed()
    def _set_aside(self) -> bool:
        """Stops thread and workers and drops the loader, but keeps slots and slabs. Whether it can be taken up."""
        if self._life.ended is not None or not self._resuming.can_start_over:
            return False
        self._traversal.start_over()
        self._opener.close()
        self._slots.start_over()
        self._loader_aside, self._opener.loader = reference(self._opener.loader), None
        return True

    def _take_up(self) -> bool:
        """Makes it as new after `_set_aside`. Whether that worked: the loader may be gone or changed by now."""
        self._opener.loader = self._loader_aside()
        return self._life.ended is None and self._opener.is_as_it_was()

    def close(self) -> None:
        """Stops thread and workers, within 5 s. Idempotent; the loader cannot be iterated afterwards."""
        self._life.close()

    def __enter__(self) -> SinkLoader[Batch]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a SinkLoader cannot be pickled or copied: it holds a thread, worker processes and device memory. Send the "
            "loader that it wraps, sink.loader, and wrap it in the other process; its position is sink.state_dict()"
        )

    def _check_usable(self) -> None:
        if self._life.ended is not None:
            raise SinkError(self._life.ended)
