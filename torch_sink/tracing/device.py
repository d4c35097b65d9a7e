"""When the device did what was launched: pairs of CUDA events, on the stream that was current."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from torch_sink.tracing.spans import Recorder


class Mark(NamedTuple):
    """The beginning of something that is launched."""

    lane: str
    name: str
    stream: Any
    begin: Any


class DeviceClock:
    """Times launches on CUDA; on other devices it does nothing.

    An event is recorded before and after each launch, about 2 us of the host each; nothing waits until `collect`.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Mark, Any]] = []
        self.is_on = torch.cuda.is_available()
        if self.is_on:
            torch.cuda.synchronize()
            self.training_stream = torch.cuda.current_stream()
            self.origin = self._event(self.training_stream)
            self.origin.synchronize()
            self.origin_nanoseconds = time.perf_counter_ns()

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def begin(self, lane: str, name: str) -> Mark | None:
        """Before something is launched on the current stream; the lane "stream" is found by that."""
        if not self.is_on or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream()
        if lane == "stream":
            lane = "device" if stream == self.training_stream else "copy stream"
        return Mark(lane, name, stream, self._event(stream))

    def end(self, mark: Mark | None) -> None:
        """After it was launched."""
        if mark is not None and not torch.cuda.is_current_stream_capturing():
            self.pairs.append((mark, self._event(mark.stream)))

    def collect(self, recorder: Recorder) -> None:
        """Waits for the device, and adds what it did to the recorder."""
        if not self.is_on:
            return
        torch.cuda.synchronize()
        for mark, end in self.pairs:
            begin, finished = (self.origin_nanoseconds + self._after_origin(event) for event in (mark.begin, end))
            recorder.add(mark.lane, mark.name, begin, finished)

    def _after_origin(self, event: Any) -> int:
        return round(self.origin.elapsed_time(event) * 1e6)
