"""The sources of a batch, packed so that they cross to another process cheaply."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import get_worker_info

from torch_sink.image.core.ops import Op
from torch_sink.image.core.tensor_argument import PackedArgument, tensor_arguments, with_packed, with_unpacked
from torch_sink.image.decode.jpeg.block import JpegFiles, joined, lay_out_jpegs
from torch_sink.image.sources.source import EncodedSource, FinishedSource, PixelSource, Source

T = TypeVar("T")

_ALIGNMENT_BYTES = 16


class Sealed(Generic[T]):
    """A value that crosses to another process as bytes, which nobody opens before `value` is asked for."""

    __slots__ = ("_pickled", "_value")

    def __init__(self, value: T) -> None:
        self._value = value
        self._pickled: bytes | memoryview | None = None

    @property
    def value(self) -> T:
        """The value; opened the first time where it came from another process."""
        if self._pickled is not None:
            self._value, self._pickled = pickle.loads(self._pickled), None
        return self._value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        pickled = self._pickled or pickle.dumps(self._value, pickle.HIGHEST_PROTOCOL)
        return _sealed, (pickle.PickleBuffer(pickled) if protocol >= 5 else bytes(pickled),)


def _sealed(pickled: bytes | memoryview) -> Sealed[Any]:
    sealed: Sealed[Any] = Sealed(None)
    sealed._pickled = pickled
    return sealed


class Contents(NamedTuple):
    """What stock code, or a new plan, has to know of a batch."""

    entries: tuple[tuple[Any, ...], ...]  # how to cut each source out of the blob
    programs: tuple[tuple[Op, ...], ...]  # the calls recorded on each image; their tensors lie in the blob
    jpegs: JpegFiles  # what the JPEG kernels have to know of the files at the beginning of the blob


class Packed(NamedTuple):
    """The sources of a batch, in a form that crosses to another process cheaply.

    Attributes:
        blob: uint8 [bytes], every file, pixel array and finished tensor, and every tensor among the arguments of calls,
            one after the other; shared memory in a worker, where the arrays of the plan follow them.
        contents: what lies where in it, and the calls.
        entry_of_image: int32 [N], position in `Contents.entries` of each image's source; the same file twice is packed
            once.
    """

    blob: torch.Tensor
    contents: Sealed[Contents]
    entry_of_image: np.ndarray

    @property
    def jpegs(self) -> JpegFiles:
        """The files at the beginning of the blob that kernels decode."""
        return self.contents.value.jpegs

    def source(self, at: int) -> Source:
        """That of an entry."""
        data = self.blob.numpy()
        kind, pieces, *rest = self.contents.value.entries[at]
        if kind == "file":
            return EncodedSource(joined(data, pieces), *rest)
        ((begin, end),) = pieces
        if kind == "pixels":
            mode, size, path = rest
            return PixelSource(Image.frombytes(mode, size, data[begin:end].tobytes()), path)
        shape, dtype, path = rest
        return FinishedSource(self.blob[begin:end].view(dtype).reshape(shape), path)

    def sources(self) -> list[Source]:
        """One source for each entry."""
        return [self.source(at) for at in range(len(self.contents.value.entries))]

    def calls(self) -> list[tuple[Op, ...]]:
        """The calls recorded on each image, with the tensors among their arguments."""
        return [with_unpacked(ops, self.blob) for ops in self.contents.value.programs]


class Crossing(NamedTuple):
    """What goes to another process beside the blob of a batch."""

    pickled: bytes  # objects, but for their arrays
    arrays: tuple[tuple[int, int], ...]  # begin and end of each of these in the blob

    def open(self, blob: torch.Tensor) -> Any:
        """The objects; their arrays are views of the blob."""
        data = blob.numpy()
        return pickle.loads(self.pickled, buffers=[data[begin:end] for begin, end in self.arrays])


class Packing:
    """The sources of a batch, each once, and the tensors among the arguments of its calls, before they are written.

    Args:
        sources: of each image.
        programs: the calls recorded on each.

    Attributes:
        contents, entry_of_image: as of `Packed`.
        jpegs: those of `contents`.
    """

    def __init__(self, sources: Sequence[Source], programs: Sequence[tuple[Op, ...]]) -> None:
        distinct, entry_of_image = _distinct(sources)
        self.entry_of_image = np.array(entry_of_image, dtype=np.int32)
        self.jpegs, pieces_of_source, self._chunks, self._end = lay_out_jpegs(distinct)
        entries: list[tuple[Any, ...]] = []
        for at, source in enumerate(distinct):
            kind, chunk, *described = _payload(source)
            pieces = pieces_of_source.get(at) or [self._add(chunk, _ALIGNMENT_BYTES if kind == "tensor" else 1)]
            entries.append((kind, pieces, *described))
        arguments: dict[int, PackedArgument] = {}
        for argument in tensor_arguments(programs):
            if id(argument) not in arguments:
                begin, _ = self._add(_bytes_of(argument.tensor))
                arguments[id(argument)] = PackedArgument(begin, tuple(argument.tensor.shape), argument.tensor.dtype)
        crossing = tuple(with_packed(ops, arguments) for ops in programs) if arguments else tuple(programs)
        self.contents = Sealed(Contents(tuple(entries), crossing, self.jpegs))

    def _add(self, chunk: bytes | memoryview, alignment: int = _ALIGNMENT_BYTES) -> tuple[int, int]:
        """Where it begins and ends."""
        begin = -(-self._end // alignment) * alignment
        self._chunks += [bytes(begin - self._end), chunk]
        self._end = begin + len(chunk)
        return begin, self._end

    def seal(self, objects: Any) -> Crossing:
        """Lets the blob hold the arrays of objects, and what they have sealed."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(objects, 5, buffer_callback=buffers.append)
        return Crossing(pickled, tuple(self._add(buffer.raw()) for buffer in buffers))

    def write(self) -> Packed:
        """Writes the blob."""
        blob = collated_tensor((self._end,), torch.uint8)
        view, begin = memoryview(blob.numpy().data), 0
        for chunk in self._chunks:
            view[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return Packed(blob, self.contents, self.entry_of_image)


def pack(sources: Sequence[Source], programs: Sequence[tuple[Op, ...]]) -> Packed:
    """Packs the sources of a batch and the calls recorded on each image."""
    return Packing(sources, programs).write()


def _distinct(sources: Sequence[Source]) -> tuple[list[Source], list[int]]:
    """The distinct ones among sources, and which of them each is."""
    places: dict[Any, int] = {}
    entry_of_image = []
    distinct: list[Source] = []
    for source in sources:
        key = _identity(source)
        place = places.get(key)
        # A file may change between two reads of it, and images in memory share a name: compare the bytes as well.
        if place is None or (isinstance(source, EncodedSource) and source.data != distinct[place].data):  # type: ignore[union-attr]
            place = places[key] = len(distinct)
            distinct.append(source)
        entry_of_image.append(place)
    return distinct, entry_of_image


def _payload(source: Source) -> tuple[Any, ...]:
    """Kind of entry, bytes for the blob, and what else the entry has to say."""
    if isinstance(source, EncodedSource):
        return "file", source.data, source.path, source.header, source.mode
    if isinstance(source, PixelSource):
        return "pixels", source.image.tobytes(), source.image.mode, source.image.size, source.path
    return "tensor", _bytes_of(source.tensor), tuple(source.tensor.shape), source.tensor.dtype, source.path


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    values = tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1)
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _identity(source: Source) -> tuple[Any, ...]:
    """Equal for one file in one mode, and for handles that were recorded from one image in memory."""
    if isinstance(source, EncodedSource):
        return source.path, source.mode
    return (id(source[0]),)


def collated_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor, in shared memory when made in a data worker."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = torch.UntypedStorage._new_shared(max(torch.Size(shape).numel() * dtype.itemsize, 1))
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload]
