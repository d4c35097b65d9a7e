"""torch_sink: image decoding, augmentation, batch queue and training loop on the device."""

from importlib import import_module, metadata

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
from torch_sink.image.decode.images import decode_images
from torch_sink.image.decode.providers import decode_providers, set_decode_provider
from torch_sink.image.support import SupportRow, support_table
from torch_sink.loop import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    Evaluation,
    History,
    JitConfig,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    ProgressBar,
    ReduceLROnPlateau,
    RunContext,
    RunHistory,
    StepLoop,
    SummaryCollector,
    TimeMonitor,
    amp,
    data_sink,
    jit,
    no_host_sync,
)
from torch_sink.sink import QueueStats, SinkLoader
from torch_sink.tracing import timeline

# The classes of recorded images and tensors: importing them imports torchvision, so they wait until they are asked for.
_HANDLES = {
    "LazyBatch": "torch_sink.image.execute.batch",
    "LazyImage": "torch_sink.image.handles.image",
    "LazyTVImage": "torch_sink.image.handles.tensor",
    "LazyTensor": "torch_sink.image.handles.tensor",
}


def _installed_version() -> str:
    """As the package's metadata say; sources that nobody installed have none."""
    try:
        return metadata.version("torch-sink")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _installed_version()
    if name in _HANDLES:
        return getattr(import_module(_HANDLES[name]), name)
    raise AttributeError(f"module 'torch_sink' has no attribute {name!r}")


__all__ = [
    "Callback",
    "CheckpointConfig",
    "DecodeError",
    "DecodeReport",
    "EarlyStopping",
    "Evaluation",
    "FallbackReport",
    "History",
    "HostSyncError",
    "JitConfig",
    "LambdaCallback",
    "LearningRateScheduler",
    "LossMonitor",
    "Model",
    "ModelCheckpoint",
    "NonFiniteLoss",
    "OnRequestExit",
    "ProgressBar",
    "QueueStats",
    "ReduceLROnPlateau",
    "RunContext",
    "RunHistory",
    "SinkError",
    "SinkLoader",
    "SinkTimeout",
    "StepLoop",
    "SummaryCollector",
    "SupportRow",
    "TimeMonitor",
    "UnsupportedOperation",
    "amp",
    "data_sink",
    "decode_images",
    "decode_providers",
    "decode_report",
    "fallback_report",
    "get_image_backend",
    "image_backend",
    "jit",
    "no_host_sync",
    "set_decode_provider",
    "set_image_backend",
    "support_table",
    "timeline",
]
