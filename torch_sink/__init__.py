"""torch_sink: image decoding, augmentation, batch queue and training loop on the device."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

from torch_sink import amp, loop, releases
from torch_sink.damage.report import DecodeReport, decode_report
from torch_sink.errors import (
    DecodeError,
    HostSyncError,
    NonFiniteLoss,
    SinkError,
    SinkTimeout,
    UnsupportedOperation,
)
from torch_sink.image.backend import get_image_backend, image_backend, set_image_backend
from torch_sink.image.core.fallback import FallbackReport, fallback_report
from torch_sink.image.decode import decode_images
from torch_sink.image.decode.providers import decode_providers, set_decode_provider
from torch_sink.loop import *  # noqa: F403 - its public names are public here
from torch_sink.mindspore import Model, data_sink
from torch_sink.sink import QueueStats, SinkLoader
from torch_sink.tracing import timeline

__all__ = [
    "DecodeError",
    "DecodeReport",
    "FallbackReport",
    "HostSyncError",
    "Model",
    "NonFiniteLoss",
    "QueueStats",
    "SinkError",
    "SinkLoader",
    "SinkTimeout",
    "SupportRow",
    "UnsupportedOperation",
    "amp",
    "data_sink",
    "decode_images",
    "decode_providers",
    "decode_report",
    "explain",
    "fallback_report",
    "get_image_backend",
    "image_backend",
    "set_decode_provider",
    "set_image_backend",
    "support_table",
    "timeline",
]
__all__ += loop.__all__
__all__.sort()

# Importing these imports torchvision, so they wait until they are asked for.
_LATER = {
    "LazyBatch": "torch_sink.image.run.batch",
    "LazyImage": "torch_sink.image.handles.image",
    "LazyTVImage": "torch_sink.image.handles.tensor",
    "LazyTensor": "torch_sink.image.handles.tensor",
    "SupportRow": "torch_sink.image.support",
    "explain": "torch_sink.cli.program",
    "support_table": "torch_sink.image.support",
}
if TYPE_CHECKING:
    from torch_sink.cli.program import explain
    from torch_sink.image.support import SupportRow, support_table


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER, "__doc__", "__version__"})


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'torch_sink' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


releases.check_python()
releases.warn_of_newer()
