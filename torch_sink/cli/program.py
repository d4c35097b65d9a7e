"""`with torch_sink.explain():` around a program as it is: the report of `explain` on the loaders that it reads."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

import torch_sink
from torch_sink.cli import explain as command
from torch_sink.cli.pipelines import pipeline_of
from torch_sink.common.patches import Patches
from torch_sink.common.random_state import (
    find_generators,
    generator_states,
    global_draws,
    set_generator_states,
    set_global_draws,
)
from torch_sink.image.core.fallback import Row, ledger
from torch_sink.sink.openers import DataLoaderOpener

_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_MOST_LOADERS = 4
_OFF = 'the image backend was off: torch_sink.set_image_backend("device") switches it on; below is what it would do'


def explain(device: str | None = None) -> AbstractContextManager[None]:
    """Says what torch_sink does, or would do, with the batches of a program, which stays as it is.

    Put `with torch_sink.explain():` around a loop over a DataLoader or a SinkLoader, or around `loop.run(...)`, with
    the image backend on or off. The code inside runs as it would without. At the end, or after Ctrl-C, a report on each
    DataLoader that was read inside is printed, as `python -m torch_sink explain` prints it: what is recorded, launches,
    fallbacks with their remedies, and what an image costs at each stage. For it, some batches of each loader
    are made once more, at least 128 samples in a data worker, and measured. Random generators are put back, but for
    those inside of a dataset.

    Args:
        device: "cpu", or a GPU to ask about: "h200", "h100", "a100", "b200" or "rtx4090". Default: this machine's.

    Raises:
        TypeError: the device is no string.
        ValueError: there are no figures for the device.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> with torch_sink.explain("h200"):  # doctest: +SKIP
        ...     for images, labels in DataLoader(dataset, 64):
        ...         pass
    """
    if device is not None and not isinstance(device, str):
        raise TypeError(
            f"torch_sink.explain() of {type(device).__name__} is not known; put `with torch_sink.explain():` around "
            'the code that reads its batches, or name a device, such as torch_sink.explain("h200")'
        )
    command.known_device(device)  # said now, and not after a run of days
    return _explained(device)


@contextmanager
def _explained(device: str | None) -> Iterator[None]:
    watch = _Watch()
    try:
        yield
    except KeyboardInterrupt:  # its user has seen enough of the run
        print(watch.report(device))
        raise
    else:
        print(watch.report(device))
    finally:
        watch.patches.undo()


class _Watch:
    """Notes which loaders are read, by a layer over the functions that begin their iterators."""

    def __init__(self) -> None:
        self.loaders: dict[int, Any] = {}
        self.passes: Counter[int] = Counter()
        self.backends: set[str] = set()
        self.before = ledger.folder, ledger.total()[0]
        self.lock = threading.RLock()  # no worker of another thread starts while the backend is another one
        self.is_inside = False
        self.patches = Patches()
        self.patches.replace(DataLoaderOpener, "open", self._noting(lambda opener: opener.loader))
        self.patches.replace(DataLoader, "__iter__", self._noting(lambda loader: loader))
        if _TORCHDATA in sys.modules:
            self.patches.replace(
                sys.modules[_TORCHDATA].StatefulDataLoader, "__iter__", self._noting(lambda loader: loader)
            )

    def _noting(self, loader_of: Callable[[Any], Any]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        def make(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
            @functools.wraps(stock)
            def begin(owner: Any) -> Any:
                with self.lock:
                    outermost, self.is_inside = not self.is_inside, True  # a SinkLoader reads a copy of its loader
                    try:
                        if outermost:
                            self._note(loader_of(owner))
                        return stock(owner)
                    finally:
                        self.is_inside = not outermost

            return begin

        return make

    def _note(self, loader: Any) -> None:
        self.loaders[id(loader)] = loader
        self.passes[id(loader)] += 1
        self.backends.add(torch_sink.get_image_backend())

    def report(self, device: str | None) -> str:
        """The text of the whole run; what cannot be looked at says why, for the program shall go on."""
        if not self.loaders:
            return "torch_sink.explain(): no DataLoader was read inside of the block; put it around the loop"
        run = command.lines_of("This run", self._about_run())
        with self.lock, ledger.set_aside():
            self.is_inside = True  # what is read from here on is not the program's
            loaders = [*self.loaders.values()]
            parts = [self._look(loader, device) for loader in loaders[:_MOST_LOADERS]]
        more = [f"and {len(loaders) - _MOST_LOADERS} more loaders"] if len(loaders) > _MOST_LOADERS else []
        return "\n\n".join([f"{run.title}\n{run.as_text()}", *parts, *more])

    def _about_run(self) -> list[str]:
        fallbacks = self._fallbacks()
        if "device" not in self.backends and not fallbacks:
            return [_OFF]
        return ["fell back to stock code:", *command.remedies(fallbacks)] if fallbacks else ["no fallbacks"]

    def _fallbacks(self) -> Counter[Row]:
        """Since the block began."""
        folder, counts = self.before
        now = ledger.total()[0]
        return now - counts if ledger.folder == folder else now

    def _look(self, loader: Any, device: str | None) -> str:
        name = f"{type(loader).__name__} of {type(loader.dataset).__name__}"
        draws, generators = global_draws(), find_generators(loader)
        states = generator_states(generators)
        try:
            report = command.report_of(command.explain(pipeline_of(name, loader), device))
            about = [*report.about, f"read {_times(self.passes[id(loader)])} in this run"]
            return report._replace(about=about).as_text()
        except Exception as error:
            again = ", a stream that may be read only once" if isinstance(loader.dataset, IterableDataset) else ""
            return f"Pipeline {name}{again}: it cannot be looked at: {error}"
        finally:
            set_global_draws(draws)
            set_generator_states(generators, states)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
