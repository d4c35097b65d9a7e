"""Metrics with their state on the device, and their results: one collective and one copy to the host per pass."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torch_sink.common.arguments import check_count, explains_wrong_calls
from torch_sink.common.ranks import warn
from torch_sink.common.transfer import to_host
from torch_sink.loop.core.distributed import Ranks
from torch_sink.thread_waits import host_sync_allowed

MetricName = Literal["accuracy", "top5", "miou", "loss"]
# The `metrics` argument; a single str is no collection of names.
Metrics = Collection[MetricName] | Mapping[str, Any]


class MeanMetric:
    """Base of metrics that are the mean of a value over all samples of all ranks."""

    def __init__(self) -> None:
        self._state: Tensor | None = None

    def reset(self) -> None:
        """Drop all samples."""
        self._state = None

    def add(self, total: Tensor, count: int) -> None:
        """Add the sum of a value over `count` samples: `total` is float32 or float64 [] on the device."""
        if self._state is None:
            self._state = torch.zeros(2, dtype=torch.float64, device=total.device)
        self._state[0].add_(total.detach())
        self._state[1].add_(count)

    def sums(self) -> Tensor:
        """The sum of the value, and the number of samples: float64 [2] on the device."""
        return torch.zeros(2, dtype=torch.float64, device="cpu") if self._state is None else self._state

    def compute_from(self, sums: Tensor) -> Tensor:
        """The mean for a result of `sums`: float64 []; NaN without samples."""
        return sums[0] / sums[1]

    def compute(self) -> Tensor:
        """The mean over the samples of this rank: float64 [] on the device; NaN without samples."""
        return self.compute_from(self.sums())


class Loss(MeanMetric):
    """The mean of the batches' losses, weighted by their samples; or their sum over samples, divided by these.

    Attributes:
        adds_up: whether the loss of a batch is the sum over its samples, as with `reduction="sum"`, and not their mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adds_up = False

    def update(self, loss: Tensor, batch_size: int) -> None:
        """Add the loss of a batch, or one value per sample."""
        self.add(loss.sum() if self.adds_up else loss.mean() * batch_size, batch_size)


