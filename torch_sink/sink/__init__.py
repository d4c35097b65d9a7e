"""The data sink: a bounded queue of batches on the device, fed from an unmodified loader."""

from torch_sink.sink.loader import SinkLoader
from torch_sink.sink.stats import QueueStats

__all__ = ["QueueStats", "SinkLoader"]
