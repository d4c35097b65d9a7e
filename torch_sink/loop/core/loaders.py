"""The SinkLoaders of a loop: those that it is given, and its own over plain loaders, which it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeGuard

import torch

from torch_sink.common import reference

KEPT = 3  # such as one to train and two to evaluate


class Sink(Protocol):
    """A SinkLoader, as a loop uses it."""

    is_last_epoch: bool

    @property
    def loader(self) -> Any: ...
    @property
    def batches_per_epoch(self) -> int | None: ...
    @property
    def slot_index(self) -> int | None: ...
    def epoch(self, batches: int | None) -> Iterator[Any]: ...
    def static_batches(self, batch: Any) -> dict[int, Any]: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def rehearsal(self) -> AbstractContextManager[Iterator[Any]]: ...
    def whole_pass(self) -> AbstractContextManager[None]: ...
    def give_back(self) -> None: ...
    def wait_for_loader(self) -> bool: ...
    def start_over(self) -> bool: ...
    def state_dict(self, draws: Any = None) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def is_sink(loader: Any) -> TypeGuard[Sink]:
    """Whether a loader is a SinkLoader."""
    from torch_sink.sink import SinkLoader

    return isinstance(loader, SinkLoader)


class Wrappers:
    """SinkLoaders over plain loaders; each waits for the next run or evaluation over the same loader.

    So the slots, the page-locked memory and the graphs that read the slots are made once. The latest few are kept, each
    no longer than its loader lives; a list, to which there are no weak references, is kept with its wrapper.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "meta" else device
        self._waiting: list[tuple[Any, Any]] = []  # a reference to the loader, and its SinkLoader

    @contextmanager
    def over(self, dataset: Any) -> Iterator[Sink]:
        """The dataset itself if it is a SinkLoader, else one over it."""
        from torch_sink.sink import SinkLoader

        if is_sink(dataset):
            yield dataset
            return
        sink = self._take(dataset) or SinkLoader(dataset, device=self._device)
        try:
            yield sink
            if sink.wait_for_loader():
                self._waiting.append((reference(dataset, sink.close), sink))
            else:
                sink.close()
        except BaseException:
            sink.close()
            raise
        for _, oldest in self._waiting[:-KEPT]:
            oldest.close()
        del self._waiting[:-KEPT]

    def close(self) -> None:
        """Give back what the SinkLoaders hold."""
        while self._waiting:
            self._waiting.pop()[1].close()

    def _take(self, dataset: Any) -> Any:
        """The latest one over this very loader, None if there is none or the loader was changed since."""
        self._waiting = [one for one in self._waiting if one[0]() is not None]
        for place, (loader, sink) in reversed([*enumerate(self._waiting)]):
            if loader() is dataset:
                del self._waiting[place]
                if sink.start_over():
                    return sink
                sink.close()
        return None
