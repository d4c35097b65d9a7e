"""Watches a loader's worker-run iterators: what their workers are given, and a guard for each."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from torch_sink.common.random_state import RandomState, find_generators, set_generator_states
from torch_sink.common.slab_writer import SlabCollate
from torch_sink.common.slabs import Slabs
from torch_sink.damage.loaders import LoaderGuard
from torch_sink.sink.sources.base import Source, in_this_thread
from torch_sink.sink.sources.guard import ReportingContext, WorkerGuard, guard
from torch_sink.sink.sources.position import PassStart, Sampling, sampling_of
from torch_sink.sink.sources.recording import RecordingCollate, WorkerInit

_CONTEXT = "_DataLoader__multiprocessing_context"
_here = threading.local()  # its `watch` is the one for which this thread opens or runs a pass


def data_loaders_in(loader: Any) -> list[DataLoader[Any]]:
    """The loader, if it is a DataLoader, and the DataLoaders among its attributes."""
    attributes = getattr(loader, "__dict__", {}).values()
    return [one for one in (loader, *attributes) if isinstance(one, DataLoader)]


class LoaderWatch:
    """One guard for each worker-run iterator of a SinkLoader's passes, whoever made it and whenever.

    A class may make its iterator in a generator, at the first `next`, or keep one in an attribute for all passes
    (timm's `MultiEpochsDataLoader`). New iterators are seen through `_get_iterator`, which is what
    `DataLoader.__iter__` calls; kept ones among the attributes. DataLoaders that the loader wraps are watched as well.

    A generator is run by the producer's thread, but workers are started by the consumer's: a process that is forked in
    another thread than the main one destroys what the main thread keeps to itself, process groups included.

    `slabs` are written to by the workers of one iterator at a time; others take the ordinary way.
    """

    def __init__(self, loader: Any, decoding: LoaderGuard, *, is_guarding: bool) -> None:
        self.loaders = data_loaders_in(loader)
        self.decoding = decoding
        self.is_guarding = is_guarding
        self.guards: list[WorkerGuard] = []
        self.is_cancelled = False
        self.in_consumer: Callable[[Callable[[], Any]], Any] = in_this_thread  # during a pass, the consumer's thread
        self.slabs: Slabs | None = None
        self.slab_writers: list[Any] = []
        self._writing: Callable[[], Any] = lambda: None  # the iterator that these belong to
        self.records = False  # the workers of the loader itself add their generator states to their batches
        self.states: dict[int, RandomState] = {}  # of workers that go on where others were
        self.placeholders = 0  # workers whose first batch is an empty one
        self._hooks = [_Hook.on(one) for one in self.loaders]

    @property
    def broken(self) -> bool:
        """Whether a worker died."""
        return any(one.broken for one in self.guards)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, iterators that this thread asks for belong to a pass; others are their maker's own business."""
        before, _here.watch = getattr(_here, "watch", None), self
        try:
            yield
        finally:
            _here.watch = before

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
            owner.worker_init_fn = WorkerInit(init, self.states)
            states = is_torchdatas(owner)
            attributes.update({name: ReportingContext(one, sends_states=states) for name, one in context.items()})
            if self.records and owner is self.loaders[0]:
                owner.collate_fn = RecordingCollate(owner.collate_fn, self.placeholders)
        try:
            with self.decoding.making_iterator(owner):
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
        self.decoding.add(iterator)
        made = guard(iterator) if self.is_guarding and self.guard_of(iterator) is None else None
        if made is None:
            return
        if self.is_cancelled:
            made.cancel()
        # One assignment: the consumer's thread may be looking through the list meanwhile.
        self.guards = [*(one for one in self.guards if not one.is_stopped), made]

    def guard_of(self, iterator: Any) -> WorkerGuard | None:
        """The guard of an iterator's workers, if it has any."""
        return next((one for one in self.guards if one.iterator is iterator), None)

    def kept(self) -> list[tuple[DataLoader[Any], str, Any]]:
        """Iterators that the class keeps in attributes of its own: owner, attribute, iterator."""
        return [
            (owner, name, value)
            for owner in self.loaders
            for name, value in list(vars(owner).items())
            if name != "_iterator" and runs_workers(value)
        ]

    def begin(self, *, anew: bool) -> None:
        """Before a pass: kept iterators that cannot go on, or all of them (`anew`), are replaced."""
        self.is_cancelled = False
        for owner, name, iterator in self.kept():
            if anew or iterator._shutdown:
                if (before := self.guard_of(iterator)) is not None:
                    before.stop()
                owner._iterator = None
                setattr(owner, name, owner._get_iterator())
            else:
                self.add(iterator)
        for one in self.guards:
            one.cancelled.clear()

    def cancel(self) -> None:
        """Makes a wait for any of the workers end within half a second."""
        self.is_cancelled = True
        for one in self.guards:
            one.cancel()

    def dead(self) -> bool:
        """Whether a worker that still has work to do is gone."""
        return any(one.dead() for one in self.guards)

    def free_reader(self, is_free: threading.Event, seconds: float) -> None:
        """Frees a thread that waits for the rest of a message whose writer is dead."""
        for one in self.guards:
            if one.dead():
                one.free_reader(is_free, seconds)

    def end_pass(self, *, keeps_workers: bool) -> None:
        """Stops the workers that the loader does not keep for its next pass; all of them after a death."""
        if self.broken:
            self.stop()
            return
        kept = [iterator for _, _, iterator in self.kept()]
        for one in self.guards:
            if not (keeps_workers or any(one.iterator is iterator for iterator in kept)):
                one.stop()

    def stop(self) -> None:
        """Stops all workers; the loader's next pass starts new ones."""
        for one in self.guards:
            one.stop()
        for owner in self.loaders:
            latest = getattr(owner, "_iterator", None)
            if owner.persistent_workers and self.guard_of(latest) is not None:
                owner._iterator = None
        self.guards = []

    def close(self) -> None:
        """Stops all workers and leaves the loader as it was."""
        self.stop()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.leave()


def is_torchdatas(loader: Any) -> bool:
    """Whether `loader` is torchdata's, or a subclass of that."""
    return any(one.__module__.startswith("torchdata.") for one in type(loader).__mro__)


def runs_workers(iterator: Any) -> bool:
    """Whether `iterator` is a DataLoader's own, with worker processes."""
    return hasattr(iterator, "_workers_status")


class _Hook:
    """Stands in for a loader's `_get_iterator`: shows the watch that is active the iterators made in its passes."""

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
        watch: LoaderWatch | None = getattr(_here, "watch", None)
        if watch is None or not watch.watches(owner):
            return stock()
        iterator = watch.in_consumer(functools.partial(watch.make, owner, stock))
        watch.add(iterator)
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


class WatchedSource(Source):
    """A loader with watched workers. Without `is_guarding` they are left to torch: nobody waits beside the caller."""

    is_guarding = True

    def __init__(self, loader: Any, watched: Any = None) -> None:
        super().__init__(loader)
        self.watch = LoaderWatch(loader if watched is None else watched, self.guard, is_guarding=self.is_guarding)
        self.has_workers = self.is_guarding and loader.num_workers > 0
        self.runs_ahead = self.runs_in_thread = self.has_workers
        self.keeps_random_state = not self.has_workers
        self.keeps_workers = self.has_workers and loader.persistent_workers
        self.pins_batches = self.has_workers and loader.pin_memory
        self.generators = find_generators(loader) if self.is_guarding else []

    def make_slabs(self, batches: int) -> Slabs | None:
        """Slabs for what each worker makes ahead, and for its part of the batches that are in use."""
        workers = max(one.num_workers for one in self.watch.loaders)
        ahead = max(one.prefetch_factor or 1 for one in self.watch.loaders)
        with contextlib.suppress(OSError):
            self.watch.slabs = Slabs(workers, ahead + -(-batches // workers)) if workers else None
        return self.watch.slabs

    def sampling(self) -> Sampling:
        return sampling_of(self.loader) if self.is_guarding else Sampling()

    def rewind(self, start: PassStart) -> None:
        set_generator_states(self.generators, start.generators)

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self.watch.active()

    def forget_workers(self) -> None:
        self.watch.stop()
        vars(self.watch.loaders[0])["_iterator"] = None

    def close(self) -> None:
        self.watch.close()
