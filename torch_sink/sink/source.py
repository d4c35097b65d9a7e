"""A wrapped loader as a source of passes: who begins them, and how one is resumed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torch_sink.common.integrations import without_fabric
from torch_sink.common.random_state import set_generator_states
from torch_sink.sink.openers import DataLoaderOpener, Opener
from torch_sink.sink.passes import Pass
from torch_sink.sink.position import PassStart, ResumePoint
from torch_sink.sink.resuming import ByIndexLists, ByMakingAgain, ByOwnState, Resuming


class Source:
    """A wrapped loader: its `opener` begins passes, `resuming` enters one behind the batches that were consumed."""

    def __init__(self, resuming: Resuming) -> None:
        self.resuming, self.opener = resuming, resuming.opener

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        """Begins pass `number`, or enters it, in the calling thread: workers are started and seeded here."""
        batch_sampler = getattr(self.opener.loader, "batch_sampler", None)
        owners = (getattr(self.opener.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        for owner in {id(owner): owner for owner in owners}.values():
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(number)
        return self.resuming.begin(number) if resume is None else self.resuming.enter(resume)

    def rewind(self, start: PassStart) -> None:
        """Takes back what a pass drew that was begun ahead and of which nothing was consumed."""
        set_generator_states(self.resuming.generators, start.generators)

    def described(self) -> dict[str, Any]:
        """What a state holds of the loader: how it cuts a pass into batches, and what may differ in a resumed run."""
        opener = self.opener
        return {
            "num_workers": opener.num_workers,
            **opener.sampling(),
            "not_covered": self.resuming.not_covered(),
        }


def open_source(loader: Any, policy: str | None = None) -> Source:
    """The source that fits `loader`; `policy` is what becomes of samples with broken files.

    Raises:
        TypeError: neither iterable nor callable, a dataset of samples, a class, or a dict of loaders.
    """
    loader = without_fabric(loader)
    if isinstance(loader, DataLoader):
        iterates = type(loader).__iter__
        if iterates is DataLoader.__iter__:
            opener = DataLoaderOpener(loader, policy)
            has_lists = opener.is_map_style and loader.batch_sampler is not None
            return Source(ByIndexLists(opener) if has_lists else ByMakingAgain(opener))
        if iterates.__module__.startswith("torchdata."):
            return Source(ByOwnState(DataLoaderOpener(loader, policy, sends_states=True)))
        # Others make iterators in their own way (those of training libraries, timm's): as any iterable.
    _check_gives_batches(loader)
    return Source(ByMakingAgain(Opener(loader, policy, is_function=not isinstance(loader, Iterable))))


def _check_gives_batches(loader: Any) -> None:
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
