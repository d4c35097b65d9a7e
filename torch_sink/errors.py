"""torch_sink's errors, and hints that it adds to errors of torch, torchvision and pickle for common mistakes.

Wrong arguments raise `ValueError` or `TypeError`.
"""

from __future__ import annotations

import re
import traceback


class SinkError(RuntimeError):
    """Base of torch_sink's errors."""


class UnsupportedOperation(SinkError):
    """Under `strict=True`: an operation would have run in stock code on the CPU."""


class DecodeError(SinkError, OSError):
    """An image of a batch could not be decoded.

    Attributes:
        path: file of the image, or a description of its source.
        index_in_batch: position of the image in its batch; -1 outside a batch.
        reason: the decoder's message.
    """

    # The defaults serve torch's DataLoader, which raises an error of a worker again as `type(error)(message)`.
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
    """The host waited for the device inside `no_host_sync()`; the message names file and line."""


class NonFiniteLoss(SinkError):
    """The loss of a training step was NaN or infinite; the message names the first such step."""


# --- hints for errors of other libraries

_NONE = (
    "the dataset returned None for a sample: raise an error instead, and leave broken files to "
    "SinkLoader(..., on_decode_error='skip')"
)
_TO_TENSOR = "this transform takes tensors: put it behind transforms.ToTensor()"
_CHANNELS = r", but got \[(\d+), \d+, \d+\] at entry \d+ and \[(?!\1,)"
# A pattern in the message, or in the traceback above it, and what to do.
_HINTS = {
    r"pic should be PIL Image or ndarray. Got <class '[\w.]*Tensor'>": (
        "this is a tensor already: one ToTensor() is enough, behind the transforms that need images"
    ),
    r"(pic should be PIL Image or ndarray. Got|Unexpected type) <class '(str|pathlib\.\w+)'>": (
        "the transform gets a path: open the file first, Image.open(path).convert('RGB')"
    ),
    r"img should be Tensor Image|does not support PIL images|Image' object has no attribute 'shape'": _TO_TENSOR,
    r"Input tensor should be a float tensor. Got torch.uint8": (
        "Normalize takes floats: put transforms.ToTensor(), or v2.ToDtype(torch.float32, scale=True), before it"
    ),
    r"in normalize\b(.|\n)*(The size of tensor a|doesn't match the broadcast shape)": (
        "Normalize takes one mean and one std for each channel of the image"
    ),
    r"Only torch.uint8 image tensors are supported, but found torch.float": (
        "this transform takes images or bytes: put it before transforms.ToTensor()"
    ),
    r"(torchvision/transforms|torch_sink/image)/(.|\n)*\.__init__\(\) (takes|missing|got)": (
        "a class stands among the transforms: write ToTensor(), an instance, instead of ToTensor"
    ),
    rf"stack expects each tensor to be equal size{_CHANNELS}": (
        "the images have different numbers of channels: open them as Image.open(path).convert('RGB')"
    ),
    rf"stack expects each tensor to be equal size(?!{_CHANNELS})": (
        "the images of a batch need one size: add transforms.Resize((224, 224)), RandomResizedCrop or CenterCrop, or "
        "pass a collate_fn to the DataLoader that returns lists"
    ),
    r"out of memory.* private pools": (
        "CUDA graphs keep the memory of a step while a run lasts: evaluate by Evaluation(...) or loop.evaluate(...), "
        "which share it, or run with mode='compile'; print(loop.explain()) says how much they keep"
    ),
    r"Cannot re-initialize CUDA in forked subprocess": (
        "data workers cannot use CUDA: return CPU tensors from the dataset; the SinkLoader moves batches to the device"
    ),
    r"batch must contain .* found <class '(PIL|torch_sink)\.[\w.]*Image'>": (
        "the dataset returns images: end its transform with transforms.ToTensor(), or v2.ToImage() and v2.ToDtype()"
    ),
    r"batch must contain .* found <class 'NoneType'>": _NONE,
    r"utils/data/_utils/collate\.py(.|\n)*NoneType": _NONE,
    (
        r"(?s)^(?!.*(not one sample|in the dataset's own code)).*(cannot identify image file|cannot decode "
        r"|image file is truncated|broken data stream|\nfile: "
        r"|No such file or directory: [^\n]*\.(jpe?g|png|webp|gif|bmp|tiff?)')"
    ): (
        "repair the file, or leave out samples whose files are missing or broken by "
        "SinkLoader(loader, on_decode_error='skip')"
    ),
    r"(Can't|cannot|Cannot) (pickle|get) local object|Can't pickle <function <lambda>|Can't get attribute": (
        "spawned workers get the dataset as a pickle: define functions and classes at the top of a module instead of "
        "lambdas and inner functions, or pass multiprocessing_context='fork' to the DataLoader"
    ),
    r"expected (target dtype to be Long|scalar type Long)": (
        "class labels are integers: pass labels.long(), or a loss for floating-point targets such as "
        "binary_cross_entropy_with_logits"
    ),
    r"(mse_loss|l1_loss|huber_loss)(.|\n)*The size of tensor a|Target size .* must be the same as input size": (
        "this loss wants targets of the shape and dtype of the model's output: for class labels use cross_entropy, for "
        "one output labels.float().unsqueeze(1)"
    ),
    r"Target -?\d+ is out of bounds": (
        "labels count from 0 to the number of the model's outputs - 1: compare num_classes with len(dataset.classes)"
    ),
    r"Expected floating point type for target with class probabilities": (
        "one-hot labels are taken as probabilities: pass class indices, labels.argmax(1), or labels.float()"
    ),
    r"multi-target not supported": "the labels have a dimension too many: pass labels.squeeze(1)",
    r"all elements of input should be between 0 and 1": "BCELoss takes probabilities: use BCEWithLogitsLoss",
    r"argument 'target' .*must be Tensor, not (tuple|list)": (
        "the labels are no numbers: let the dataset return class indices, as dataset.class_to_idx has them"
    ),
    r"invalid combination of arguments - got \((list|tuple|dict), |'(list|tuple|dict)' object has no attribute": (
        "the model gets a list or a dict of images: pass forward=lambda model, batch: loss, and take them apart there"
    ),
    r"argument '(input|self)' .*must be Tensor, not (tuple|list|dict|\w*Output)": (
        "the model does not return a tensor: pass forward=lambda model, batch: loss, and choose the output there"
    ),
    r"but got Byte and |Input type \((unsigned char|torch\.(cuda\.)?ByteTensor)\)": (
        "the images are bytes: end the transform with transforms.ToTensor(), or with "
        "v2.ToDtype(torch.float32, scale=True)"
    ),
    r"but got Double and |Input type \((double|torch\.(cuda\.)?DoubleTensor)\)": (
        "the images are float64, as numpy's floats are: let the dataset return image.float()"
    ),
    r"to have \d+ channels, but got \d+ channels instead": (
        "compare the model's first layer with the images: transforms.Grayscale(3) makes three channels of one"
    ),
    r"Tried to step \d+ times. The specified number of total steps is": (
        "the schedule is shorter than the run: with schedule='step' it counts updates, so that total_steps is epochs x "
        "ceil(len(loader) / accumulate)"
    ),
    r"size mismatch for [\w.]+: copying a param": (
        "the checkpoint is of another model: build the model with the arguments of the run that saved it"
    ),
}


def add_note(error: BaseException, text: str) -> None:
    """Adds a line under an error's message. Python 3.10 keeps such notes too, but does not print them."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.__dict__.setdefault("__notes__", []).append(text)


def add_hints(error: BaseException) -> None:
    """Adds a note that says what to do, if the error is that of a common mistake."""
    text = "\n".join([*traceback.format_tb(error.__traceback__), str(error), *getattr(error, "__notes__", ())])
    for pattern, advice in _HINTS.items():
        # An error of a data worker has the worker's notes in its message.
        if re.search(pattern, text) and advice not in text:
            add_note(error, advice)
