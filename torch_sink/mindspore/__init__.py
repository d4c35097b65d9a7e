"""The training loop with MindSpore's interface: `Model` and `data_sink`."""

from torch_sink.mindspore.data_sink import data_sink
from torch_sink.mindspore.model import Model

__all__ = ["Model", "data_sink"]
