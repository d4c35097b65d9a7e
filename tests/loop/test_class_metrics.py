"""Metrics of classes equal plain PyTorch code, without the labels that the loss function ignores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional

from loop.engines.test_on_fake_cuda import UNCOMPILED
from torch_sink.loop import Accuracy, Evaluation, MeanIoU, StepLoop, no_host_sync
from torch_sink.loop.metrics import ignore_index_of
from torch_sink.mindspore import Model

CLASSES = 7
Shape = tuple[int, ...]


def make_batches(inner: Shape, ignored: int | None, sizes: Shape = (4, 4, 3)) -> list[tuple[Tensor, Tensor]]:
    """Scores, which the model of the tests returns as they are, and labels, of which 30 % are `ignored`."""
    generator = torch.Generator().manual_seed(len(inner) * 1000 + (ignored or 0))
    batches = []
    for size in sizes:
        labels = torch.randint(0, CLASSES - 1, (size, *inner), generator=generator)  # one class never occurs
        if ignored is not None:
            labels[torch.rand(labels.shape, generator=generator) < 0.3] = ignored
        batches.append((torch.randn(size, CLASSES, *inner, generator=generator), labels))
    return batches


def together(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Scores [n, classes] and labels [n] of all batches."""
    return torch.cat([scores.movedim(1, -1).reshape(-1, CLASSES) for scores, _ in batches]), torch.cat(
        [labels.reshape(-1) for _, labels in batches]
    )


def by_hand(batches: list[tuple[Tensor, Tensor]], ignored: int | None) -> dict[str, float]:
    scores, labels = together(batches)
    if ignored is not None:
        scores, labels = scores[labels != ignored], labels[labels != ignored]
    ranks = scores.argsort(dim=1, descending=True)
    is_class = (labels >= 0) & (labels < CLASSES)
    best, true = ranks[is_class, 0].numpy(), labels[is_class].numpy()
    with np.errstate(invalid="ignore"):
        shares = [
            np.float64(((best == one) & (true == one)).sum()) / ((best == one) | (true == one)).sum()
            for one in range(CLASSES)
        ]
    return {
        "accuracy": (ranks[:, 0] == labels).double().mean().item(),
        "top5": (ranks[:, :5] == labels[:, None]).any(1).double().mean().item(),
        "miou": float(np.nanmean(shares)),
    }


class Scores(nn.Module):
    """Returns its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.scale


class Smoothed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.inner(scores, labels)


class Masked(Smoothed):
    """Ignores a label itself; the loss inside has torch's default."""

    ignore_index = 3

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.inner(scores, labels.masked_fill(labels == self.ignore_index, -100))


LOSSES: dict[str, tuple[Callable[..., Any], int | None]] = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss(ignore_index=255), 255),
    "CrossEntropyLoss, its default": (nn.CrossEntropyLoss(), -100),
    "cross_entropy": (functional.cross_entropy, -100),
    "cross_entropy of -1": (functools.partial(functional.cross_entropy, ignore_index=-1), -1),
    "a loss around it": (Smoothed(nn.CrossEntropyLoss(ignore_index=0)), 0),
    "its own label before that of a loss in it": (Masked(nn.CrossEntropyLoss()), 3),
    "a default beside another label": (Smoothed(Masked(nn.CrossEntropyLoss())), 3),
    "partial of a loss": (functools.partial(nn.CrossEntropyLoss(ignore_index=2)), 2),
    "method of a loss": (nn.CrossEntropyLoss(ignore_index=2).forward, 2),
    "another loss": (lambda scores, labels: scores.mean(), None),
}
METRICS: Any = {"accuracy", "top5", "miou"}


