"""What becomes of the images of a batch whose files are damaged."""

from __future__ import annotations

from typing import NamedTuple

from torch_sink.damage.report import BrokenFile
from torch_sink.errors import DecodeError
from torch_sink.image.decode.source import EncodedSource, PixelSource, Source


class Survivors(NamedTuple):
    """The images that a result shows."""

    rows: list[int] | None  # which, in order; None where it shows every image at its own place
    broken_files: tuple[BrokenFile, ...] = ()  # those of the others


def try_decode(source: Source) -> Source | DecodeError:
    """The source with its pixels made, or the error."""
    if not isinstance(source, EncodedSource):
        return source
    try:
        return PixelSource(source.decode(), source.path)
    except DecodeError as error:
        return error


def survivors(errors: dict[int, DecodeError], count: int, mixes: int, policy: str) -> Survivors:
    """What is left of a batch.

    Args:
        errors: of the images that are damaged, in order.
        count: how many images there are.
        mixes: how often each image takes a part of the one before it, damage included.
        policy: "raise", "skip" a damaged image, or "replace" it by the next good one.

    Raises:
        DecodeError: that of the first image that is damaged, where the policy says so or none is good.
    """
    if not errors:
        return Survivors(None)
    broken_files = tuple(BrokenFile(error.path, error.reason) for error in errors.values())
    for _ in range(mixes):
        errors = errors | {(row + 1) % count: error for row, error in errors.items()}
    first = min(errors)
    if policy == "raise" or len(errors) == count:
        error = errors[first]
        raise DecodeError(error.path, first, error.reason) from error
    good = [row for row in range(count) if row not in errors]
    if policy == "replace":
        following = [next((row for row in good if row >= place), good[0]) for place in range(count)]
        return Survivors(following, broken_files)
    return Survivors(good, broken_files)
