"""Containers of transforms: one loop, which hands an image from step to step as a draft."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from torch_sink.image.core.fallback import executing, ledger
from torch_sink.image.handles.array import ORDINARY
from torch_sink.image.steps.draft import Draft, draft_of, finished, records
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

    __slots__ = ("row", "times", "transform")

    def __init__(self, transform: Any) -> None:
        self.times, self.row = 0, ledger.latest
        key = id(transform)
        self.transform = weakref.ref(transform, lambda _: _habits.pop(key, None))


_habits: dict[int, _Habit] = {}  # by `id` of the transform
# After so many in a row it runs in stock code at once, as recording only costs time; at times recording is tried again.
_IN_A_ROW, _TRIED_AGAIN = 16, 256
# Of these all calls on bytes or floats are recorded, whatever is drawn: in front of a fallback they need not be.
_ALWAYS_RECORDED = frozenset(
    getattr(module, name)
    for module, names in ((v1, "ToTensor PILToTensor"), (v2, "ToTensor PILToTensor ToImage ToDtype"))
    for name in (*names.split(), "ConvertImageDtype", "RandomHorizontalFlip", "RandomVerticalFlip")
)


def _is_not_tried(habit: _Habit | None) -> bool:
    """True for a transform that always falls back, which stock code shall run at once; counts that."""
    if habit is None or habit.times < _IN_A_ROW or not habit.times % _TRIED_AGAIN or ledger.strict:
        return False
    habit.times += 1
    ledger.add(*habit.row)
    return True


def _run(transforms: Sequence[Any], image: Any) -> Any:
    """Runs a container's transforms on a Pillow image; on one in memory as stock code up to one that always falls back.

    What comes before that is not recorded.
    """
    if _habits and type(image) in ORDINARY:
        for at, transform in enumerate(transforms):
            habit = _habits.get(id(transform))
            if habit is not None and records(image) and _is_not_tried(habit):
                with executing():
                    for transform in transforms[: at + 1]:
                        image = transform(image)
                return run_all(transforms[at + 1 :], draft_of(image))
            if habit is not None or type(transform) not in _ALWAYS_RECORDED:
                break
    return run_all(transforms, draft_of(image))


def _called(transform: Any, draft: Draft) -> Any:
    """Calls a transform itself, for which no step stands, on the image of a draft."""
    if type(draft.origin) not in ORDINARY or ledger.strict:
        return transform(draft.handle())
    if _is_not_tried(_habits.get(id(transform))):
        with executing():
            return transform(draft.values())
    before = ledger.added
    made = transform(draft.handle())
    is_stocks = isinstance(made, (Image.Image, torch.Tensor)) and not getattr(made, "is_recording", False)
    if not is_stocks or ledger.added != before + 1:
        _habits.pop(id(transform), None)
    elif type(transform).__weakrefoffset__:
        habit = _habits.setdefault(id(transform), _Habit(transform))
        habit.times, habit.row = habit.times + 1, ledger.latest
    return made


def compose_v1(stock: Callable[..., Any], compose: Any, img: Any) -> Any:
    """For `transforms.Compose.__call__`."""
    return finished(_run(compose.transforms, img)) if isinstance(img, Image.Image) else stock(compose, img)


def compose_v2(stock: Callable[..., Any], compose: Any, *inputs: Any) -> Any:
    """For `v2.Compose.forward`."""
    if not inputs or not compose.transforms:
        return stock(compose, *inputs)
    if len(inputs) == 1 and isinstance(inputs[0], (Image.Image, torch.Tensor)):
        is_pillow = isinstance(inputs[0], Image.Image)
        return finished(_run(compose.transforms, inputs[0])) if is_pillow else stock(compose, *inputs)
    return run_on_sample(compose.transforms, inputs)


def alone(stock: Callable[..., Any], transform: Any, img: Any) -> Any:
    """For `forward` of a v1 transform that is called outside of a container."""
    draft = draft_of(img)
    run = run_of(transform) if type(draft) is Draft else None
    made = NotImplemented if run is None else run(transform, draft)
    return stock(transform, img) if made is NotImplemented else finished(made)


# Containers call no functionals; `step` wants two names.
_contains = "pad crop"


@step(v1.Compose, v2.Compose, calls=_contains)
def _compose(compose: Any, draft: Draft) -> Any:
    return run_all(compose.transforms, draft) if compose.transforms else NotImplemented


@step(nn.Sequential, calls=_contains)
def _sequential(sequential: Any, draft: Draft) -> Any:
    return run_all(sequential, draft)


@step(v1.RandomApply, calls=_contains)
def _apply_v1(apply: Any, draft: Draft) -> Any:
    if not is_probability(apply.p):
        return NotImplemented
    return run_all(apply.transforms, draft) if as_drawn(apply.p) >= chance() else draft


@step(v2.RandomApply, calls=_contains)
def _apply_v2(apply: Any, draft: Draft) -> Any:
    if not is_probability(apply.p) or not len(apply.transforms):
        return NotImplemented
    return run_all(apply.transforms, draft) if chance() < as_drawn(apply.p) else draft


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
