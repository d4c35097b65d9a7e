"""A project that uses torch_sink: runs on the installed wheel, and type-checks strictly (`make check`)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_sink


class Mine(torch_sink.Callback):
    def on_train_step_end(self, run_context: torch_sink.RunContext) -> None:
        fields = run_context.original_args()
        losses: torch.Tensor = fields.losses
        print(fields.cur_step_num, float(losses.mean()), fields.loop.step_count)
        if TYPE_CHECKING:
            print(fields.cur_step)  # type: ignore[attr-defined]


torch_sink.set_image_backend("PIL")
batches = torch_sink.SinkLoader(DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), 4))
model = torch.nn.Linear(3, 2)
loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
history: torch_sink.RunHistory = loop.run(batches, callbacks=[torch_sink.LossMonitor(), Mine()])
losses: torch.Tensor = history.losses
verdict: str = batches.stats().verdict
pairs: torch_sink.SinkLoader[tuple[torch.Tensor, torch.Tensor]] = batches
sizes: list[int] = [len(images) for images, _ in pairs]
tensors = torch_sink.SinkLoader([torch.zeros(2)])


def rows() -> Iterator[dict[str, torch.Tensor]]:
    yield {"image": torch.zeros(2)}


def first(loader: torch_sink.SinkLoader) -> torch.Tensor:
    tensor: torch.Tensor = next(iter(loader))
    return tensor


def is_typed() -> None:
    """Each line that is marked has to be an error."""
    for images, labels in pairs:
        print(images.shape, labels.shape, images.no_such_name)  # type: ignore[attr-defined]
    for image in tensors:
        print(image.no_such_name)  # type: ignore[attr-defined]
    for row in torch_sink.SinkLoader(rows, batches_per_epoch=2):
        print(row.no_such_name)  # type: ignore[attr-defined]
    with torch_sink.SinkLoader(pairs) as outer:
        print(next(outer.rest()).no_such_name)  # type: ignore[attr-defined]
    torch_sink.SinkLoader(3)  # type: ignore[arg-type]


if TYPE_CHECKING:  # each line that is marked has to be an error: `--strict` reports a mark that is not needed
    text: str = input()
    torch_sink.set_image_backend(torch_sink.get_image_backend())
    torch_sink.set_image_backend(text)  # type: ignore[arg-type]
    torch_sink.set_image_backend("device", on_decode_error=text)  # type: ignore[arg-type]
    torch_sink.image_backend(text)  # type: ignore[arg-type]
    torch_sink.SinkLoader([], on_decode_error=text)  # type: ignore[arg-type]
    torch_sink.decode_images([], mode=text)  # type: ignore[arg-type]
    torch_sink.decode_images([], on_error=text)  # type: ignore[arg-type]
    torch_sink.decode_images([], provider=torch_sink.decode_providers()[0])
    torch_sink.StepLoop(model, None, mode=text)  # type: ignore[arg-type]
    torch_sink.StepLoop(model, None, amp=text)  # type: ignore[arg-type]
    torch_sink.StepLoop(model, None, schedule=text)  # type: ignore[arg-type]
    torch_sink.StepLoop(model, None, loss_scaler=text)  # type: ignore[arg-type]
    torch_sink.StepLoop(
        model, None, mode="eager", amp="O1", schedule=None, loss_scaler=torch_sink.amp.DynamicLossScaler()
    )
    torch_sink.Model(model, mode=text)  # type: ignore[arg-type]
    torch_sink.Model(model, amp_level=text)  # type: ignore[arg-type]
    torch_sink.Model(model, schedule=text)  # type: ignore[arg-type]
    torch_sink.Model(model, loss_scaler=text)  # type: ignore[arg-type]
    torch_sink.Model(model, amp="O1")  # type: ignore[call-arg]
    torch_sink.Model(model, metrics={"accuracy", "top5"}, mode="graph", jit_config=torch_sink.JitConfig("O2"))
    torch_sink.Model(model, metrics="accuracy")  # type: ignore[arg-type]
    torch_sink.Evaluation(batches, {"acuracy"})  # type: ignore[arg-type]
    torch_sink.Evaluation(batches, {"mine": object()})
    loop.evaluate(batches, metrics=["loss"])
    loop.evaluate(batches, metrics=text)  # type: ignore[arg-type]
    torch_sink.JitConfig(jit_level=text)  # type: ignore[arg-type]
    torch_sink.JitConfig(exc_mode=text)  # type: ignore[arg-type]
    torch_sink.jit(print, jit_level=text)  # type: ignore[call-overload]
    torch_sink.amp.auto_mixed_precision(model, text)  # type: ignore[arg-type]
    torch_sink.LossMonitor(on_nonfinite=text)  # type: ignore[arg-type]
    torch_sink.EarlyStopping(mode=text)  # type: ignore[arg-type]
    torch_sink.ReduceLROnPlateau(mode=text)  # type: ignore[arg-type]
    torch_sink.ModelCheckpoint(monitor="f1", mode=text)  # type: ignore[arg-type]
    torch_sink.ModelCheckpoint(text, text, monitor=text, mode="max")


print(len(losses), verdict, torch_sink.__file__)