class ClassMetric(MeanMetric):
    """Base of metrics of classes: scores [batch, classes, ...] against the number of a class, int [batch, ...].

    Sums end with the number of labels that are no class and are not ignored.
    """

    name = ""

    def __init__(self, ignore_index: int | Literal["loss"] | None) -> None:
        super().__init__()
        is_number = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
        if not (is_number or ignore_index is None or ignore_index == "loss"):
            raise TypeError(
                f"ignore_index={ignore_index!r} is a {type(ignore_index).__name__}; pass the label that does not "
                "count, None if all do, or 'loss' for that of the loss function"
            )
        self._given = ignore_index
        self.ignored: Any = None if ignore_index == "loss" else ignore_index

    def follow_loss(self, loss_fn: Any) -> None:
        """Ignore what the loss function ignores, unless `ignore_index` was given."""
        if self._given == "loss":
            self.ignored = ignore_index_of(loss_fn)

    def accumulate(self, sums: Tensor) -> None:
        """Add the sums of a batch: [n] on the device."""
        if self._state is None:
            self._state = torch.zeros(len(sums), dtype=torch.float64, device=sums.device)
        self._state += sums.detach()

    def classes(self, output: Any, labels: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The labels, which of them count, and the number of those that are no class; raises for other shapes."""
        if not isinstance(output, Tensor) or output.dim() < 2:
            got = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise ValueError(
                f"{self.name} takes scores [batch, classes, ...], and the output is {got}; for a network that returns "
                "something else pass a function that gives (loss, output, labels): Model(..., eval_network=...), "
                "StepLoop.evaluate(..., forward=...)"
            )
        if output.shape[1] == 1:
            raise ValueError(
                f"{self.name} takes scores of each class, and the output {list(output.shape)} has one: for two classes "
                "pass torch.cat([-scores, scores], 1), by evaluate(..., forward=lambda model, batch: (loss, output, "
                "labels)), or a metric for these, such as torchmetrics' BinaryAccuracy"
            )
        given, wanted = labels[0] if labels else None, [*output.shape[:1], *output.shape[2:]]
        shape = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        if shape == list(output.shape):
            raise ValueError(
                f"{self.name} takes the number of each sample's class, int {wanted}, and the labels are {shape} as the "
                "scores: one-hot, multi-hot or soft ones. For one class a sample pass labels.argmax(1) instead, by "
                "evaluate(..., forward=lambda model, batch: (loss, output, labels)); for several classes a sample pass "
                "a metric for these, such as torchmetrics' MultilabelAccuracy"
            )
        if not isinstance(given, Tensor) or shape != wanted:
            raise ValueError(
                f"{self.name} compares scores {list(output.shape)} with labels {wanted}, and the labels are {shape}; "
                "for these pass a metric of your own"
            )
        if given.is_floating_point():
            raise ValueError(
                f"{self.name} takes the number of each sample's class, int {wanted}, and the labels are "
                f"{str(given.dtype).removeprefix('torch.')}: probabilities, or values to predict; if they are numbers "
                "of classes, pass labels.long(), by evaluate(..., forward=lambda model, batch: (loss, output, labels))"
            )
        numbers = given.long()  # uint8 holds no -100
        is_class = (numbers >= 0) & (numbers < output.shape[1])
        if self.ignored is None:
            return numbers, torch.ones_like(is_class), (~is_class).sum()
        counts = numbers != self.ignored
        return numbers, counts, (counts & ~is_class).sum()


class Accuracy(ClassMetric):
    """Share of samples whose label is among the k highest scores: of "accuracy" with k=1, of "top5" with k=5.

    Args:
        k: how many of the highest scores count.
        ignore_index: label that does not count, such as 255 for pixels without one; None if all count. Default that of
            the loss function: its attribute or argument `ignore_index`, if it has one.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Examples:
        >>> import torch
        >>> metric = Accuracy(ignore_index=255)
        >>> metric.update(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 0, 255]))
        >>> metric.compute().item()
        0.5
    """

    @explains_wrong_calls(top_k="it is k: Accuracy(k=...)")
    def __init__(self, k: int = 1, *, ignore_index: int | Literal["loss"] | None = "loss") -> None:
        super().__init__(ignore_index)
        check_count("k", k, minimum=1)
        self._k, self.name = k, "accuracy" if k == 1 else f"top{k}"
        self._has_warned = False

    @explains_wrong_calls()
    def update(self, output: Tensor, *labels: Tensor) -> None:
        """Add scores [batch, classes, ...] and labels, the numbers of classes: int [batch, ...].

        Raises:
            ValueError: other shapes, such as those of one-hot, multi-hot or soft labels, or labels that are not int.
        """
        classes, counts, outside = self.classes(output, labels)
        if output.shape[1] <= self._k and not self._has_warned:
            self._has_warned = True
            warn("%s says nothing: of %d classes all are among the best %d", self.name, output.shape[1], self._k)
        best = output.topk(min(self._k, output.shape[1]), dim=1).indices
        hits = (best == classes.unsqueeze(1)).any(1) & counts
        self.accumulate(torch.stack([hits.sum(), counts.sum(), outside]))

    def sums(self) -> Tensor:
        """The numbers of hits, of labels that count, and of those that are no class: float64 [3] on the device."""
        return torch.zeros(3, dtype=torch.float64, device="cpu") if self._state is None else self._state


class MeanIoU(ClassMetric):
    """Mean over the classes of intersection over union, "miou", of the pixels of all images together.

    The matrix that counts labels against predictions is on the device. A class that is neither among the labels nor
    predicted does not count; labels that are no class count for none.

    Args:
        ignore_index: as for `Accuracy`.

    Raises:
        TypeError: an argument of another type.

    Examples:
        >>> import torch
        >>> metric = MeanIoU(ignore_index=255)
        >>> scores = torch.tensor([[[0.9, 0.8, 0.1, 0.9]], [[0.1, 0.2, 0.9, 0.1]]]).transpose(0, 1)
        >>> metric.update(scores, torch.tensor([[0, 1, 1, 255]]))
        >>> metric.compute().item()
        0.5
    """

    name = "miou"

    @explains_wrong_calls(num_classes="the scores tell it")
    def __init__(self, *, ignore_index: int | Literal["loss"] | None = "loss") -> None:
        super().__init__(ignore_index)
        self._classes = 0

    @explains_wrong_calls()
    def update(self, output: Tensor, *labels: Tensor) -> None:
        """Add scores [batch, classes, ...] and labels, the numbers of classes: int [batch, ...].

        Raises:
            ValueError: other shapes, or labels that are no integers.
        """
        numbers, counts, outside = self.classes(output, labels)
        self._classes = size = output.shape[1]
        counts &= (numbers >= 0) & (numbers < size)
        cells = torch.where(counts, numbers * size + output.argmax(1), 0).flatten()
        sums = torch.zeros(size * size + 1, dtype=torch.float64, device=output.device)
        sums.index_add_(0, cells, counts.flatten().to(sums.dtype))
        sums[-1] += outside
        self.accumulate(sums)

    def agree(self, ranks: Ranks) -> None:
        """Take over the number of classes from other ranks: one without a batch does not know it."""
        self._classes = max(ranks.gather(self._classes))

    def sums(self) -> Tensor:
        """The matrix, flat, and the number of labels that are no class: float64 [classes * classes + 1]."""
        size = self._classes**2 + 1
        return torch.zeros(size, dtype=torch.float64, device="cpu") if self._state is None else self._state

    def compute_from(self, sums: Tensor) -> Tensor:
        """The mean for a result of `sums`: float64 []; NaN without labels."""
        size = math.isqrt(len(sums) - 1)
        matrix = sums[:-1].reshape(size, size)
        hits = matrix.diagonal()
        return (hits / (matrix.sum(0) + matrix.sum(1) - hits)).nanmean()


_TORCHS_DEFAULT = -100  # of `ignore_index`


def ignore_index_of(loss_fn: Any) -> int | None:
    """The label that a loss function ignores: its attribute, that of a module in it, or its argument; None without.

    Of several modules, those with torch's default of -100 do not count beside another label.
    """
    if isinstance(getattr(loss_fn, "ignore_index", None), int):
        return int(loss_fn.ignore_index)
    modules: Iterable[Any] = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
    found: set[int] = {one.ignore_index for one in modules if isinstance(getattr(one, "ignore_index", None), int)}
    found = found - {_TORCHS_DEFAULT} or found
    if not found and callable(loss_fn):
        with suppress(TypeError, ValueError):  # a function that has no signature
            parameter = inspect.signature(loss_fn).parameters.get("ignore_index")
            found = {parameter.default} if parameter is not None and isinstance(parameter.default, int) else set()
    if found:
        return found.pop() if len(found) == 1 else None
    # A `functools.partial`, or a method of a loss.
    inner = getattr(loss_fn, "func", None) or getattr(loss_fn, "__self__", None)
    return ignore_index_of(inner) if inner is not None and inner is not loss_fn else None


def sums_samples(loss_fn: Any) -> bool:
    """Whether a loss function gives the sum over a batch: its attribute `reduction`, or argument in a `partial`."""
    if isinstance(loss_fn, functools.partial):
        given = loss_fn.keywords.get("reduction")
        return sums_samples(loss_fn.func) if given is None else bool(given == "sum")
    return getattr(loss_fn, "reduction", None) == "sum"


def make_metrics(metrics: Metrics | None) -> dict[str, Any]:
    """Turn the `metrics` argument (None, a set or list of names, or name -> object) into name -> metric.

    A metric has `reset()`, `update(output, *labels)` and `compute()`. With more than one process, a metric that also
    has `sums()` (a tensor to add over the ranks) and `compute_from(sums)` is computed from the sums of all ranks.
    Metrics of torchmetrics reduce themselves. For any other metric, the result is the ranks' values averaged by number
    of samples, which is exact for means over samples only.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            if isinstance(metric, type):
                kind = metric.__name__
                raise TypeError(f"metric {name!r} is the class {kind}; pass an instance: {kind}()")
            missing = [part for part in ("reset", "update", "compute") if not callable(getattr(metric, part, None))]
            if missing:
                raise TypeError(f"metric {name!r} ({type(metric).__name__}) has no {', '.join(missing)}()")
        return dict(metrics)
    if not isinstance(metrics, (set, frozenset, list, tuple)):
        raise TypeError(f"metrics is a {type(metrics).__name__}; pass a set of names, or a dict of name -> metric")
    known: dict[str, Any] = {"accuracy": Accuracy(), "top5": Accuracy(5), "miou": MeanIoU(), "loss": Loss()}
    for name in metrics:
        if name not in known:
            raise ValueError(
                f"unknown metric {name!r}; the names are {', '.join(map(repr, get_args(MetricName)))}, or pass a dict "
                "of objects"
            )
    return {name: known[name] for name in sorted(metrics)}


