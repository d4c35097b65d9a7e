"""LazyTensor and LazyTVImage: tensors whose values do not exist yet; and how a lazy tensor does without memory."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torchvision import tv_tensors
from torchvision.tv_tensors import _torch_function_helpers as return_types

from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import executing, ledger, report_fallback
from torch_sink.image.core.ops import (
    PIXELS,
    RECORDERS_OF,
    InPlaceOp,
    Op,
    Recorder,
    ViewOp,
    made_by,
    recorded,
    replay,
)
from torch_sink.image.core.recording import Recording
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import FinishedSource, replayed
from torch_sink.image.handles.lazy import Lazy, plain_call
from torch_sink.image.handles.names import StockTensorType, named_as, stays, unpickled, written
from torch_sink.image.operations import RECORDERS

# --- memory

# No public function does this. Where a release of torch lacks it, the backend cannot be set, and says so.
_raise_on_access = torch._C._set_storage_data_ptr_access_error_msg
_NO_VALUES = (
    "the values of this image or batch do not exist yet: torch_sink recorded it, and C++ code reads its memory without "
    "asking torch for it; give that code `x.clone()`, or `batch.to(device)`"
)

# By shape and dtype, a tensor without memory that new ones are aliases of: they are made in half of the time. None for
# what was seen only once, as the sizes of random crops are.
_ORIGINALS: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor | None] = {}
_MOST_ORIGINALS = 512


def without_memory(cls: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A new tensor of a lazy class, contiguous and on the CPU: who reads or writes its memory gets an error."""
    original = _ORIGINALS.get((shape, dtype))
    if original is None:
        if (shape, dtype) not in _ORIGINALS:
            if len(_ORIGINALS) >= _MOST_ORIGINALS:
                _ORIGINALS.clear()
            _ORIGINALS[shape, dtype] = None
            return _refusing(torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype))  # type: ignore[attr-defined]
        with torch.inference_mode(False), _disable_current_modes():
            original = _ORIGINALS[shape, dtype] = _refusing(torch.empty(shape, dtype=dtype, device="cpu"))
    return torch.Tensor._make_subclass(cls, original)  # type: ignore[attr-defined]


