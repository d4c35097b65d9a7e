"""Every error that torch_sink raises for a state it is in. Wrong arguments raise `ValueError` or `TypeError`."""

from __future__ import annotations


class SinkError(RuntimeError):
    """Base of torch_sink's own errors."""


class UnsupportedOperation(SinkError):
    """Under `strict=True`: an operation would have run in stock code on the CPU."""


class DecodeError(SinkError, OSError):
    """An image of a batch could not be decoded.

    Attributes:
        path: file the image came from, or a description of the source.
        index_in_batch: position of the image in its batch; -1 outside a batch.
        reason: what the decoder said.

    The defaults are for torch's DataLoader, which makes an error of a worker anew from its whole message.
    """

    def __init__(self, path: str, index_in_batch: int = -1, reason: str = "") -> None:
        super().__init__(path, index_in_batch, reason)
        self.path, self.index_in_batch, self.reason = path, index_in_batch, reason

    def __str__(self) -> str:
        if not self.reason:
            return self.path
        place = f" (image {self.index_in_batch} of its batch)" if self.index_in_batch >= 0 else ""
        return f"cannot decode {self.path}{place}: {self.reason}"


class SinkTimeout(SinkError):
    """No batch arrived within `timeout_seconds`."""


class HostSyncError(SinkError):
    """Inside `no_host_sync()` the host waited for the device; the message names file and line."""


class NonFiniteLoss(SinkError):
    """The loss of a training step was NaN or infinite; the message names the first such step."""
