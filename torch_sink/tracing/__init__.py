"""Timelines: what workers, producer, copies, device and host did when, as a page, a picture and a trace."""

from torch_sink.tracing.timeline import timeline

__all__ = ["timeline"]
