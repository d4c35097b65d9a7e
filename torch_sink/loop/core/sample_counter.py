"""How many samples a batch holds, where its loader does not say it: by its tensors, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_sink.common.containers import is_flat, leaves, values_in
from torch_sink.common.ranks import warn

# What the number is: the first dimension of all tensors, as default_collate makes them; the length of the lists among
# the fields of a batch, as detection has them; the length of the batch itself, a list of samples.
Reading = Literal["tensors", "lists", "batch"]


class SampleCounter:
    """Counts the samples of batches of one loader.

    Where a batch can be read in several ways, the loader's `batch_size` decides, or else a warning says what is taken.
    """

    def __init__(self, loader: Any) -> None:
        size = getattr(loader, "batch_size", None)
        self._batch_size = size if isinstance(size, int) else None
        self._reading: Reading | None = None  # of the batches that can be read in several ways
        self._has_warned = False

    def count(self, batch: Any, inside: list[Any] | None = None) -> int:
        """The number of samples; 1 for a batch in which nothing has a dimension. `inside` are its leaves, if known."""
        inside, size = leaves(batch) if inside is None else inside, self._batch_size
        self._batch_size = None  # only the first batch is sure to be a whole one
        if len(inside) == 2 and size is None and self._reading is None and is_flat(batch):  # (x, y), nearly always
            x, y = inside
            if x.dim() and y.dim() and x.size(0) == y.size(0):
                number: int = x.size(0)
                return number
        if self._reading is None and (rows := _rows_of_all(batch, inside)) is not None and size in (None, rows):
            return rows
        readings = _readings(batch, inside, pairs=self._reading == "batch" or size == 2)
        found = {number for number, _ in readings.values()}
        if len(found) == 1:
            return found.pop()
        if not found:
            return self._of_most(inside)
        if self._reading not in readings:
            proved = [one for one, (number, _) in readings.items() if number == size]
            preferred = [one for one, (_, prefers) in readings.items() if prefers]
            self._reading = [*proved, *preferred, *readings][0]
            if not proved:
                shown = " or ".join(f"{readings[one][0]} ({_SHOWN[one]})" for one in readings)
                self._warn(f"a batch does not tell how many samples it holds: {shown}", readings[self._reading][0])
        return readings[self._reading][0]

    def _of_most(self, inside: list[Any]) -> int:
        sizes = [_rows(leaf) for leaf in inside if _has_rows(leaf)]
        if not sizes:
            if any(hasattr(leaf, "to") and not isinstance(leaf, Tensor) for leaf in inside):
                self._warn("a batch does not tell how many samples it holds", 1)
            return 1
        usual = max(sizes, key=sizes.count)
        self._warn(f"the first dimensions of a batch's tensors differ: {', '.join(map(str, sizes[:8]))}", usual)
        return usual

    def _warn(self, what: str, number: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                "%s; it counts as %d, in history.samples and as a weight in evaluations. A DataLoader with batch_size= "
                "or batch_sampler= tells, and so does an attribute batch_size of your own loader",
                what,
                number,
            )


_SHOWN: dict[Reading, str] = {
    "tensors": "the first dimension of its tensors",
    "lists": "the length of its lists",
    "batch": "the length of the batch",
}


def _rows_of_all(batch: Any, inside: list[Any]) -> int | None:
    """The first dimension of all tensors, if no two are of a kind, as in a list of samples, and none is an image.

    So the containers of most batches need not be looked through.
    """
    rows, kinds, may_be_list = None, [], False
    for leaf in inside:
        if isinstance(leaf, Tensor) and (dims := leaf.dim()):
            if rows is None:
                rows = leaf.size(0)
            elif rows != leaf.size(0):
                return None
            may_be_list = may_be_list or dims == 3 or (dims, leaf.dtype) in kinds
            kinds.append((dims, leaf.dtype))
    return None if may_be_list and not (len(kinds) == 2 and is_flat(batch)) else rows


def _readings(batch: Any, inside: list[Any], *, pairs: bool) -> dict[Reading, tuple[int, bool]]:
    """The numbers that a batch can be read as, and whether to prefer each if there are several.

    A batch of two is (x, y), unless such `pairs` may be samples, as in a loader whose batch size is 2.
    """
    found: dict[Reading, tuple[int, bool]] = {}
    rows = {_rows(leaf) for leaf in inside if _has_rows(leaf)}
    by_tensors = len(rows) == 1
    if by_tensors:
        found["tensors"] = rows.pop(), False
    lists: list[Any] = []
    numbers = set(_of_fields(batch, lists))
    if len(numbers) == 1 and lists and (not by_tensors or any(map(_holds_samples, lists))):
        found["lists"] = numbers.pop(), any(map(_holds_images, lists))
    holds_samples = _is_list(batch) and (not by_tensors or _holds_samples(batch))
    if holds_samples and (pairs or len(batch) != 2 or isinstance(batch[0], Mapping)):
        found["batch"] = len(batch), _holds_images(batch)
    return found


def _of_fields(value: Any, lists: list[Any]) -> Iterator[int]:
    """The numbers of samples of all fields, which are tensors, or lists that are added to `lists`."""
    for field in values_in(value) or [value]:
        if _has_rows(field):
            yield _rows(field)
        elif _is_list(field) and not isinstance(field[0], (int, float)):  # two numbers are a size
            lists.append(field)
            yield len(field)
        elif values_in(field):
            yield from _of_fields(field, lists)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence) or (isinstance(leaf, Tensor) and leaf.dim() > 0)


def _rows(leaf: Any) -> int:
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    rows: int = leaf.size(0)  # a nested tensor has no shape
    return rows


def _is_list(value: Any) -> bool:
    """Whether a value can be a list of samples: a list or tuple whose members are all of one kind."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or isinstance(value, PackedSequence):
        return False
    return bool(value) and len({_kind(member) for member in value}) == 1


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor, value.dim(), value.dtype
    if isinstance(value, Mapping):
        return Mapping, frozenset(value)
    if isinstance(value, tuple):
        return tuple, tuple(map(_kind, value))
    if isinstance(value, list):
        return list, _kind(value[0]) if value else None
    return type(value)


def _holds_samples(members: Any) -> bool:
    """Whether a list of one kind may hold samples although all its tensors have the same first dimension.

    Samples of one shape would have been stacked; a list of images need not be.
    """
    shapes = {member.shape for member in members if isinstance(member, Tensor)}
    return len(shapes) != 1 or _holds_images(members)


def _holds_images(members: Any) -> bool:
    """Whether the members are images, [C, H, W] as torchvision's detection models take them, or hold one."""
    inside = [members[0]] if isinstance(members[0], Tensor) else values_in(members[0]) or []
    return any(isinstance(one, Tensor) and one.dim() == 3 for one in inside) or isinstance(members[0], Mapping)
