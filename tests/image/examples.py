"""Example calls of operations, which `trials/` lists: their arguments, and how they are called."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

# What an operation is compared with: Pillow images, and the tensors of both families.
REFERENCES = ("Pillow", "v1 uint8", "v1 float32", "v2 uint8", "v2 float32")
# Enough draws to meet every operation that an automatic augmentation chooses from.
MANY_DRAWS = 40
STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Example(NamedTuple):
    """One way to call a functional, or to construct a transform, that the tables of parity and support try.

    Attributes:
        name: of torchvision's functional; "" for a transform.
        args: of the functional, behind the image, or of the constructor.
        kwargs: the same.
        label: what is special about the arguments; empty for the usual ones, which come first.
        run: what takes the image, where no functional of torchvision does.
        draws: how often to run a transform that depends on chance.
        form: the image comes alone ("image"), in a dict with boxes ("detection"), or in a batch with labels ("batch").
    """

    name: str
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012, never written to
    label: str = ""
    run: Callable[[Any], Any] | None = None
    draws: int = 1
    form: str = "image"

    @property
    def title(self) -> str:
        """The line of the parity table."""
        return f"{self.name}, {self.label}" if self.label else self.name

    def called(self, functional: Any, image: Any) -> Any:
        """The result; `functional` is torchvision's module, where the function is looked up at each call."""
        return self.run(image) if self.run else getattr(functional, self.name)(image, *self.args, **self.kwargs)


def of_functional(name: str, arguments: Callable[[Arguments], tuple[Any, ...]] = lambda a: ()) -> Examples:
    """One example, of a functional, with the arguments behind the image."""
    return lambda a: [Example(name, arguments(a))]


def of_method(a: Arguments, name: str, calls: Mapping[str, Sequence[Any]]) -> list[Example]:
    """Examples of a method of Pillow's images, called behind a flip, which makes a handle of an ordinary image."""

    def call(args: Sequence[Any], image: Any) -> Any:
        return getattr(v1.functional.hflip(image), name)(*args)

    runs = {label: functools.partial(call, args) for label, args in calls.items()}
    return [Example(name, label=label, run=run) for label, run in runs.items()] if a.is_pillow else []


def sample(*args: Any, label: str = "", draws: int = 1, form: str = "image", **kwargs: Any) -> Example:
    """One way to construct a transform: what is no field of an `Example` goes to the constructor."""
    return Example("", args, kwargs, label, None, draws, form)


def interpolations(*args: Any, usual: str, **kwargs: Any) -> list[Example]:
    """The usual way, and one for each interpolation that is not the usual one."""
    others = [InterpolationMode[name] for name in ("NEAREST", "BILINEAR", "BICUBIC") if name != usual]
    labeled = [Example("", args, {**kwargs, "interpolation": mode}, f"interpolation={mode.name}") for mode in others]
    return [Example("", args, kwargs), *labeled]


class Arguments:
    """Random arguments for images of one size and kind."""

    def __init__(self, chance: random.Random, reference: str, height: int, width: int, channels: int) -> None:
        self.chance, self.height, self.width, self.channels = chance, height, width, channels
        self.is_pillow = reference == "Pillow"
        self.scale = 1 / 255 if reference.endswith("float32") else 1
        self.transforms: Any = v2 if reference.startswith("v2") else v1
        self.functional: Any = self.transforms.functional
        self.smaller = [max(height * 2 // 3, 1), max(width * 3 // 5, 1)]
        self.other = [height * 2 // 3 + 3, width * 3 // 4 + 5]
        self.padding = [min(2, width - 1), min(3, height - 1), min(1, width - 1), min(4, height - 1)]

    def factor(self) -> float:
        return self.chance.uniform(0.0, 2.5)

    def fill(self) -> list[float]:
        values = [self.chance.randrange(256) * self.scale for _ in range(self.channels)]
        return [int(value) for value in values] if self.scale == 1 else values

    def corner(self) -> tuple[int, int]:
        """(top, left) of a box of the smaller size."""
        top, left = self.height - self.smaller[0], self.width - self.smaller[1]
        return self.chance.randint(0, top), self.chance.randint(0, left)

    def corner_outside(self) -> tuple[int, int]:
        """(top, left) of a box of the smaller size that ends to the right of the image, and mostly begins above it."""
        left = self.width - self.smaller[1]
        return -self.chance.randint(0, self.smaller[0] - 1), left + self.chance.randint(1, self.smaller[1])

    def corners(self) -> tuple[list[list[int]], list[list[int]]]:
        """Corners before and after a perspective transform, [x, y] each."""
        right, bottom = self.width - 1, self.height - 1
        start = [[0, 0], [right, 0], [right, bottom], [0, bottom]]
        moved = [[x + self._shift(x, self.width), y + self._shift(y, self.height)] for x, y in start]
        return start, moved

    def _shift(self, at: int, side: int) -> int:
        inwards = self.chance.randint(0, side // 4)
        return inwards if at == 0 else -inwards

    def displacement(self) -> torch.Tensor:
        """[1, H, W, 2] in fractions of half the image."""
        return torch.rand((1, self.height, self.width, 2), generator=self._generator()) * 0.2 - 0.1

    def noise(self, height: int, width: int) -> torch.Tensor:
        values = torch.randint(0, 256, (self.channels, height, width), generator=self._generator())
        return values.to(torch.uint8) if self.scale == 1 else values / 255

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.chance.randrange(1 << 30))


# The examples of an operation, for images of one kind.
Examples = Callable[[Arguments], Iterable[Example]]
