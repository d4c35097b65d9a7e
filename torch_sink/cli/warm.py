"""What `torch-sink warm` does: compiles the kernels of a pipeline before the first batch has to wait for them."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import torch_sink
from torch_sink.cli.explain import recorded
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import PIPELINES, Pipeline, open_pipeline
from torch_sink.errors import SinkError
from torch_sink.image.execute import ahead
from torch_sink.image.execute.batch import LazyBatch

BATCHES = 6  # of each pipeline: what is drawn at random decides which kernels a batch needs
_BAR_COLUMNS = 30


def warm(
    pipelines: Sequence[str], target_name: str | None, batch_size: int, processes: int | None, *, everything: bool
) -> int:
    """Compile what pipelines launch (none: all built-in ones), and the decoder, into Triton's cache.

    Transforms get generated images. With `everything`, every variant of every kernel is compiled instead. Returns 0, or
    1 where a kernel cannot be compiled.

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
        jobs.update(_jobs_of_pipelines(pipelines or [*PIPELINES], batch_size, target))
    started = time.perf_counter()
    outcomes = list(_shown(ahead.compile_all(list(jobs), target, processes), len(jobs)))
    failed = [outcome for outcome in outcomes if outcome.error]
    there = sum(outcome.was_there for outcome in outcomes)
    from triton import knobs

    print(
        f"{len(outcomes) - there - len(failed)} kernels compiled for {target.backend}:{target.arch} in "
        f"{time.perf_counter() - started:.0f} s, {there} were in Triton's cache ({knobs.cache.dir}) already."
    )
    for outcome in failed:
        print(f"{outcome.job.kernel} cannot be compiled: {outcome.error}", file=sys.stderr)
    if not failed and target_name is None:
        print(_decoder_verdict())
    return int(bool(failed))


def _jobs_of_pipelines(names: Sequence[str], batch_size: int, target: Any) -> Iterator[ahead.Job]:
    """What recorded batches of pipelines launch."""
    with tempfile.TemporaryDirectory(prefix="torch_sink_warm_") as folder:
        photo = make_photo(500, 375, seed=0)
        for number in range(batch_size):
            photo.save(Path(folder, f"{number}.jpg"))
        for name in names:
            yield from _jobs_of_pipeline(open_pipeline(name, folder, batch_size), target)


def _jobs_of_pipeline(pipeline: Pipeline, target: Any) -> list[ahead.Job]:
    with torch_sink.image_backend("device", device="meta"):
        leaves = [leaf for _, leaves in islice(recorded(pipeline), BATCHES) for leaf in leaves]
        batches = [leaf for leaf in leaves if isinstance(leaf, LazyBatch)]
        if not batches:
            raise ValueError(
                f"{pipeline.name} launches no kernel: stock code makes all of its images. The reasons:\n"
                f"{torch_sink.fallback_report()}"
            )
        return ahead.jobs_of(lambda: ahead.launch_batches(batches), target)


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


def _decoder_verdict() -> str:
    """Lets the compiled decoder prove itself, so that the first batch need not."""
    from torch_sink.image.decode import proof

    found = proof.verdict(torch.device("cuda"))
    return "The JPEG kernels give Pillow's pixels here." if found.holds else f"Pillow decodes here: {found.reason}"
