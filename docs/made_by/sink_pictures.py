"""Draw what each sink removes: four timelines of one training loop, on a slow device that this script pretends to have.

    python docs/made_by/sink_pictures.py            # writes sinks.png and sinks_dark.png below docs/images

The loaders, workers and the SinkLoader are real. The device is two threads that take a stated time for each copy and
each kernel; a launch costs the host a stated time. On a machine with a GPU, `torch_sink.timeline` shows a real one.
"""

from __future__ import annotations

import argparse
import functools
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader, Dataset

import torch_sink
from torch_sink.sink.slots import Slots
from torch_sink.tracing import _active
from torch_sink.tracing.spans import DARK, LIGHT, Span, SpanLog, write_picture

IMAGES = Path(__file__).resolve().parents[1] / "images"
# Milliseconds. A step is many small kernels, as of a ResNet; a graph launches all of them at once.
SAMPLE, COPY, KERNEL, LAUNCH = 1.0, 6.0, 0.25, 0.5
KERNELS, BATCH, STEPS, WINDOW = 40, 16, 28, 120.0
SINK = 8
TITLES = (
    "No sink: the host receives, copies, launches every kernel, and syncs at every step",
    "Data sink: a thread keeps batches ready on the device",
    "+ graph sink: one launch per step",
    f"+ loop sink: one sync every {SINK} steps",
)


class Samples(Dataset[Any]):
    """Each takes `SAMPLE` ms of a worker."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(len(indices) * SAMPLE / 1e3)
        return [torch.zeros(8) for _ in indices]


class Stream:
    """Does what is launched in order, in a thread; `lane` is where its work is drawn."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.work: queue.Queue[tuple[str, float]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            name, milliseconds = self.work.get()
            begin = time.perf_counter_ns()
            time.sleep(milliseconds / 1e3)
            if _active:
                _active[-1].add(self.lane, name, begin, time.perf_counter_ns())
            self.work.task_done()

    def launch(self, name: str, milliseconds: float) -> None:
        self.work.put((name, milliseconds))

    def sync(self, name: str) -> None:
        begin = time.perf_counter_ns()
        self.work.join()
        _active[-1].add("host", name, begin, time.perf_counter_ns(), True)


def on_host(name: str, milliseconds: float) -> None:
    begin = time.perf_counter_ns()
    time.sleep(milliseconds / 1e3)
    _active[-1].add("host", name, begin, time.perf_counter_ns())


def launch_step(device: Stream, *, as_graph: bool) -> None:
    """Kernels that are launched one by one run as they come; a graph's run back to back."""
    if as_graph:
        on_host("launch", LAUNCH)
        device.launch("step", KERNELS * KERNEL)
        return
    for _ in range(4):
        on_host("launch", LAUNCH * KERNELS / 4)
        device.launch("kernels", KERNELS * KERNEL / 4)


def train(batches: Iterable[Any], device: Stream, copies: Stream | None, *, as_graph: bool, sink: int) -> None:
    for number, _ in enumerate(batches, 1):
        if copies is not None:
            copies.launch("copy", COPY)
            copies.sync("copy a batch")
        launch_step(device, as_graph=as_graph)
        if number % sink == 0:
            device.sync("loss.item()" if sink == 1 else "all losses")


def record(run: Callable[[], None]) -> list[Span]:
    """The spans of `WINDOW` ms from the middle of a run, as of 0."""
    with tempfile.TemporaryDirectory() as folder:
        with torch_sink.timeline(Path(folder, "run.html")):
            log: SpanLog = _active[-1]
            run()
            begin = (log.began + time.perf_counter_ns()) // 2
            spans = log.collected()
        end = begin + int(WINDOW * 1e6)
        seen = [span for span in spans if span.end > begin and span.begin < end]
        return [span._replace(begin=span.begin - begin, end=span.end - begin) for span in seen]


def four_timelines() -> list[list[Span]]:
    device, copies = Stream("device"), Stream("copy stream")
    loader = DataLoader(Samples(), BATCH, num_workers=2)
    found = [record(lambda: train(loader, device, copies, as_graph=False, sink=1))]
    stock = Slots.fill

    def fill(slots: Slots, slot: int, batch: Any) -> Any:
        copies.launch("copy", COPY)
        return stock(slots, slot, batch)

    Slots.fill = fill
    try:
        for as_graph, sink in ((False, 1), (True, 1), (True, SINK)):
            with torch_sink.SinkLoader(loader) as ready:
                run = functools.partial(train, ready, device, None, as_graph=as_graph, sink=sink)
                found.append(record(run))
    finally:
        Slots.fill = stock
    return found


def draw(timelines: list[list[Span]], path: Path, *, is_dark: bool) -> None:
    pictures = []
    with tempfile.TemporaryDirectory() as folder:
        for title, spans in zip(TITLES, timelines, strict=True):
            write_picture(Path(folder, "one.png"), spans, 0, int(WINDOW * 1e6), title, is_dark=is_dark)
            pictures.append(Image.open(Path(folder, "one.png")).convert("RGB"))
    note = (
        f"Simulated device on a CPU: {KERNELS} kernels of {KERNEL} ms a step, {LAUNCH} ms a launch, "
        f"{COPY:g} ms a copy, {SAMPLE} ms a sample in one of 2 workers, batches of {BATCH}."
    )
    colors = DARK if is_dark else LIGHT
    height = sum(picture.height for picture in pictures) + 30
    whole = Image.new("RGB", (pictures[0].width, height), colors.back)
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    ImageDraw.Draw(whole).text((20, top + 4), note, colors.ink, ImageFont.load_default(size=16))
    whole.quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder (default: %(default)s)")
    folder, timelines = parser.parse_args().output, four_timelines()
    draw(timelines, folder / "sinks.png", is_dark=False)
    draw(timelines, folder / "sinks_dark.png", is_dark=True)
