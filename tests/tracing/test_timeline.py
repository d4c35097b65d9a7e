"""Timelines: what they see of real runs, that they leave nothing behind, and that the page works without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import fetch, worker

import torch_sink
from torch_sink.sink.slots import Slots
from torch_sink.tracing import HOOKS
from torch_sink.tracing.spans import Span, verdict

pytestmark = pytest.mark.once

BATCHES = 6


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index % 2


def loop() -> torch_sink.StepLoop:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torch_sink.StepLoop(model, nn.functional.cross_entropy, optimizer, steps_per_sync=3)


def events(path: Path) -> list[tuple[str, str, float, float]]:
    """(lane, name, begin, length) of each span of a trace, in milliseconds."""
    found = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    spans = [event for event in found if event["ph"] == "X"]
    return [(lanes[event["tid"]], event["name"], event["ts"] / 1e3, event["dur"] / 1e3) for event in spans]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_run_shows_workers_producer_and_host(method: str, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    with torch_sink.SinkLoader(DataLoader(Samples(), 4, num_workers=2, multiprocessing_context=method)) as loader:
        loop().run(loader, timeline=page)
    seen = events(page)
    assert {lane for lane, *_ in seen} == {"worker 0", "worker 1", "producer", "host"}
    count = {(lane, name): 0 for lane, name, *_ in seen}
    for lane, name, *_ in seen:
        count[lane, name] += 1
    assert count["worker 0", "make a batch"] == count["worker 1", "make a batch"] == BATCHES / 2
    assert count["host", "step"] == BATCHES
    assert count["host", "end of the sink"] == 2
    # Processes share one clock: no batch is received before it was made.
    made = min(begin + length for lane, _, begin, length in seen if lane.startswith("worker"))
    received = min(begin + length for lane, name, begin, length in seen if name == "receive a batch")
    assert made <= received
    with Image.open(page.with_suffix(".png")) as picture:
        assert picture.width == 1600
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) > 4


def test_a_plain_loop_shows_its_parts(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch_sink.timeline(tmp_path / "plain.html"):
        for values, labels in DataLoader(Samples(), 4):
            nn.functional.cross_entropy(model(values), labels).backward()
            optimizer.step()
    names = [name for _, name, *_ in events(tmp_path / "plain.html")]
    assert names.count("backward") == names.count("optimizer") == BATCHES
    assert names.count("receive a batch") == BATCHES + 1  # the last one is the end


def functions() -> list[Any]:
    found: list[Any] = [worker._worker_loop, fetch._MapDatasetFetcher.fetch, fetch._IterableDatasetFetcher.fetch]
    found += [vars(torch.Tensor).get(hook.path.partition(".")[2]) for hook in HOOKS if hook.module == "torch"]
    return found


def test_afterwards_every_function_is_the_same_object(tmp_path: Path) -> None:
    before, folders = functions(), set(Path(tempfile.gettempdir()).glob("torch_sink_timeline_*"))

    def interrupted() -> None:
        with torch_sink.timeline(tmp_path / "run.html"):
            assert [a is b for a, b in zip(functions(), before, strict=True)].count(True) == 2  # the fetchers
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(now is then for now, then in zip(functions(), before, strict=True))
    assert (tmp_path / "run.html").is_file()
    assert set(Path(tempfile.gettempdir()).glob("torch_sink_timeline_*")) == folders


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    with (
        torch_sink.timeline(tmp_path / "a.html"),
        pytest.raises(RuntimeError, match="another timeline is running"),
        torch_sink.timeline(tmp_path / "b.html"),
    ):
        pass


def test_one_that_is_still_open_when_the_program_ends(tmp_path: Path) -> None:
    code = f"""
