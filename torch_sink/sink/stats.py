"""What the queue saw: how often it was empty or full, who waited for whom, and what that means."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch_sink.damage.report import BrokenFile, DecodeReport

INPUT_BOUND_SHARE = 0.3  # MindInsight's rule: empty in more than 30 % of the fetches
WAITS_KEPT = 4096  # percentiles describe the latest waits, so a slow start does not color a long run
LAST_SHOWN = 10
WARM_UP = 10  # fetches in which workers start, files come from a cold disk, and the consumer's code is compiled
FEWEST = 20

ADVICE = {
    "too few batches to tell": f"ask again after {FEWEST} batches; the first {WARM_UP} count as warm-up",
    "input-bound": "the consumer waits for data: use more workers, a faster dataset, or decode on the device",
    "compute-bound": "data waits for the consumer: the input pipeline keeps up, more workers would not help",
}


@dataclass(frozen=True)
class QueueStats:
    """What a `SinkLoader`'s queue saw so far.

    Attributes:
        batches: batches delivered since the loader was made.
        empty: fetches that found no batch ready. Where batches are made on demand (`num_workers=0`) nothing is ever
            queued; a fetch then counts as empty when it took longer than half of the consumer's own step.
        full: fetches that found every slot filled.
        consumer_wait_p50_seconds: median time that a fetch waited, over the latest 4,096 fetches.
        consumer_wait_p90_seconds: 90th percentile of the same.
        consumer_wait_p99_seconds: 99th percentile of the same.
        producer_wait_p50_seconds: median time that the producer waited for a free slot, over the latest 4,096 batches.
        producer_wait_p99_seconds: 99th percentile of the same.
        bytes_held: bytes of the slots now (CPU: the tensors that the slots refer to; accelerator: the whole ring, and
            the most that kernels took to make a batch: compressed files, decoded pixels, and what transforms leave in
            between).
        skipped: samples dropped under `on_decode_error="skip"`.
        replaced: samples replaced under `on_decode_error="replace"`.
        judged: fetches that the verdict and the consumer's percentiles are of: all but the first 10, the warm-up.
        judged_empty: those of them that found no batch ready.
        broken_files: path of each file that could not be opened or decoded, and the reason.
        verdict: "too few batches to tell" below 20 batches; else "input-bound" if more than 30 % of the judged fetches
            found the queue empty, else "compute-bound".
    """

    batches: int
    empty: int
    full: int
    consumer_wait_p50_seconds: float
    consumer_wait_p90_seconds: float
    consumer_wait_p99_seconds: float
    producer_wait_p50_seconds: float
    producer_wait_p99_seconds: float
    bytes_held: int
    skipped: int
    replaced: int
    judged: int
    judged_empty: int
    broken_files: tuple[BrokenFile, ...] = ()

    @property
    def verdict(self) -> str:
        if self.batches < FEWEST:
            return "too few batches to tell"
        return "input-bound" if self.judged_empty > INPUT_BOUND_SHARE * self.judged else "compute-bound"

    @property
    def advice(self) -> str:
        """One line that says what to do about the verdict."""
        return ADVICE[self.verdict]

    @property
    def evidence(self) -> str:
        """What the verdict judges by: how often the queue was empty, and three percentiles of the wait for a batch."""
        waits = (self.consumer_wait_p50_seconds, self.consumer_wait_p90_seconds, self.consumer_wait_p99_seconds)
        p50, p90, p99 = (f"{seconds * 1e3:.2f} ms" for seconds in waits)
        return f"queue empty at {self.judged_empty} of {self.judged} fetches, waits p50 {p50}, p90 {p90}, p99 {p99}"

    def __str__(self) -> str:
        broken = "".join(f"\n  {path}: {reason}" for path, reason in self.broken_files)
        return (
            f"{self.batches} batches, queue empty at {self.empty} and full at {self.full} fetches; "
            f"producer waited p50 {self.producer_wait_p50_seconds * 1e3:.2f} ms, "
            f"p99 {self.producer_wait_p99_seconds * 1e3:.2f} ms; "
            f"{self.bytes_held / 2**20:.1f} MiB held; {self.skipped} samples skipped, {self.replaced} replaced\n"
            f"{self.verdict}: {self.advice}{f' (after the warm-up: {self.evidence})' if self.judged else ''}{broken}"
        )


class StatsCollector:
    """Collects what `QueueStats` shows.

    Consumer figures are written by the consumer only and producer figures by the producer only; each update is a
    single append or addition on a field that has one writer, so no lock is needed, with or without a GIL.
    """

    def __init__(self) -> None:
        self.batches = self.empty = self.full = 0
        self.loss = DecodeReport()
        self.judged = self.judged_empty = 0
        self.queue_sizes: deque[int] = deque(maxlen=LAST_SHOWN)
        self.latest_waits: deque[float] = deque(maxlen=LAST_SHOWN)
        self.consumer_waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self.producer_waits: deque[float] = deque(maxlen=WAITS_KEPT)

    def fetched(self, queue_size: int, waited_seconds: float, *, empty: bool, full: bool) -> None:
        """Counts a fetch by the consumer, which found `queue_size` batches ready."""
        self.queue_sizes.append(queue_size)
        self.latest_waits.append(waited_seconds)
        self.batches += 1
        self.empty += empty
        self.full += full
        if self.batches > WARM_UP:
            self.judged += 1
            self.judged_empty += empty
            self.consumer_waits.append(waited_seconds)

    def recent(self, queue_size: int, waited_seconds: float) -> str:
        """The latest queue sizes and waits, oldest first, this fetch last: what a timeout message shows."""
        waits = [*self.latest_waits, waited_seconds][-LAST_SHOWN:]
        sizes = [*self.queue_sizes, queue_size][-LAST_SHOWN:]
        return f"last queue sizes {sizes}, last waits in seconds [{', '.join(f'{wait:.3f}' for wait in waits)}]"

    def collected(self, bytes_held: int) -> QueueStats:
        """The figures so far; `bytes_held` are those of the slots now."""
        consumer = _percentiles(self.consumer_waits or self.latest_waits, 0.50, 0.90, 0.99)
        producer = _percentiles(self.producer_waits, 0.50, 0.99)
        return QueueStats(
            batches=self.batches,
            empty=self.empty,
            full=self.full,
            consumer_wait_p50_seconds=consumer[0],
            consumer_wait_p90_seconds=consumer[1],
            consumer_wait_p99_seconds=consumer[2],
            producer_wait_p50_seconds=producer[0],
            producer_wait_p99_seconds=producer[1],
            bytes_held=bytes_held,
            skipped=self.loss.skipped,
            replaced=self.loss.replaced,
            judged=self.judged,
            judged_empty=self.judged_empty,
            broken_files=tuple(BrokenFile(path, reason) for path, reason in self.loss.files.items()),
        )


def _percentiles(waits: deque[float], *shares: float) -> list[float]:
    ordered = sorted(waits.copy()) or [0.0]  # copy() is one C call: the writer may append meanwhile
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]
