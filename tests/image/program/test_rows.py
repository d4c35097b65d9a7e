"""The rows of a batch are those of its images, wherever they lie in it; images of equal calls are planned once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torchvision import transforms as v1

import torch_sink
from image.cases import rgb_images
from image.random_pipelines import make_scenario, run
from torch_sink.image.core.lowering import lower
from torch_sink.image.handles.tensor import Handle
from torch_sink.image.program import plan
from torch_sink.image.program.launches import make_program
from torch_sink.image.program.program import ARRAYS, Program
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

OF_JOB = [*range(rows.HEIGHT, rows.VIEW_FILL), rows.SOURCE_KIND, rows.TARGET_KIND, rows.TOP]
TABLED = (Kind.REMAP, Kind.PASTE, *range(Kind.LOOKUP, Kind.AFFINE), *range(Kind.FILTER_X, Kind.BOX_BLUR))


def program_of(images: list[Any]) -> Program:
    recordings = [image.lazy_recording for image in images]
    shape = len(images), *recordings[0].shape
    sources, calls = [image.source for image in recordings], [image.calls for image in recordings]
    return make_program(sources, calls, [(shape, recordings[0].dtype)], "meta")


def atoms_of(operations: np.ndarray) -> np.ndarray:
    """Rows of atoms, without where their tables lie."""
    found = operations.copy()
    found[np.isin(found[:, 0], TABLED), rows.TABLE : rows.TABLE + 3] = 0
    return found


def writers_of(found: np.ndarray) -> list[int]:
    """The job whose output each reads; -1 for a decoded image."""
    writers: list[int] = []
    for job in found:
        target = found[: len(writers), rows.TARGET : rows.TARGET + 4]
        kind = min(job[rows.SOURCE_KIND], rows.FLOATS) if job[rows.SOURCE_KIND] != rows.VALUED else rows.BYTES
        equal = (target == job[rows.SOURCE : rows.SOURCE + 4]).all(1) & (
            found[: len(writers), rows.TARGET_KIND] == kind
        )
        writers.append(-1 if job[rows.SOURCE] == rows.NAMED else int(np.flatnonzero(equal)[-1]))
    return writers


def assert_made_of(batch: Program, alone: list[Program]) -> None:
    """A batch does for each image what a batch of that image does."""
    all_jobs, all_atoms, tables = (batch.array(name) for name in ("jobs", "operations", "tables"))
    first_job = first_atom = 0
    measured = {(int(row[-1]), int(row[rows.MEASURED_CHANNEL])): row for row in batch.array("statistics")}
    for number, one in enumerate(alone):
        expected, operations = one.array("jobs"), one.array("operations")
        found = all_jobs[first_job : first_job + len(expected)].copy()
        atoms = all_atoms[first_atom + 1 : first_atom + len(operations)]
        np.testing.assert_array_equal(atoms_of(atoms), atoms_of(operations[1:]))
        assert found[-1, rows.TARGET : rows.TARGET + 3].tolist() == [rows.NAMED, number, 0]
        assert writers_of(found) == writers_of(expected)
        for column in (rows.VIEW_FILL, rows.HEAD):
            found[:, column] -= first_atom * (found[:, column] > 0)
        found[:, [rows.TAIL_BEGIN, rows.TAIL_END]] -= first_atom
        same = [*OF_JOB, rows.VIEW_FILL, rows.HEAD, rows.TAIL_BEGIN, rows.TAIL_END]
        np.testing.assert_array_equal(found[:, same], expected[:, same])
        for row in one.array("statistics").tolist():
            job, atom, channel, waits = measured.pop((row[-1] + first_job, row[rows.MEASURED_CHANNEL])).tolist()
            assert [job - first_job, atom - first_atom, channel, waits - first_job] == row
        for mine, its in zip(atoms, operations[1:], strict=True):
            if mine[0] == Kind.VALUES:
                begins = zip(mine[rows.TABLE : rows.TABLE + 3], its[rows.TABLE : rows.TABLE + 3], strict=True)
                assert all((tables[at : at + 256] == one.array("tables")[to : to + 256]).all() for at, to in begins)
        first_job, first_atom = first_job + len(expected), first_atom + len(operations) - 1
    assert (len(all_jobs), len(all_atoms), measured) == (first_job, first_atom + 1, {})


def batches(seeds: range, folder: Path) -> Iterator[list[Any]]:
    """Images of one shape and type that random pipelines recorded."""
    for seed in seeds:
        scenario = make_scenario(seed, folder)
        groups: dict[Any, list[Any]] = {}
        for outcome in [*run(scenario, seed), *run(scenario, seed + 1)]:
            for leaf in tree_leaves(outcome.result):
                if isinstance(leaf, Handle) and leaf.is_recording:
                    groups.setdefault((leaf.lazy_recording.shape, leaf.lazy_recording.dtype), []).append(leaf)
        yield from groups.values()


def recorded(transform: Any) -> list[Any]:
    torch.manual_seed(3)
    return [transform(open_image()) for open_image in rgb_images() * 3]


@pytest.mark.filterwarnings("ignore")
def test_a_batch_is_made_of_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[int] = set()
    with torch_sink.image_backend("device", device="meta"):
        measured = recorded(
            v1.Compose([v1.Resize((24, 20)), v1.ColorJitter(contrast=0.4), v1.RandomEqualize(), v1.ToTensor()])
        )
        for images in [*batches(range(40), tmp_path), measured]:
            batch = program_of(images)
            assert_made_of(batch, [program_of([image]) for image in images])
            kept = [batch.array(name).copy() for name in ARRAYS]
            monkeypatch.setattr(plan, "_kept", {})
            anew = program_of(images)
            assert anew[1:] == batch[1:]
            for name, array in zip(ARRAYS, kept, strict=True):
                np.testing.assert_array_equal(anew.array(name), array)
            kinds |= {*batch.array("operations")[:, 0].tolist()}
    assert {Kind.CONTRAST, Kind.EQUALIZE, Kind.RESAMPLE_Y, Kind.FILTER_Y, Kind.GRID, Kind.WARP} <= kinds


def test_equal_calls_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(plan, "_kept", {})
    monkeypatch.setattr(plan, "lower", lambda *args: planned.append(args) or lower(*args))
    with torch_sink.image_backend("device", device="meta"):
        for _ in range(2):
            program_of(recorded(v1.Compose([v1.Resize((24, 20)), v1.ToTensor()])))
    assert len(planned) == len({size for size, *_ in planned}) == len(plan._kept)


def test_what_was_drawn_for_each_pixel_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_kept", {})
    with torch_sink.image_backend("device", device="meta"):
        program_of(recorded(v1.Compose([v1.Resize((24, 20)), v1.ToTensor(), v1.RandomErasing(1.0, value="random")])))
    assert not plan._kept