import torch, torch_sink
shown = torch_sink.timeline({str(tmp_path / "run.html")!r})
shown.__enter__()
torch.ones(3, requires_grad=True).sum().backward()
"""
    folders = set(Path(tempfile.gettempdir()).glob("torch_sink_timeline_*"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert [name for _, name, _, _ in events(tmp_path / "run.html")] == ["backward"]
    assert set(Path(tempfile.gettempdir()).glob("torch_sink_timeline_*")) == folders


@pytest.mark.parametrize(
    ("given", "written"), [("run.html", "run"), ("run.png", "run"), ("run", "run"), ("new/epoch.5", "new/epoch.5")]
)
def test_files_are_named_as_given(tmp_path: Path, given: str, written: str) -> None:
    with torch_sink.timeline(tmp_path / given):
        pass
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {tmp_path / f"{written}.{suffix}" for suffix in ("html", "png", "json")}


def test_a_path_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    seen: list[Any] = []
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 4
    for path, error in ((tmp_path / "run.html", IsADirectoryError), ("", ValueError)):
        with pytest.raises(error, match=r"run\.json|names no file"):
            loop().run((seen.append(batch) or batch for batch in data), timeline=path)
    assert seen == []


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    with torch_sink.timeline(tmp_path / "run.html"):
        loop().run([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 4)
    page = (tmp_path / "run.html").read_text()
    assert not re.search(r"(src|href)=|https?://|@import|fetch\(", page)


@pytest.mark.parametrize("name", ["item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"])
def test_a_watch_inside_sees_the_same_waits(name: str, tmp_path: Path) -> None:
    def error() -> str:
        with pytest.raises(torch_sink.HostSyncError) as caught, torch_sink.no_host_sync():
            getattr(torch.ones(1), name)()
        return str(caught.value)

    without = error()
    with torch_sink.timeline(tmp_path / "run.html"):
        assert error() == without
    assert f"{__file__}:" in without


class SlowSamples(Samples):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def timed(path: Path, *, sample: float = 0.0, copy: float = 0.0, step: float = 0.0) -> str:
    """The verdict on the page of a run in which these parts sleep, in seconds."""
    stock, training = Slots.fill, loop()
    training.model.register_forward_pre_hook(lambda *_: time.sleep(step))

    def fill(slots: Slots, slot: int, batch: Any) -> Any:
        time.sleep(copy)
        return stock(slots, slot, batch)

    with (
        pytest.MonkeyPatch.context() as patch,
        torch_sink.SinkLoader(DataLoader(SlowSamples(sample), 4, num_workers=1)) as loader,
    ):
        patch.setattr(Slots, "fill", fill)
        training.run(loader, timeline=path)
    found = re.search(r'id="verdict">([^<]*)<', path.read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("part", "seconds", "limit"), [("sample", 0.06, "loader"), ("copy", 0.24, "copy"), ("step", 0.24, "step")]
)
def test_the_slow_part_is_what_limits(part: str, seconds: float, limit: str, tmp_path: Path) -> None:
    """A batch has four samples, so each of the parts takes 240 ms, long on a busy machine too; the others take none."""
    found = timed(tmp_path / "run.html", **{part: seconds})
    assert found.startswith(f"The {limit} limits: the loop waited ")
    share = int(found.split(" waited ")[1].split(" %")[0])
    assert share < 10 if limit == "step" else share > 50
    with Image.open(tmp_path / "run.png") as picture:
        assert picture.height > 100


def rounds(*parts: tuple[str, str, int], after: tuple[Span, ...] = ()) -> list[Span]:
    """Ten rounds of the training loop, whose parts take these times one after the other."""
    spans, now = [], 0
    for _ in range(10):
        for lane, name, length in parts:
            spans.append(Span(lane, name, now, now + length))
            now += length
    return [*spans, Span("host", "wait for a batch", now, now + 10**6), *after]


WAIT, STEP = ("host", "wait for a batch", 62), ("host", "step", 38)


def test_the_share_is_that_of_the_waits_from_the_second_batch_on() -> None:
    assert verdict(rounds(WAIT, STEP)).startswith("The loader limits: the loop waited 62 % of the time for data.")
    slow_start = [
        Span("host", "wait for a batch", -10_000, 0),
        *rounds(("host", "receive a batch", 5), ("host", "backward", 95)),
    ]
    assert verdict(slow_start).startswith("The step limits: the loop waited 5 % of the time for data.")


@pytest.mark.parametrize(
    ("lane", "name", "limit"),
    [
        ("copy stream", "copy a batch", "copy"),
        ("producer", "take a batch", "copy"),
        ("producer", "receive a batch", "loader"),
    ],
)
def test_a_wait_counts_for_what_happens_meanwhile(lane: str, name: str, limit: str) -> None:
    spans = [Span(lane, name, begin, begin + 60) for begin in range(0, 1000, 100)]
    assert verdict(rounds(WAIT, STEP, after=tuple(spans))).startswith(f"The {limit} limits: the loop waited 62 %")


def test_a_wait_while_the_device_computes_costs_nothing() -> None:
    spans = [Span("device", "step", begin + 2, begin + 98) for begin in range(0, 1000, 100)]
    assert verdict(rounds(WAIT, STEP, after=tuple(spans))).startswith("The step limits: the loop waited 2 %")


def test_a_loop_of_which_only_the_waits_are_seen() -> None:
    spans = [span for span in rounds(WAIT, STEP) if span.name != "step"]
    assert verdict(spans).startswith("The loader limits: the loop waited 62 % of the time for data.")


def test_few_batches_give_no_verdict() -> None:
    assert verdict([]) == verdict(rounds(WAIT, STEP)[:6]) != verdict(rounds(WAIT, STEP)[:10])
    assert verdict([]).startswith("No verdict: the loop took fewer than 4 batches")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# Zooms with wheel, keys and buttons, moves, searches, hovers; writes what it found into the page.
PLAY = """<script>
const box = canvas.getBoundingClientRect(), before = to - from, result = {};
const press = key => canvas.dispatchEvent(new KeyboardEvent("keydown", {key}));
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -500, clientX: box.left + 300, clientY: box.top + 60}));
result.wheel = (to - from) / before;
showAll();
press("+"); press("+");
result.keys = (to - from) / before;
const begin = from;
press("ArrowRight");
result.moved = (from - begin) / (to - from);
press("0");
result.restored = to - from === before;
byId("closer").click();
result.button = (to - from) / before;
byId("all").click();
search.value = "step"; search.dispatchEvent(new Event("input"));
result.found = byId("found").textContent;
press("Enter");
result.next = shown !== null && nameOf(shown) === "step" && from <= shown[2] && shown[2] + shown[3] <= to;
byId("all").click();
const tipOf = span => {
  const {left, top} = canvas.getBoundingClientRect();
  const at = {clientX: left + xOf(span[2] + span[3] / 2), clientY: top + span[0] * ROW + ROW / 2};
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  return tip.textContent;
};
result.step = tipOf(data.spans.find(span => nameOf(span) === "step"));
result.wait = tipOf(data.spans.filter(span => nameOf(span) === "receive a batch").sort((a, b) => b[3] - a[3])[0]);
result.shown = tip.style.display;
result.legend = [...byId("legend").children].map(item => item.textContent);
result.verdict = byId("verdict").textContent;
/* The colors in the middle of a step and along the longest wait: one, and those of a pattern. */
const colors = span => {
  const ratio = devicePixelRatio, left = Math.ceil(xOf(span[2])) + 2, right = Math.floor(xOf(span[2] + span[3])) - 2;
  const line = context.getImageData(left * ratio, (span[0] * ROW + CAPTION + 3) * ratio, Math.max(right - left, 1) * ratio, 1).data;
  return new Set(Array.from({length: line.length / 4}, (_, at) => line.slice(4 * at, 4 * at + 4).join())).size;
};
search.value = ""; search.dispatchEvent(new Event("input"));
const longest = name => data.spans.filter(span => nameOf(span) === name).sort((a, b) => b[3] - a[3])[0];
const zoomTo = span => show(span[2], span[3]);
zoomTo(longest("step")); result.colorsOfWork = colors(longest("step"));
zoomTo(longest("receive a batch")); result.colorsOfWait = colors(longest("receive a batch"));
/* Words that are drawn on a narrow screen, none over another: left and right of those in each line, in order. */
const lines = {}, write = context.fillText.bind(context);
context.fillText = (words, x, y) => {
  const width = context.measureText(words).width, left = context.textAlign === "center" ? x - width / 2 : x;
  (lines[y] ??= []).push([left, left + width]);
  write(words, x, y);
};
document.body.style.width = "368px";
showAll();
const apart = line => line.sort((a, b) => a[0] - b[0]).every(([left, right], at) =>
  left >= 0 && right <= 368 && (at === 0 || line[at - 1][1] < left));
