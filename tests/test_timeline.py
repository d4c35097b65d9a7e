"""Timelines: what they see of real runs, that they leave nothing behind, and that the page works without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import fetch, worker

import torch_sink
from torch_sink.tracing import HOOKS

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
    return torch_sink.StepLoop(model, nn.functional.cross_entropy, optimizer, sink_size=3)


def events(path: Path) -> list[tuple[str, str, float, float]]:
    """(lane, name, begin, length) of each span of a trace, in milliseconds."""
    found = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    spans = [event for event in found if event["ph"] == "X"]
    return [(lanes[event["tid"]], event["name"], event["ts"] / 1e3, event["dur"] / 1e3) for event in spans]


@pytest.mark.parametrize("method", ["fork", "spawn"])
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
        pytest.raises(RuntimeError, match="records already"),
        torch_sink.timeline(tmp_path / "b.html"),
    ):
        pass


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


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# Zooms with the wheel, searches, hovers; writes what it found into the title.
PLAY = """<script>
const box = canvas.getBoundingClientRect(), before = to - from;
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -500, clientX: box.left + 600, clientY: box.top + 60}));
const zoomed = (to - from) / before;
search.value = "step"; search.dispatchEvent(new Event("input"));
const found = document.getElementById("found").textContent;
document.getElementById("all").click();
const first = data.spans.find(span => nameOf(span) === "step");
const at = {clientX: box.left + xOf(first[2] + first[3] / 2), clientY: box.top + first[0] * ROW + ROW / 2};
canvas.dispatchEvent(new MouseEvent("mousemove", at));
document.body.dataset.result = JSON.stringify([zoomed, found, to - from === before, tip.style.display, tip.textContent]);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_zoom_search_and_hover_in_a_browser(tmp_path: Path) -> None:
    with torch_sink.timeline(tmp_path / "run.html"):
        loop().run([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 4)
    played = tmp_path / "played.html"
    played.write_text((tmp_path / "run.html").read_text().replace("</body>", PLAY + "</body>"))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path}/user", "--dump-dom", played.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    result = re.search(r'data-result="([^"]*)"', dom)
    assert result is not None
    zoomed, found, restored, shown, tip = json.loads(result[1].replace("&quot;", '"'))
    assert zoomed == pytest.approx(2.718281828**-1, rel=0.01)
    assert found == "4 found"
    assert restored
    assert shown == "block"
    assert tip.startswith("step\n")
