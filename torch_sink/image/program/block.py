"""The block of bytes that batches travel in: files, pixels, and the arrays of its program, one after the other."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import get_worker_info

from torch_sink.common import pool_writer
from torch_sink.image.core.ops import InPlaceOp, Op, PackedArgument, TensorArgument, with_packed, with_unpacked
from torch_sink.image.decode.encoded import BaselineScan, EncodedSource, JpegHeader
from torch_sink.image.decode.jpeg_block import ALIGNMENT_BYTES, joined, lay_out_jpegs
from torch_sink.image.decode.source import BytesSource, FinishedSource, PixelSource, Source


class Contents(NamedTuple):
    """What stock code, or a reader of single images, needs to know."""

    entries: tuple[tuple[Any, ...], ...]  # how to cut each source out of the block
    programs: tuple[tuple[Op, ...], ...]  # the calls recorded on each image; their tensors lie in the block
    entry_of_image: list[int]  # entry of each image's source; the same file twice is packed once


class Packed:
    """The sources of a program, in a form that crosses to another process cheaply.

    Args:
        blob: uint8 [bytes], every file, the arrays of the program, every pixel array, finished tensor, and tensor among
            the arguments of calls, one after the other; shared memory in a worker.
        contents: places of the sources in it, and the calls; None where these are still pickled in the blob.
        sealed: begin and end of the pickled contents in the blob; None where it was not made in a worker.
    """

    def __init__(self, blob: torch.Tensor, contents: Contents | None, sealed: tuple[int, int] | None = None) -> None:
        self.blob = blob
        self._contents, self._sealed = contents, sealed

    @property
    def contents(self) -> Contents:
        """Places of the sources in the blob, and the calls; unpickled at the first use."""
        opened = self._contents
        if opened is None:
            assert self._sealed is not None
            begin, end = self._sealed
            entries, programs, entry_of_image = pickle.loads(self.blob.numpy()[begin:end].data)
            calls = (tuple(op if type(op) is InPlaceOp else Op(*op) for op in ops) for ops in programs)
            opened = self._contents = Contents(entries, tuple(calls), entry_of_image)
        return opened

    def __reduce__(self) -> Any:
        return Packed, (self.blob, None if self._sealed else self._contents, self._sealed)

    def in_block(self, blob: torch.Tensor) -> Packed:
        """These sources in another tensor that holds a copy of the blob."""
        return Packed(blob, self._contents, self._sealed)

    @property
    def entry_of_image(self) -> list[int]:
        """Number of each image's entry."""
        return self.contents.entry_of_image

    def source(self, at: int) -> Source:
        """The source of an entry."""
        data = self.blob.numpy()
        kind, pieces, *rest = self.contents.entries[at]
        if kind == "file":
            path, mode, about, scan = rest
            header = JpegHeader(*about, scan=BaselineScan(*scan) if scan else None)  # type: ignore[misc]
            return EncodedSource(joined(data, pieces), path, header, mode)
        ((begin, end),) = pieces
        if kind == "pixels":
            mode, size, path = rest
            return PixelSource(Image.frombytes(mode, size, data[begin:end].tobytes()), path)
        shape, dtype, path = rest
        return FinishedSource(self.blob[begin:end].view(dtype).reshape(shape), path)

    def sources(self) -> list[Source]:
        """One source for each entry."""
        return [self.source(at) for at in range(len(self.contents.entries))]

    def calls(self, images: slice = slice(None)) -> list[tuple[Op, ...]]:
        """The calls recorded on each image, or on some, with the tensors among their arguments."""
        return [with_unpacked(ops, self.blob) for ops in self.contents.programs[images]]


