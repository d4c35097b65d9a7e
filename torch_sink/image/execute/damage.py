"""What becomes of the images of a batch whose files are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_sink.damage.cause import BrokenFile
from torch_sink.errors import DecodeError
from torch_sink.image.sources.source import EncodedSource, PixelSource, Source


class Survivors(NamedTuple):
    """The images that a result shows.

    Attributes:
        rows: which, in order.
        are_all: every image, at its own place.
        broken_files: those of the others.
    """

    rows: list[int]
    are_all: bool
    broken_files: tuple[BrokenFile, ...]


def try_decode(source: Source) -> Source | DecodeError:
    """The source with its pixels made, or the error."""
    if not isinstance(source, EncodedSource):
        return source
    try:
        return PixelSource(source.decode(), source.path)
    except DecodeError as error:
        return error


def survivors(images: Sequence[Any], mixes: int, policy: str) -> Survivors:
    """What is left of a batch.

    Args:
        images: the error of each one that is damaged; anything else stands for a good one.
        mixes: how often each image takes a part of the one before it, damage included.
        policy: "raise", "skip" a damaged image, or "replace" it by the next good one.

    Raises:
        DecodeError: that of the first image that is damaged, where the policy says so or none is good.
    """
    errors = {row: image for row, image in enumerate(images) if isinstance(image, DecodeError)}
    broken_files = tuple(BrokenFile(error.path, error.reason) for error in errors.values())
    for _ in range(mixes):
        errors |= {(row + 1) % len(images): error for row, error in errors.items()}
    return Survivors(_surviving_rows(len(images), errors, policy), not errors, broken_files)


def _surviving_rows(count: int, errors: dict[int, DecodeError], policy: str) -> list[int]:
    if not errors:
        return list(range(count))
    first = min(errors)
    if policy == "raise" or len(errors) == count:
        error = errors[first]
        raise DecodeError(error.path, first, error.reason) from error
    good = [row for row in range(count) if row not in errors]
    if policy == "skip":
        return good
    return [row if row not in errors else next((g for g in good if g > row), good[0]) for row in range(count)]
