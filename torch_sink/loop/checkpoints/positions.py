"""Remembers the loader of a run, so that `save` and `resume` may be given what `run` was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class LoaderPositions:
    """`run` wraps a plain loader in a SinkLoader of its own; the position is that of the wrapper."""

    def __init__(self) -> None:
        self._given: Any = None
        self._sink: Any = None
        self._state: Any = None
        self._last: Any = None

    @contextmanager
    def opened(self, given: Any, device: torch.device, epoch_size: int) -> Iterator[Any]:
        """The SinkLoader of a run: the given one, or a wrapper, which gets the state that was loaded for `given`.

        Args:
            given: what `run` was given.
            device: of a wrapper.
            epoch_size: batches in an epoch of a wrapper; -1 for one pass.
        """
        with sink_over(given, device, epoch_size) as sink:
            if sink is given:
                self._given, self._sink, self._state = given, sink, None
                yield sink
                return
            if given is self._given and self._sink is None and self._state is not None:
                sink.load_state_dict(self._state)
            self._given, self._sink, self._state = given, sink, None
            try:
                yield sink
            finally:
                self._closed()

    def state(self, loader: Any) -> Any:
        """Position of `loader`, None if it has none yet."""
        if hasattr(loader, "slot_index"):
            return loader.state_dict()
        if loader is not self._given:
            return None
        if self._sink is not None:
            return self._sink.state_dict()
        return self._state if self._state is not None else self._last

    def load(self, loader: Any, state: Any) -> None:
        """Put a position back, now or when a run wraps the loader."""
        if hasattr(loader, "slot_index"):
            loader.load_state_dict(state)
        else:
            self._given, self._sink, self._state = loader, None, state

    def _closed(self) -> None:
        """The run's own wrapper is about to be closed: keep its position for a later `save`, not for a later run."""
        self._state = None
        try:
            self._last = self._sink.state_dict()
        except Exception:  # a loader that failed may have no state; the run's own error is what counts
            self._last = None
        self._sink = None


@contextmanager
def sink_over(dataset: Any, device: torch.device, epoch_size: int = -1) -> Iterator[Any]:
    """The dataset itself if it is a SinkLoader, else a SinkLoader over it."""
    from torch_sink.sink import SinkLoader

    if isinstance(dataset, SinkLoader):
        yield dataset
    else:
        target = None if device.type == "meta" else device
        with SinkLoader(dataset, sink_size=epoch_size, device=target) as sink:
            yield sink
