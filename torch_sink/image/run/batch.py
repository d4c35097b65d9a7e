"""LazyBatch, which `default_collate` and `torch.stack` make of handles: recordings, or their program."""

from __future__ import annotations

import functools
import math
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from torch_sink.damage.report import POLICIES, BrokenFile
from torch_sink.errors import DecodeError, SinkError
from torch_sink.image.core import uses
from torch_sink.image.core.arguments import parsed_to
from torch_sink.image.core.fallback import executing, report_fallback
from torch_sink.image.core.ops import RECORDERS_OF, Op, made_by
from torch_sink.image.core.recording import Recording
from torch_sink.image.handles.lazy import Lazy, without_memory
from torch_sink.image.handles.names import StockTensorType, named_as, stays, unpickled
from torch_sink.image.handles.tensor import LazyTensor
from torch_sink.image.program.launches import make_program
from torch_sink.image.program.program import Program, Wanted, survivors
from torch_sink.image.run.device import make_on_device
from torch_sink.image.run.proof import kernels_make
from torch_sink.image.run.stock import make_for_device, make_in_stock_code


def program_of(images: Sequence[Recording], destination: str, interpreted: bool = False) -> Program:
    """The program of images of one shape and dtype; see `make_program` for the other arguments."""
    uses.batches += 1
    sources, calls = [each.source for each in images], [each.calls for each in images]
    shape = len(images), *images[0].shape
    return make_program(sources, calls, shape, images[0].dtype, destination, interpreted)


class Images:
    """The images that a batch and its views share: as they were recorded, as a program, and later their values.

    Args:
        recordings: of one shape and dtype; [] where the program is given.
        program: by default it is made of the recordings when it is needed.
        destination, interpreted: of that program.
    """

    def __init__(
        self, recordings: Sequence[Recording], program: Program | None, destination: str = "", interpreted: bool = False
    ) -> None:
        self.recordings, self.destination, self.interpreted = recordings, destination, interpreted
        self.values: torch.Tensor | None = None  # [images, C, H, W]
        if program is not None:
            self.program = program

    @functools.cached_property
    def program(self) -> Program:
        """That of all images, [images, C, H, W]."""
        return program_of(self.recordings, self.destination, self.interpreted)

    def made_on_cpu(self) -> torch.Tensor:
        """New values, made in stock code."""
        return make_in_stock_code(self.program, Wanted(torch.device("cpu")))[0]

    def real(self) -> torch.Tensor:
        """The values, made once."""
        if self.values is None:
            with executing():
                self.values = self.made_on_cpu()
        return self.values

    @property
    def is_recording(self) -> bool:
        """False once the values were made."""
        return self.values is None

    def give(self, at: int) -> LazyTensor:
        """A handle of one image, which shares its memory with the batch, as `batch[at]` does."""
        part = LazyTensor(self.recordings[at])
        part.lazy_base, part.lazy_part = self, at
        return part

    def make_view(self, view: LazyTensor) -> None:
        """Makes all values; an image that `give` returned becomes a view of them."""
        view.become_all(self.real()[view.lazy_part])


