"""`data_sink`: binds a step function to a dataset, so that one call runs many steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch_sink.common.arguments import check_count, explains_wrong_calls
from torch_sink.loop.core.batches import call_with
from torch_sink.loop.engines.jit import JitConfig, jit_with

_END = object()
# id of a SinkLoader -> the DataSink that uses it, and keeps it alive.
_bound: weakref.WeakValueDictionary[int, DataSink] = weakref.WeakValueDictionary()


@explains_wrong_calls()
def data_sink(
    fn: Callable[..., Any], dataset: Any, sink_size: int = 1, jit_config: JitConfig | None = None
) -> DataSink:
    """Bind a step function to a dataset.

    Args:
        fn: the whole step, optimizer included; called as `fn(*batch)`.
        dataset: a loader or SinkLoader, which is read over and over; a call continues where the last one ended. A
            SinkLoader can be bound to one function at a time, until the result is closed or collected.
        sink_size: steps per call, at least 1.
        jit_config: how to compile `fn`; None does not compile it.

    Returns:
        A function without arguments that runs `sink_size` steps and returns the last step's output.

    Raises:
        TypeError, ValueError: an argument that cannot be used, such as a SinkLoader that another function is bound to.

    Examples:
        >>> import torch
        >>> step = data_sink(lambda x: x.sum(), [torch.ones(2), torch.zeros(2)], sink_size=3)
        >>> float(step()), float(step())
        (2.0, 0.0)
    """
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; pass a function of a batch's members")
    check_count("sink_size", sink_size, minimum=1)
    if jit_config is not None and not isinstance(jit_config, JitConfig):
        raise TypeError(f"jit_config is a {type(jit_config).__name__}; pass a torch_sink.JitConfig")
    return DataSink(fn, dataset, sink_size, jit_config)


class DataSink:
    """The result of `data_sink`: call it to run steps; `close()` stops the queue."""

    def __init__(self, fn: Callable[..., Any], dataset: Any, sink_size: int, config: JitConfig | None) -> None:
        from torch_sink.sink import SinkLoader

        self._function = fn if config is None else jit_with(fn, config)
        self._sink_size, self._own = sink_size, not isinstance(dataset, SinkLoader)
        self._loader = SinkLoader(dataset) if self._own else dataset
        if _bound.setdefault(id(self._loader), self) is not self:  # two functions would share its batches
            raise ValueError(
                "the SinkLoader is bound to another function; close() that data_sink first, or make another"
            )
        self._batches: Iterator[Any] = iter(())

    def __call__(self) -> Any:
        for _ in range(self._sink_size):
            while (batch := next(self._batches, _END)) is _END:
                batches = self._loader.batches_per_epoch
                self._batches = self._loader._epoch(batches, goes_on=True, numbers_passes=True)
            output = call_with(self._function, batch)
        return output

    def close(self) -> None:
        """Stop the queue, unless it belongs to a SinkLoader of the user. Idempotent."""
        if self._own:
            self._loader.close()
        if _bound.get(id(self._loader)) is self:
            del _bound[id(self._loader)]
