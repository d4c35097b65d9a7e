"""Guards the workers of a DataLoader whose class makes or keeps its iterators in a way of its own."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from torch_sink.damage.loaders import LoaderGuard
from torch_sink.sink.sources.base import InConsumer
from torch_sink.sink.workers.guard import WorkerGuard, guard


class LoaderWatch:
    """One guard for each worker-run iterator of a loader, whoever made it and whenever.

    Such a class may make its iterator in a generator, at the first `next`, or keep one in an attribute for all passes
    (timm's `MultiEpochsDataLoader`). New iterators are seen through `_get_iterator`, which is what
    `DataLoader.__iter__` calls; kept ones among the attributes. DataLoaders that the loader wraps are watched as well.

    A generator is run by the producer's thread, but workers are started by the consumer's: a process that is forked in
    another thread than the main one destroys what the main thread keeps to itself, process groups included.

    Args:
        loader: the user's DataLoader.
        decoding: what becomes of samples with broken files.

    Attributes:
        in_consumer: calls a function in the consumer's thread, during a pass.
    """

    def __init__(self, loader: DataLoader[Any], decoding: LoaderGuard) -> None:
        inner = [value for value in vars(loader).values() if isinstance(value, DataLoader)]
        self.loaders: list[DataLoader[Any]] = [loader, *inner]
        self.guards: list[WorkerGuard] = []
        self.decoding = decoding
        self.is_cancelled = False
        self.in_consumer: InConsumer | None = None
        self._hooks = [_hook(one, weakref.ref(self)) for one in self.loaders]

    @property
    def broken(self) -> bool:
        """Whether a worker died."""
        return any(one.broken for one in self.guards)

    def add(self, iterator: Any) -> None:
        """Guards `iterator`, if it has workers and is not guarded yet."""
        self.decoding.add(iterator)
        if any(one.iterator is iterator for one in self.guards):
            return
        made = guard(iterator)
        if made is None:
            return
        if self.is_cancelled:
            made.cancel()
        # One assignment: the consumer's thread may be looking through the list meanwhile.
        self.guards = [*(one for one in self.guards if not one.is_stopped), made]

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
                for one in self.guards:
                    if one.iterator is iterator:
                        one.stop()
                owner._iterator = None
                setattr(owner, name, owner._get_iterator())
            else:
                self.add(iterator)
        for one in self.guards:
            one.allow()

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
            if owner.persistent_workers and any(one.iterator is latest for one in self.guards):
                owner._iterator = None
        self.guards = []

    def close(self) -> None:
        """Stops all workers and leaves the loader as it was."""
        self.stop()
        for unhook in self._hooks:
            unhook()


def runs_workers(iterator: Any) -> bool:
    """Whether `iterator` is a DataLoader's own, with worker processes."""
    return hasattr(iterator, "_workers_status")


def _hook(loader: DataLoader[Any], watch_of: weakref.ref[LoaderWatch]) -> Callable[[], None]:
    """Shows each iterator that `loader` makes to the watch; returns what undoes this."""
    attributes = vars(loader)
    before = attributes.get("_get_iterator")
    loader_of = weakref.ref(loader)

    def get_iterator() -> Any:
        owner: Any = loader_of()
        stock = before if before is not None else functools.partial(type(owner)._get_iterator, owner)
        watch = watch_of()
        if watch is None:
            return stock()
        decoding = watch.decoding

        def make() -> Any:
            with decoding.making_iterator(owner):
                return stock()

        iterator = make() if watch.in_consumer is None else watch.in_consumer(make)
        watch.add(iterator)
        return iterator

    def unhook() -> None:
        if attributes.get("_get_iterator") is not get_iterator:
            return  # a later SinkLoader over the same loader has put its own on top
        if before is None:
            del attributes["_get_iterator"]
        else:
            attributes["_get_iterator"] = before

    attributes["_get_iterator"] = get_iterator
    return unhook
