"""Steps that stand for torchvision's transforms, as long as users replace none of their methods and functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torchvision.transforms import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.ops import recorder
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import LazyTVImage
from torch_sink.image.steps.draft import Draft, draft_of

# Takes a transform and a draft. Returns the transformed draft or image; or `NotImplemented`, before anything was drawn,
# where the transform itself has to be called.
Run = Callable[[Any, Draft], Any]


class Step(NamedTuple):
    """Stands for the transforms of one class, as long as their code is torchvision's.

    Attributes:
        run: draws and records.
        methods: names of the methods that it stands for.
        read: returns these methods of a class.
        functions: returns the functionals that they call, from `namespace`.
        namespace: the names of the functionals' module.
        takes_samples: whether it sets `Draft.moves`, with which masks, boxes and points are transformed as well.
        known: the methods and functionals when the backend was set; None where some were not torchvision's.
    """

    run: Run
    methods: tuple[str, ...]
    read: Callable[[Any], Any]
    functions: Callable[[Any], Any]
    namespace: dict[str, Any]
    takes_samples: bool
    known: tuple[Any, Any] | None = None


STEPS: dict[type, Step] = {}

_METHODS = {
    "v1": ("__call__", "forward", "get_params", "_augmentation_space"),
    "v2": (
        "__call__", "forward", "transform", "make_params", "check_inputs", "_call_kernel", "_transformed_types",
        "_AUGMENTATION_SPACE", "_get_random_item", "_apply_image_or_video_transform",
    ),
}  # fmt: skip
_FUNCTIONALS = {"v1": F, "v2": F_v2}


def step(*kinds: type, calls: str, takes_samples: bool = False) -> Callable[[Run], Run]:
    """Registers the step of transform classes; `calls` names at least two functionals that their methods may call."""

    def register(run: Run) -> Run:
        for kind in kinds:
            family = "v2" if issubclass(kind, v2.Transform) else "v1"
            methods = tuple(name for name in _METHODS[family] if hasattr(kind, name))
            namespace = vars(_FUNCTIONALS[family])
            functions = itemgetter(*(name for name in calls.split() if name in namespace))
            is_v2 = takes_samples and family == "v2"
            STEPS[kind] = Step(run, methods, attrgetter(*methods), functions, namespace, is_v2)
        return run

    return register


def learn() -> None:
    """Notes the methods and functionals that steps stand for; `run_of` returns no step once one was replaced."""
    for kind, found in STEPS.items():
        values = [*(getattr(kind, name) for name in found.methods), *found.functions(found.namespace)]
        known = (found.read(kind), found.functions(found.namespace)) if all(map(_is_known, values)) else None
        STEPS[kind] = found._replace(known=known)


_ROOTS = (torch.__path__[0], torchvision.__path__[0], str(Path(__file__).parents[2]))


def _is_known(value: Any) -> bool:
    """True for functions of torch, torchvision and this package, and for anything that cannot be called."""
    while inspect.isfunction(value):
        if not value.__code__.co_filename.startswith(_ROOTS):
            return False
        value = getattr(value, "__wrapped__", None)
    return not callable(value)


def run_of(transform: Any) -> Run | None:
    """The `run` of a transform's step; None where the transform itself has to be called."""
    kind = type(transform)
    found = STEPS.get(kind)
    if found is None or found.known != (found.read(kind), found.functions(found.namespace)):
        return None
    fields = transform.__dict__
    if not fields.keys().isdisjoint(found.methods):
        return None
    is_hooked = fields.get("_forward_hooks") or fields.get("_forward_pre_hooks") or "_compiled_call_impl" in fields
    return None if is_hooked else found.run


def takes_samples(transform: Any) -> bool:
    """Whether a step can stand for a v2 transform of samples with more than the image."""
    found = STEPS.get(type(transform))
    return found is not None and found.takes_samples


# --- functionals that steps record


def family_of(transform: Any) -> str:
    """The family of functionals that a transform calls, "v1" or "v2"."""
    return "v2" if isinstance(transform, v2.Transform) else "v1"


class Functional:
    """One of torchvision's functionals, for drafts: its recorder on Pillow images, or {family: recorder}.

    `tensors` is {family: name of its kernel}, for families that record it on tensors.
    """

    def __init__(
        self, name: str, pillow: Callable[..., Any] | Mapping[str, Callable[..., Any]], **tensors: str
    ) -> None:
        self.name = name
        self.on_images = {"v1": pillow, "v2": pillow} if callable(pillow) else pillow
        self.on_tensors = {family: recorder(f"{family}.{kernel}") for family, kernel in tensors.items()}

    def record(self, family: str, draft: Draft, *args: Any) -> Any:
        """The draft with one more call, or `NotImplemented`; v1 would turn a `tv_tensors.Image` into a pure tensor."""
        if family == "v1" and draft.kind is LazyTVImage:
            return NotImplemented
        record = (self.on_images if draft.kind is LazyImage else self.on_tensors).get(family)
        return NotImplemented if record is None else record(draft, *args)

    def __call__(self, family: str, image: Any, *args: Any) -> Any:
        """As `record`, for use after a draw: where it cannot record, calls the functional on the handle so far."""
        if type(image) is Draft:
            made = self.record(family, image, *args)
            if made is not NotImplemented:
                return made
            image = image.handle()
        return draft_of(getattr(_FUNCTIONALS[family], self.name)(image, *args))
