"""Forward passes without gradients, compiled and captured as training steps are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from torch_sink.loop.core.batches import batch_tensors
from torch_sink.loop.core.history import first_line
from torch_sink.loop.core.host_sync import user_place
from torch_sink.loop.engines import build
from torch_sink.loop.engines.launched import CompiledLoss
from torch_sink.loop.engines.recordings import Recordings

_log = logging.getLogger("torch_sink")


class Inference:
    """How a function of a batch runs without gradients: `forward`, compiled if the mode says so.

    A recording holds the addresses of the model's parameters and buffers. Once something could not be captured, the
    mode is the next lower one.
    """

    def __init__(self, forward: Callable[[Any], Any], model: nn.Module, settings: build.Settings) -> None:
        self.model, self.reasons, self.device = model, settings.reasons, settings.device
        self.mode, self._lower_mode = build.resolve_modes(model, settings)
        compiles = self._lower_mode == "compile"
        self.forward = CompiledLoss(forward, model, settings.jit_config, self.reasons) if compiles else forward

    def step_down(self, error: Exception) -> None:
        """Something could not be captured: run in the lower mode from now on."""
        self.mode = self._lower_mode
        text = f"forward passes cannot be captured, so they run in mode {self.mode!r}: {first_line(error)}"
        self.reasons.note(f"{text} (at {user_place(error)})")
        _log.warning(text)


class Runner:
    """Calls a function of a batch, which calls `inference.forward`; in mode "graph" recorded once a slot, and replayed.

    Where it `reuses_results`, what a call returns is valid until the next one. All is recorded anew when parameters or
    buffers have moved.
    """

    def __init__(self, function: Callable[[Any], Any], inference: Inference) -> None:
        self._function, self._inference = function, inference
        # Its own: to forget the recordings of one runner leaves those of the others.
        self._capture = build.make_capture(inference.device) if inference.mode == "graph" else None
        self._recordings = Recordings(self._capture, inference.reasons) if self._capture is not None else None
        self.reuses_results = self._recordings is not None
        self._places: list[int] = []

    @contextmanager
    def running(self, loader: Any, *, stays: bool) -> Iterator[None]:
        """Context of the calls for the batches of a SinkLoader, or None; if it stays, it pays to record its slots."""
        if self._capture is None or self._recordings is None:
            yield
            return
        model = self._inference.model
        places = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
        if self._recordings and places != self._places:
            self._recordings.forget()
        self._places = places
        self._recordings.attach(loader, reads_slots=stays)
        with self._capture.stream():
            yield

    def __call__(self, batch: Any) -> Any:
        if self._recordings is None or self._inference.mode != "graph":
            return self._function(batch)
        found = self._recordings.find(batch, batch_tensors(batch))
        if found is None:
            return self._function(batch)
        slot, batch, replay = found
        return (replay or self._record(self._recordings, slot, batch) or partial(self._function, batch))()

    def close(self) -> None:
        """Release what the device holds."""
        if self._recordings is not None:
            self._recordings.forget()

    def _record(self, recordings: Recordings, slot: Any, batch: Any) -> Callable[[], Any] | None:
        result: list[Any] = []

        def function(batch: Any) -> None:
            result[:] = [self._function(batch)]

        try:
            recorded = recordings.record(function, {slot: batch})[slot]
        except Exception as error:
            self._inference.step_down(error)
            recordings.forget()
            return None

        def replay() -> Any:
            recorded()
            return result[0]

        recordings.keep({slot: replay}, {slot: batch})
        return replay
