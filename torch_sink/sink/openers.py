"""How a pass over a wrapped loader is begun: by its own `iter`, or with worker processes that are watched."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torch_sink.common.integrations import LENGTH_CALLED
from torch_sink.common.pool import Pool
from torch_sink.common.random_state import RandomState, find_generators, generator_states
from torch_sink.damage.report import Policy, decode_errors, policy_of_thread
from torch_sink.errors import add_hints
from torch_sink.sink.workers import WorkerGuard
from torch_sink.worker.fetchers import give_worker_batches
from torch_sink.worker.prepare import SinkWorker, WorkerCollate, WorkerContext

_CONTEXT = "_DataLoader__multiprocessing_context"
_OF_THE_COPY = ("_iterator", "_get_iterator", "_initial_iter_for_state_dict", "next_iter_state")

# Workers of two loaders are not started at the same time: libraries that watch forks (filelock) refuse to fork while
# another thread does.
_starting = threading.RLock()


class Opener:
    """Begins passes over any iterable, or over what a function returns; the loader makes its iterators itself.

    A function is called once a pass. Each batch is begun only when it is asked for, in the calling thread: what it
    draws from global generators comes in the plain loop's order, and modes and context variables are the program's.
    """

    guard: WorkerGuard | None = None  # of the workers of the latest iterator that was made here
    has_workers = False  # guarded worker processes make the batches, so a thread may ask for them ahead
    keeps_workers = False  # workers, and their generators, go on to the next pass
    pins_batches = False  # batches come in page-locked memory that nobody writes to again

    def __init__(self, loader: Any, policy: Policy | None = None) -> None:
        self.loader = loader  # None while nobody uses it
        self.policy = policy  # on broken files; None leaves it to the image backend
        self.policy_of_iterators = policy  # while the loader's own iterators run; None for those made here
        self._is_function = not isinstance(loader, Iterable)
        self.renew()

    def renew(self) -> None:
        """Takes over the attributes that the loader has now, for the pass that is begun next."""
        loader = self.loader
        self.generators = find_generators(loader) if isinstance(loader, DataLoader) else []  # its samplers' too

    @property
    def copy(self) -> Any:
        """The loader with the attributes that it had when the latest pass began."""
        return self.loader

    def open(self) -> Iterator[Any]:
        """A new iterator over the loader, made in the calling thread."""
        with policy_of_thread(self.policy):
            return iter(self.loader() if self._is_function else self.loader)

    @property
    def is_broken(self) -> bool:
        """Whether the pass cannot go on: a worker died, or a result is lost."""
        return self.guard is not None and self.guard.is_broken

    def make_pool(self) -> Pool | None:
        """Memory that workers write to; None if they write elsewhere.

        To be called before the first pass. It may be page-locked, for only the ring copies from it.
        """
        return None

    def is_as_it_was(self) -> bool:
        """Whether the loader is there and has the attributes that it had when the opener was made."""
        return self.loader is not None

    def end_pass(self, batches: Iterator[Any]) -> None:
        """Stops the workers of a pass that is over, unless they serve the next one too."""

    def forget_workers(self) -> None:
        """Stops all workers, persistent ones too: the next pass starts new ones."""

    def close(self) -> None:
        """Stops the workers of iterators that a DataLoader, or one inside of the loader, keeps for its next pass."""
        for owner in (self.loader, *getattr(self.loader, "__dict__", {}).values()):
            attributes = vars(owner) if isinstance(owner, DataLoader) else {}
            for name, held in list(attributes.items()):
                if isinstance(held, Iterator) and (iterators := _iterators_in(held)):
                    for iterator in iterators:
                        WorkerGuard(iterator).stop()
                    attributes[name] = None


class DataLoaderOpener(Opener):
    """Begins passes over a DataLoader whose iterators are made here: its workers are guarded, and write to a pool.

    What is put around the user's functions sits on a shallow copy; the user's own loader is not touched.
    """

    def __init__(self, loader: DataLoader[Any], policy: Policy | None) -> None:
        self._copy: Any = copy.copy(loader)
        make: Any = weakref.WeakMethod(self.make_iterator)  # weak, because a cycle would keep the workers
        # Not through attribute assignment, which a DataLoader refuses after it was made.
        vars(self.copy).update(_iterator=None, _initial_iter_for_state_dict=False, _get_iterator=lambda: make()())
        self.pool: Pool | None = None  # written to by the workers of one iterator at a time
        super().__init__(loader, policy)
        self.policy_of_iterators = None
        self.is_map_style = not isinstance(loader.dataset, IterableDataset)
        self.sends_snapshots = False  # workers send those of their global generators with each batch
        self.worker_generators: list[bytes] = []  # states of `generators` when the latest workers were started
        self.writers: list[Any] = []  # the workers that write to the pool
        self._writing: Callable[[], Any] = lambda: None  # the iterator that these belong to
        self._found = _attributes_of(loader)
        self.prepare_workers({})

    @property
    def copy(self) -> Any:
        return self._copy

    @property
    def pins_batches(self) -> bool:  # type: ignore[override]
        """Whether they do; slabs are page-locked."""
        return self.has_workers and (self.copy.pin_memory or self.pool is not None)

    def renew(self) -> None:
        if self.is_broken:
            self.forget_workers()
        now = _attributes_to_follow(self.loader)
        if self.goes_on_with_workers():
            vars(self.copy)[LENGTH_CALLED] = now[LENGTH_CALLED]
        else:
            vars(self.copy).update(now)
        self.has_workers = self.copy.num_workers > 0
        self.keeps_workers = self.has_workers and self.copy.persistent_workers
        super().renew()

    def goes_on_with_workers(self) -> bool:
        """Whether the next pass is made by the workers of the latest one, as they were started."""
        return self.keeps_workers and self.copy._iterator is not None and self.loader.num_workers > 0

    def prepare_workers(self, snapshots: dict[int, RandomState], placeholders: int = 0) -> None:
        """The workers that are started next go on from snapshots of generators, the first ones with an empty batch."""
        self._snapshots, self._placeholders = snapshots, placeholders

    def open(self) -> Iterator[Any]:
        if self.guard is not None:
            self.guard.is_cancelled = False
        try:
            with _starting:
                return iter(self.copy)
        except Exception as error:
            add_hints(error)
            raise

    def make_iterator(self) -> Any:
        """A new iterator of the copy, whose workers write to slabs and report what they cannot send."""
        loader, policy = self.loader, self.policy or decode_errors.policy
        self.worker_generators = generator_states(self.generators)
        pool = self._free_pool()
        if self.has_workers:
            collate = loader.collate_fn
            vars(self.copy)["collate_fn"] = collate if pool is None else WorkerCollate(collate, pool)
            snapshots = self._snapshots if self.sends_snapshots else None
            feature = SinkWorker(policy, pool is not None, snapshots, self._placeholders)
            vars(self.copy)[_CONTEXT] = WorkerContext(vars(loader)[_CONTEXT], feature)  # its setter takes torch's only
        with policy_of_thread(policy):
            iterator = type(self.copy)._get_iterator(self.copy)
        give_worker_batches(iterator, policy)
        if self.has_workers:
            self.guard = WorkerGuard(iterator)
        if pool is not None:
            self.writers, self._writing = getattr(iterator, "_workers", []), weakref.ref(iterator)
        return iterator

    def _free_pool(self) -> Pool | None:
        """The pool, when the workers of no iterator write to it, for as many workers as it is made for."""
        pool, writing = self.pool, self._writing()
        if pool is None or self.copy.num_workers > pool.workers:
            return None
        # A worker that was given up and still runs may write to its slabs.
        if any(worker.is_alive() for worker in self.writers):
            return None
        if writing is not None and not getattr(writing, "_shutdown", True):
            return None
        pool.begin_generation()
        return pool

    def make_pool(self) -> Pool | None:
        with contextlib.suppress(OSError):
            self.pool = Pool(self.loader.num_workers) if self.loader.num_workers else None
        return self.pool

    def is_as_it_was(self) -> bool:
        now = {} if self.loader is None else _attributes_of(self.loader)
        return now.keys() == self._found.keys() and all(now[name] is self._found[name] for name in now)

    def end_pass(self, batches: Iterator[Any]) -> None:
        guard = self.guard
        if guard is None or guard.iterator is not batches:
            return  # those of the next pass run already
        if guard.is_broken:
            self.forget_workers()
        elif not self.keeps_workers:
            guard.stop()

    def forget_workers(self) -> None:
        if self.guard is not None:
            self.guard.stop()
        self.guard, self.copy._iterator = None, None

    def close(self) -> None:
        self.forget_workers()


def _attributes_to_follow(loader: DataLoader[Any]) -> dict[str, Any]:
    """Those that an iterator of the loader may read, and that say nothing of one iterator."""
    return {name: value for name, value in vars(loader).items() if name not in _OF_THE_COPY}


def _attributes_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes by which a DataLoader makes its iterators, and the generators that it draws from."""
    shown = {name: value for name, value in vars(loader).items() if not name.startswith("_") or name == _CONTEXT}
    return shown | {f"generator {number}": one for number, one in enumerate(find_generators(loader))}