def collect_results(metrics: dict[str, Any], ranks: Ranks, samples: int) -> dict[str, Any]:
    """Computes the results by name, as Python numbers; every rank calls this and gets the same numbers.

    A result that is no number or tensor of one element stays as it is; on a rank without `samples` it is NaN.
    """
    values: dict[str, Any] = {}
    shares: dict[str, Tensor] = {}
    for metric in metrics.values() if ranks.many else ():
        if isinstance(metric, MeanIoU):
            metric.agree(ranks)
    for name, metric in metrics.items():
        if _adds_up(metric):
            values[name], shares[name] = math.nan, metric.sums()
        elif not ranks.many or _reduces_itself(metric):
            values[name] = metric.compute()
        else:
            # A rank without samples cannot compute a value, nor know whether the value of others is a number: all
            # metrics have a share in the table.
            values[name] = value = metric.compute() if samples else math.nan
            shares[name] = torch.zeros(2, dtype=torch.float64, device=ranks.device)
            if samples and _is_number(value):
                _warn_of_mean(type(metric).__name__)
                with host_sync_allowed():
                    number = torch.as_tensor(value, dtype=torch.float64, device=ranks.device).detach().reshape(())
                shares[name] = torch.stack([number * samples, torch.full_like(number, samples)])
    if ranks.many and shares:  # one collective for all
        table = torch.cat([share.to(ranks.device, torch.float64).flatten() for share in shares.values()])
        ranks.sum(table)
        parts = table.split([share.numel() for share in shares.values()])
        shares = {name: part.reshape(shares[name].shape) for name, part in zip(shares, parts, strict=True)}
    for name, total in shares.items():
        if _adds_up(metrics[name]):
            values[name] = metrics[name].compute_from(total)
        elif _is_number(values[name]):
            values[name] = total[0] / total[1]
    strange = {name: total[-1] for name, total in shares.items() if isinstance(metrics[name], ClassMetric)}
    results = _on_host({"values": values, "strange": strange}, ranks.device)
    values, strange = results["values"], results["strange"]
    for name, number in strange.items():
        if number:
            warn(
                "%s: %d labels are no class, and are counted as wrong or left out as that metric does; to ignore one, "
                "say which: metrics={%r: torch_sink.%s(ignore_index=...)}, or ignore_index of the loss function",
                name,
                number,
                name,
                type(metrics[name]).__name__,
            )
    return values


