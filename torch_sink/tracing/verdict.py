"""What limits a run, in words: the loader, the way to the device, or the training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_sink.tracing.spans import Span

FEWEST_BATCHES = 4
# A loop that waits less than this is paced by its steps; some waiting is there in every run.
LIMITING_SHARE = 0.1
# The first batch and the first step are left out: workers start then, and code is compiled.
PERIOD = "Counted from the second batch on."

Intervals = list[tuple[int, int]]  # begin and end in nanoseconds, in order, none touches another


def verdict(spans: Sequence[Span]) -> str:
    """One line that says what limits the run, with the share of the time that the training loop waited for data.

    Only the time from the second wait for a batch to the last step counts. A wait while the device still computes costs
    nothing and is left out. A wait during which a batch is copied to the device, or transformed there, counts for the
    copy, every other one for the loader.
    """
    host = [span for span in spans if span.lane == "host"]
    fetches = [span.begin for span in host if span.waits_for_data]
    if len(fetches) <= FEWEST_BATCHES:  # the last one brings none
        return f"No verdict: the loop took fewer than {FEWEST_BATCHES} batches from a DataLoader or SinkLoader."
    begin = fetches[1]
    end = max(fetches[-1], *(span.end for span in host if not span.waits_for_data), 0)
    busy = _joined(span for span in spans if span.lane == "device")
    copies = _joined(span for span in spans if _is_copy(span))
    waits = _common(_joined(span for span in host if span.waits_for_data), [(begin, end)])
    waited = _length(waits) - _length(_common(waits, busy))
    during_copies = _common(waits, copies)
    copied = _length(during_copies) - _length(_common(during_copies, busy))
    share = f"the loop waited {100 * waited / (end - begin):.0f} % of the time for data"
    if waited < LIMITING_SHARE * (end - begin):
        return f"The step limits: {share}. A faster loader would not help."
    if 2 * copied > waited:
        return f"The copy limits: {share}, mostly while batches were copied to the device or transformed there."
    return f"The loader limits: {share}. Use more workers, a faster dataset, or make the pixels on the device."


def _is_copy(span: Span) -> bool:
    return span.lane == "copy stream" or (span.lane == "producer" and not span.waits_for_data)


def _joined(spans: Iterable[Span]) -> Intervals:
    """The times that at least one span covers."""
    found: Intervals = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _common(one: Intervals, other: Intervals) -> Intervals:
    """The times that both cover."""
    found: Intervals = []
    first, second = 0, 0
    while first < len(one) and second < len(other):
        begin, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if begin < end:
            found.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return found


def _length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)
