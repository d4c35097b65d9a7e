"""Forward passes without gradients, in the modes of training: eager, compiled, or captured once a ring slot."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.core.host_sync import host_sync_allowed, user_place
from torch_sink.loop.core.reasons import Reasons
from torch_sink.loop.engines import build
from torch_sink.loop.engines.capture import Capture
from torch_sink.loop.engines.compiled import CompiledLoss, UsualShape, batch_signature
from torch_sink.loop.engines.jit import JitConfig
from torch_sink.loop.step.step import batch_leaves, batch_tensors

_log = logging.getLogger("torch_sink")
STAGED = "staged"


@dataclass(frozen=True)
class InferenceSettings:
    """How forward passes run.

    Attributes:
        mode: as asked for; see StepLoop.
        jit_config: how to compile.
        device: of the model.
        reasons: told what ran in a lower mode, and why.
    """

    mode: str
    jit_config: JitConfig
    device: torch.device
    reasons: Reasons = field(default_factory=Reasons)


class Inference:
    """How a function of a batch runs without gradients.

    Attributes:
        mode: "eager", "compile" or "graph"; a lower one once something could not be captured.
        forward: the function, compiled if the mode says so.

    Args:
        forward: the part that may be compiled.
        model: its parameters and buffers are what a recording holds the addresses of.
        settings: how it runs.
    """

    def __init__(self, forward: Callable[[Any], Any], model: nn.Module, settings: InferenceSettings) -> None:
        self.model, self.reasons, self._device = model, settings.reasons, settings.device
        capture = build.make_capture(settings.device)
        mode = build.possible_mode(settings.mode, settings.device, settings.jit_config, self.reasons, capture)
        self.lower_mode = "eager"
        if mode != "eager":
            self.lower_mode = build.compile_or_eager(model, settings.jit_config, self.reasons)
        self.mode = "graph" if mode == "graph" else self.lower_mode
        function: Any = forward
        compiles = self.lower_mode == "compile"
        self.forward: Callable[[Any], Any] = (
            CompiledLoss(function, model, settings.jit_config, self.reasons) if compiles else function
        )

    def runner(self, step: Callable[[Any], Any]) -> Runner:
        """Calls of `step`, which calls `forward`; recorded if the mode is "graph"."""
        capture = build.make_capture(self._device)  # its own: to forget one runner's recordings leaves the others'
        if capture is None or self.mode != "graph":
            return Runner(step)
        return RecordedRunner(step, self, capture)

    def step_down(self, error: Exception) -> None:
        """Something could not be captured: run in the lower mode from now on."""
        self.mode = self.lower_mode
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        text = f"forward passes cannot be captured, so they run in mode {self.mode!r}: {type(error).__name__}: {line}"
        self.reasons.note(f"{text} (at {user_place(error)})")
        _log.warning(text)


class Runner:
    """Calls a function of a batch. What a call returns is valid until the next one."""

    reuses_results = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def running(self, loader: Any, *, stays: bool) -> AbstractContextManager[Any]:
        """Context of the calls for a loader's batches.

        Args:
            loader: a SinkLoader, or None.
            stays: whether its slots will be read again, so that recordings of them pay.
        """
        return nullcontext()

    def __call__(self, batch: Any) -> Any:
        return self._function(batch)

    def close(self) -> None:
        """Release what the device holds."""


class RecordedRunner(Runner):
    """Records the function once per ring slot and replays it.

    The first batch of a shape runs unrecorded: libraries set themselves up, and the compiler works. A batch that lies
    in no static slot is copied to one place first. Batches of other shapes than the usual one run unrecorded. When
    parameters or buffers have moved, or another ring is read, everything is recorded anew.
    """

    reuses_results = True

    def __init__(self, function: Callable[[Any], Any], inference: Inference, capture: Capture) -> None:
        super().__init__(function)
        self._inference, self._capture = inference, capture
        self._shape = UsualShape()
        self._recordings: dict[Any, tuple[Any, Callable[[], None], list[Any]]] = {}
        self._staging: Any = None
        self._places: list[int] = []
        self._ring: weakref.ref[Any] | None = None
        self._slot: Callable[[], Any] = lambda: None
        self._pause: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def running(self, loader: Any, *, stays: bool) -> Iterator[None]:
        model = self._inference.model
        places = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
        is_other_ring = stays and self._ring is not None and self._ring() is not loader
        if self._recordings and (places != self._places or is_other_ring):
            self.close()
        self._places = places
        self._pause = getattr(loader, "paused", nullcontext)
        if stays:
            self._ring = weakref.ref(loader)
        self._slot = (lambda: loader.slot_index) if stays else (lambda: None)
        with self._capture.stream():
            yield

    def __call__(self, batch: Any) -> Any:
        if self._inference.mode != "graph":
            return self._function(batch)
        signature = batch_signature(batch), tuple(leaf for leaf in batch_leaves(batch) if not isinstance(leaf, Tensor))
        is_known = self._shape.knows(signature)
        if not self._shape.accepts(signature):
            self._inference.reasons.count(
                "batches of another shape or with other numbers than the usual ones ran uncaptured"
            )
            return self._function(batch)
        return self._replay(batch) if is_known else self._function(batch)

    def close(self) -> None:
        self._recordings.clear()
        self._staging = None
        self._capture.reset()

    def _replay(self, batch: Any) -> Any:
        tensors, slot = batch_tensors(batch), self._slot()
        places = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
        known = self._recordings.get(slot) if slot is not None else None
        if slot is None or (known is not None and known[0] != places):
            slot, places = STAGED, []
            batch = self._staged(batch, tensors)
            known = self._recordings.get(slot)
        if known is None:
            known = self._record(slot, places, batch)
        if known is None:
            return self._function(batch)
        known[1]()
        return known[2][0]

    def _staged(self, batch: Any, tensors: list[Tensor]) -> Any:
        if self._staging is None:
            self._staging = torch.utils._pytree.tree_map_only(Tensor, torch.clone, batch)
        for target, source in zip(batch_tensors(self._staging), tensors, strict=True):
            target.copy_(source, non_blocking=True)
        return self._staging

    def _record(self, slot: Any, places: Any, batch: Any) -> Any:
        result: list[Any] = []

        def function() -> None:
            result[:] = [self._function(batch)]

        try:
            with host_sync_allowed(), self._pause():
                replay = self._capture.record(function)
        except Exception as error:
            self._inference.step_down(error)
            self.close()
            return None
        self._recordings[slot] = places, replay, result
        return self._recordings[slot]
