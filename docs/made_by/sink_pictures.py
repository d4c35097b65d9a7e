"""Draw what each sink removes: four schedules of one training loop, computed from stated costs.

    python docs/made_by/sink_pictures.py            # writes sinks.png and sinks_dark.png below docs/images

Nothing runs and nothing is measured: kernels run in the order of their launches, each once it is launched and the one
before has ended. On a machine with a GPU, `torch_sink.timeline` shows a real run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

IMAGES = Path(__file__).resolve().parents[1] / "images"
# Microseconds: to receive and copy a batch, of a launch, and between the end of the last kernel and a sync's return.
FETCH, LAUNCH, SYNC = 100.0, 8.0, 15.0
# A step on the GPU: so many kernels, of so many microseconds each.
KERNELS, KERNEL = 40, 5.0
STEPS_PER_SYNC = 8
STEPS = 3 * STEPS_PER_SYNC
ASSUMED = (
    f"a step of {KERNELS} kernels of {KERNEL:g} us, {LAUNCH:g} us of CPU time for each launch, {FETCH:g} us to receive "
    f"and copy a batch, and {SYNC:g} us between the end of the last kernel and the return of a sync"
)

WINDOW = 900.0  # microseconds that are drawn
# Pixels: large enough to be read where the picture is 400 pixels wide.
WIDTH, LEFT, RIGHT, TYPE = 1200, 96, 1190, 40
GPU_ROW, CPU_ROW, ROOM = 64, 34, 34
GREEN, BROWN, BLUE = "#009E73", "#8C6239", "#0072B2"


class Theme(NamedTuple):
    """The colors that differ on white and on black pages. Idle differs from work in lightness, for every reader."""

    back: str
    ink: str
    gpu_idle: str
    cpu_idle: str


LIGHT = Theme("#ffffff", "#222222", "#ffcfa8", "#e4e4e4")
DARK = Theme("#1b1b1b", "#eeeeee", "#6b3a12", "#3a3a3a")


class Sinks(NamedTuple):
    """A training loop with some of the sinks.

    Attributes:
        title: above its rows.
        has_batches: whether the next batch lies on the GPU when it is asked for (data sink).
        is_graph: whether one launch is a whole step (graph sink).
        steps_per_sync: above 1 with the loop sink.
    """

    title: str
    has_batches: bool
    is_graph: bool
    steps_per_sync: int


LOOPS = (
    Sinks("No sink", False, False, 1),
    Sinks("Data sink: batches are ready", True, False, 1),
    Sinks("+ graph sink: one launch per step", True, True, 1),
    Sinks(f"+ loop sink: one sync per {STEPS_PER_SYNC} steps", True, True, STEPS_PER_SYNC),
)


class Schedule(NamedTuple):
    """When the GPU and the CPU work, as (begin, end) in microseconds, and when each sync returns."""

    gpu: list[tuple[float, float]]
    cpu: list[tuple[float, float]]
    syncs: list[float]

    @property
    def busy(self) -> float:
        """The GPU's working part of the time between the first sync and the last one."""
        begin, end = self.syncs[0], self.syncs[-1]
        return sum(stop - start for start, stop in self.gpu if begin <= start < end) / (end - begin)


def schedule(sinks: Sinks, steps: int) -> Schedule:
    """The first `steps` steps of a loop whose data workers keep up."""
    made = Schedule([], [], [])
    now = gpu_ends = 0.0

    def work(microseconds: float) -> None:
        nonlocal now
        made.cpu.append((now, now + microseconds))
        now += microseconds

    for step in range(1, steps + 1):
        if not sinks.has_batches:
            work(FETCH)
        for _ in range(1 if sinks.is_graph else KERNELS):
            work(LAUNCH)
            begin = max(now, gpu_ends)
            gpu_ends = begin + (KERNELS * KERNEL if sinks.is_graph else KERNEL)
            made.gpu.append((begin, gpu_ends))
        if step % sinks.steps_per_sync == 0:
            now = max(now, gpu_ends) + SYNC
            made.syncs.append(now)
    return made


def busy_percentages() -> list[int]:
    """How much of the time the GPU works, for each of `LOOPS`."""
    return [round(100 * schedule(sinks, STEPS).busy) for sinks in LOOPS]


def describe() -> str:
    """The picture's text for those who do not see it, and inside of the file."""
    first, second, third, last = busy_percentages()
    return (
        f"Four timelines. The GPU is busy {first} % of the time with no sink, {second} % with the data sink, "
        f"{third} % with the graph sink too, {last} % with all three"
    )


def draw(path: Path, theme: Theme) -> None:
    """The GPU's row comes first and is the taller one: it is the one that matters."""
    panel = TYPE + 14 + GPU_ROW + 6 + CPU_ROW + ROOM
    image = Image.new("RGB", (WIDTH, panel * len(LOOPS) + TYPE + 20), theme.back)
    pen = ImageDraw.Draw(image)
    pen.font = ImageFont.load_default(size=TYPE)

    def row(name: str, top: int, height: int, idle: str, spans: list[tuple[str, float, float]]) -> None:
        pen.text((LEFT - 10, top + height // 2), name, theme.ink, anchor="rm")
        for color, begin, end in [(idle, 0.0, WINDOW), *spans]:
            left, right = (LEFT + at / WINDOW * (RIGHT - LEFT) for at in (max(begin, 0), min(end, WINDOW)))
            if left < right:
                pen.rectangle((left, top, right - 1, top + height), color)

    for number, (sinks, percent) in enumerate(zip(LOOPS, busy_percentages(), strict=True)):
        made = schedule(sinks, STEPS)
        # From the end of a sync on; where syncs are rare, one comes in the middle.
        zero = made.syncs[0] - (WINDOW / 2 if sinks.steps_per_sync > 1 else 0)
        top = panel * number
        pen.text((LEFT, top), sinks.title, theme.ink)
        pen.text((RIGHT, top), f"GPU busy {percent} %", GREEN, anchor="ra")
        top += TYPE + 14
        row("GPU", top, GPU_ROW, theme.gpu_idle, [(GREEN, begin - zero, end - zero) for begin, end in made.gpu])
        works = [(BROWN, begin - zero, end - zero) for begin, end in made.cpu]
        syncs = [(BLUE, at - SYNC - zero, at - zero) for at in made.syncs]
        row("CPU", top + GPU_ROW + 6, CPU_ROW, theme.cpu_idle, works + syncs)

    at, top = 10, panel * len(LOOPS)
    legend = {
        GREEN: "GPU works", theme.gpu_idle: "GPU idle",
        BROWN: "CPU works", theme.cpu_idle: "waits", BLUE: "sync ends",
    }  # fmt: skip
    for color, says in legend.items():
        pen.rectangle((at, top + 6, at + TYPE, top + 4 + TYPE), color)
        pen.text((at + TYPE + 10, top), says, theme.ink)
        at += TYPE + 10 + round(pen.textlength(says)) + 28
    about = PngInfo()
    about.add_text("Description", describe())
    image.quantize(64).save(path, optimize=True, pnginfo=about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder (default: %(default)s)")
    folder = parser.parse_args().output
    draw(folder / "sinks.png", LIGHT)
    draw(folder / "sinks_dark.png", DARK)
