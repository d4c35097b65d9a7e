"""`with torch_sink.explain():` prints the report of the command `explain` on the loaders that a program reads."""

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
from torch_sink.common.arguments import explains_wrong_calls
from torch_sink.common.patches import Patches
from torch_sink.common.random_state import (
    find_generators,
    generator_states,
    global_draws,
    set_generator_states,
    set_global_draws,
)
from torch_sink.common.ranks import speaks
from torch_sink.damage.report import Policy
from torch_sink.image.core.fallback import ledger
from torch_sink.sink.openers import DataLoaderOpener

_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_MOST_LOADERS = 4
_OFF = 'the image backend was off: torch_sink.set_image_backend("device") switches it on; below is what it would do'


@explains_wrong_calls()
def explain(device: str | None = None) -> AbstractContextManager[None]:
    """A context that prints what torch_sink does, or would do, with the batches of a program.

    Put `with torch_sink.explain():` around a loop over a DataLoader or a SinkLoader, or around `loop.run(...)`, with
    the image backend on or off. The code inside runs unchanged. At the end, or after Ctrl-C, this prints a report on
    each of the first four DataLoaders that were read inside, as `python -m torch_sink explain` does: recorded
    operations, launches, fallbacks with their remedies, and what a data worker costs here. For the report, a data
    worker makes batches of each loader again: six times four batches to warm up, and then at least 64 samples. Random
    generators are restored, except those inside a dataset.

    Args:
        device: where the pixels would be made: "cuda" for a GPU, which this machine need not have, or "cpu". The name
            of a GPU, such as "h200", means the same as "cuda". Default: what this machine has.

    Raises:
        TypeError: the device is no string.
        ValueError: it is none of these.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> with torch_sink.explain("cuda"):  # doctest: +SKIP
        ...     for images, labels in DataLoader(dataset, 64):
        ...         pass
    """
    if device is not None and not isinstance(device, str):
        raise TypeError(
            f"torch_sink.explain() of {type(device).__name__} is not known; put `with torch_sink.explain():` around "
            'the code that reads its batches, or name a device: torch_sink.explain("cuda")'
        )
    command.known_device(device)  # an unknown device raises now, and not after a long run
    return _explained(device)


@contextmanager
def _explained(device: str | None) -> Iterator[None]:
    watch = _Watch()
    try:
        yield
    except KeyboardInterrupt:  # the user ends the run to see the report
        watch.show_report(device)
        raise
    else:
        watch.show_report(device)
    finally:
        watch.patches.undo()


class _Watch:
    """Notes which loaders are read, by stand-ins for the functions that make their iterators."""

    def __init__(self) -> None:
        self.loaders: dict[int, Any] = {}
        self.policies: dict[int, Policy | None] = {}  # of the SinkLoaders that read them
        self.passes: Counter[int] = Counter()
        self.backends: set[str] = set()
        self.before = ledger.report, ledger.total()[0]
        self.lock = threading.RLock()  # no other thread starts workers while the report changes the backend
        self.is_inside = False
        self.patches = Patches()
        self.patches.replace(DataLoaderOpener, "open", self._noting)
        self.patches.replace(DataLoader, "__iter__", self._noting)
        if _TORCHDATA in sys.modules:
            self.patches.replace(sys.modules[_TORCHDATA].StatefulDataLoader, "__iter__", self._noting)

    def _noting(self, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Makes the stand-in for a function that takes a loader, or an opener of one."""

        @functools.wraps(stock)
        def begin(owner: Any) -> Any:
            with self.lock:
                outermost, self.is_inside = not self.is_inside, True  # a SinkLoader reads a copy of its loader
                try:
                    if outermost:
                        loader = owner.loader if isinstance(owner, DataLoaderOpener) else owner
                        self.loaders[id(loader)] = loader
                        self.policies[id(loader)] = getattr(owner, "policy", None)
                        self.passes[id(loader)] += 1
                        self.backends.add(torch_sink.get_image_backend())
                    return stock(owner)
                finally:
                    self.is_inside = not outermost

        return begin

    def show_report(self, device: str | None) -> None:
        if speaks():  # the loaders of the other ranks are of the same kind
            print(self.report(device))

    def report(self, device: str | None) -> str:
        """The text of all reports; an error in one of them becomes text, because the program has to go on."""
        if not self.loaders:
            return "torch_sink.explain(): no DataLoader was read inside of the block; put it around the loop"
        name, counts = self.before
        report = torch_sink.fallback_report()
        now = report.counts
        fallbacks = now - counts if ledger.report == name else now  # those since the block began
        about = ["fell back to stock code:", *command.remedies(fallbacks)] if fallbacks else []
        about += report.said_of_origins[:1] or ([] if fallbacks else ["no fallbacks"])  # the rest stands below
        run = command.lines_of("This run", about if fallbacks or "device" in self.backends else [_OFF])
        with self.lock, ledger.set_aside():
            self.is_inside = True  # loaders are read for the report from here on
            loaders = [*self.loaders.values()]
            parts = [self._look(loader, device) for loader in loaders[:_MOST_LOADERS]]
        left = len(loaders) - _MOST_LOADERS
        more = [f"and {left} more loader{'s' * (left > 1)}"] if left > 0 else []
        return "\n\n".join([f"{run.title}\n{run.as_text()}", *parts, *more])

    def _look(self, loader: Any, device: str | None) -> str:
        name = f"{type(loader).__name__} of {type(loader.dataset).__name__}"
        draws, generators = global_draws(), find_generators(loader)
        states = generator_states(generators)
        try:
            report = command.report_of(command.explain(pipeline_of(name, loader, self.policies[id(loader)]), device))
            passes = self.passes[id(loader)]
            about = [*report.about, f"read {'once' if passes == 1 else f'{passes} times'} in this run"]
            return report._replace(about=about).as_text()
        except Exception as error:
            again = ", a stream that may be read only once" if isinstance(loader.dataset, IterableDataset) else ""
            return f"Pipeline {name}{again}: it cannot be looked at: {error}"
        finally:
            set_global_draws(draws)
            set_generator_states(generators, states)
