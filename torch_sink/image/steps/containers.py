"""Containers of transforms: one loop, which hands an image from step to step as a draft."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from torch_sink.common import reference
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import MUTED, count_dispatch_modes, count_function_modes, ledger
from torch_sink.image.core.ops import VALUE_CALLS
from torch_sink.image.decode.source import BytesSource, PixelSource
from torch_sink.image.handles.array import ORDINARY, ArrayImage
from torch_sink.image.handles.image import RECORDED_MODES, LazyImage
from torch_sink.image.handles.tensor import HANDLES, Handle
from torch_sink.image.steps.draft import Draft, draft_of, finished
from torch_sink.image.steps.draws import as_drawn, chance, is_probability
from torch_sink.image.steps.registry import run_of, step
from torch_sink.image.steps.samples import run_on_sample


def run_all(transforms: Iterable[Any], image: Any) -> Any:
    """Runs transforms in turn on an image or a draft; returns a draft wherever one can stand for the result."""
    for transform in transforms:
        if type(image) is Draft:
            run = run_of(transform)
            made = NotImplemented if run is None else run(transform, image)
            if made is not NotImplemented:
                image = made
                continue
            image = draft_of(_called(transform, image))
        else:
            image = draft_of(transform(image))
    return image


class _Habit:
    """How often in a row a transform fell back to stock code, and what the report of fallbacks says of it."""

    def __init__(self, transform: Any) -> None:
        self.times, self.row = 0, ledger.latest
        self.transform = reference(transform, functools.partial(_habits.pop, id(transform), None))


_habits: dict[int, _Habit] = {}  # by `id` of the transform
# After so many in a row it runs in stock code at once, as recording only costs time; at times recording is tried again.
_IN_A_ROW, _TRIED_AGAIN = 16, 256
# Of these all calls are recorded, whatever they draw: in front of a fallback they need not be.
_NAMES = (
    "ToTensor PILToTensor ToImage ToDtype ConvertImageDtype Pad CenterCrop RandomCrop RandomResizedCrop "
    "RandomHorizontalFlip RandomVerticalFlip"
)
_ALWAYS_RECORDED = {getattr(module, name, None) for module in (v1, v2) for name in _NAMES.split()}


def _run(transforms: Sequence[Any], image: Any) -> Any:
    """Runs a container's transforms on a Pillow image; on one in memory as stock code up to one that always falls back.

    What comes before that is not recorded.
    """
    for at, transform in enumerate(transforms if _habits else ()):
        habit = _habits.get(id(transform))
        if habit is not None:
            # Whether the image could be recorded, but need not be.
            is_tried = habit.times < _IN_A_ROW or not habit.times % _TRIED_AGAIN or ledger.strict
            is_plain = type(image) in ORDINARY and image.mode in RECORDED_MODES and 0 not in image.size
            if is_tried or not is_plain or MUTED.depth or count_function_modes() or count_dispatch_modes():
                break
            habit.times += 1
            ledger.add(*habit.row)
            if type(image) is not Image.Image:
                image.load()  # what was made of an array becomes an ordinary image
            with MUTED:
                for transform in transforms[: at + 1]:
                    image = transform(image)
            others = transforms[at + 1 :]
            return finished(run_all(others, draft_of(image))) if others else image
        if type(transform) not in _ALWAYS_RECORDED:
            break
    return finished(run_all(transforms, draft_of(image)))


def _called(transform: Any, draft: Draft) -> Any:
    """Calls a transform itself, for which no step stands, on the image of a draft."""
    before = ledger.added
    made = transform(draft.handle())
    is_stocks = isinstance(made, (Image.Image, torch.Tensor)) and not getattr(made, "is_recording", False)
    if not is_stocks or ledger.added != before + 1:
        _habits.pop(id(transform), None)
    elif type(transform).__weakrefoffset__ and type(draft.origin) in ORDINARY:
        habit = _habits.setdefault(id(transform), _Habit(transform))
        habit.times, habit.row = habit.times + 1, ledger.latest
    return made


class _Samples:
    """How many samples a transform made in memory, and what the report says of the latest recorded ones.

    Its samples wait where their batch, which converts and normalizes them as a whole, gains by it.
    """

    waiting = 0  # how many calls, of all transforms, made samples that wait for their batch

    def __init__(self, transform: Any) -> None:
        self.transform = reference(transform, functools.partial(_samples.pop, id(transform), None))
        self.count, self.waits = 0, False
        self.rows: deque[list[tuple[str, ...]]] = deque(maxlen=_IN_A_ROW)

    def recorded(self, record: Callable[..., Any], stock: Callable[..., Any], transform: Any, *inputs: Any) -> Any:
        """What `record` makes of a sample; notes what the report says of it."""
        before, waiting = ledger.counts.copy(), _Samples.waiting
        made = record(stock, transform, *inputs)
        self.rows.append(list((ledger.counts - before).elements()))
        floats = [x for x in _leaves(made) if type(x) in HANDLES and x.is_recording and x.lazy_dtype.is_floating_point]
        gains = isinstance(transform, v2.Compose) or any(each.lazy_ops[-1].name in VALUE_CALLS for each in floats)
        # Where a user's own transform makes views, the container that makes one may be one whose samples wait.
        self.waits = gains and not self.rows[-1] and (_has_steps(transform) or waiting < _Samples.waiting)
        _Samples.waiting += self.waits
        return made


_samples: dict[int, _Samples] = {}  # by `id` of their transform


def sampled(record: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes stand-ins for methods that transform: `record` gets the stock method first, and records for a device.

    Without a device, recording an image in memory only tells what a device would do, unless a batch gains by it, which
    converts and normalizes many as a whole, or steps are faster. It is done for the first samples and then at times,
    and for all with `strict`. Others are made in stock code; the report counts what it said of the recorded ones.
    """

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def stand_in(transform: Any, *inputs: Any, **kwargs: Any) -> Any:
            if MUTED.depth:
                return stock(transform, *inputs, **kwargs)
            active = settings.active
            is_here = active is not None and active.device == "cpu" and not (active.interpreted or ledger.strict)
            if kwargs or not is_here or not _are_in_memory(inputs):
                return record(stock, transform, *inputs, **kwargs)
            samples = _samples.get(id(transform)) or _samples.setdefault(id(transform), _Samples(transform))
            samples.count = count = samples.count + 1
            if count <= _IN_A_ROW or not samples.rows or not count % _TRIED_AGAIN:
                return samples.recorded(record, stock, transform, *inputs)
            if samples.waits:
                _Samples.waiting += 1
                return record(stock, transform, *inputs)
            with MUTED:
                for image in _leaves(inputs) if type(inputs[0]) is not Image.Image else ():
                    if type(image) in (LazyImage, ArrayImage):
                        image.load()  # an ordinary image from now on
                made = stock(transform, *inputs)
            for row in samples.rows[count % len(samples.rows)]:
                ledger.add(*row)
            return made

        return stand_in

    return make


