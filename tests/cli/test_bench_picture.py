"""The picture of `bench`: it says what it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_sink.cli import bench
from torch_sink.cli.machine import describe_machine

pytestmark = pytest.mark.once


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
