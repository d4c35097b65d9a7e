"""LazyBatch, which `default_collate` makes of handles: packed bytes and the calls recorded on each image."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from torch_sink.damage.report import POLICIES, BrokenFile
from torch_sink.errors import SinkError
from torch_sink.image.core.fallback import report_fallback
from torch_sink.image.core.ops import Op
from torch_sink.image.handles.lazy import Lazy, without_memory
from torch_sink.image.handles.names import named_as, stays, unpickled
from torch_sink.image.program.program import Program, Wanted
from torch_sink.image.run.device import make_on_device
from torch_sink.image.run.proof import kernels_make
from torch_sink.image.run.stock import make_for_device, make_in_stock_code


@named_as(torch.Tensor)
class LazyBatch(Lazy, torch.Tensor):  # type: ignore[misc]
    """A batch [N, C, H, W] whose values do not exist yet; to programs a `torch.Tensor` on the CPU.

    `to(accelerator)` decodes and transforms there, on the current stream, and returns an ordinary tensor. Any other
    operation gives what it gives on the ordinary CPU tensor.

    Attributes:
        program: the sources, the calls, and how kernels make the batch.
        broken_files: files whose images were skipped or replaced when the batch was executed.
    """

    calls: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {}  # filled in `stack`
    lazy_class: ClassVar[tuple[str, str]]
    program: Program
    broken_files: tuple[BrokenFile, ...]
    lazy_base: Any = None  # the handle whose memory a batch of one shares
    fields = frozenset(("program", "broken_files", "lazy_base", "lazy_real"))

    @staticmethod
    def __new__(cls: Any, program: Program) -> Any:
        batch = without_memory(cls, torch.Size(program.shape), program.dtype)
        batch.program = program
        return batch

    def __init__(self, program: Program) -> None:
        super().__init__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol) or not self.is_recording:
            return self.materialize().__reduce_ex__(protocol)
        return unpickled, (self.lazy_class, self.program)

    @property
    def is_recording(self) -> bool:
        """False once the values were made."""
        return self.lazy_real is None

    def record_mix(self, op: Op) -> LazyBatch:
        """A new batch with one more call that mixes its images; mixes run after every image is made."""
        return LazyBatch(self.program._replace(mixes=(*self.program.mixes, op)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return pickle.loads(pickle.dumps(self)) if self.is_recording else self.materialize().__deepcopy__(memo)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The text of the ordinary tensor. The batch keeps recording, so showing it in a debugger changes nothing."""
        if self.is_recording and self.program.destination == "meta":
            return f"LazyBatch(shape={tuple(self.shape)}, dtype={self.dtype}, recorded only)"
        return repr(self._made_on_cpu() if self.is_recording else self.materialize())

    def as_subclass(self, cls: type) -> Any:
        """The values as another tensor type; for `torch.Tensor`, the batch itself."""
        return self if cls is torch.Tensor else self.materialize().as_subclass(cls)

    # --- moving

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As `Tensor.to`; a move to an accelerator decodes and transforms there."""
        device, dtype, memory_format = parsed_to(*args, **kwargs)
        if device is None and len(args) < 2 and "copy" not in kwargs and self._is_already(dtype, memory_format):
            return self
        if device is None or not self.is_recording or (device.type == "cpu" and not self.program.interpreted):
            return self.materialize().to(*args, **kwargs)
        if device.type == "meta":
            return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")
        wanted = {} if memory_format in (None, torch.preserve_format) else {"memory_format": memory_format}
        return self.__torch_sink_execute__(device, dtype=dtype, **wanted)[0]  # type: ignore[arg-type]

    def float(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The batch as float32, as `Tensor.float` gives it; a float32 batch is returned as it is."""
        return self.to(torch.float32, memory_format=memory_format)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """As `Tensor.contiguous`: the batch itself, since batches are made contiguous."""
        if self._is_already(None, memory_format):
            return self
        return self.materialize().contiguous(memory_format=memory_format)

    def _is_already(self, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> bool:
        """True where a batch whose values are not made yet will have this dtype and memory format."""
        waits = self.is_recording and self.lazy_base is None
        as_made = memory_format in (None, torch.preserve_format, torch.contiguous_format)
        return waits and as_made and dtype in (None, self.dtype)

    def cuda(self, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As `Tensor.cuda`."""
        target = torch.device("cuda") if device is None else torch.device(device)
        return self.to(target, non_blocking=non_blocking, **kwargs)

    def pin_memory(self, device: Any = None) -> LazyBatch:  # type: ignore[override]
        """The same batch with its bytes in pinned memory; unchanged where there is no accelerator."""
        if not self.is_recording:
            return self.materialize().pin_memory()  # type: ignore[return-value]
        if not torch.accelerator.is_available():
            return self
        packed = self.program.packed
        return self._holding(self.program._replace(packed=packed.in_block(packed.blob.pin_memory())))

    def _holding(self, program: Program) -> LazyBatch:
        """A batch like this one, of another program."""
        return LazyBatch(program)

    def is_pinned(self, device: Any = None) -> bool:  # type: ignore[override]
        """True when the bytes lie in pinned memory."""
        return torch.accelerator.is_available() and self.program.packed.blob.is_pinned()

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
            device: device of the result; "cpu" runs stock code, or the kernels under Triton's interpreter.
            dtype: dtype of the result; default the batch's own.
            memory_format: of the result, unless `out` is given.
            out: written to instead of a new tensor, [N, C, H, W].
            on_decode_error: "raise", "skip" a damaged image, or "replace" it by the next good one of the batch.

        Returns:
            The tensor; and the original position of the image in each row, or None where none was skipped or replaced.

        Raises:
            DecodeError: a file is damaged and the policy is "raise", or no image of the batch is good.
        """
        if on_decode_error not in POLICIES:
            raise ValueError(f"on_decode_error must be one of {POLICIES}, got {on_decode_error!r}")
        return self._execute(Wanted(torch.device(device), dtype, memory_format, out, on_decode_error))

    def _execute(self, wanted: Wanted) -> tuple[torch.Tensor, list[int] | None]:
        self._refuse_meta()
        if not self.is_recording:
            real = self.materialize().to(wanted.device, wanted.dtype or self.dtype, memory_format=wanted.memory_format)
            return (real if wanted.out is None else wanted.out.copy_(real)), None
        make = make_on_device if self.program.interpreted else make_in_stock_code
        if wanted.device.type != "cpu":
            make = make_on_device if kernels_make(self.program, wanted) else make_for_device
        made, shown, self.broken_files = make(self.program, wanted)
        return made, shown

    def make(self) -> None:
        """Makes the values on the CPU, in stock code."""
        self._refuse_meta()
        report_fallback("batch", "used on the CPU before it was moved to the device", "torch")
        if self.lazy_base is None:
            self.become(self._made_on_cpu().data)  # `data` has a version counter of its own, which begins at 0
        else:
            self.lazy_base.make_view(self)

    def become_view(self, real: torch.Tensor, ops: tuple[Op, ...]) -> None:
        """A batch of one becomes a view of its image."""
        self.become(real.as_subclass(torch.Tensor).unsqueeze(0))

    def _made_on_cpu(self) -> torch.Tensor:
        return make_in_stock_code(self.program, Wanted(torch.device("cpu")))[0]

    def _refuse_meta(self) -> None:
        if self.program.destination == "meta":
            raise SinkError(
                'this batch was recorded with device="meta": it has a shape and a plan, but no pixels can be made; '
                "set the backend with a real device"
            )

    @property
    def plan(self) -> Program:
        """The program of the batch; `print(batch.plan)` shows what will run where. Executes nothing."""
        return self.program


def parsed_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None]:
    """(device, dtype, memory format) from the arguments of `Tensor.to`; torch's own parser does not take `copy`."""
    by_position = 3 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 4
    if len(args) == by_position and "copy" not in kwargs:
        args = args[:-1]
    kwargs.pop("copy", None)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, memory_format