@pytest.mark.parametrize("inner", [(), (6, 5), (9,)])
@pytest.mark.parametrize("name", LOSSES)
@torch.no_grad()
def test_metrics_are_those_of_plain_code_on_the_labels_that_the_loss_counts(
    name: str, inner: Shape, caplog: pytest.LogCaptureFixture
) -> None:
    loss_fn, ignored = LOSSES[name]
    assert ignore_index_of(loss_fn) == ignored
    batches, loop = make_batches(inner, ignored), StepLoop(Scores(), loss_fn)
    with no_host_sync():
        found = loop.evaluate(batches, metrics=METRICS)
    expected = by_hand(batches, ignored)
    assert {one: found[one] for one in expected} == pytest.approx(expected, abs=1e-12)
    assert caplog.messages == []


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_in_every_mode_with_one_sync(fake_cuda: FakeCuda, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn, batches = nn.CrossEntropyLoss(ignore_index=255), make_batches((6, 5), 255, (4, 4, 4, 4, 3))
    loop = StepLoop(Scores().cuda(), loss_fn, mode=mode, jit_config=UNCOMPILED)
    expected = by_hand(batches, 255)
    for _ in range(2):
        found = loop.evaluate(batches, metrics=METRICS)
        assert {one: found[one] for one in expected} == pytest.approx(expected, abs=1e-12)
    loop.close()


@torch.no_grad()
def test_what_is_given_goes_before_the_loss() -> None:
    batches = make_batches((6, 5), 255)
    metrics = {
        "of the loss": Accuracy(),
        "all": Accuracy(ignore_index=None),
        "255": Accuracy(5, ignore_index=255),
        "miou": MeanIoU(ignore_index=0),
    }
    found = StepLoop(Scores(), nn.CrossEntropyLoss(ignore_index=255)).evaluate(batches, metrics=metrics)
    for name, (key, ignored) in {
        "of the loss": ("accuracy", 255),
        "all": ("accuracy", None),
        "255": ("top5", 255),
    }.items():
        assert found[name] == pytest.approx(by_hand(batches, ignored)[key], abs=1e-12), name
    assert found["miou"] == pytest.approx(by_hand(batches, 0)["miou"], abs=1e-12)


def test_labels_that_are_no_class_are_not_left_out_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    batches = make_batches((6, 5), 255)
    loop = StepLoop(Scores(), None, forward=lambda model, batch: model(batch[0]).mean())
    judge = lambda model, batch: (None, model(batch[0]), batch[1])  # noqa: E731
    found = loop.evaluate(batches, metrics={"accuracy", "miou"}, forward=judge)
    for name in ("accuracy", "miou"):
        assert found[name] == pytest.approx(by_hand(batches, None)[name], abs=1e-12)
    number = sum(int((labels == 255).sum()) for _, labels in batches)
    assert len(caplog.messages) == 2
    assert f"accuracy: {number} labels are no class" in caplog.messages[0]
    assert "metrics={'accuracy': torch_sink.Accuracy(ignore_index=...)}" in caplog.messages[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_masks_of_any_integer_type(dtype: torch.dtype) -> None:
    ignored = 255 if dtype is torch.uint8 else -100
    batches = make_batches((6, 5), ignored)
    for metric, name in ((Accuracy(ignore_index=ignored), "accuracy"), (MeanIoU(ignore_index=ignored), "miou")):
        for scores, labels in batches:
            metric.update(scores, labels.to(dtype))
        assert float(metric.compute()) == pytest.approx(by_hand(batches, ignored)[name], abs=1e-12)
    metric = Accuracy(ignore_index=-100)
    metric.update(torch.eye(200)[156:157], torch.tensor([156], dtype=torch.uint8))
    assert float(metric.compute()) == 1.0, "-100 as uint8 is 156"


@pytest.mark.parametrize("kind", ["one-hot", "multi-hot", "soft"])
@pytest.mark.parametrize("metric", ["accuracy", "top5", "miou"])
def test_labels_of_the_shape_of_the_scores_are_refused(kind: str, metric: Any) -> None:
    scores = torch.randn(8, CLASSES)
    labels = {
        "one-hot": functional.one_hot(torch.arange(8) % CLASSES, CLASSES),
        "multi-hot": (torch.rand(8, CLASSES) < 0.4).float(),
        "soft": torch.softmax(torch.randn(8, CLASSES), 1),
    }[kind]
    loop = StepLoop(Scores(), nn.BCEWithLogitsLoss() if kind == "multi-hot" else lambda scores, labels: scores.mean())
    with pytest.raises(
        ValueError, match=rf"{metric} takes the number of each sample's class, int \[8\].*MultilabelAcc"
    ):
        loop.evaluate([(scores, labels)], metrics={metric})
    assert "loss" in loop.evaluate([(scores, labels)])


def test_no_label_that_counts_is_no_number() -> None:
    for metric in (Accuracy(ignore_index=1), MeanIoU(ignore_index=1)):
        metric.update(torch.randn(3, CLASSES), torch.ones(3, dtype=torch.long))
        assert torch.isnan(metric.compute())


@pytest.mark.parametrize("metric", [Accuracy(), MeanIoU()])
def test_labels_that_are_no_integers_are_refused(metric: Any) -> None:
    with pytest.raises(ValueError, match=r"class, int \[3\], and the labels are float32.*pass labels.long\(\)"):
        metric.update(torch.randn(3, CLASSES), torch.ones(3))
    with pytest.raises(ValueError, match=r"class, int \[4, 4\], and the labels are float32"):
        metric.update(torch.randn(4, 4, 4), torch.rand(4, 4))


@pytest.mark.parametrize("labels", [torch.ones(4, 1), torch.ones(4).long()])
def test_one_score_a_sample_is_an_error_that_says_what_to_pass(labels: Tensor) -> None:
    for metric in (Accuracy(), MeanIoU()):
        with pytest.raises(ValueError, match=r"has one: for two classes pass torch.cat\(\[-scores, scores\], 1\)"):
            metric.update(torch.randn(4, 1), labels)


def test_arguments() -> None:
    for metric in (Accuracy, MeanIoU):
        for given in ("255", 1.5, True):
            with pytest.raises(TypeError, match="pass the label that does not count, None if all do, or 'loss'"):
                metric(ignore_index=given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k=0"):
        Accuracy(0)


def test_during_training_and_of_a_model() -> None:
    torch.manual_seed(0)
    batches = make_batches((6, 5), 255)
    network = nn.Conv2d(CLASSES, CLASSES, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss(ignore_index=255)
    trainer = Model(network, loss_fn, optimizer, metrics=METRICS)
    trainer.fit(2, batches, batches)
    with torch.no_grad():
        expected = by_hand([(network(scores), labels) for scores, labels in batches], 255)
    found = trainer.eval(batches)
    assert {one: found[one] for one in expected} == pytest.approx(expected, abs=1e-12)
    assert trainer.loop.history.evaluations[-1][1]["miou"] == pytest.approx(expected["miou"], abs=1e-12)
    loop = StepLoop(network, loss_fn, optimizer)
    loop.run(batches, callbacks=[Evaluation(batches, {"miou"})])
    assert loop.history.evaluations[-1][1]["miou"] == loop.evaluate(batches, metrics={"miou"})["miou"]