def stop_workers_under(batches: Any) -> None:
    """Stops the workers of the DataLoader iterators that `batches` is or reads, at the end of all passes.

    torch would wait 5 s for each worker of a generator that is dropped. Workers that a DataLoader keeps may be in use
    elsewhere, and go on.
    """
    for iterator in _iterators_under(batches):
        if not iterator._persistent_workers:
            WorkerGuard(iterator).stop()


def _iterators_under(batches: Any) -> list[Any]:
    """The DataLoader iterators with workers that a generator or a wrapper is reading, or those inside of it."""
    if not isinstance(batches, GeneratorType) or batches.gi_running:
        return _iterators_in(batches)
    # Its variables, and what its loops go over: Python 3.10 keeps these in the frame.
    return [one for held in gc.get_referents(batches, batches.gi_frame) for one in _iterators_under(held)]


def _iterators_in(held: Any) -> list[Any]:
    """The DataLoader iterators with workers that an object is or, as a wrapper around one, has as an attribute."""
    attributes = getattr(held, "__dict__", {})
    if "_workers_status" in attributes:
        return [held]
    return [one for one in attributes.values() if "_workers_status" in getattr(one, "__dict__", {})]


def check_gives_batches(loader: Any) -> None:
    """Raises TypeError for a dataset of samples, a class, a dict, a path, or what is neither iterable nor callable."""
    is_map_style = hasattr(type(loader), "__getitem__") and not isinstance(loader, Iterable)  # as torch's Datasets are
    if is_map_style or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise TypeError(
            f"{type(loader).__name__} gives samples, not batches: this is a Dataset; wrap it in a "
            "DataLoader(dataset, batch_size=...)"
        )
    if isinstance(loader, type) and not issubclass(loader, Iterator):
        raise TypeError(f"loader is the class {loader.__name__}; pass an instance: {loader.__name__}(...)")
    if isinstance(loader, Mapping):
        raise TypeError(f"loader is a {type(loader).__name__}; pass one of its values, or make a SinkLoader of each")
    if isinstance(loader, (str, os.PathLike)):
        raise TypeError(
            f"loader is a path, {os.fspath(loader)!r}; pass batches, such as a "
            "DataLoader(datasets.ImageFolder(path, transform), batch_size=...)"
        )
    if not isinstance(loader, Iterable) and not callable(loader):
        raise TypeError(
            f"loader must be an iterable of batches or a function that returns an iterator, got {type(loader).__name__}"
        )
