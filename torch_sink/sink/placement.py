"""Chooses where ready batches wait."""

from __future__ import annotations

from torch_sink.sink.options import SinkOptions
from torch_sink.sink.producers.items import Slots
from torch_sink.sink.slots.device import CudaOps
from torch_sink.sink.slots.host import HostSlots
from torch_sink.sink.slots.ring import DeviceRing


def make_slots(options: SinkOptions, reads_pinned: bool) -> Slots:
    """Slots for the device of `options`; `reads_pinned` as for a `DeviceRing`."""
    if options.device.type == "cpu":
        return HostSlots(options.slot_count, options.image_format)
    ops = CudaOps(options.device)
    return DeviceRing(options.slot_count, options.image_format, ops, options.max_bytes, reads_pinned)
