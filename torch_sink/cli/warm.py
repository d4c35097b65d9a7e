"""What `torch-sink warm` does: compiles the kernels of a pipeline before the first batch has to wait for them."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

import torch_sink
from torch_sink.cli.photos import SIZES, make_photo
from torch_sink.cli.pipelines import PIPELINES, WHAT_IS_ALLOWED, a_kind, pipeline_named
from torch_sink.errors import SinkError
from torch_sink.image.execute import ahead
from torch_sink.image.execute.batch import LazyBatch
from torch_sink.image.execute.collate import collate_handles
from torch_sink.image.handles.tensor import HANDLES

BATCHES = 6  # of each pipeline: what is drawn at random decides which kernels a batch needs
_BAR_COLUMNS = 30


def warm(
    pipelines: Sequence[str], target_name: str | None, batch_size: int, processes: int | None, *, everything: bool
) -> int:
    """Compile what pipelines launch, and the decoder, into Triton's cache.

    Args:
        pipelines: names of built-in pipelines, or "module:attribute" of a transform, a dataset or, with "()" at its
            end, of a function that makes one; none for all built-in ones.
        target_name: GPU to compile for, such as "cuda:90"; None for this machine's.
        batch_size: images in each of the batches that are looked at.
        processes: that compile; None for one a core.
        everything: every variant of every kernel instead.

    Returns:
        0, or 1 where a kernel cannot be compiled.

    Raises:
        SinkError: there is no GPU and no target, or the kernels run in Triton's interpreter.
        ValueError: a pipeline or target is unknown, or runs no kernel.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SinkError("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    target = ahead.target_named(target_name)
    jobs = set(ahead.jobs_of(ahead.launch_decoder, target))
    if everything:
        jobs.update(ahead.jobs_of(lambda: ahead.launch_everything(target), target))
    else:
        for name in pipelines or PIPELINES:
            jobs.update(_jobs_of_pipeline(name, batch_size, target))
    started = time.perf_counter()
    outcomes = list(_shown(ahead.compile_all(list(jobs), target, processes), len(jobs)))
    failed = [outcome for outcome in outcomes if outcome.error]
    there = sum(outcome.was_there for outcome in outcomes)
    print(
        f"{len(outcomes) - there - len(failed)} kernels compiled for {target.backend}:{target.arch} in "
        f"{time.perf_counter() - started:.0f} s, {there} were in Triton's cache ({_cache_folder()}) already."
    )
    for outcome in failed:
        print(f"{outcome.job.kernel} cannot be compiled: {outcome.error}", file=sys.stderr)
    if not failed and target_name is None:
        print(_decoder_verdict())
    return int(bool(failed))


def _jobs_of_pipeline(name: str, batch_size: int, target: Any) -> list[ahead.Job]:
    with torch_sink.image_backend("device", device="meta"):
        batches = list(_batches(name, batch_size))
        if not batches:
            raise ValueError(
                f"{name} launches no kernel: stock code makes all of its images. The reasons:\n"
                f"{torch_sink.fallback_report()}"
            )
        return ahead.jobs_of(lambda: ahead.launch_batches(batches), target)


def _batches(name: str, batch_size: int) -> Iterator[LazyBatch]:
    """Recorded batches of a pipeline, on generated images or those of its dataset."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    sample = _sampler(name)
    for _ in range(BATCHES):
        samples = [sample() for _ in range(batch_size)]
        try:
            leaves = tree_leaves(default_collate(samples))
        except (RuntimeError, TypeError):
            # Images of many sizes, or samples that only a collate function of their own can join.
            leaves = [collate_handles([leaf]) for leaf in tree_leaves(samples) if isinstance(leaf, HANDLES)]
        yield from (leaf for leaf in leaves if isinstance(leaf, LazyBatch))


def _sampler(name: str) -> Callable[[], Any]:
    """A function that gives one sample after the other of a built-in pipeline or of "module:attribute"."""
    found = pipeline_named(name, None)
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        return lambda: found[random.randrange(len(found))]
    if not callable(found):
        raise ValueError(f"{name} is {a_kind(found)}; name {WHAT_IS_ALLOWED}")
    images = [make_photo(*size, seed) for seed, size in enumerate(SIZES)]
    return lambda: found(random.choice(images))


def _shown(outcomes: Iterator[ahead.Outcome], total: int) -> Iterator[ahead.Outcome]:
    """The outcomes, with a bar on a terminal, and a line each elsewhere."""
    in_place = sys.stderr.isatty()
    for count, outcome in enumerate(outcomes, 1):
        filled = _BAR_COLUMNS * count // total
        bar = f"[{'#' * filled}{'.' * (_BAR_COLUMNS - filled)}] {count}/{total}"
        state = "failed" if outcome.error else "in the cache" if outcome.was_there else f"{outcome.seconds:.1f} s"
        line = f"{bar} {outcome.job.kernel}, {state}"
        print(f"\r{line:79}" if in_place else line, end="" if in_place else "\n", file=sys.stderr, flush=True)
        yield outcome
    if in_place:
        print(file=sys.stderr)


def _cache_folder() -> str:
    from triton import knobs

    return str(knobs.cache.dir)


def _decoder_verdict() -> str:
    """Lets the compiled decoder prove itself, so that the first batch need not."""
    from torch_sink.image.decode import proof

    found = proof.verdict(torch.device("cuda"))
    return "The JPEG kernels give Pillow's pixels here." if found.holds else f"Pillow decodes here: {found.reason}"
