"""Graph sink and loop sink: many training steps per host sync."""

from torch_sink.loop import amp
from torch_sink.loop.callbacks import Callback, LambdaCallback, RunContext
from torch_sink.loop.controls import EarlyStopping, LearningRateScheduler, OnRequestExit, ReduceLROnPlateau
from torch_sink.loop.data_sink import data_sink
from torch_sink.loop.evaluation import Evaluation
from torch_sink.loop.history import RunHistory
from torch_sink.loop.host_sync import no_host_sync
from torch_sink.loop.jit import JitConfig, jit
from torch_sink.loop.model import Model
from torch_sink.loop.model_checkpoint import CheckpointConfig, ModelCheckpoint
from torch_sink.loop.monitors import History, LossMonitor, ProgressBar, TimeMonitor
from torch_sink.loop.step_loop import StepLoop
from torch_sink.loop.summary import SummaryCollector

__all__ = [
    "Callback",
    "CheckpointConfig",
    "EarlyStopping",
    "Evaluation",
    "History",
    "JitConfig",
    "LambdaCallback",
    "LearningRateScheduler",
    "LossMonitor",
    "Model",
    "ModelCheckpoint",
    "OnRequestExit",
    "ProgressBar",
    "ReduceLROnPlateau",
    "RunContext",
    "RunHistory",
    "StepLoop",
    "SummaryCollector",
    "TimeMonitor",
    "amp",
    "data_sink",
    "jit",
    "no_host_sync",
]
