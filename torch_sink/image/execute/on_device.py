"""A batch by the kernels: decoded and transformed on the device, and what becomes of damaged images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core.ops import replay
from torch_sink.image.core.state import host_buffer, send, to_device, to_host_later
from torch_sink.image.decode.providers import decode_sources, launch_packed
from torch_sink.image.decode.source import Box, Decoded
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.planned import Order, Planned, order_alone
from torch_sink.image.execute.recorded import Made, Recorded, Wanted, survivors
from torch_sink.image.plan.build import placed_jobs

# What the kernels convert values to, other than the dtype of the batch.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Pixels(NamedTuple):
    """Pixels of some images, all on the device that the batch is made on.

    Attributes:
        places: int64 [images, 4], the address of pixel (0, 0) of each, and bytes between rows, columns and channels.
        owners: the tensors that they lie in.
    """

    places: np.ndarray
    owners: tuple[torch.Tensor, ...]

    def places_from(self, workspace: torch.Tensor) -> np.ndarray:
        """`places` with positions in bytes from the beginning of a tensor."""
        return self.places - np.array([workspace.data_ptr(), 0, 0, 0])

    def chosen(self, images: np.ndarray) -> Pixels:
        """Those of some images."""
        return Pixels(self.places[images], self.owners)

    def replaced(self, images: Sequence[int] | np.ndarray, other: Pixels) -> Pixels:
        """These with other pixels for some images."""
        places = self.places.copy()
        places[images] = other.places
        return Pixels(places, self.owners + other.owners)


def pixels_of(images: Sequence[Decoded | DecodeError], device: torch.device) -> Pixels:
    """Those of images on the host or the device; what is on the host goes to the device in one transfer.

    Args:
        images: in the place of one that is damaged a single 0 is read everywhere.
        device: where they are wanted.
    """
    places = np.zeros((len(images), 4), np.int64)
    there = [(at, image) for at, image in enumerate(images) if isinstance(image, Decoded)]
    owners = _sent([image.pixels.as_strided((image.pixels.numel(),), (1,)) for _, image in there], device)
    for (at, image), owner in zip(there, owners, strict=True):
        places[at] = image.place
        places[at, 0] += owner.data_ptr()
    if len(there) < len(images):
        owners.append(torch.zeros(1, dtype=torch.uint8, device=device))
        places[[isinstance(image, DecodeError) for image in images], 0] = owners[-1].data_ptr()
    return Pixels(places, tuple(owners))


def _sent(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """uint8 tensors [bytes] on the device: those of the host in one transfer, the others themselves."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device.type == "cpu" or not on_host:
        return tensors
    sizes = [len(tensor) for tensor in on_host]
    together = torch.cat(on_host, out=host_buffer(sum(sizes), torch.uint8, device))
    arrived = iter(together.to(device, non_blocking=True).split(sizes))
    return [next(arrived) if tensor.device.type == "cpu" else tensor for tensor in tensors]


