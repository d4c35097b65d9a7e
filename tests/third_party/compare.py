"""Other people's pipelines on stock torchvision and on the "device" backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from image.cases import array_opener, encoded, opener
from image.check import Opener
from image.random_pipelines import Scenario, compare_scenario


class Later:
    """A library that is imported when a test first uses it, or the test is skipped.

    Imported when tests are collected, it would make every process larger that a worker of pytest forks, tests of other
    folders included.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):
            raise AttributeError(name)  # which pytest asks every value of a module for
        return getattr(pytest.importorskip(self._name, reason="the extra third-party is not installed"), name)


def photographs() -> list[Opener]:
    """A color and a gray JPEG file, a PNG file, and an image that never was a file."""
    return [
        opener(encoded(120, 90, 1, quality=90)),
        opener(encoded(64, 100, 2, "L")),
        opener(encoded(51, 50, 3, kind="PNG")),
        array_opener(48, 64, 4),
    ]


def assert_same_as_stock(
    pipeline: Callable[[], Any], *, seeds: int = 1, openers: Sequence[Opener] | None = None, refusal: str | None = None
) -> None:
    """Equal results, warnings and draws of torch, numpy and random, image by image and as a batch.

    Args:
        pipeline: makes the pipeline anew, so that no state stays in it.
        seeds: how many times to run it on every image.
        openers: default `photographs()`.
        refusal: message of an error that the pipeline raises for some draws in stock code; ours has to raise it there.
    """
    scenario = Scenario(pipeline, list(openers or photographs()))
    for seed in range(seeds):
        for outcome in compare_scenario(scenario, 1000 * seed):
            refused = outcome.error is not None and str(outcome.error) == refusal
            assert refused or outcome.error is None, f"the pipeline fails in stock code: {outcome.error!r}"