class Packing:
    """The sources of a program, each once, and the tensors among the arguments of its calls, before they are written.

    The files that kernels decode come first.

    Args:
        sources: one for each image.

    Attributes:
        sources: the distinct ones.
        entry_of_image: number of each image's entry.
        jpegs: the files that kernels decode.
        chunks: what the block will hold; arrays are appended to it.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources, self.entry_of_image = _distinct(sources)
        self.jpegs = lay_out_jpegs(self.sources)
        self.chunks = self.jpegs.chunks

    def write(self, programs: Sequence[tuple[Op, ...]], arguments: Iterable[TensorArgument]) -> Packed:
        """Writes the blob: all arrays that were added, and in a data worker the contents.

        Args:
            programs: the calls recorded on each image.
            arguments: the tensors among their arguments.
        """
        entries: list[tuple[Any, ...]] = []
        for at, source in enumerate(self.sources):
            kind, chunk, *described = _payload(source)
            alignment = ALIGNMENT_BYTES if kind == "tensor" else 1
            pieces = self.jpegs.pieces.get(at) or [self.chunks.add(chunk, alignment)]
            entries.append((kind, pieces, *described))
        packed: dict[int, PackedArgument] = {}
        for argument in arguments:
            if id(argument) not in packed:
                begin, _ = self.chunks.add(_bytes_of(argument.tensor))
                packed[id(argument)] = PackedArgument(begin, tuple(argument.tensor.shape), argument.tensor.dtype)
        calls = tuple(with_packed(ops, packed) for ops in programs) if packed else tuple(programs)
        contents = Contents(tuple(entries), calls, self.entry_of_image)
        is_worker = get_worker_info() is not None
        sealed = self.chunks.add(_sealed(contents)) if is_worker else None
        blob = pool_writer.allocate(self.chunks.size) if is_worker else None
        if blob is None:
            blob = collated_tensor((self.chunks.size,), torch.uint8)
        return Packed(self.chunks.write(blob), contents, sealed)


def _distinct(sources: Sequence[Source]) -> tuple[list[Source], list[int]]:
    """The distinct sources, and which of them each image has."""
    places: dict[Any, int] = {}  # by what handles of one read of a file, or of one image, have in common
    alike: dict[Any, list[int]] = {}  # those that may be equal: a file may be read twice, and images may be copied
    entry_of_image = []
    distinct: list[Source] = []
    for source in sources:
        known = id(source[0]), getattr(source, "mode", None)
        place = places.get(known)
        if place is None:
            same, data = _likeness(source)
            candidates = alike.setdefault(same, [])
            for at in candidates:
                if data == _data(distinct[at]):
                    place = at
                    break
        if place is None:
            place = len(distinct)
            candidates.append(place)
            # The bytes of an image were looked at, and are kept for the block.
            distinct.append(BytesSource((*same[:2], data), source.path) if isinstance(source, PixelSource) else source)
        places[known] = place
        entry_of_image.append(place)
    return distinct, entry_of_image


_SAMPLE_BYTES = 64


def _likeness(source: Source) -> tuple[tuple[Any, ...], Any]:
    """What two sources have in common that are equal if their data are, and the data."""
    if isinstance(source, PixelSource):
        data, middle = source.tobytes(), math.prod(source.size) * len(source.mode) // 2
        # Some of the bytes, so that few of thousands of small images are compared.
        return (source.mode, source.size, source.path, data[middle : middle + _SAMPLE_BYTES]), data
    if isinstance(source, EncodedSource):
        return (source.path, source.mode, len(source.data)), source.data
    return (id(source.tensor),), None


def _data(source: Source) -> Any:
    """What `_likeness` compares with, of one of the distinct sources."""
    if isinstance(source, BytesSource):
        return source.tobytes()
    return source.data if isinstance(source, EncodedSource) else None


def _payload(source: Source) -> tuple[Any, ...]:
    """Kind of a source's entry, bytes for the blob, and the entry's other fields."""
    if isinstance(source, EncodedSource):
        *about, scan = source.header
        return "file", source.data, source.path, source.mode, tuple(about), scan and tuple(scan)
    if isinstance(source, PixelSource):
        return "pixels", source.tobytes(), source.mode, source.size, source.path
    return "tensor", _bytes_of(source.tensor), tuple(source.tensor.shape), source.tensor.dtype, source.path


def _sealed(contents: Contents) -> bytes:
    """The pickled contents; the calls as plain tuples, since pickle runs Python code for each named one.

    Calls in place stay what they are: whoever opens the contents tells them by their type.
    """
    calls = [
        [*map(tuple, ops)]
        if InPlaceOp not in map(type, ops)
        else [op if type(op) is InPlaceOp else tuple(op) for op in ops]
        for ops in contents.programs
    ]
    return pickle.dumps((contents.entries, calls, contents.entry_of_image), pickle.HIGHEST_PROTOCOL)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    values = tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1)
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]


def collated_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor, in shared memory when made in a data worker."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = torch.UntypedStorage._new_shared(max(torch.Size(shape).numel() * dtype.itemsize, 1))
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload]