class Decoding:
    """A batch whose decoding has begun: what the JPEG kernels take is launched, and nobody waits for it at first.

    Args:
        packed: its sources; those that nobody reads are left out.
        order: how the JPEG files are decoded.
        device: where the pixels are wanted.

    Attributes:
        errors: by number of source, those that are known.
        workspace: uint8 [bytes] for the stages, where they read all pixels at the places that the order expects; else
            None.
    """

    def __init__(self, packed: Packed, order: Order, device: torch.device) -> None:
        self._packed, self._device = packed, device
        self.errors: dict[int, DecodeError] = {}
        self.workspace: torch.Tensor | None = None
        jpegs, spare_bytes = order.jpegs_in(packed.blob), order.workspace_bytes if order.is_placed else 0
        self._launched = launch_packed(jpegs, packed.blob, device, spare_bytes) if jpegs else None
        # It travels while the host goes on.
        self._status = to_host_later(self._launched.status) if self._launched is not None else None
        if self._launched is not None and order.is_placed:
            (owner,) = self._launched.owners
            self.workspace = owner[len(owner) - spare_bytes :]
        else:
            self._decode_rest()

    @property
    def _plan(self) -> Planned:
        """Asked only where the order does not say enough."""
        return self._packed.contents.planned

    @functools.cached_property
    def _files(self) -> np.ndarray:
        """Sources that kernels decode."""
        jpegs = self._plan.jpegs
        return np.zeros(0, np.int32) if jpegs is None or self._launched is None else jpegs.sources

    @functools.cached_property
    def pixels(self) -> Pixels:
        """Those of each source. What is damaged may be anything."""
        pixels, jpegs = Pixels(np.zeros((len(self._plan.boxes), 4), np.int64), ()), self._plan.jpegs
        if self._launched is None or jpegs is None:
            return pixels
        launched = self._launched._replace(plan=jpegs)
        return pixels.replaced(self._files, Pixels(launched.places, launched.owners))

    def _decode_rest(self) -> None:
        """Decodes what the kernels do not, before anything else happens."""
        boxes = self._plan.boxes
        is_read = boxes[:, 2] > 0
        is_read[self._files] = False
        if is_read.any():
            self._decode(np.flatnonzero(is_read).tolist(), boxes=list(map(Box._make, boxes[is_read].tolist())))

    def _decode(self, sources: list[int], **how: Any) -> None:
        """Decodes some sources, for the pixels and errors of these."""
        images = decode_sources([self._packed.source(at) for at in sources], self._device, **how)  # type: ignore[misc]
        found = zip(sources, images, strict=True)
        self.errors |= {at: image for at, image in found if isinstance(image, DecodeError)}
        self.pixels = self.pixels.replaced(sources, pixels_of(images, self._device))

    def decode_again(self) -> list[int]:
        """Waits for the kernels; Pillow decodes what they found damaged. Returns which sources have new pixels."""
        found = [] if self._status is None else self._status().tolist()
        if not any(found):
            return []
        damaged = self._files[np.flatnonzero(found)].tolist()
        self._decode(damaged, provider="pillow")
        return [at for at in damaged if at not in self.errors]


def make_on_device(recorded: Recorded, wanted: Wanted) -> Made:
    """Makes a batch, on the current stream of the device.

    Everything is launched as if no file were damaged. Then the host asks which are, and makes those images anew.

    Raises:
        DecodeError: as `survivors` says.
    """
    packed, order = recorded.packed, recorded.order
    decoding = Decoding(packed, order, wanted.device)
    result = wanted.result(recorded, recorded.shape[0])
    whole = result
    if not _is_direct(recorded, wanted):
        whole = torch.empty(recorded.shape, dtype=recorded.dtype, device=wanted.device, memory_format=order.layout)

    def pixels() -> Pixels:
        return decoding.pixels.chosen(packed.entry_of_image)

    run_order(order, packed.blob, lambda: recorded.planned, pixels, whole, decoding.workspace)
    if not order.is_complete:
        for row in np.flatnonzero(recorded.planned.boxes[packed.entry_of_image, 2] == 0):
            whole[row].copy_(packed.source(packed.entry_of_image[row]).decode(), non_blocking=True)  # type: ignore[arg-type]
    if not _keeps_rows(wanted):
        _finish(recorded, whole, result)
    again: list[int] = []
    if decoded_again := decoding.decode_again():
        again = np.flatnonzero(np.isin(packed.entry_of_image, decoded_again)).tolist()
        run_planned(recorded.plan_again(again), pixels(), whole)
    errors = {}
    if decoding.errors:
        entries = enumerate(packed.entry_of_image.tolist())
        errors = {row: decoding.errors[at] for row, at in entries if at in decoding.errors}
    left = survivors(errors, recorded.shape[0], len(recorded.mixes), wanted.on_decode_error)
    if left.rows is not None:
        result = wanted.result(recorded, len(left.rows))
    if again or errors or _keeps_rows(wanted):
        _finish(recorded, whole, result, left.rows)
    return Made(result, left.rows, left.broken_files)


def _finish(recorded: Recorded, whole: torch.Tensor, result: torch.Tensor, rows: list[int] | None = None) -> None:
    """Mixes a batch and copies it to the result; of some rows only those."""
    mixed = replay(whole, recorded.mixes)
    if rows is not None:
        mixed = mixed[to_device(np.array(rows), whole.device)]
    if mixed is not result:
        result.copy_(mixed)