def _refusing(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with a storage that gives up its memory and raises an error where code asks for its address."""
    with plain_call():
        storage = tensor.untyped_storage()
    _raise_on_access(storage._cdata, _NO_VALUES)
    return tensor


# --- the tensors of one image


class Handle(Lazy):
    """The base of both kinds of handle: it holds a `Recording`."""

    lazy_class: ClassVar[tuple[str, str]]
    image_class: ClassVar[type]  # LazyImage, once its module, which imports this one, is loaded
    lazy_recording: Recording
    lazy_was_collated = False  # its values were made for a batch, in this process
    # The handle or stack whose memory stock code's tensor shares, as a crop shares that of its image. Once one of the
    # two has its values, so has the other: a change of one in place changes the other.
    lazy_base: Any = None
    lazy_part: int  # the number of this image in the stack that is its base
    fields = frozenset(f"lazy_{name}" for name in ("recording", "was_collated", "base", "part", "refs", "real"))

    @staticmethod
    def __new__(cls: Any, recording: Recording) -> Any:
        handle = without_memory(cls, recording.shape, recording.dtype)
        handle.__dict__["lazy_recording"] = recording
        if type(recording.source) is EncodedSource and uses.begins_passes:
            uses.of_files[id(handle)] = handle
        if recording.calls and not ledger.has_recorded:
            ledger.note_recorded()
        return handle

    # Where C++ code holds a handle, its real tensor answers: a call in place may change its shape, `data` its dtype.

    @property
    def shape(self) -> torch.Size:
        fields = self.__dict__
        return fields["lazy_real"].shape if "lazy_real" in fields else torch.Size(fields["lazy_recording"].shape)

    @property
    def dtype(self) -> torch.dtype:
        fields = self.__dict__
        return fields["lazy_real"].dtype if "lazy_real" in fields else fields["lazy_recording"].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_recording(self) -> bool:
        """False once the values were made, or those of the tensor that this one is a view of."""
        return "lazy_real" not in self.__dict__ and (self.lazy_base is None or self.lazy_base.is_recording)

    @property
    def is_of_file(self) -> bool:
        """True for what is made of a file that was not decoded."""
        return isinstance(self.lazy_recording.source, EncodedSource)

    def handle_of(self, made: Any, begun: Recording, kind: Any = None) -> Any:
        """The handle of what a recorder made of `begun`, the recording of this one; what is no recording as it is.

        Where stock code's result shares memory with its input, or is the input itself, so does the handle. `kind` is
        that of the handle of another tensor, by default this one's.
        """
        if type(made) is not Recording:
            return made
        kind = kind or type(self)
        if made is begun:
            return self if kind is type(self) else self.record_as(kind)
        if made.mode is not None:
            return self.image_class(made)
        last = type(made.calls[-1])
        if last is Op:
            return kind(made)
        if last is InPlaceOp:
            changed = self.record_in_place(made.calls[-1]) if self.changes_in_place else NotImplemented
            return changed if changed is NotImplemented or kind is type(self) else self.record_as(kind)
        is_view = all(type(op) is ViewOp for op in made.calls[len(begun.calls) :])
        return self.lend_to(kind(made)) if is_view else kind(made)

    def lend_to(self, view: Any) -> Any:
        """Notes that another handle or batch is a view of this one, and returns it."""
        view.__dict__["lazy_base"] = self
        refs = self.__dict__.setdefault("lazy_refs", [])
        if len(refs) % 64 == 63:
            refs[:] = [ref for ref in refs if ref() is not None]
        refs.append(weakref.ref(view))
        return view

    @property
    def lazy_views(self) -> list[Any]:
        """The handles and batches that are views of this one, as far as the program holds them."""
        return [view for ref in self.__dict__.get("lazy_refs", ()) if (view := ref()) is not None]

    @property
    def changes_in_place(self) -> bool:
        """True where a call in place can be recorded: the program holds no other part of the memory that it changes."""
        if is_expanded(self.lazy_recording.calls) or self.lazy_recording.dtype not in PIXELS:
            return False
        return bool(self._twins()) or (not self.lazy_views and _is_last_of_its_memory(self))

    def record_in_place(self, op: Op) -> Any:
        """Records a call that changes what this handle stands for; returns the handle."""
        twins = self._twins()
        if not twins:
            self.__dict__.pop("lazy_base", None)  # this handle held it alone
        for handle in twins or [self]:
            handle.__dict__["lazy_recording"] = handle.lazy_recording.record(op)
        return self

    def _twins(self) -> list[Any]:
        """All handles of the whole of this memory, itself included; [] where one stands for a part of it."""
        found: list[Any] = [self]
        count = len(self.lazy_recording.calls)
        while found[0].lazy_base is not None:
            found[0] = found[0].lazy_base
            if not isinstance(found[0], Handle):
                return []
        for handle in found:
            if not isinstance(handle, Handle) or len(handle.lazy_recording.calls) != count:
                return []
            found += handle.lazy_views
        return found

    def make(self) -> None:
        """Makes the values, or where this is a view those of its base, of which it gets its part."""
        if self.lazy_base is None:
            self.become_all(self._replayed())
        else:
            self.lazy_base.make_view(self)

    def make_view(self, view: Any) -> None:
        """Makes the values of this handle, and with them those of its view."""
        self.materialize()

    def become_all(self, values: torch.Tensor) -> None:
        """Becomes a tensor of new values; the views of this handle become views of that tensor."""
        views, calls = self.lazy_views, self.lazy_recording.calls
        uses.of_files.pop(id(self), None)
        real = self.become(self._stock_type(values))
        for view in views:
            view.become_view(real, calls)

    def become_view(self, real: torch.Tensor, calls: tuple[Op, ...]) -> None:
        """Becomes a view of `real`, which `calls` made, the first of the calls of this handle."""
        self.become_all(_other_than(real, replay(real, self.lazy_recording.calls[len(calls) :])))

    def _replayed(self) -> torch.Tensor:
        uses.batches += 1
        with executing():
            source, calls = self.lazy_recording.source, self.lazy_recording.calls
            return _other_than(getattr(source, "tensor", None), replayed(source, calls, in_place=True))

    @staticmethod
    def _stock_type(tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def note_use(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.is_recording:
            devices = [str(value) for value in arguments if isinstance(value, (str, torch.device))]
            is_moved = function is torch.Tensor.cuda or (function is torch.Tensor.to and devices not in ([], ["cpu"]))
            moved = "one image is moved by itself, a batch is made on the device"
            reason = moved if is_moved else "tensor read by other code"
            report_fallback(f"torch: {written(function)}", reason, "torch")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The text of the stock tensor. The handle keeps recording: a debugger that shows it changes nothing."""
        return repr(self._stock_type(self._replayed()) if self.is_recording else self.materialize())

    def as_subclass(self, cls: type) -> Any:
        """The same values as another tensor type; a pure tensor of them is another handle, and makes no values."""
        if cls is torch.Tensor and self.is_recording:
            return self.record_as(LazyTensor)
        return self.materialize().as_subclass(cls)

    def record_as(self, kind: type) -> Any:
        """A handle of a kind for the same memory: a view of the first one, however often this is called in a row."""
        first, count = self, len(self.lazy_recording.calls)
        while isinstance(first.lazy_base, Handle) and len(first.lazy_base.lazy_recording.calls) == count:
            first = first.lazy_base
        return first.lend_to(self.record_nothing(kind))

    def as_tv_image(self) -> Any:
        """A `tv_tensors.Image` of the same memory."""
        return self.record_as(LazyTVImage)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if stays(protocol) or not self.is_recording or settings.sends_pixels():
            return self.materialize().__reduce_ex__(protocol)
        uses.batches += 1
        return unpickled, (self.lazy_class, self.lazy_attributes, self.lazy_recording)

    def __copy__(self) -> Any:
        """Another tensor of the same memory, with the attributes that the program has set."""
        if not self.is_recording:
            return copy.copy(self.materialize())
        made = self.record_as(type(self))
        made.__dict__.update(self.lazy_attributes)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_recording:
            return self.materialize().__deepcopy__(memo)
        made = memo[id(self)] = self.record_nothing()
        made.__dict__.update(copy.deepcopy(self.lazy_attributes, memo))
        return made

    def record_nothing(self, kind: Any = None) -> Any:
        """A second, independent handle for the same values, of another kind where one is given."""
        return (kind or type(self))(self.lazy_recording)


@named_as(torch.Tensor)
class LazyTensor(Handle, torch.Tensor, metaclass=StockTensorType):  # type: ignore[misc, override]
    """A pure tensor [C, H, W] that `ToTensor` or `PILToTensor` would return; uint8 in [0, 255] or float in [0, 1]."""

    @staticmethod
    def _stock_type(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


@named_as(tv_tensors.Image)
class LazyTVImage(Handle, tv_tensors.Image, metaclass=StockTensorType):
    """A `tv_tensors.Image` [C, H, W] that `ToImage` would return; uint8 in [0, 255] or float."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A clone, as in stock code: without the attributes that the program has set."""
        return self.clone() if self.is_recording else super().__deepcopy__(memo)

    @staticmethod
    def _stock_type(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if type(tensor) is tv_tensors.Image else tensor.as_subclass(tv_tensors.Image)


HANDLES = (LazyTensor, LazyTVImage)


def _is_last_of_its_memory(view: Any) -> bool:
    """True where the program holds neither the base of a view nor another view of it, as behind a crop in `Compose`."""
    base = view.lazy_base
    if base is None:
        return True
    if not isinstance(base, Handle) or len(base.lazy_views) > 1 or is_expanded(base.lazy_recording.calls):
        return False
    del base
    return _references_to_base(view) == _LEAST_REFERENCES and _is_last_of_its_memory(view.lazy_base)


def _references_to_base(view: Any) -> int:
    base = vars(view)["lazy_base"]
    return sys.getrefcount(base)


_LEAST_REFERENCES = _references_to_base(SimpleNamespace(lazy_base=object()))


def _other_than(held: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or where it is `held` itself another tensor object of the same memory."""
    return tensor.as_subclass(type(tensor)) if tensor is held else tensor


def is_expanded(ops: Sequence[Op]) -> bool:
    """True where the channels of stock code's tensor share memory, which it does not write to in place."""
    name = ops[-1].name.partition(".")[2] if ops else ""
    return name == "grayscale_to_rgb" or (name == "rgb_to_grayscale" and ops[-1].args[0] == 3)


def on_handles(recorder: Recorder, keeps_type: bool = False) -> Callable[..., Any]:
    """Makes what records a call of torch on handles, the first of which is among its first two arguments.

    With `keeps_type` the function returns a `tv_tensors.Image` of one, also without `set_return_type("TVTensor")`.
    """

    def record(*args: Any, **kwargs: Any) -> Any:
        handles = [each for each in (*args, *kwargs.values()) if type(each) in HANDLES]
        handle = next((image for image in args[:2] if type(image) in HANDLES), None)
        if handle is None or not all(each.is_recording for each in handles):
            return NotImplemented
        kind = type(handle) if keeps_type else _kind_of_result(handle)
        given = [each.lazy_recording if type(each) in HANDLES else each for each in args]
        named = {key: each.lazy_recording if type(each) in HANDLES else each for key, each in kwargs.items()}
        return handle.handle_of(made_by(recorder, *given, **named), handle.lazy_recording, kind)

    return record


Handle.calls = RECORDERS_OF["an image"]
_KEEP_TYPE = (torch.Tensor.clone,)
for _function, _recorder in RECORDERS.items():
    if callable(_function):
        recorded(_function, of="an image")(on_handles(_recorder, keeps_type=_function in _KEEP_TYPE))


def _kind_of_result(handle: Any) -> Any:
    """Of a `tv_tensors.Image` torchvision returns a pure tensor, unless `set_return_type` says otherwise."""
    return type(handle) if return_types._must_return_subclass() else LazyTensor


@recorded(torch.Tensor.detach, of="an image")
def _detach(handle: Any) -> Any:
    return handle.record_as(type(handle)) if handle.is_recording else NotImplemented


@recorded(torch.detach, of="an image")
def _detached(input: Any) -> Any:
    is_recording = type(input) in HANDLES and input.is_recording
    return input.record_as(_kind_of_result(input)) if is_recording else NotImplemented


def finished_handle(tensor: torch.Tensor) -> LazyTensor:
    """A handle around values that exist, so that they can travel in a batch of handles."""
    return LazyTensor(Recording(FinishedSource(tensor), (), tensor.shape, tensor.dtype))


def packable(item: Any, at_once: bool) -> Any:
    """A handle that a program can take: one that records, or one of finished values.

    Where values are made at once, a handle that a dataset yields a second time keeps them.
    """
    if not isinstance(item, Handle):
        return finished_handle(item)
    is_recording = (item.lazy_real is None and item.lazy_base is None) or item.is_recording  # mostly without a call
    if is_recording and not (at_once and item.lazy_was_collated):
        return item
    return finished_handle(item.materialize())