def _leaves(inputs: Any) -> Iterable[Any]:
    """What a sample, or the inputs of a transform, hold; not what containers inside of them do."""
    value = inputs[0] if type(inputs) is tuple and len(inputs) == 1 else inputs
    return value.values() if type(value) is dict else value if type(value) in (tuple, list) else (value,)


def _are_in_memory(inputs: tuple[Any, ...]) -> bool:
    """True where there are images, and all of them have pixels."""
    if len(inputs) == 1 and type(inputs[0]) in ORDINARY:
        return True
    images = [leaf for leaf in _leaves(inputs) if isinstance(leaf, (Image.Image, Handle))]
    kinds = {type(vars(each).get("lazy_source") if type(each) is LazyImage else each) for each in images}
    return bool(kinds) and kinds <= {*ORDINARY, PixelSource, BytesSource}


def _has_steps(transform: Any) -> bool:
    return run_of(transform) is not None and all(map(_has_steps, getattr(transform, "transforms", ())))


def compose_v1(stock: Callable[..., Any], compose: Any, img: Any) -> Any:
    """For `transforms.Compose.__call__`."""
    return _run(compose.transforms, img) if isinstance(img, Image.Image) else stock(compose, img)


def compose_v2(stock: Callable[..., Any], compose: Any, *inputs: Any) -> Any:
    """For `v2.Compose.forward`."""
    if not inputs or not compose.transforms:
        return stock(compose, *inputs)
    if len(inputs) == 1 and isinstance(inputs[0], (Image.Image, torch.Tensor)):
        is_pillow = isinstance(inputs[0], Image.Image)
        return _run(compose.transforms, inputs[0]) if is_pillow else stock(compose, *inputs)
    return run_on_sample(compose.transforms, inputs)


def alone(stock: Callable[..., Any], transform: Any, img: Any) -> Any:
    """For `forward` of a v1 transform that is called outside of a container."""
    draft = draft_of(img)
    run = run_of(transform) if type(draft) is Draft else None
    made = NotImplemented if run is None else run(transform, draft)
    return stock(transform, img) if made is NotImplemented else finished(made)


# Containers call no functionals; `step` wants two names.
_contains = "pad crop"


@step(v1.Compose, v2.Compose, nn.Sequential, calls=_contains)
def _compose(compose: Any, draft: Draft) -> Any:
    transforms = compose if type(compose) is nn.Sequential else compose.transforms
    return run_all(transforms, draft) if transforms else NotImplemented


@step(v1.RandomApply, v2.RandomApply, calls=_contains)
def _apply(apply: Any, draft: Draft) -> Any:
    if not is_probability(apply.p) or not apply.transforms:
        return NotImplemented
    drawn, p = chance(), as_drawn(apply.p)
    return run_all(apply.transforms, draft) if drawn < p or (drawn == p and type(apply) is v1.RandomApply) else draft


@step(v1.RandomChoice, calls=_contains)
def _choice_v1(choice: Any, draft: Draft) -> Any:
    return run_all(random.choices(choice.transforms, weights=choice.p), draft)


@step(v2.RandomChoice, calls=_contains)
def _choice_v2(choice: Any, draft: Draft) -> Any:
    return run_all([choice.transforms[int(torch.multinomial(torch.tensor(choice.p), 1))]], draft)


@step(v1.RandomOrder, calls=_contains)
def _order_v1(order: Any, draft: Draft) -> Any:
    places = list(range(len(order.transforms)))
    random.shuffle(places)
    return run_all((order.transforms[place] for place in places), draft)


@step(v2.RandomOrder, calls=_contains)
def _order_v2(order: Any, draft: Draft) -> Any:
    if not order.transforms:
        return NotImplemented
    return run_all((order.transforms[place] for place in torch.randperm(len(order.transforms)).tolist()), draft)
