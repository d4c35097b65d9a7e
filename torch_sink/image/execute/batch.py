"""LazyBatch: what `default_collate` makes of handles: packed bytes and the calls recorded on each image."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_sink.damage.cause import BrokenFile
from torch_sink.damage.policy import POLICIES
from torch_sink.errors import DecodeError, SinkError
from torch_sink.image.core.atoms import Program
from torch_sink.image.core.fallback import report_fallback
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.core.tensor_argument import with_unpacked
from torch_sink.image.decode.providers import decodes_boxes
from torch_sink.image.execute.damage import surviving_rows, try_decode
from torch_sink.image.execute.describe import describe
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.programs import programs_of
from torch_sink.image.execute.run import decoded_images, run_programs
from torch_sink.image.execute.stock import run_image_on_cpu
from torch_sink.image.handles.tensor import METADATA, run_on_real
from torch_sink.image.sources.decoded import Box
from torch_sink.image.sources.source import FinishedSource, Source

# row of the batch -> the programs of its image, one for each pass
ProgramsByRow = dict[int, tuple[Program, ...]]
# What the kernels convert values to, other than the dtype of the batch.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LazyBatch(torch.Tensor):
    """A batch [N, C, H, W] whose values do not exist yet; a `torch.Tensor` on the CPU to whoever asks.

    `to(accelerator)` decodes and transforms there, on the current stream, and returns an ordinary tensor. Any other
    operation gives what it gives on the ordinary CPU tensor.

    Attributes:
        packed: the sources.
        programs: the calls recorded on each image; large arguments of theirs lie among the sources.
        mixes: calls recorded on the whole batch, `MixUp` and `CutMix`.
        destination: device that the backend was set to, as a string; nothing can be executed for "meta".
        interpreted: the kernels run on the CPU under Triton's interpreter.
        broken_files: those whose images were skipped or replaced when it was executed.
    """

    packed: Packed
    programs: tuple[tuple[Op, ...], ...]
    destination: str
    interpreted: bool
    mixes: tuple[Op, ...]
    broken_files: tuple[BrokenFile, ...]
    _viewed: Any = None  # the handle whose memory a batch of one shares, and the calls recorded on it then
    _recorded: tuple[Op, ...] = ()
    _tensor: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: Any,
        packed: Packed,
        programs: tuple[tuple[Op, ...], ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        destination: str = "cpu",
        interpreted: bool = False,
        mixes: tuple[Op, ...] = (),
    ) -> Any:
        batch = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        batch.packed, batch.programs = packed, programs
        batch.destination, batch.interpreted = destination, interpreted
        batch.mixes = mixes
        batch._tensor = None
        return batch

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._follow_view()
        # Protocol 2 is that of torch.save: what it writes has to be readable without this package.
        if protocol == 2 or self._tensor is not None:
            return self.materialize().__reduce_ex__(protocol)
        return LazyBatch, self._fields()

    def _fields(self) -> tuple[Any, ...]:
        shape = tuple(self.shape)
        return self.packed, self.programs, shape, self.dtype, self.destination, self.interpreted, self.mixes

    def view_of(self, handle: Any) -> LazyBatch:
        """This batch, as one of one image that shares its memory with a handle."""
        self._viewed, self._recorded = handle, handle.sink_ops
        return self

    def _follow_view(self) -> None:
        """Takes the values of the image where they were made, or changed in place, since."""
        image = self._viewed
        if self._tensor is None and image is not None and not (image.is_recording and image.sink_ops is self._recorded):
            self._tensor = image.materialize().unsqueeze(0)

    @property
    def is_recording(self) -> bool:
        """False once somebody has asked for the values."""
        self._follow_view()
        return self._tensor is None

    def record_mix(self, op: Op) -> LazyBatch:
        """A new batch with one more call that mixes its images; they run after every image is made."""
        *fields, mixes = self._fields()
        return LazyBatch(*fields, (*mixes, op))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return pickle.loads(pickle.dumps(self)) if self._tensor is None else self._tensor.__deepcopy__(memo)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As of the ordinary tensor. The batch goes on waiting: a debugger's look at it changes nothing."""
        self._follow_view()
        if self._tensor is None and self.destination == "meta":
            return f"LazyBatch(shape={tuple(self.shape)}, dtype={self.dtype}, recorded only)"
        return repr(self._made_on_cpu() if self._tensor is None else self._tensor)

    # --- moving

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As `Tensor.to`; a move to an accelerator decodes and transforms there."""
        self._follow_view()
        device, dtype, memory_format = _parsed_to(*args, **kwargs)
        if device is None or self._tensor is not None or (device.type == "cpu" and not self.interpreted):
            return self.materialize().to(*args, **kwargs)
        if device.type == "meta":
            return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")
        wanted = {} if memory_format is None else {"memory_format": memory_format}
        return self.__torch_sink_execute__(device, dtype=dtype, **wanted)[0]  # type: ignore[arg-type]

    def cuda(self, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As `Tensor.cuda`."""
        target = torch.device("cuda") if device is None else torch.device(device)
        return self.to(target, non_blocking=non_blocking, **kwargs)

    def pin_memory(self, device: Any = None) -> LazyBatch:  # type: ignore[override]
        """The same batch with its bytes in pinned memory; unchanged where there is no accelerator."""
        if not torch.accelerator.is_available() or self._tensor is not None:
            return self
        return LazyBatch(self.packed._replace(blob=self.packed.blob.pin_memory()), *self._fields()[1:])

    def is_pinned(self, device: Any = None) -> bool:  # type: ignore[override]
        """True when the bytes lie in pinned memory."""
        return torch.accelerator.is_available() and self.packed.blob.is_pinned()

    # --- executing

    def __torch_sink_execute__(
        self,
        device: torch.device | str,
        *,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        out: torch.Tensor | None = None,
        on_decode_error: str = "raise",
    ) -> tuple[torch.Tensor, list[int] | None]:
        """Decodes and transforms on `device`, on its current stream.

        Args:
            device: where; "cpu" runs stock code, or the kernels under Triton's interpreter.
            dtype: of the result; default the batch's own.
            memory_format: of a new result.
            out: written to instead of a new tensor, [N, C, H, W].
            on_decode_error: "raise", "skip" a damaged image, or "replace" it by the next good one of the batch.

        Returns:
            The tensor, and where images were skipped or replaced the original positions that its rows show.

        Raises:
            DecodeError: a file is damaged and the policy is "raise", or no image of the batch is good.
        """
        if on_decode_error not in POLICIES:
            raise ValueError(f"on_decode_error must be one of {POLICIES}, got {on_decode_error!r}")
        self._refuse_meta()
        self._follow_view()
        device = torch.device(device)
        if self._tensor is not None:
            real = self._tensor.to(device, dtype or self.dtype, memory_format=memory_format)
            return (real if out is None else out.copy_(real)), None
        in_kernels = device.type != "cpu" or self.interpreted
        return self._make(device, in_kernels, dtype, memory_format, out, on_decode_error)

    def _make(
        self,
        device: torch.device,
        in_kernels: bool,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        out: torch.Tensor | None = None,
        on_decode_error: str = "raise",
    ) -> tuple[torch.Tensor, list[int] | None]:
        sources = self.packed.sources()
        programs = self._programs(sources) if in_kernels else {}
        results = self._decoded(sources, programs, device) if in_kernels else [try_decode(item) for item in sources]
        images = [results[at] for at in self.packed.entry_of_image]
        errors = {row: image for row, image in enumerate(images) if isinstance(image, DecodeError)}
        for _ in self.mixes:
            # Each image takes a part of the one before it, damage included.
            errors |= {(row + 1) % len(images): error for row, error in errors.items()}
        rows = surviving_rows(len(images), errors, on_decode_error)
        self.broken_files = tuple(
            BrokenFile(image.path, image.reason) for image in images if isinstance(image, DecodeError)
        )
        if out is None:
            shape = (len(rows), *self.shape[1:])
            out = torch.empty(shape, dtype=dtype or self.dtype, device=device, memory_format=memory_format)
        out = out[: len(rows)]
        if self.mixes:
            whole = torch.zeros(tuple(self.shape), dtype=self.dtype, device=device)
            intact = [row for row, image in enumerate(images) if not isinstance(image, DecodeError)]
            self._fill(images, programs, intact, intact, whole, in_kernels)
            out.copy_(replay(whole, self.mixes)[rows] if errors else replay(whole, self.mixes))
        else:
            # Half precision is made as such, for what is asked for may be wider; the kernels write no other integers.
            converts = self.dtype.itemsize != 2 and out.dtype in _FLOATS
            is_written = converts or out.dtype == self.dtype or not in_kernels
            made = out if is_written else torch.empty_like(out, dtype=self.dtype)
            self._fill(images, programs, rows, list(range(len(rows))), made, in_kernels)
            if made is not out:
                out.copy_(made)
        return out, (rows if errors else None)

    def _programs(self, sources: Sequence[Source]) -> ProgramsByRow:
        """The programs of each image that is no finished tensor."""
        images = [sources[at] for at in self.packed.entry_of_image]
        rows = [row for row, image in enumerate(images) if not isinstance(image, FinishedSource)]
        lowered = programs_of([images[row] for row in rows], [self._calls(row) for row in rows], self.dtype)
        return dict(zip(rows, lowered, strict=True))

    def _decoded(self, sources: list[Source], programs: ProgramsByRow, device: torch.device) -> list[Any]:
        """Pixels of every source; of one that only crops are made of, those that they read."""
        boxes: list[Box | None] = [None] * len(sources)
        if programs and decodes_boxes(device):
            from torch_sink.image.plan.regions import boxes_read

            entries = [self.packed.entry_of_image[row] for row in programs]
            sizes = [sources[entry].size for entry in entries]  # type: ignore[union-attr]
            boxes = boxes_read(sizes, [passes[0] for passes in programs.values()], entries, len(sources))
        return decoded_images(self.packed, sources, device, boxes)

    def _fill(
        self,
        images: list[Any],
        programs: ProgramsByRow,
        rows: list[int],
        places: list[int],
        out: torch.Tensor,
        in_kernels: bool,
    ) -> None:
        """Makes images `rows` of the batch at `places` of `out`."""
        decoded, chosen, targets = [], [], []
        for row, place in zip(rows, places, strict=True):
            if not in_kernels:
                run_image_on_cpu(images[row], self._calls(row), out[place])
            elif isinstance(images[row], FinishedSource):
                out[place].copy_(images[row].tensor, non_blocking=True)
            else:
                targets.append(place)
                decoded.append(images[row])
                chosen.append(programs[row])
        if targets:
            run_programs(decoded, chosen, targets, out)

    def _calls(self, row: int) -> tuple[Op, ...]:
        """The calls recorded on an image, with the tensors among their arguments."""
        return with_unpacked(self.programs[row], self.packed.blob)

    def materialize(self) -> torch.Tensor:
        """The ordinary CPU tensor, made once, in stock code."""
        if self._tensor is None:
            self._refuse_meta()
            report_fallback("batch", "used on the CPU before it was moved to the device", "torch")
            viewed = self._viewed
            self._tensor = self._made_on_cpu() if viewed is None else viewed.materialize().unsqueeze(0)
        return self._tensor

    def _made_on_cpu(self) -> torch.Tensor:
        return self._make(torch.device("cpu"), in_kernels=False)[0]

    def _refuse_meta(self) -> None:
        if self.destination == "meta":
            raise SinkError(
                'this batch was recorded with device="meta": it has a shape and a plan, but no pixels can be made; '
                "set the backend with a real device"
            )

    @property
    def plan(self) -> Any:
        """What will run where; `print(batch.plan)` shows it. Builds the plan of this batch, executes nothing."""
        sources = self.packed.sources()
        images = [sources[at] for at in self.packed.entry_of_image]
        programs = [self._calls(row) for row in range(len(images))]
        return describe(images, programs, torch.device(self.destination))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and args[0]._tensor is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _run_on_real(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run_on_real(func, args, kwargs or {})


# A handle answers these three as properties of its own.
_METADATA = METADATA | {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim")}


def _run_on_real(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = run_on_real(func, args, kwargs, LazyBatch)
    if not isinstance(result, LazyBatch):
        return result
    # A call in place gives back the object that the caller holds; one that changed nothing, an ordinary tensor.
    name = getattr(func, "__name__", "").partition(".")[0]
    return result if name.startswith("__i") or name.rstrip("_") + "_" == name else result.materialize()


def _parsed_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """(device, dtype, memory format) of the arguments of `Tensor.to`; torch's own parser knows no `copy`."""
    by_position = 3 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 4
    if len(args) == by_position and "copy" not in kwargs:
        args = args[:-1]
    kwargs.pop("copy", None)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, memory_format
