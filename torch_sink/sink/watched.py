"""Loaders with worker processes: what the workers are given, and a guard for each iterator that has some."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.random_state import RandomState, find_generators
from torch_sink.common.slab_writer import SlabCollate
from torch_sink.common.slabs import Slabs
from torch_sink.sink.recording import RecordingCollate, ReportingContext, WorkerInit
from torch_sink.sink.source import Source, in_this_thread
from torch_sink.sink.workers import WorkerGuard

_CONTEXT = "_DataLoader__multiprocessing_context"
_here = threading.local()  # its `running` is the source for which this thread opens or runs a pass, with `in_consumer`


def data_loaders_in(loader: Any) -> list[DataLoader[Any]]:
    """The loader, if it is a DataLoader, and the DataLoaders among its attributes."""
    attributes = getattr(loader, "__dict__", {}).values()
    return [one for one in (loader, *attributes) if isinstance(one, DataLoader)]


def runs_workers(iterator: Any) -> bool:
    """Whether `iterator` is a DataLoader's own, with worker processes."""
    return hasattr(iterator, "_workers_status")


class WatchedSource(Source):
    """A loader of which every iterator with workers is guarded in its passes, whoever makes it and whenever.

    A class may make its iterator in a generator, at the first `next`, or keep one in an attribute for all passes
    (timm's `MultiEpochsDataLoader`). New iterators are seen through `_get_iterator`, which is what
    `DataLoader.__iter__` calls; kept ones among the attributes. DataLoaders that the loader wraps are watched as well.
    Without `is_guarding` their workers are left to torch: nobody waits beside the caller.

    A generator is run by the producer's thread, but workers are started by the consumer's: a process that is forked in
    another thread than the main one destroys what the main thread keeps to itself, process groups included.
    """

    is_guarding = True

    def __init__(self, loader: Any, watched: Any = None) -> None:
        super().__init__(loader)
        self.has_workers = self.runs_in_thread = self.is_guarding and loader.num_workers > 0
        self.keeps_workers = self.has_workers and loader.persistent_workers
        self.pins_batches = self.has_workers and loader.pin_memory
        self.generators = find_generators(loader) if self.is_guarding else []
        self.loaders = data_loaders_in(loader if watched is None else watched)
        self.slabs: Slabs | None = None  # written to by the workers of one iterator at a time
        self.slab_writers: list[Any] = []
        self._writing: Callable[[], Any] = lambda: None  # the iterator that these belong to
        self.records = False  # the workers of the loader itself add their generator states to their batches
        self.states: dict[int, RandomState] = {}  # of workers that go on where others were
        self.placeholders = 0  # workers whose first batch is an empty one
        self._hooks = [_Hook.on(one) for one in self.loaders]

    @contextlib.contextmanager
    def active(self, in_consumer: Callable[..., Any] = in_this_thread) -> Iterator[None]:
        """Inside, iterators that this thread asks for belong to a pass; others are their maker's own business."""
        before, _here.running = getattr(_here, "running", None), (self, in_consumer)
        try:
            yield
        finally:
            _here.running = before

    def make_slabs(self, batches: int) -> Slabs | None:
        """Slabs for what each worker makes ahead, and for its part of the batches that are in use."""
        workers = max(one.num_workers for one in self.loaders)
        ahead = max(one.prefetch_factor or 1 for one in self.loaders)
        with contextlib.suppress(OSError):
            self.slabs = Slabs(workers, ahead + -(-batches // workers)) if workers else None
        return self.slabs

    def sampling(self) -> dict[str, int | None]:
        loader = self.loader
        if self.is_guarding and loader.batch_size is not None and not isinstance(loader.dataset, IterableDataset):
            with contextlib.suppress(TypeError, NotImplementedError):
                return {"samples": len(loader.sampler), "batch_size": loader.batch_size}
        return super().sampling()

    def watches(self, loader: Any) -> bool:
        """Whether iterators of `loader` are guarded; none are once this is closed."""
        return bool(self._hooks) and any(one is loader for one in self.loaders)

    def make(self, owner: Any, stock: Callable[[], Any]) -> Any:
        """An iterator of `owner`, whose workers write to slabs and report what they cannot send."""
        collate, init, attributes = owner.collate_fn, owner.worker_init_fn, vars(owner)
        context = {_CONTEXT: attributes[_CONTEXT]} if _CONTEXT in attributes else {}  # its setter takes torch's only
        slabs = self._free_slabs(owner)
        if slabs is not None:
            owner.collate_fn = SlabCollate(collate, slabs)
        if owner.num_workers:
            goes_to_slots = self.hands_over and owner is self.loaders[0]
            layout = self.layout if goes_to_slots else torch.contiguous_format
            owner.worker_init_fn = WorkerInit(init, self.states, layout)
            is_torchdatas = any(one.__module__.startswith("torchdata.") for one in type(owner).__mro__)
            for name, one in context.items():
                attributes[name] = ReportingContext(one, sends_states=is_torchdatas)
            if self.records and owner is self.loaders[0]:
                owner.collate_fn = RecordingCollate(owner.collate_fn, self.placeholders)
        try:
            with self.damage.making_iterator(owner):
                iterator = stock()
        finally:
            owner.collate_fn, owner.worker_init_fn = collate, init
            attributes.update(context)
        if slabs is not None:
            self.slab_writers, self._writing = getattr(iterator, "_workers", []), weakref.ref(iterator)
        return iterator

    def _free_slabs(self, owner: Any) -> Slabs | None:
        """The slabs, when the workers of no iterator write to them, for as many workers as they are made for."""
        slabs, writing = self.slabs, self._writing()
        if slabs is None or not 0 < owner.num_workers <= slabs.workers or isinstance(owner.collate_fn, SlabCollate):
            return None
        if writing is not None and not getattr(writing, "_shutdown", True):
            return None
        slabs.begin_generation(self.slab_writers)
        return slabs

    def add(self, iterator: Any) -> None:
        """Guards `iterator`, if it has workers and is not guarded yet."""
        self.damage.add(iterator)
        if not self.is_guarding or not runs_workers(iterator) or self._guard_of(iterator) is not None:
            return
        made = WorkerGuard(iterator)
        made.is_cancelled = self.is_cancelled
        # One assignment: the consumer's thread may be looking through the list meanwhile.
        self.guards = [*(one for one in self.guards if not one.is_stopped), made]

    def _guard_of(self, iterator: Any) -> WorkerGuard | None:
        return next((one for one in self.guards if one.iterator is iterator), None)

    def kept(self) -> list[tuple[DataLoader[Any], str, Any]]:
        """Iterators that the class keeps in attributes of its own: owner, attribute, iterator."""
        return [
            (owner, name, value)
            for owner in self.loaders
            for name, value in list(vars(owner).items())
            if name != "_iterator" and runs_workers(value)
        ]

    def prepare(self, *, anew: bool) -> None:
        """Before a pass: kept iterators that cannot go on, or all of them (`anew`), are replaced."""
        if self.is_broken:
            self.forget_workers()
        self.is_cancelled = False
        for owner, name, iterator in self.kept():
            if anew or iterator._shutdown:
                if (before := self._guard_of(iterator)) is not None:
                    before.stop()
                owner._iterator = None
                setattr(owner, name, owner._get_iterator())
            else:
                self.add(iterator)
        for one in self.guards:
            one.is_cancelled = False

    def end_pass(self, batches: Iterator[Any]) -> None:
        """Stops the workers that the loader does not keep for its next pass; all of them after a death."""
        # Those of the next pass may run already.
        guards = [one for one in self.guards if one.iterator is batches or not runs_workers(batches)]
        if any(one.is_broken for one in guards):
            self._stop()
        elif not self.keeps_workers:
            kept = [id(iterator) for _, _, iterator in self.kept()]
            for one in guards:
                if id(one.iterator) not in kept:
                    one.stop()

    def forget_workers(self) -> None:
        self._stop()
        vars(self.loaders[0])["_iterator"] = None

    def _stop(self) -> None:
        """Stops all workers; the loader's next pass starts new ones."""
        for one in self.guards:
            one.stop()
        for owner in self.loaders:
            if owner.persistent_workers and self._guard_of(getattr(owner, "_iterator", None)) is not None:
                owner._iterator = None
        self.guards = []

    def close(self) -> None:
        """Stops all workers and leaves the loader as it was."""
        self._stop()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.leave()


class _Hook:
    """Stands in for a loader's `_get_iterator`: shows the source that is active the iterators made in its passes."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader_of = weakref.ref(loader)
        before: Any = vars(loader).get("_get_iterator")
        # The copy of a hooked loader comes with the hook.
        self.before: Callable[[], Any] | None = before.before if isinstance(before, _Hook) else before
        self.users = 0

    @staticmethod
    def on(loader: DataLoader[Any]) -> _Hook:
        """The one hook of a loader, however many SinkLoaders are over it."""
        hook = vars(loader).get("_get_iterator")
        if not isinstance(hook, _Hook) or hook.loader_of() is not loader:
            hook = vars(loader)["_get_iterator"] = _Hook(loader)
        hook.users += 1
        return hook

    def __call__(self) -> Any:
        owner: Any = self.loader_of()
        stock = self.before or functools.partial(type(owner)._get_iterator, owner)
        running = getattr(_here, "running", None)
        if running is None or not running[0].watches(owner):
            return stock()
        source, in_consumer = running
        iterator = in_consumer(functools.partial(source.make, owner, stock))
        source.add(iterator)
        return iterator

    def leave(self) -> None:
        """One user less; the last one leaves the loader as it was."""
        self.users -= 1
        owner = self.loader_of()
        if self.users or owner is None or vars(owner).get("_get_iterator") is not self:
            return
        if self.before is None:
            del vars(owner)["_get_iterator"]
        else:
            vars(owner)["_get_iterator"] = self.before
