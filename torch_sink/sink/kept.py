"""The loaders of a training, SinkLoaders and plain ones: opened for a run or a pass, at positions that can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from torch_sink.common import reference
from torch_sink.common.epochs import epochs_in, set_epochs
from torch_sink.common.integrations import inner_loader
from torch_sink.common.random_state import Draws
from torch_sink.sink.loader import SinkLoader

KEPT = 3  # plain loaders, such as one to train and two to evaluate


class _Plain:
    """A plain loader: the SinkLoaders over it that nobody uses now, and where a training stands in it.

    Attributes:
        loader: a weak reference; with the loader its SinkLoaders are closed.
        sinks: the SinkLoaders, the one that was used last at the end.
        in_run: the SinkLoader of the run under way.
        state: the position where no run is under way; None if it has none.
        is_loaded: whether `state` was loaded, so that the next run begins there.
    """

    def __init__(self, loader: Any) -> None:
        self.sinks: list[SinkLoader] = []
        self.loader = reference(loader, partial(_close, self.sinks))
        self.in_run: SinkLoader | None = None
        self.state: dict[str, Any] | None = None
        self.is_loaded = False

    def take(self) -> SinkLoader | None:
        """The SinkLoader that was used last, made as new; None if there is none, or if the loader was changed since."""
        while self.sinks:
            sink = self.sinks.pop()
            if sink._take_up():
                return sink
            sink.close()
        return None


class KeptLoaders:
    """Opens loaders. For a plain one it keeps a SinkLoader over it, and the position of the latest run.

    So slots, page-locked memory and the graphs that read the slots are made only once, and `save` and `resume` take the
    loader that `run` takes. The latest few loaders are kept, and the one that was trained on last, each as long as it
    lives. A list supports no weak references, so it lives as long as it is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "meta" else device
        self._known: list[_Plain] = []  # the latest at the end
        self._trained_on: _Plain | None = None

    @contextmanager
    def over(self, loader: Any) -> Iterator[SinkLoader]:
        """A context with the loader itself if it is a SinkLoader, else with a SinkLoader over it, at its beginning."""
        if isinstance(loader, SinkLoader):
            yield loader
            return
        sink = self._find(loader).take()
        if sink is None:  # bool() would ask for its length, which a stream may not have
            sink = SinkLoader(loader, device=self._device)
        try:
            yield sink
            if sink._set_aside():
                self._find(loader).sinks.append(sink)
            else:
                sink.close()
        except BaseException:
            sink.close()
            raise

    @contextmanager
    def in_run(self, loader: Any) -> Iterator[SinkLoader]:
        """As `over`, for a run: at the position that was loaded for a plain loader, or else at its beginning."""
        with self.over(loader) as sink:
            if sink is loader:
                yield sink
                return
            self._trained_on = plain = self._find(loader)
            if plain.is_loaded and plain.state is not None:
                sink.load_state_dict(plain.state)
            plain.in_run, plain.state, plain.is_loaded = sink, None, False
            try:
                yield sink
            finally:
                plain.in_run = None
                if not plain.is_loaded:  # the SinkLoader will start over, and its position may be saved later
                    with suppress(Exception):  # a loader that failed may have no position
                        plain.state = sink.state_dict()

    def position(self, loader: Any, draws: Draws | None = None) -> dict[str, Any] | None:
        """Where a training stands in the loader, as `SinkLoader.state_dict` says; None if it is not known."""
        if isinstance(loader, SinkLoader):
            return loader._position(draws)
        plain = next((one for one in self._known if one.loader() is loader), None)
        if plain is None or plain.in_run is None or plain.is_loaded:
            return None if plain is None else plain.state
        return plain.in_run._position(draws)

    def load(self, loader: Any, state: dict[str, Any], undo: ExitStack) -> None:
        """Goes to a position, with a plain loader in its next run; `undo` gets what goes back to the present one.

        What has `set_epoch` is told its epoch now, so that the program may still set another.
        """
        if isinstance(loader, SinkLoader):
            before: Any = loader.state_dict()
            loader.load_state_dict(state)
            undo.callback(loader.load_state_dict, before)
        else:
            self._trained_on = plain = self._find(loader)
            undo.callback(vars(plain).update, dict(vars(plain)))
            plain.state, plain.is_loaded = state, True
        wrapped = inner_loader(loader.loader if isinstance(loader, SinkLoader) else loader)
        undo.callback(set_epochs, wrapped, set_epochs(wrapped, epochs_in(state)))

    def stay(self, loader: Any) -> None:
        """Make the next run go on where this one stands."""
        if (state := self.position(loader)) is not None:
            self.load(loader, state, ExitStack())

    def close(self) -> None:
        """Close the SinkLoaders that nobody uses."""
        for plain in self._known:
            _close(plain.sinks)

    def _find(self, loader: Any) -> _Plain:
        """What is known of a plain loader, which is now the latest; the oldest is forgotten."""
        plain = next((one for one in self._known if one.loader() is loader), None) or _Plain(loader)
        self._known = [*(one for one in self._known if one is not plain and one.loader() is not None), plain]
        for oldest in self._known[:-KEPT]:
            if oldest is not self._trained_on:
                _close(oldest.sinks)
                self._known.remove(oldest)
        return plain


def _close(sinks: list[SinkLoader]) -> None:
    while sinks:
        sinks.pop().close()