@named_as(torch.Tensor)
class LazyBatch(Lazy, torch.Tensor, metaclass=StockTensorType):  # type: ignore[misc]
    """A batch whose values do not exist yet; to programs a `torch.Tensor` on the CPU.

    It is [N, C, H, W], or a stack of images [k, C, H, W], as programs make it after `FiveCrop` and `TenCrop`, or a
    batch [N, k, C, H, W] of stacks, which runs as one of N * k images. Images of one file share its decoding.

    `to(accelerator)` decodes and transforms there, on the current stream, and returns an ordinary tensor. Any other
    operation gives what it gives on the ordinary CPU tensor.

    Attributes:
        images: those of the batch, which its views share.
        broken_files: files whose images were skipped or replaced when the batch was executed.
    """

    calls = RECORDERS_OF["a batch"]
    lazy_class: ClassVar[tuple[str, str]]
    images: Images
    lazy_shape: torch.Size
    broken_files: tuple[BrokenFile, ...]
    are_recorded: ClassVar[bool] = False  # whether this process has made some that have no program yet
    lazy_base: Any = None  # the handle whose memory a batch of one shares
    fields = frozenset(("images", "lazy_shape", "broken_files", "lazy_base", "lazy_real"))

    @staticmethod
    def __new__(cls: Any, images: Images | Program, size: tuple[int, ...] | None = None) -> Any:
        if isinstance(images, Program):
            images = Images([], images)
        elif images.recordings:
            LazyBatch.are_recorded = True
        dtype = images.recordings[0].dtype if images.recordings else images.program.dtype
        shape = torch.Size(size or images.program.shape)
        batch = without_memory(cls, shape, dtype)
        batch.images, batch.lazy_shape = images, shape
        return batch

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @property
    def program(self) -> Program:
        """The sources, the calls, and how kernels make all images as a batch [images, C, H, W]."""
        return self.images.program

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol) or not self.is_recording:
            return self.materialize().__reduce_ex__(protocol)
        return unpickled, (self.lazy_class, self.program, self.lazy_shape)

    @property
    def is_recording(self) -> bool:
        """False once the values were made, for the batch itself or for one of its views."""
        return self.lazy_real is None and self.images.values is None

    def pack(self) -> None:
        """Makes the program and drops the recordings, before the batch is sent to another process."""
        if self.is_recording:
            self.images = Images([], self.program)

    def record_each(self, recorder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch of what a recorder makes of each image, or `NotImplemented`."""
        images = self.images
        before = images.recordings if self.is_recording and not kwargs.get("inplace") else []
        made = [made_by(recorder, image, *args, **kwargs) for image in before]
        if not made or any(image is NotImplemented for image in made):
            return NotImplemented
        is_same = all(map(operator.is_, made, before))
        others = Images(made, None, images.destination, images.interpreted)
        return self if is_same else LazyBatch(others, (*self.lazy_shape[:-3], *made[0].shape))

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
        return repr(self.images.made_on_cpu().view(self.lazy_shape) if self.is_recording else self.materialize())

    def as_subclass(self, cls: type) -> Any:
        """The values as another tensor type; for `torch.Tensor`, the batch itself."""
        return self if cls is torch.Tensor else self.materialize().as_subclass(cls)

    # --- moving

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As `Tensor.to`; a move to an accelerator decodes and transforms there.

        It waits until the JPEG files are decoded, also with `non_blocking=True`, because a damaged one raises here.
        """
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
        return LazyBatch(self.program._replace(packed=packed.in_block(packed.blob.pin_memory())), self.lazy_shape)

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
        return self._make_images(wanted) if len(self.lazy_shape) == 4 else self._make_samples(wanted)

    def _make_images(self, wanted: Wanted) -> tuple[torch.Tensor, list[int] | None]:
        make = make_on_device if self.program.interpreted else make_in_stock_code
        if wanted.device.type != "cpu":
            make = make_on_device if kernels_make(self.program, wanted) else make_for_device
        made, shown, self.broken_files = make(self.program, wanted)
        return made, shown

    def _make_samples(self, wanted: Wanted) -> tuple[torch.Tensor, list[int] | None]:
        """As `_execute`, for samples of several images; the policy for damaged files applies to whole samples."""
        (count, *rest), out, policy = self.lazy_shape, wanted.out, wanted.on_decode_error
        # Raises if the format does not fit.
        torch.empty(self.lazy_shape, device="meta", memory_format=wanted.memory_format)
        flat = None if out is None else out.view(-1, *rest[-3:])
        of_images = "skip" if policy == "replace" else policy
        images, rows = self._make_images(wanted._replace(out=flat, on_decode_error=of_images))
        if rows is None:
            return images.view(-1, *rest), None
        row_of = {image: row for row, image in enumerate(rows)}
        views = math.prod(rest[:-3])
        samples = [[row_of.get(at * views + view) for view in range(views)] for at in range(count)]
        lost = DecodeError(self.broken_files[0].path, -1, self.broken_files[0].reason)
        errors = {at: lost for at, sample in enumerate(samples) if None in sample}
        chosen = survivors(errors, count, 0, policy)[0] or []
        shown = torch.tensor([samples[at] for at in chosen], device=images.device).flatten()
        kept = images[shown].view(-1, *rest)
        return (kept if out is None else out[: len(chosen)].copy_(kept)), chosen

    def make(self) -> None:
        """Makes the values of the batch and its views on the CPU, in stock code."""
        if self.is_recording:
            self._refuse_meta()
            report_fallback("batch", "used on the CPU before it was moved to the device", "torch")
        if self.lazy_base is None:
            values = self.images.real()
            # `data` has a version counter of its own, which begins at 0.
            self.become(values.data if values.shape == self.lazy_shape else values.view(self.lazy_shape))
        else:
            self.lazy_base.make_view(self)

    def become_view(self, real: torch.Tensor, ops: tuple[Op, ...]) -> None:
        """A batch of one becomes a view of its image."""
        self.become(real.as_subclass(torch.Tensor).unsqueeze(0))

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
