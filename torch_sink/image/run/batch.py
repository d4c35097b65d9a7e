"""LazyBatch, which `default_collate` and `torch.stack` make of handles: recordings, or their program."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torch_sink.damage.report import POLICIES, BrokenFile
from torch_sink.errors import DecodeError, SinkError
from torch_sink.image.core import uses
from torch_sink.image.core.arguments import parsed_to
from torch_sink.image.core.fallback import executing, report_fallback
from torch_sink.image.core.ops import RECORDERS_OF, InPlaceOp, Op, made_by
from torch_sink.image.core.recording import Recording
from torch_sink.image.handles.lazy import Lazy
from torch_sink.image.handles.names import StockTensorType, named_as, stays, unpickled
from torch_sink.image.handles.tensor import LazyTensor, without_memory
from torch_sink.image.program.launches import make_program
from torch_sink.image.program.program import Batch, Made, Program, Wanted, survivors
from torch_sink.image.run.device import ProgramOnDevice
from torch_sink.image.run.shared import SharedProgram
from torch_sink.image.run.stage_proof import kernels_make
from torch_sink.image.run.stock import make_for_device, make_in_stock_code


class Images:
    """The images of a batch, which its views share: as they were recorded, then in a program, and later their values.

    Args:
        recordings: of one shape and dtype.
        destination, interpreted: of their program, which is made when it is needed.

    Attributes:
        shape, dtype: those of all images, [images, C, H, W].
        placed: the program that they are in and which batch of it they are, once there is one.
        values: once they were made on the CPU.
        on_devices: see `Maker`.
    """

    def __init__(self, recordings: Sequence[Recording], destination: str, interpreted: bool) -> None:
        self.recordings = recordings
        self._begin((len(recordings), *recordings[0].shape), recordings[0].dtype, destination, interpreted)

    def _begin(self, shape: tuple[int, ...], dtype: torch.dtype, destination: str, interpreted: bool) -> None:
        self.shape, self.dtype, self.destination, self.interpreted = shape, dtype, destination, interpreted
        self.placed: tuple[SharedProgram, Batch] | None = None
        self.values: torch.Tensor | None = None
        self.on_devices: list[ProgramOnDevice] = []

    @classmethod
    def of(cls, shared: SharedProgram, batch: Batch) -> Images:
        """The images of a batch of a program."""
        images = cls.__new__(cls)
        images.recordings = ()
        images._begin(batch.shape, batch.dtype, shared.program.destination, shared.program.interpreted)
        images.placed = shared, batch
        shared.enter(images)
        return images

    def _place(self) -> tuple[SharedProgram, Batch]:
        if self.placed is None:
            join([self])
        assert self.placed is not None
        return self.placed

    @property
    def shared(self) -> SharedProgram:
        """Their program, shared with the batches that were made together with this one."""
        return self._place()[0]

    @property
    def batch(self) -> Batch:
        """Which batch of the program they are."""
        return self._place()[1]

    def __reduce__(self) -> Any:
        return Images.of, self._place()

    def __deepcopy__(self, memo: dict[int, Any]) -> Images:
        return Images.of(copy.deepcopy(self.shared, memo), self.batch)

    def made_on_cpu(self) -> torch.Tensor:
        """New values, made in stock code."""
        return make_in_stock_code(self.shared.program, self.batch, Wanted(torch.device("cpu")))[0]

    def real(self) -> torch.Tensor:
        """The values, made once."""
        if self.values is None:
            with executing():
                self.values = self.made_on_cpu()
            self.shared.leave(self)
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


def join(several: Iterable[Images]) -> None:
    """Makes one program of the images of batches that have none yet: they share files, and on a device their pixels."""
    uses.batches += 1
    by_destination: dict[tuple[str, bool], list[Images]] = {}
    for images in several:
        by_destination.setdefault((images.destination, images.interpreted), []).append(images)
    for destination, together in by_destination.items():
        together.sort(key=lambda images: str(images.dtype))  # those of one dtype can be made in one launch
        recordings = [image for images in together for image in images.recordings]
        sources, calls = [image.source for image in recordings], [image.calls for image in recordings]
        shapes = [(images.shape, images.dtype) for images in together]
        shared = SharedProgram(make_program(sources, calls, shapes, *destination), together)
        for images, batch in zip(together, shared.program.batches, strict=True):
            images.placed = shared, batch


def pack(leaves: Iterable[Any]) -> None:
    """Joins the batches among the leaves of what a `collate` made, and drops their recordings."""
    found = {id(leaf.images): leaf.images for leaf in leaves if type(leaf) is LazyBatch and leaf.is_recording}
    if waiting := [images for images in found.values() if images.placed is None]:
        join(waiting)
    for images in found.values():
        images.recordings = ()


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
    are_recorded: ClassVar[bool] = False  # whether this process has made some that had no program yet
    lazy_base: Any = None  # the handle whose memory a batch of one shares
    fields = frozenset(("images", "lazy_shape", "broken_files", "lazy_base", "lazy_real"))

    @staticmethod
    def __new__(cls: Any, images: Images, size: tuple[int, ...] | None = None) -> Any:
        LazyBatch.are_recorded |= images.placed is None
        shape = torch.Size(size or images.shape)
        batch = without_memory(cls, shape, images.dtype)
        batch.images, batch.lazy_shape = images, shape
        return batch

    @property
    def program(self) -> Program:
        """That of all batches that were made together with this one: sources, calls, and what the kernels do."""
        return self.images.shared.program

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol) or not self.is_recording:
            return self.materialize().__reduce_ex__(protocol)
        return unpickled, (self.lazy_class, self.lazy_attributes, self.images, self.lazy_shape)

    @property
    def is_recording(self) -> bool:
        """False once the values were made, for the batch itself or for one of its views."""
        return self.lazy_real is None and self.images.values is None

    def record_each(self, recorder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch of what a recorder makes of each image, or `NotImplemented`."""
        images = self.images
        before = images.recordings if self.is_recording else []
        made = [made_by(recorder, image, *args, **kwargs) for image in before]
        if not made or any(image is NotImplemented for image in made):
            return NotImplemented
        if all(map(operator.is_, made, before)):
            return self
        if any(type(image.calls[-1]) is InPlaceOp for image in made):  # it would change this batch as well
            return NotImplemented
        others = Images(made, images.destination, images.interpreted)
        return LazyBatch(others, (*self.lazy_shape[:-3], *made[0].shape))

    def record_mix(self, op: Op) -> LazyBatch:
        """A new batch with one more call that mixes its images; mixes run after every image is made."""
        batch = self.images.batch
        return LazyBatch(Images.of(self.images.shared, batch._replace(mixes=(*batch.mixes, op))))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_recording:
            return self.materialize().__deepcopy__(memo)
        made = memo[id(self)] = LazyBatch(copy.deepcopy(self.images, memo), self.lazy_shape)
        made.__dict__.update(copy.deepcopy(self.lazy_attributes, memo))
        return made

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The text of the ordinary tensor. The batch keeps recording, so showing it in a debugger changes nothing."""
        if self.is_recording and self.images.destination == "meta":
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
        if device is None or not self.is_recording or (device.type == "cpu" and not self.images.interpreted):
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
        is_alone = self.is_recording and self.lazy_base is None
        as_made = memory_format in (None, torch.preserve_format, torch.contiguous_format)
        return is_alone and as_made and dtype in (None, self.dtype)

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
        return LazyBatch(Images.of(self.images.shared.pinned(), self.images.batch), self.lazy_shape)

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
        how = {"dtype": dtype, "memory_format": memory_format, "out": out, "on_decode_error": on_decode_error}
        (result,) = LazyBatch.__torch_sink_execute_all__([self], device, [how])
        return result

    @property
    def __torch_sink_memory__(self) -> tuple[int, int]:
        """(`id` of what is shared with the batches made together with this one, bytes that it takes on a device)."""
        shared = self.images.shared
        return id(shared), shared.program.device_bytes if self.is_recording else 0

    @staticmethod
    def __torch_sink_execute_all__(
        batches: Sequence[LazyBatch], device: torch.device | str, how: Sequence[Mapping[str, Any]]
    ) -> list[tuple[torch.Tensor, list[int] | None]]:
        """Executes several batches, those of one program side by side; what it takes that one alone would take.

        Args:
            batches: in any order.
            device: of all results.
            how: for each, the other arguments of `__torch_sink_execute__`.

        Returns:
            What that returns, for each.
        """
        wanted = [Wanted(torch.device(device), **options) for options in how]
        for each in wanted:
            if each.on_decode_error not in POLICIES:
                raise ValueError(f"on_decode_error must be one of {POLICIES}, got {each.on_decode_error!r}")
        results: dict[int, Any] = {}
        by_kernels: dict[int, list[int]] = {}
        for at, (batch, each) in enumerate(zip(batches, wanted, strict=True)):
            batch._refuse_meta()
            if not batch.is_recording:
                results[at] = batch._deliver_real(each)
            elif batch._is_for_kernels(each):
                by_kernels.setdefault(id(batch.images.shared), []).append(at)
            else:
                make = make_in_stock_code if each.device.type == "cpu" else make_for_device
                program, images = batch.program, batch._wanted_images(each)
                results[at] = batch._deliver(make(program, batch.images.batch, images), each)
        for together in by_kernels.values():
            shared = batches[together[0]].images.shared
            made = shared.make([(batches[at].images, batches[at]._wanted_images(wanted[at])) for at in together])
            for at, one in zip(together, made, strict=True):
                results[at] = batches[at]._deliver(one, wanted[at])
        return [results[at] for at in range(len(batches))]

    def _is_for_kernels(self, wanted: Wanted) -> bool:
        if wanted.device.type == "cpu":
            return self.images.interpreted
        return self.images.interpreted or kernels_make(self.images.batch, wanted)

    def _deliver_real(self, wanted: Wanted) -> tuple[torch.Tensor, None]:
        real = self.materialize().to(wanted.device, wanted.dtype or self.dtype, memory_format=wanted.memory_format)
        return (real if wanted.out is None else wanted.out.copy_(real)), None

    def _wanted_images(self, wanted: Wanted) -> Wanted:
        """How the images are wanted for a batch that is; of samples of several images, whole ones are replaced."""
        if len(self.lazy_shape) == 4:
            return wanted
        # Raises if the format does not fit.
        torch.empty(self.lazy_shape, device="meta", memory_format=wanted.memory_format)
        out = None if wanted.out is None else wanted.out.view(-1, *self.lazy_shape[-3:])
        of_images = "skip" if wanted.on_decode_error == "replace" else wanted.on_decode_error
        return wanted._replace(out=out, on_decode_error=of_images)

    def _deliver(self, made: Made, wanted: Wanted) -> tuple[torch.Tensor, list[int] | None]:
        """The batch of images that were made; the policy for damaged files applies to whole samples."""
        images, rows, self.broken_files = made
        if len(self.lazy_shape) == 4:
            return images, rows
        (count, *rest), out, policy = self.lazy_shape, wanted.out, wanted.on_decode_error
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
        if self.images.destination == "meta":
            raise SinkError(
                'this batch was recorded with device="meta": it has a shape and a plan, but no pixels can be made; '
                "set the backend with a real device"
            )

    @property
    def plan(self) -> Program:
        """The program of this batch alone; `print(batch.plan)` shows what will run where. Executes nothing."""
        return self.program._replace(batches=(self.images.batch,))
