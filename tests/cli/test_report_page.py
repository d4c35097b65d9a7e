"""The page of `explain --html` and the picture of `bench`: nothing is cut off, and both say what they are of."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torch_sink.cli import bench
from torch_sink.cli.machine import describe_machine
from torch_sink.cli.report import Report, Table, bars

pytestmark = pytest.mark.once

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HEAD = ("stage", "place", " bytes in", " bytes out", " us", "how")
ROWS = [
    ("worker", "this machine, AMD EPYC 9554P 64-Core Processor", "110,352", "151,352", "3,938.46", "measured"),
    ("host", "training process; CPU assumed: AMD EPYC", "151,352", "152,096", "4.61", "modeled"),
]
RATES = {"worker": 2_031.0, "host": 217_155.0, "decode + kernels": 1_118_817.0}
REPORT = Report(
    "Pipeline train:transform",
    ["a batch of 32 samples"],
    "The limit: worker.",
    [
        Table("Falls back", (), [("-> use the transform",)]),
        Table("For an image", HEAD, ROWS),
        bars("Rates", "images/s", RATES, limit="worker"),
    ],
)
# What is wider than its place; how long each bar is, of the longest; what stands on a page of this width as one block a row.
LOOK = """<script>
const cut = [...document.querySelectorAll(".scroll")].filter(part => part.scrollWidth > part.clientWidth);
const lengths = [...document.querySelectorAll(".bar")].map(bar => bar.offsetWidth);
const rows = [...document.querySelectorAll(".stacked tr")].map(row => getComputedStyle(row).display);
const sideways = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.dataset.result = JSON.stringify({cut: cut.length, sideways, lengths, rows});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "row"), [(500, "block"), (1280, "table-row")])
def test_nothing_is_cut_off_in_a_browser(width: int, row: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    # A window of Chromium is at least 500 pixels wide, a phone 400.
    narrow = "<style>body { max-width: 360px !important; }</style>" if width == 500 else ""
    page.write_text(REPORT.as_html().replace("</body>", f"{narrow}{LOOK}</body>"))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", f"--window-size={width},900", f"--user-data-dir={tmp_path}/user"]
    dom = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r'data-result="([^"]*)"', dom)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert (seen["cut"], seen["sideways"]) == (0, 0)
    assert seen["rows"] == [row] * 3
    worker, host, kernels = seen["lengths"]
    assert 3 <= worker < host < kernels
    assert host / kernels == pytest.approx(8 / 40, abs=0.02)


def test_a_cell_of_a_narrow_page_says_its_column() -> None:
    page = REPORT.as_html()
    assert '<td class=number data-head="bytes in">110,352</td>' in page
    assert "\N{RIGHTWARDS ARROW} use the transform" in page
    assert "\N{LEFTWARDS ARROW} the limit" in page


def test_the_picture_of_bench_says_what_when_and_of_which_releases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import matplotlib.figure

    written: list[str] = []

    def saved(figure: matplotlib.figure.Figure, path: Path, **_: Any) -> None:
        written.extend(text.get_text() for text in figure.findobj(matplotlib.text.Text))

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", saved)
    machine = describe_machine()
    cost = {key: {"p50": 1.0} for key in ("stock_ms", "torch_sink_ms")}
    loader = {
        "pipeline": "v1 train",
        "workers": 2,
        **{side: {"images_per_second": 9.0} for side in ("stock", "torch_sink")},
    }
    bench.draw({"machine": machine, "worker_cost": {"v1 train": cost}, "loader": loader}, tmp_path / "b.png")
    words = "\n".join(written)
    assert "torch_sink beside stock torchvision" in words
    for each in (
        machine["date"],
        machine["cpu"],
        *(f"{name} {machine['releases'][name]}" for name in ("torch-sink", "torch")),
    ):
        assert each in words
