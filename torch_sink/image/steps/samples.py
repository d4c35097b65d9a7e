"""Samples of v2: tuples and dicts with an image, masks, boxes and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import v2

from torch_sink.image.handles.tensor import LazyTensor
from torch_sink.image.steps.draft import Draft, draft_of, finished
from torch_sink.image.steps.registry import run_of, takes_samples

_MOVED = (tv_tensors.Mask, tv_tensors.BoundingBoxes, tv_tensors.KeyPoints)
_RESIZES = (v2.RandomResizedCrop, v2.Resize)
# Next to an image, transforms of v2 pass these on unchanged.
_KEPT = frozenset((torch.Tensor, int, float, str, bool, bytes, type(None)))


class Sample:
    """The one Pillow image of a sample as a draft, and the other leaves of its containers."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.leaves, self.spec = tree_flatten(inputs)
        self.place, self.image = -1, None
        for at, leaf in enumerate(self.leaves):
            if isinstance(leaf, Image.Image) and self.place < 0:
                self.place, self.image = at, draft_of(leaf)
            elif type(leaf) not in _MOVED and type(leaf) not in _KEPT:
                self.place, self.image = len(self.leaves), None
        self._find_moved()

    def _find_moved(self) -> None:
        """Finds masks, boxes and points. They agree where all have the size of a draft; stock code may raise else."""
        self.moved = [at for at, leaf in enumerate(self.leaves) if type(leaf) in _MOVED]
        size = tuple(self.image.lazy_shape[1:]) if type(self.image) is Draft else None
        self.agrees = all(_size_of(self.leaves[at]) == size for at in self.moved)

    def takes(self, transform: Any) -> bool:
        """Runs the step of a transform on the sample; returns False where the transform itself has to be called."""
        draft = self.image
        run = run_of(transform) if takes_samples(transform) else None
        if run is None or type(draft) is not Draft or draft.kind is LazyTensor or not self.agrees:
            return False
        draft.moves, draft.beside = None, [self.leaves[at] for at in self.moved]
        made = run(transform, draft)
        if made is NotImplemented:
            return False
        self.image = made
        if draft.moves is not None:
            for at in self.moved:
                leaf = self.leaves[at]
                is_resized = type(made) is Draft and type(leaf) is tv_tensors.Mask and _takes_nearest(transform)
                moved = _resized_mask(leaf, draft.moves, made.lazy_shape[1:]) if is_resized else None
                self.leaves[at] = transform.transform(leaf, draft.moves) if moved is None else moved
            self._find_moved()  # stock code makes plain tensors of some
        return True

    def inputs(self) -> Any:
        """The sample in its containers, with a handle in place of the draft."""
        if self.image is not None:
            self.leaves[self.place] = finished(self.image)
        return tree_unflatten(self.leaves, self.spec)


def _takes_nearest(transform: Any) -> bool:
    """Whether a transform resizes masks with `mode="nearest"`; newer releases also do with "nearest-exact"."""
    mode = transform.interpolation if type(transform) in _RESIZES else Mode.NEAREST_EXACT
    return mode not in (Mode.NEAREST_EXACT, Mode.NEAREST_EXACT.value)


def _resized_mask(mask: torch.Tensor, box: Mapping[str, int], size: tuple[int, ...]) -> torch.Tensor | None:
    """The part of a mask in a box, as `interpolate(mode="nearest")` resizes it at three times the cost, or None.

    Args:
        mask: uint8 [..., height, width] on the CPU.
        box: {"top", "left", "height", "width"}, or {} for all of it.
        size: height and width of the result.
    """
    begins = (box["top"], box["left"]) if box else (0, 0)
    lengths = (box["height"], box["width"]) if box else tuple(mask.shape[-2:])
    # Stock code's result shares the mask's memory where no size changes.
    if lengths == size or mask.dtype is not torch.uint8 or not mask.is_cpu:
        return None
    values: Any = mask.as_subclass(torch.Tensor).numpy()
    for axis, begin, length, count in zip((-2, -1), begins, lengths, size, strict=True):
        at = np.arange(count, dtype=np.float32) * (np.float32(length) / np.float32(count))
        values = values.take(begin + np.minimum(at.astype(np.intp), length - 1), axis, mode="clip")
    return tv_tensors.wrap(torch.from_numpy(values), like=mask)


def _size_of(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape[-2:]) if type(leaf) is tv_tensors.Mask else tuple(leaf.canvas_size)


def run_on_sample(transforms: Iterable[Any], inputs: tuple[Any, ...]) -> Any:
    """Runs transforms on a sample, as `v2.Compose` does."""
    sample: Sample | None = None
    is_one, is_usual = len(inputs) == 1, True
    for transform in transforms:
        if sample is None and is_usual and takes_samples(transform):
            sample = Sample(inputs)
            is_usual = type(sample.image) is Draft and sample.agrees
        if sample is not None and sample.takes(transform):
            continue
        if sample is not None:
            inputs, sample = sample.inputs(), None
        made = transform(*inputs)
        inputs = (made,) if is_one else made
    inputs = inputs if sample is None else sample.inputs()
    return inputs[0] if is_one else inputs