def _adds_up(metric: Any) -> bool:
    return all(callable(getattr(metric, part, None)) for part in ("sums", "compute_from"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _reduces_itself(metric: Any) -> bool:
    """Whether a metric gathers its state from all ranks, as those of torchmetrics do unless `sync_on_compute=False`."""
    own = any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(metric).__mro__)
    return own and bool(getattr(metric, "sync_on_compute", True))


@functools.cache
def _warn_of_mean(kind: str) -> None:
    warn(
        "metrics of type %s cannot be added up over the ranks: the value is the mean of theirs, weighted by samples, "
        "which is exact for means over samples only; give it sums() and compute_from(sums), or use torchmetrics",
        kind,
    )


def _on_host(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Replaces tensors of one element, also in nested containers, by Python numbers, in one copy to the host."""
    leaves, structure = torch.utils._pytree.tree_flatten(values)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.numel() == 1]
    if places:
        with host_sync_allowed():
            scalars = [leaves[index].detach().reshape(()).to(device, torch.float64) for index in places]
            numbers = to_host(torch.stack(scalars)).tolist()  # host sync
        for index, number in zip(places, numbers, strict=True):
            leaves[index] = number
    result: dict[str, Any] = torch.utils._pytree.tree_unflatten(leaves, structure)
    return result
