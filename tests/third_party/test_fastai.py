"""fastai, whose images are of a class of its own: its `ImageDataLoaders` train to stock code's losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(find_spec("fastai") is None, reason="the extra fastai is not installed")
def test_image_data_loaders_train_to_the_same_losses(generated_photos: Path, tmp_path: Path) -> None:
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "third_party" / "fastai_training.py"), str(generated_photos)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = json.loads(finished.stdout.splitlines()[-1])
    assert results.pop("class") == "PILImage"
    for name, result in results.items():
        assert result["ours"] == result["stock"], name
        assert len(set(result["stock"])) == len(result["stock"]) >= 4, f"{name}: training changed nothing"
        assert "fastai" in result["report"] or "fasttransform" in result["report"], name
