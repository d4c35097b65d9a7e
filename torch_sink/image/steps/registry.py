"""Which transform of torchvision is which step, and whether it still is: users replace methods and functions."""

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

# Takes a transform and a draft. Returns what the transform makes of it, or `NotImplemented` where the transform has to
# be called itself: nothing was drawn then.
Run = Callable[[Any, Draft], Any]


class Step(NamedTuple):
    """What stands for the transforms of one class, while their code is torchvision's.

    Attributes:
        run: draws and records.
        methods: names of the methods that it stands for.
        read: those of the class.
        functions: the functionals that they call, of a module's names.
        namespace: these names.
        takes_samples: it says in `Draft.moves` how what lies beside an image moves as well.
        known: what the methods and functionals were when the backend was set; None where they were somebody else's.
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
    """Registers the step of transform classes; `calls` names two functionals or more that their methods may call."""

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
    """Notes the code of the classes and functionals, which stays what it is while steps stand for it."""
    for kind, found in STEPS.items():
        values = [*(getattr(kind, name) for name in found.methods), *found.functions(found.namespace)]
        known = (found.read(kind), found.functions(found.namespace)) if all(map(_is_known, values)) else None
        STEPS[kind] = found._replace(known=known)


_ROOTS = (torch.__path__[0], torchvision.__path__[0], str(Path(__file__).parents[2]))


def _is_known(value: Any) -> bool:
    """True for code of torch, torchvision and this package, and for what is no code."""
    while inspect.isfunction(value):
        if not value.__code__.co_filename.startswith(_ROOTS):
            return False
        value = getattr(value, "__wrapped__", None)
    return not callable(value)


def run_of(transform: Any) -> Run | None:
    """What stands for a transform; None for one that has to be called itself."""
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
    """Whether a step of v2 can stand for a transform where other things lie beside the image."""
    found = STEPS.get(type(transform))
    return found is not None and found.takes_samples


# --- what steps record


def family_of(transform: Any) -> str:
    """Whose functionals a transform calls."""
    return "v2" if isinstance(transform, v2.Transform) else "v1"


class Functional:
    """One of torchvision's functionals, for drafts.

    Args:
        name: of the functional in both families.
        pillow: records it on Pillow images; or {family: what does}.
        tensors: {family: name of its kernel} of those that record it on tensors.
    """

    def __init__(
        self, name: str, pillow: Callable[..., Any] | Mapping[str, Callable[..., Any]], **tensors: str
    ) -> None:
        self.name = name
        self.on_images = {"v1": pillow, "v2": pillow} if callable(pillow) else pillow
        self.on_tensors = {family: recorder(f"{family}.{kernel}") for family, kernel in tensors.items()}

    def record(self, family: str, draft: Draft, *args: Any) -> Any:
        """The draft with one more call, or `NotImplemented`. v1 makes pure tensors of a `tv_tensors.Image`."""
        if family == "v1" and draft.kind is LazyTVImage:
            return NotImplemented
        record = (self.on_images if draft.kind is LazyImage else self.on_tensors).get(family)
        return NotImplemented if record is None else record(draft, *args)

    def __call__(self, family: str, image: Any, *args: Any) -> Any:
        """The same behind a draw: what cannot be recorded is called, on what there is by then."""
        if type(image) is Draft:
            made = self.record(family, image, *args)
            if made is not NotImplemented:
                return made
            image = image.handle()
        return draft_of(getattr(_FUNCTIONALS[family], self.name)(image, *args))
