"""What becomes of the images of a batch whose files are damaged."""

from __future__ import annotations

from torch_sink.errors import DecodeError
from torch_sink.image.sources.source import EncodedSource, PixelSource, Source


def try_decode(source: Source) -> Source | DecodeError:
    """The source with its pixels made, or the error."""
    if not isinstance(source, EncodedSource):
        return source
    try:
        return PixelSource(source.decode(), source.path)
    except DecodeError as error:
        return error


def surviving_rows(count: int, errors: dict[int, DecodeError], policy: str) -> list[int]:
    """Which images the rows of the result show, after skipping or replacing the damaged ones."""
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