def _keeps_rows(wanted: Wanted) -> bool:
    """True where damaged images are to leave rows of a given tensor as they are."""
    return wanted.out is not None and wanted.on_decode_error == "skip"


def _is_direct(recorded: Recorded, wanted: Wanted) -> bool:
    """True where the kernels write the result itself: nothing follows them, and they write the type that is asked for.

    Half precision is made as such, for what is asked for may be wider; the kernels write no other integers.
    """
    made, asked = recorded.dtype, wanted.dtype_of_result(recorded)
    writes = asked == made or (made.itemsize != 2 and asked in _FLOATS)
    return writes and not recorded.mixes and not _keeps_rows(wanted)


def kernel_dtype(recorded: Recorded, wanted: Wanted) -> torch.dtype:
    """The type of the values that the kernels write."""
    return wanted.dtype_of_result(recorded) if _is_direct(recorded, wanted) else recorded.dtype


def run_planned(planned: Planned, pixels: Pixels, out: torch.Tensor) -> None:
    """Runs a plan that was made just now.

    Args:
        planned: what to run.
        pixels: of each image of the batch.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
    """
    order, host = order_alone(planned, np.zeros(len(out), np.int32), tuple(out.shape))
    run_order(order, host, lambda: planned, lambda: pixels, out)


def run_order(
    order: Order,
    host: torch.Tensor,
    plan: Callable[[], Planned],
    pixels: Callable[[], Pixels],
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
) -> None:
    """Runs the plan of a batch.

    Args:
        order: of its launches.
        host: uint8 [bytes], which its arrays lie in.
        plan: gives the plan; asked only where the order does not say enough.
        pixels: gives those of each image; asked only where they do not lie where the order expects them.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
        workspace: uint8 [bytes] of the device, behind the pixels that the order expects there; None without.
    """
    if not order.launches:
        return
    if workspace is not None and out.is_contiguous(memory_format=order.layout):
        launch_run(order, host, workspace, out)
        return
    if workspace is None:
        workspace = torch.empty(order.workspace_bytes, dtype=torch.uint8, device=out.device)
    launched = plan().plan
    assert launched is not None  # there are launches
    launch_run(order, host, workspace, out, placed_jobs(launched, pixels().places_from(workspace), out.stride()))


def launch_run(
    order: Order, host: torch.Tensor, workspace: torch.Tensor, target: torch.Tensor, jobs: np.ndarray | None = None
) -> None:
    """Launches a prologue, then as many stages as the longest image has.

    Args:
        order: of the batch.
        host: uint8 [bytes], which its arrays lie in.
        workspace: uint8 [bytes], from which the jobs count where pixels lie.
        target: [N, C, H, W], written to; its device is where everything runs.
        jobs: int64 [jobs, JOB_COLUMNS], in the place of those that lie there.
    """
    from torch_sink.triton_kernels.stages.prologue import run_prologue
    from torch_sink.triton_kernels.stages.stage import run_stage
    from torch_sink.triton_kernels.stages.statistics import run_statistics

    device = target.device
    (last, tiles, columns) = order.arrays[-1]
    memory = torch.empty(last + tiles * columns, dtype=torch.int32, device=device)
    given = host.narrow(0, order.begin, order.size).view(torch.int32)
    if jobs is not None:
        given = torch.cat([torch.from_numpy(jobs).view(torch.int32).flatten(), given[jobs.nbytes // given.itemsize :]])
    send(given, memory.narrow(0, 0, len(given)))
    ours, operations, work, statistics, tables, tiles_of_all = [
        memory.as_strided((rows, columns), (columns, 1), begin) for begin, rows, columns in order.arrays
    ]
    ours = ours.view(torch.int64)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        run_prologue(work, tables, tiles_of_all, order.tile)
        for launch, (begin, end) in zip(order.launches, order.ranges, strict=True):
            if launch.statistics_begin < launch.statistics_end:
                measured = statistics[launch.statistics_begin : launch.statistics_end]
                run_statistics(workspace, ours, operations, tables, measured)
            run_stage(
                workspace, target, ours, operations, tables, tiles_of_all[begin:end],
                is_heavy=launch.is_heavy, rows_and_columns=order.tile,
            )  # fmt: skip
