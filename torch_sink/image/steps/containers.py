"""Containers of transforms: one loop, which hands an image from step to step as a draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import nn
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from torch_sink.image.core.fallback import executing, ledger
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


# {transform: how often in a row it fell back to stock code, and what the report of fallbacks says of it}.
_fallbacks: WeakKeyDictionary[Any, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()
# After so many in a row it runs in stock code at once, as recording only costs time; at times recording is tried again.
_IN_A_ROW, _TRIED_AGAIN = 16, 64


def _called(transform: Any, draft: Draft) -> Any:
    """Calls a transform itself, for which no step stands, on the image of a draft."""
    if type(draft.origin) is not Image.Image or ledger.strict or not _is_key(transform):
        return transform(draft.handle())
    times, row = _fallbacks.get(transform, (0, ()))
    if times >= _IN_A_ROW and times % _TRIED_AGAIN:
        _fallbacks[transform] = times + 1, row
        ledger.add(*row)
        with executing():
            return transform(draft.values())
    ledger.latest = []
    made = transform(draft.handle())
    is_stocks = isinstance(made, (Image.Image, torch.Tensor)) and not getattr(made, "is_recording", False)
    if is_stocks and len(ledger.latest) == 1:
        _fallbacks[transform] = times + 1, ledger.latest[0]
    elif times:
        del _fallbacks[transform]
    return made


def _is_key(transform: Any) -> bool:
    kind: Any = type(transform)
    return kind.__hash__ is object.__hash__ and kind.__weakrefoffset__ != 0


def compose_v1(stock: Callable[..., Any], compose: Any, img: Any) -> Any:
    """For `transforms.Compose.__call__`."""
    return finished(run_all(compose.transforms, draft_of(img))) if isinstance(img, Image.Image) else stock(compose, img)


def compose_v2(stock: Callable[..., Any], compose: Any, *inputs: Any) -> Any:
    """For `v2.Compose.forward`."""
    if not inputs or not compose.transforms:
        return stock(compose, *inputs)
    if len(inputs) == 1 and isinstance(inputs[0], (Image.Image, torch.Tensor)):
        is_pillow = isinstance(inputs[0], Image.Image)
        return finished(run_all(compose.transforms, draft_of(inputs[0]))) if is_pillow else stock(compose, *inputs)
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
