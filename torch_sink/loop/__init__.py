"""Training loops that sync host and device once in many steps: StepLoop, its callbacks, and jit."""

from torch_sink.loop.callbacks import Callback, LambdaCallback, LearningRateScheduler, OnRequestExit, RunContext
from torch_sink.loop.controls import EarlyStopping, Evaluation, ReduceLROnPlateau
from torch_sink.loop.core.history import RunHistory
from torch_sink.loop.core.host_sync import no_host_sync
from torch_sink.loop.engines.jit import JitConfig, jit
from torch_sink.loop.metrics import Accuracy, MeanIoU
from torch_sink.loop.model_checkpoint import CheckpointConfig, ModelCheckpoint
from torch_sink.loop.monitors import History, LossMonitor, ProgressBar, SummaryCollector, TimeMonitor
from torch_sink.loop.step_loop import StepLoop

__all__ = [
    "Accuracy",
    "Callback",
    "CheckpointConfig",
    "EarlyStopping",
    "Evaluation",
    "History",
    "JitConfig",
    "LambdaCallback",
    "LearningRateScheduler",
    "LossMonitor",
    "MeanIoU",
    "ModelCheckpoint",
    "OnRequestExit",
    "ProgressBar",
    "ReduceLROnPlateau",
    "RunContext",
    "RunHistory",
    "StepLoop",
    "SummaryCollector",
    "TimeMonitor",
    "jit",
    "no_host_sync",
]
