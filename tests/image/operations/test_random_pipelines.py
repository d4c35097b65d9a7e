"""Random pipelines: the backend gives stock torchvision's values, errors, warnings and draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors

import torch_sink
from image import random_pipelines
from image.random_pipelines import Outcome, compare, make_scenario, run

pytestmark = pytest.mark.halved


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, 100, 20))
@pytest.mark.sampled(2)
def test_the_cpu_path_equals_stock(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        compare(seed, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_nothing_runs_in_stock_code_unnoticed(tmp_path: Path) -> None:
    """Where fallbacks are forbidden, an image is recorded with stock's shape and type, or an error is raised."""
    recorded = 0
    scenarios = {seed: make_scenario(seed, tmp_path) for seed in range(300, 370)}
    stock = {seed: run(scenario, seed) for seed, scenario in scenarios.items()}
    with torch_sink.image_backend("device", device="meta", strict=True):
        for seed, scenario in scenarios.items():
            for expected, actual in zip(stock[seed], run(scenario, seed), strict=True):
                if isinstance(actual.error, torch_sink.UnsupportedOperation):
                    continue
                assert type(actual.error) is type(expected.error), (seed, expected.error, actual.error)
                leaves = zip(tree_leaves(actual.result), tree_leaves(expected.result), strict=True)
                recorded += sum(_is_recorded_like(leaf, stock_leaf) for leaf, stock_leaf in leaves)
    assert recorded > 30


def _is_recorded_like(actual: object, expected: object) -> bool:
    if isinstance(expected, Image.Image):
        assert isinstance(actual, Image.Image)
        assert (actual.size, actual.mode) == (expected.size, expected.mode)
        return False
    annotation = isinstance(expected, tv_tensors.TVTensor) and not isinstance(expected, tv_tensors.Image)
    if not isinstance(expected, torch.Tensor) or annotation or expected.ndim != 3:
        return False
    assert isinstance(actual, random_pipelines.Handle)
    assert isinstance(actual, type(expected))
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_cpu_path_equals_stock_in_many_scenarios(tmp_path: Path) -> None:
    for seed in range(10_000, 12_000):
        compare(seed, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_the_scenarios_reach_what_they_are_for(tmp_path: Path) -> None:
    """Most inputs end in a value, many in a handle; some raise in stock code."""
    with torch_sink.image_backend("device", device="cpu"):
        outcomes = [outcome for seed in range(60) for outcome in run(make_scenario(seed, tmp_path), seed)]
    raised = sum(outcome.error is not None for outcome in outcomes)
    handles = sum(isinstance(outcome.result, random_pipelines.Handle) for outcome in outcomes)
    assert 0.05 < raised / len(outcomes) < 0.4
    assert handles / len(outcomes) > 0.2


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (Outcome(torch.zeros(2), None, [], (0, 0, 0)), Outcome(torch.ones(2), None, [], (0, 0, 0))),
        (Outcome(torch.zeros(2), None, [], (0, 0, 0)), Outcome(-torch.zeros(2), None, [], (0, 0, 0))),
        (Outcome(torch.zeros(2), None, [], (0, 0, 0)), Outcome(torch.zeros(2), None, [], (0, 1, 0))),
        (Outcome(torch.zeros(2), None, [], (0, 0, 0)), Outcome(torch.zeros(2), None, [("UserWarning", "")], (0, 0, 0))),
        (Outcome(None, ValueError(), [], (0, 0, 0)), Outcome(None, TypeError(), [], (0, 0, 0))),
        (Outcome(torch.zeros(2), None, [], (0, 0, 0)), Outcome(None, TypeError(), [], (0, 0, 0))),
    ],
    ids=["values", "sign of zero", "draws", "warnings", "kind of error", "an error"],
)
def test_differences_are_seen(stock: Outcome, ours: Outcome) -> None:
    random_pipelines._compare_outcomes(stock, stock)
    with pytest.raises(AssertionError):
        random_pipelines._compare_outcomes(stock, ours)