result.linesApart = Object.values(lines).map(apart);
result.sideways = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.dataset.result = JSON.stringify(result);
</script>"""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
)


def played(page: Path, *flags: str) -> dict[str, Any]:
    """What `PLAY` finds on a page in a browser."""
    play = page.with_name("played.html")
    play.write_text(page.read_text().replace("</body>", PLAY + "</body>"))
    command = [str(CHROMIUM), *FLAGS, *flags, f"--user-data-dir={page.parent}/user", "--dump-dom", play.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    result = re.search(r'data-result="([^"]*)"', dom)
    assert result is not None
    return json.loads(html.unescape(result[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1280])  # a window of Chromium is never narrower
@pytest.mark.sampled(1)
def test_the_page_in_a_browser(width: int, tmp_path: Path) -> None:
    with torch_sink.timeline(tmp_path / "run.html"):
        loop().run(DataLoader(SlowSamples(0.002), 4))
    found = played(tmp_path / "run.html", f"--window-size={width},900")
    assert found["wheel"] == pytest.approx(2.718281828**-1, rel=0.01)
    assert (found["keys"], found["button"], found["moved"]) == pytest.approx((0.25, 0.5, 0.2))
    assert found["restored"]
    assert (found["found"], found["next"], found["shown"]) == (f"{BATCHES} found", True, "block")
    assert found["step"].startswith("step\n")
    assert found["wait"].startswith("receive a batch\nwaits for data\n")
    assert found["legend"] == ["runs the training loop", "waits for data", "waits for the device (sync)"]
    assert found["verdict"].startswith("The loader limits: ")
    assert found["colorsOfWork"] == 1 < found["colorsOfWait"]
    assert found["linesApart"] in ([True] * 2, [True] * 3)  # axis, caption of the lane, spans if there is room
    assert found["sideways"] == 0
