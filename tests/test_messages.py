"""Mistakes that users make: each message says what was given, what is allowed, and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from torchvision import transforms
from torchvision.transforms import v2

import torch_sink
from torch_sink import Model, SinkLoader, StepLoop

pytestmark = pytest.mark.once

BATCHES = [(torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 1]))] * 4
HALF = ([0.5] * 3, [0.5] * 3)
loss_of = functional.cross_entropy


class Samples(Dataset[Any]):
    """Two samples, or as many as are asked for, each made by `make(index)`."""

    def __init__(self, make: Callable[[int], Any], count: int = 2) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def network(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, outputs))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loop(model: nn.Module | None = None, loss: Any = loss_of, **options: Any) -> StepLoop:
    model = model or network()
    return StepLoop(model, loss, sgd(model), **options)


def run(*batch: torch.Tensor, **options: Any) -> Any:
    return loop(**options).run([batch])


def collate_recorded(*sizes: tuple[int, int]) -> None:
    with torch_sink.image_backend("device"):
        default_collate([transforms.functional.to_tensor(Image.new("RGB", size)) for size in sizes])


def deliver(make: Callable[[int], Any], backend: str = "PIL", **options: Any) -> None:
    if options.get("num_workers"):  # functions inside of functions cannot be sent to workers of another kind
        options = {"multiprocessing_context": "fork", **options}
    with torch_sink.image_backend(backend), SinkLoader(DataLoader(Samples(make), 2, **options)) as loader:
        list(loader)


def cuda_in_a_worker(index: int) -> Any:
    # What torch raises in a forked worker whose parent has used CUDA.
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'")


def open_broken_file(index: int) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        file.write(b"no image")
        file.flush()
        return Image.open(file.name)


def die_at_the_third_batch(index: int) -> Any:
    if index == 2:
        os._exit(3)
    return index


def model(loss: Any = loss_of) -> Model:
    return Model(network(), loss, metrics={"top5"})


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.layers(images), None


def scheduled(make: Callable[[torch.optim.Optimizer], Any], **options: Any) -> StepLoop:
    model = network()
    optimizer = sgd(model)
    return StepLoop(model, loss_of, optimizer, scheduler=make(optimizer), **{"schedule": "step", **options})


def resume_another_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loop().save(folder)
        loop(network(outputs=5)).resume(folder)


def resume_inside_a_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loop().resume(loop().save(folder))


def resume_with_another_optimizer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loop().save(folder)
        model = network()
        StepLoop(model, loss_of, torch.optim.AdamW(model.parameters())).resume(folder)


def transformed(*steps: Any, **options: Any) -> None:
    """Images through transforms, in a SinkLoader."""
    augment = transforms.Compose(steps)
    deliver(lambda index: augment(Image.new("RGB", (4, 4))), "device", **options)


class NoContext(torch_sink.Callback):
    def on_train_step_end(self) -> None:  # type: ignore[override]
        pass


class InAColumn(nn.Module):
    """An evaluation with labels [batch, 1]."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        return images.new_zeros(()), images.flatten(1)[:, :3], labels[:, None]


def use_an_older_iterator() -> None:
    loader = SinkLoader(BATCHES)
    older = iter(loader)
    next(older)
    next(iter(loader))
    next(older)


def use_after_close() -> None:
    loader = SinkLoader(BATCHES)
    loader.close()
    next(iter(loader))


def train_on_a_generator_twice() -> None:
    loop().run((batch for batch in BATCHES), epochs=2)


def wait_on_the_host() -> None:
    with torch_sink.no_host_sync():
        torch.ones(1).item()


def read_pixels_under_strict() -> None:
    with torch_sink.image_backend("device", strict=True):
        transforms.functional.hflip(Image.new("RGB", (4, 4))).getpixel((0, 0))


# name: (what the user did, exception, what its message and notes say)
MISTAKES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    # image backend
    "unknown backend": (
        lambda: torch_sink.set_image_backend("cuda"),
        ValueError,
        "unknown image backend 'cuda'.*'device', 'PIL'",
    ),
    "device that is not there": (
        lambda: torch_sink.set_image_backend("device", device="cuda:99"),
        (RuntimeError, ValueError),
        "cuda:99.*not available.*available:",
    ),
    "unknown policy": (
        lambda: torch_sink.set_image_backend("device", on_decode_error="ignore"),
        ValueError,
        "'ignore'.*'raise', 'skip', 'replace'",
    ),
    "normalize before to_tensor": (
        lambda: transforms.Normalize([0.5], [0.5])(Image.new("RGB", (4, 4))),
        TypeError,
        "img should be Tensor Image. Got",
    ),
    "unequal sizes": (lambda: collate_recorded((8, 8), (9, 8)), RuntimeError, "equal size.*3, 8, 8.*3, 8, 9"),
    "unequal sizes in a loader": (
        lambda: deliver(lambda index: torch.zeros(3, 4 + index)),
        RuntimeError,
        "equal size.*batch 0.*one size: add transforms.Resize",
    ),
    "images instead of tensors": (
        lambda: deliver(lambda index: Image.new("RGB", (4, 4)), backend="device"),
        TypeError,
        r"(?=.*batch 0).*end its transform with transforms.ToTensor\(\)",
    ),
    "None for a sample": (lambda: deliver(lambda index: None), TypeError, "returned None.*on_decode_error='skip'"),
    "None for a label": (
        lambda: deliver(lambda index: (torch.zeros(3), None if index else 1)),
        RuntimeError,
        "returned None.*on_decode_error='skip'",
    ),
    "None for the second sample": (
        lambda: deliver(lambda index: None if index else (torch.zeros(3), 1)),
        TypeError,
        "returned None.*on_decode_error='skip'",
    ),
    "None for the second sample, in a worker": (
        lambda: deliver(lambda index: None if index else (torch.zeros(3), 1), num_workers=1),
        TypeError,
        "returned None.*on_decode_error='skip'",
    ),
    "None for the second of recorded images": (
        lambda: deliver(lambda index: (None if index else transforms.ToTensor()(Image.new("RGB", (4, 4))), 1), "device"),
        TypeError,
        "expected Tensor as element 1 in argument 0, but got NoneType.*returned None",
    ),
    "a file that is no image": (
        lambda: deliver(open_broken_file),
        OSError,
        "cannot identify image file.*batch 0.*on_decode_error='skip'",
    ),
    "a file that is no image, in a worker": (
        lambda: deliver(open_broken_file, num_workers=1),
        OSError,
        "cannot identify image file.*batch 0.*on_decode_error='skip'",
    ),
    "a file that is not there, in a worker": (
        lambda: deliver(lambda index: Image.open("missing.jpg"), num_workers=1),
        FileNotFoundError,
        "missing.jpg.*batch 0.*on_decode_error='skip'",
    ),
    "a tensor made a tensor again": (
        lambda: transformed(transforms.ToTensor(), transforms.ToTensor()),
        TypeError,
        r"Got <class 'torch.Tensor'>.*one ToTensor\(\) is enough",
    ),
    "a tensor made a tensor again, in a worker": (
        lambda: transformed(transforms.ToTensor(), transforms.ToTensor(), num_workers=1),
        TypeError,
        r"one ToTensor\(\) is enough",
    ),
    "normalize before to_tensor, in a loader": (
        lambda: transformed(transforms.Normalize(*HALF), transforms.ToTensor()),
        TypeError,
        r"img should be Tensor Image.*put it behind transforms.ToTensor\(\)",
    ),
    "normalize before to_image": (
        lambda: transformed(v2.Normalize(*HALF), v2.ToImage()),
        TypeError,
        r"put it behind transforms.ToTensor\(\)",
    ),
    "erasing before to_tensor": (
        lambda: transformed(transforms.RandomErasing(p=1.0), transforms.ToTensor()),
        AttributeError,
        r"put it behind transforms.ToTensor\(\)",
    ),
    "bytes normalized": (
        lambda: transformed(transforms.PILToTensor(), transforms.Normalize(*HALF)),
        TypeError,
        "Got torch.uint8.*Normalize takes floats",
    ),
    "a mean for each of four channels": (
        lambda: transformed(transforms.ToTensor(), transforms.Normalize([0.5] * 4, [0.5] * 4)),
        RuntimeError,
        "one mean and one std for each channel",
    ),
    "gray images normalized as colors": (
        lambda: transformed(transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize(*HALF)),
        RuntimeError,
        "one mean and one std for each channel",
    ),
    "posterize of floats, as RandAugment does": (
        lambda: transformed(transforms.ToTensor(), transforms.RandomPosterize(2, p=1.0)),
        TypeError,
        r"found torch.float32.*put it before transforms.ToTensor\(\)",
    ),
    "a class for a transform": (
        lambda: transformed(transforms.ToTensor),
        TypeError,
        r"a class stands among the transforms: write ToTensor\(\)",
    ),
    "a path for an image": (
        lambda: deliver(lambda index: transforms.ToTensor()("photo.jpg"), "device"),
        TypeError,
        r"Got <class 'str'>.*Image.open\(path\).convert\('RGB'\)",
    ),
    "a path for an image, resized": (
        lambda: deliver(lambda index: transforms.Resize(4)("photo.jpg"), "device"),
        TypeError,
        r"Unexpected type <class 'str'>.*Image.open\(path\).convert\('RGB'\)",
    ),
    "gray images among colors": (
        lambda: deliver(lambda index: transforms.ToTensor()(Image.new("RGB" if index else "L", (4, 4))), "device"),
        RuntimeError,
        r"^(?!.*Resize).*equal size.*numbers of channels: open them as Image.open\(path\).convert\('RGB'\)",
    ),
    "pixels under strict": (read_pixels_under_strict, torch_sink.UnsupportedOperation, "read by other code.*strict=False"),
    "a folder among files": (lambda: torch_sink.decode_images([Path(__file__).parent]), OSError, "tests"),
    "a device for a backend": (
        lambda: torch_sink.set_image_backend("cuda:0"),
        ValueError,
        r"set_image_backend\('device', device='cuda:0'\)",
    ),
    "a path instead of a list": (lambda: torch_sink.decode_images("a.jpg"), TypeError, "got one str; put it in a list"),
    "unknown decoder": (
        lambda: torch_sink.decode_images([], provider="turbo"),
        ValueError,
        "'turbo' cannot be used.*usable: ",
    ),
    # loaders
    "a dataset": (lambda: SinkLoader(TensorDataset(torch.zeros(3))), TypeError, r"samples, not batches.*DataLoader\("),
    "a path for a loader": (lambda: loop().run("photos"), TypeError, r"is a path, 'photos'.*DataLoader\("),
    "batches_per_epoch=0": (
        lambda: SinkLoader(BATCHES, batches_per_epoch=0),
        ValueError,
        "batches_per_epoch=0; pass an int of at least 1, or None for one pass of the loader",
    ),
    "batches_per_epoch=1.5": (
        lambda: SinkLoader(BATCHES, batches_per_epoch=1.5),
        TypeError,
        "batches_per_epoch=1.5 is a float; pass an int",
    ),
    "a class for a loader": (lambda: SinkLoader(DataLoader), TypeError, r"the class DataLoader; pass an instance"),
    "a dict of loaders": (lambda: loop().run({"train": BATCHES}), TypeError, "is a dict; pass one of its values"),
    "a typo for a device": (lambda: loop(device="gpu"), ValueError, "'gpu' is not a device, such as 'cuda'"),
    "a typo for the device of the backend": (
        lambda: torch_sink.set_image_backend("device", device="gpu"),
        ValueError,
        "'gpu' is not a device, such as 'cuda'",
    ),
    "slots=0": (lambda: SinkLoader(BATCHES, slots=0), ValueError, "slots=0; pass an int of at least 1, or None for the default"),
    "a device of the sink that is not there": (
        lambda: SinkLoader(BATCHES, device="cuda:99"),
        ValueError,
        "'cuda:99' is not there.*device='cpu'",
    ),
    "empty loader": (lambda: loop().run([]), ValueError, "gave no batch.*drop_last=True"),
    "a generator twice": (train_on_a_generator_twice, ValueError, "traversed once only: pass the generator function"),
    "an older iterator": (use_an_older_iterator, torch_sink.SinkError, "replaced by a later iter.*one SinkLoader for each"),
    "after close": (use_after_close, torch_sink.SinkError, "is closed; make a new one"),
    "CUDA in a worker": (
        lambda: deliver(cuda_in_a_worker, num_workers=1),
        RuntimeError,
        "batch 0.*cannot use CUDA: return CPU tensors",
    ),
    "a worker that dies": (
        lambda: list(SinkLoader(DataLoader(Samples(die_at_the_third_batch, 4), 1, num_workers=1, prefetch_factor=4))),
        RuntimeError,
        "exit code 3.*(batch 2|batches [01, ]*2).* of pass 0",
    ),
    "a lambda for spawned workers": (
        lambda: deliver(lambda index: index, num_workers=1, multiprocessing_context="spawn"),
        Exception,
        "at the top of a module instead of lambdas.*multiprocessing_context='fork'",
    ),
    "an argument of the DataLoader": (
        lambda: SinkLoader(TensorDataset(torch.zeros(3)), batch_size=2),
        TypeError,
        r"SinkLoader has no argument 'batch_size'; it belongs to the loader: SinkLoader\(DataLoader\(",
    ),
    "a longer queue": (lambda: SinkLoader(BATCHES, prefetch=4), TypeError, "no argument 'prefetch'; pass slots="),
    # what a loop is made of
    "a class for a loss": (lambda: loop(loss=nn.CrossEntropyLoss), TypeError, r"pass an instance: CrossEntropyLoss\(\)"),
    "a class for a model": (lambda: StepLoop(nn.Linear, loss_of, None), TypeError, "model is a type; pass a torch.nn.Module"),
    "loss and optimizer swapped": (
        lambda: StepLoop(network(), torch.optim.SGD(network().parameters()), loss_of),
        TypeError,
        "loss_fn is the optimizer, a SGD; the order is model, loss_fn, optimizer",
    ),
    "no optimizer": (lambda: StepLoop(network(), loss_of).run(BATCHES), ValueError, "no optimizer.*cannot train; pass one"),
    "not an optimizer": (lambda: StepLoop(network(), loss_of, 0.1), TypeError, "float; pass a torch.optim.Optimizer"),
    "a class for an optimizer": (
        lambda: StepLoop(network(), loss_of, torch.optim.SGD),
        TypeError,
        r"the class SGD; pass an instance: SGD\(model.parameters\(\)",
    ),
    "a class for a scheduler": (
        lambda: loop(scheduler=torch.optim.lr_scheduler.StepLR),
        TypeError,
        r"the class StepLR; pass an instance: StepLR\(optimizer",
    ),
    "the optimizer of another model": (
        lambda: StepLoop(network(), loss_of, sgd(network())),
        ValueError,
        "none of the model's parameters; build it after the model",
    ),
    "LBFGS": (
        lambda: StepLoop(model := network(), loss_of, torch.optim.LBFGS(model.parameters())),
        TypeError,
        "several times a step.*any other torch.optim optimizer",
    ),
    "nothing to train": (
        lambda: loop(network().requires_grad_(False)).run(BATCHES),
        ValueError,
        "no parameter that requires a gradient",
    ),
    "ReduceLROnPlateau as scheduler": (
        lambda: scheduled(torch.optim.lr_scheduler.ReduceLROnPlateau),
        TypeError,
        r"pass callbacks=\[torch_sink.ReduceLROnPlateau",
    ),
    "the scheduler of another optimizer": (
        lambda: scheduled(lambda _: torch.optim.lr_scheduler.StepLR(sgd(network()), 1)),
        ValueError,
        "another optimizer than the one passed",
    ),
    "unknown schedule": (
        lambda: scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), schedule="batch"),
        ValueError,
        "'batch': allowed are 'step', 'epoch'",
    ),
    "forward of the batch alone": (
        lambda: loop(forward=lambda batch: batch),
        TypeError,
        r"forward is called with \(model, batch\), which it does not take: too many",
    ),
    "unknown level": (lambda: loop(amp="fp16"), ValueError, "'fp16': the levels are O0, O1, O2, O3, auto"),
    "a dtype for a level": (lambda: loop(amp=torch.bfloat16), ValueError, "amp='O1', amp_dtype=torch.bfloat16"),
    "a dtype as text": (lambda: loop(amp="O1", amp_dtype="float16"), ValueError, "pass torch.bfloat16 or torch.float16"),
    "a scaler as text": (lambda: loop(loss_scaler="dynamic"), TypeError, "'dynamic': pass 'default', None, or"),
    "unknown mode": (lambda: loop(mode="compiled"), ValueError, "allowed are 'auto', 'eager', 'compile', 'graph'"),
    "accumulate=0": (lambda: loop(accumulate=0), ValueError, "accumulate=0; pass an int of at least 1"),
    "a negative norm": (lambda: loop(clip_grad_norm=-1), ValueError, "clip_grad_norm=-1; pass a number above 0"),
    "ema=1.5": (lambda: loop(ema=1.5), ValueError, "between 0 and 1, such as 0.999"),
    "the name of another library": (
        lambda: StepLoop(network(), criterion=loss_of),
        TypeError,
        "no argument 'criterion'; pass loss_fn=",
    ),
    # runs
    "epoch= instead of epochs=": (lambda: loop().run(BATCHES, epoch=2), TypeError, "StepLoop.run has no.*pass epochs="),
    "a loader to evaluate on": (
        lambda: loop().run(BATCHES, valid_loader=BATCHES),
        TypeError,
        r"belongs to a callback: run\(loader, callbacks=\[torch_sink.Evaluation\(valid_loader\)\]\)",
    ),
    "epochs without a name": (
        lambda: loop().run(BATCHES, 2),
        TypeError,
        "StepLoop.run got an argument without a name that needs one: epochs=, callbacks=",
    ),
    "metrics without a name": (
        lambda: loop().evaluate(BATCHES, {"accuracy"}),
        TypeError,
        "StepLoop.evaluate got an argument without a name that needs one: metrics=, forward=, ema=",
    ),
    "metric= instead of metrics=": (
        lambda: loop().evaluate(BATCHES, metric={"accuracy"}),
        TypeError,
        "StepLoop.evaluate has no argument 'metric'; did you mean metrics=",
    ),
    "metrics of an evaluation as text": (
        lambda: loop().evaluate(BATCHES, metrics="accuracy"),
        TypeError,
        "metrics is a str; pass a set of names",
    ),
    "callbacks of an evaluation": (
        lambda: loop().evaluate(BATCHES, callbacks=[]),
        TypeError,
        r"it belongs to a training: StepLoop\(...\).run\(",
    ),
    "a forward that is no function": (lambda: loop().evaluate(BATCHES, forward=3), TypeError, "forward is a int; pass a function of"),
    "an average that is no flag": (lambda: loop().evaluate(BATCHES, ema=0.9), TypeError, "ema=0.9: pass True or False"),
    "nothing to evaluate": (
        lambda: loop().evaluate(),
        TypeError,
        r"StepLoop.evaluate needs loader; call it as StepLoop.evaluate\(loader\)",
    ),
    "a prefix without a name": (
        lambda: loop().save("folder", BATCHES, "best"),
        TypeError,
        "StepLoop.save got an argument without a name that needs one: prefix=, about=",
    ),
    "a folder to save to, by another name": (
        lambda: loop().save(path="folder"),
        TypeError,
        "StepLoop.save has no argument 'path'; pass directory=",
    ),
    "no folder": (lambda: loop().save(None), TypeError, "directory is a NoneType; pass the path of a folder"),
    "the loader for the folder": (lambda: loop().resume(BATCHES, "folder"), TypeError, "is a list; pass the path of a folder"),
    "a prefix with a folder": (lambda: loop().save("folder", prefix="a/b"), ValueError, "'a/b': pass a name without '/'"),
    "a resume that must": (
        lambda: loop().resume("folder", must_exists=True),
        TypeError,
        "StepLoop.resume has no argument 'must_exists'; did you mean must_exist=",
    ),
    "a resume that must, without a name": (
        lambda: loop().resume("folder", BATCHES, True),
        TypeError,
        "StepLoop.resume got an argument without a name that needs one: must_exist=",
    ),
    "an unknown argument of predict": (
        lambda: loop().predict(BATCHES[0][0], averaged=True),
        TypeError,
        "StepLoop.predict has no argument 'averaged'; its arguments are ema",
    ),
    "predict of Model with a name": (
        lambda: model().predict(images=BATCHES[0][0]),
        TypeError,
        "Model.predict has no argument 'images'; it takes none with a name",
    ),
    "too much to evaluate": (
        lambda: model().eval(BATCHES, [], True, None),
        TypeError,
        "Model.eval got 4 arguments; its arguments are valid_dataset, callbacks, dataset_sink_mode",
    ),
    "a loader twice": (
        lambda: Model(network(), loss_of).train(1, BATCHES, epoch=2),
        TypeError,
        "Model.train got epoch twice, by its place and by its name; pass it once",
    ),
    "a size by another name": (
        lambda: torch_sink.data_sink(print, BATCHES, size=3),
        TypeError,
        "data_sink has no argument 'size'; pass sink_size=",
    ),
    "a level of jit by its place": (
        lambda: torch_sink.jit(print, "O1"),
        TypeError,
        "jit got an argument without a name that needs one: jit_level=, fullgraph=, dynamic=",
    ),
    "a patience of text": (lambda: torch_sink.EarlyStopping(patience="3"), TypeError, "patience='3' is a str; pass an int"),
    "the scale of a scaler as text": (
        lambda: torch_sink.amp.StaticLossScaler("128"),
        TypeError,
        "scale_value='128' is a str; pass a number",
    ),
    "a scheduler that is stepped twice": (
        lambda: (twice := scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 1))).run(
            BATCHES, callbacks=[torch_sink.LambdaCallback(on_train_step_end=lambda context: twice.scheduler.step())]
        ),
        torch_sink.SinkError,
        r"stepped the scheduler, and the loop steps it too, after each update.*remove scheduler.step\(\)",
    ),
    "a result that does not tell what is better": (
        lambda: loop().run(BATCHES, callbacks=[torch_sink.EarlyStopping("f1")]),
        ValueError,
        "monitor='f1': the name does not tell.*pass mode='min' or mode='max'",
    ),
    "a loader to evaluate on, of Model": (
        lambda: Model(network(), loss_of).train(1, BATCHES, val_loader=BATCHES),
        TypeError,
        r"belongs to fit: Model\(...\).fit\(epoch, train_dataset, valid_dataset\)",
    ),
    "another name for the loader to evaluate on": (
        lambda: Model(network(), loss_of).fit(1, BATCHES, val_loader=BATCHES),
        TypeError,
        "pass valid_dataset=",
    ),
    "epochs= instead of epoch=": (
        lambda: Model(network(), loss_of).train(epochs=2, train_dataset=BATCHES),
        TypeError,
        "Model.train has no.*pass epoch=",
    ),
    "epochs=1.5": (lambda: loop().run(BATCHES, epochs=1.5), TypeError, "1.5 is a float; pass an int"),
    "a class for a callback": (
        lambda: loop().run(BATCHES, callbacks=[torch_sink.LossMonitor]),
        TypeError,
        "pass an instance, not the class",
    ),
    "a function for a callback": (
        lambda: loop().run(BATCHES, callbacks=[print]),
        TypeError,
        "each must be a torch_sink.Callback",
    ),
    "a schedule for fewer steps": (
        lambda: scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=3)).run(BATCHES),
        ValueError,
        r"step 4.*total_steps is epochs x ceil\(len\(loader\) / accumulate\)",
    ),
    "a folder for checkpoints, by another name": (
        lambda: torch_sink.ModelCheckpoint(dirpath="checkpoints"),
        TypeError,
        "ModelCheckpoint has no argument 'dirpath'; pass directory=",
    ),
    "when to save, in the wrong place": (
        lambda: torch_sink.ModelCheckpoint(save_checkpoint_steps=5),
        TypeError,
        r"it belongs to config=torch_sink.CheckpointConfig\(save_checkpoint_steps=",
    ),
    "how often to evaluate, by another name": (
        lambda: torch_sink.Evaluation(BATCHES, every_n_epochs=2),
        TypeError,
        "Evaluation has no argument 'every_n_epochs'; pass every_epochs=",
    ),
    "an unknown metric of an evaluation": (
        lambda: torch_sink.Evaluation(BATCHES, {"f1"}),
        ValueError,
        "unknown metric 'f1'; the names are",
    ),
    "an event without a context": (
        lambda: loop().run(BATCHES, callbacks=[NoContext()]),
        TypeError,
        r"NoContext.on_train_step_end is called with \(run_context\), which it does not take",
    ),
    "a rate by epoch alone": (
        lambda: torch_sink.LearningRateScheduler(lambda epoch: 0.1),
        TypeError,
        r"is called with \(learning_rate, cur_step_num\), which it does not take",
    ),
    "a folder for a timeline": (
        lambda: loop().run(BATCHES, timeline=Path(__file__).parent),
        IsADirectoryError,
        "is a folder; give the path of a page, such as .*tests/run.html",
    ),
    "a batch that is a dict": (
        lambda: loop().run([{"x": BATCHES[0][0], "y": BATCHES[0][1]}]),
        TypeError,
        "a dict of 2.*pass forward=",
    ),
    "a batch of three": (lambda: run(*BATCHES[0], BATCHES[0][1]), TypeError, "a tuple of 3.*pass forward="),
    "images that are bytes": (
        lambda: run(BATCHES[0][0].byte(), BATCHES[0][1]),
        RuntimeError,
        r"uint8 \[4, 3, 2, 2\].*the images are bytes.*ToTensor\(\)",
    ),
    "images that are bytes, convolved": (
        lambda: loop(nn.Conv2d(3, 2, 1)).run([(BATCHES[0][0].byte(), BATCHES[0][1])]),
        RuntimeError,
        r"step 1.*the images are bytes.*ToTensor\(\)",
    ),
    "texts instead of tensors": (lambda: loop().run([("a", "b")]), AttributeError, "step 1, with a batch of no tensor"),
    "a run without gradients": (
        lambda: torch.inference_mode()(lambda: loop().run(BATCHES))(),
        ValueError,
        r"not inside torch.no_grad\(\) or torch.inference_mode\(\)",
    ),
    "a flag for a timeline": (lambda: loop().run(BATCHES, timeline=True), TypeError, 'timeline=True; give the path.*"run.html"'),
    "labels of a wrong dtype": (
        lambda: run(BATCHES[0][0], torch.zeros(4)),
        RuntimeError,
        r"step 1, with a batch of float32 \[4, 3, 2, 2\], float32 \[4\].*labels.long\(\)",
    ),
    "labels as texts": (
        lambda: loop().run([(BATCHES[0][0], ("cat", "dog"))]),
        TypeError,
        "argument 'target'.*the labels are no numbers(?!.*does not return a tensor)",
    ),
    "one-hot labels as ints": (
        lambda: run(BATCHES[0][0], functional.one_hot(BATCHES[0][1], 3)),
        RuntimeError,
        r"pass class indices, labels.argmax\(1\)",
    ),
    "labels in a column": (lambda: run(BATCHES[0][0], BATCHES[0][1][:, None]), RuntimeError, r"labels.squeeze\(1\)"),
    "BCELoss on scores": (
        lambda: run(BATCHES[0][0] - 9, torch.zeros(4, 3), loss=nn.BCELoss()),
        RuntimeError,
        "use BCEWithLogitsLoss",
    ),
    "images as doubles": (lambda: run(BATCHES[0][0].double(), BATCHES[0][1]), RuntimeError, r"return image.float\(\)"),
    "images as doubles, convolved": (
        lambda: loop(nn.Conv2d(3, 2, 1)).run([(BATCHES[0][0].double(), BATCHES[0][1])]),
        RuntimeError,
        r"return image.float\(\)",
    ),
    "a list of images": (
        lambda: loop().run([(list(BATCHES[0][0]), BATCHES[0][1])]),
        AttributeError,
        "gets a list or a dict of images: pass forward=",
    ),
    "a list of images, convolved": (
        lambda: loop(nn.Conv2d(3, 2, 1)).run([(list(BATCHES[0][0]), BATCHES[0][1])]),
        TypeError,
        "gets a list or a dict of images: pass forward=",
    ),
    "MSE on class labels": (lambda: run(*BATCHES[0], loss=nn.MSELoss()), RuntimeError, "step 1.*use cross_entropy"),
    "one output for labels of two classes": (
        lambda: run(*BATCHES[0], model=network(1), loss=nn.BCEWithLogitsLoss()),
        ValueError,
        r"step 1.*labels.float\(\).unsqueeze\(1\)",
    ),
    "labels beyond the outputs": (
        lambda: run(BATCHES[0][0], torch.tensor([0, 1, 7, 1])),
        IndexError,
        "Target 7.*step 1.*compare num_classes",
    ),
    "a model that returns a tuple": (lambda: loop(TwoOutputs()).run(BATCHES), TypeError, "step 1.*pass forward="),
    "images of other channels": (
        lambda: loop(nn.Conv2d(1, 2, 1)).run(BATCHES),
        RuntimeError,
        r"step 1.*Grayscale\(3\) makes three",
    ),
    "a model on another device": (
        lambda: loop(network().to("meta")).run(BATCHES),
        ValueError,
        r"model is on meta, the batch on cpu; move the model",
    ),
    "a loss for each sample": (
        lambda: loop(loss=nn.CrossEntropyLoss(reduction="none")).run(BATCHES),
        ValueError,
        r"shape \[4\]; a scalar is needed.*reduction='mean'",
    ),
    "a loss as a number": (
        lambda: loop(loss=lambda *given: loss_of(*given).item()).run(BATCHES),
        TypeError,
        "the loss is a float; .* return a tensor",
    ),
    "a detached loss": (
        lambda: loop(loss=lambda *given: loss_of(*given).detach()).run(BATCHES),
        ValueError,
        "does not depend on any parameter",
    ),
    "a loss that is NaN": (
        lambda: loop(loss=lambda *given: loss_of(*given) * torch.nan).run(BATCHES, callbacks=[torch_sink.LossMonitor()]),
        torch_sink.NonFiniteLoss,
        "step 1 is nan.*clip the gradients",
    ),
    "a wait for the device": (wait_on_the_host, torch_sink.HostSyncError, rf"{re.escape(__file__)}:\d+.*in a callback|callback"),
    # checkpoints
    "a checkpoint of another model": (resume_another_model, RuntimeError, "size mismatch.*while loading.*another model"),
    "a checkpoint instead of its folder": (resume_inside_a_checkpoint, ValueError, "itself a checkpoint; pass the directory"),
    "the weights of a model for a state": (
        lambda: loop().load_state_dict(network().state_dict()),
        ValueError,
        r"no state of a StepLoop; pass what StepLoop.state_dict\(\) returned, or use resume",
    ),
    "a checkpoint of another optimizer": (
        resume_with_another_optimizer,
        ValueError,
        "nothing of it was loaded: saved with the optimizer SGD, and this loop has AdamW; make the loop as it was made then",
    ),
    "a file instead of a folder": (lambda: loop().resume(__file__), NotADirectoryError, "is a file; pass the directory"),
    # Model
    "Model without an optimizer": (lambda: Model(network(), loss_of).train(1, BATCHES), ValueError, "no optimizer"),
    "eval without metrics": (lambda: Model(network(), loss_of).eval(BATCHES), ValueError, r"metrics=\{'accuracy'\}"),
    "predict without inputs": (lambda: model().predict(None), TypeError, r"got nothing; .*predict\(images\)"),
    "predict with a loader": (
        lambda: model().predict(DataLoader(Samples(lambda index: index), 2)),
        TypeError,
        r"got a DataLoader; .*model.predict\(images\) for images, labels in loader",
    ),
    "predict with images and labels": (lambda: model().predict(BATCHES[0]), AttributeError, r"model.predict\(images\) for"),
    "a loader for a number of epochs": (
        lambda: Model(model := network(), loss_of, sgd(model)).train(BATCHES, 2),
        TypeError,
        "^epoch is a list; pass an int",
    ),
    "a class for a metric": (
        lambda: Model(network(), loss_of, metrics={"mine": nn.CrossEntropyLoss}),
        TypeError,
        r"is the class CrossEntropyLoss; pass an instance: CrossEntropyLoss\(\)",
    ),
    "accuracy of labels in a column": (
        lambda: Model(network(), metrics={"accuracy"}, eval_network=InAColumn()).eval(BATCHES),
        ValueError,
        r"scores \[4, 3\] with labels \[4\], and the labels are \[4, 1\]",
    ),
    "unknown metric": (lambda: Model(network(), loss_of, metrics={"acc"}), ValueError, "'acc'; the names are 'accuracy'"),
    "a metric as text": (lambda: Model(network(), loss_of, metrics="accuracy"), TypeError, "is a str; pass a set"),
    "sink_size=-2": (
        lambda: Model(model := network(), loss_of, sgd(model)).train(1, BATCHES, sink_size=-2),
        ValueError,
        "sink_size=-2; .*-1 for one pass",
    ),
    "data_sink without an end": (
        lambda: torch_sink.data_sink(lambda x, y: x, BATCHES, -1),
        ValueError,
        "sink_size=-1; pass an int of at least 1",
    ),
    "jit of a number": (lambda: torch_sink.jit(3), TypeError, "jit got int; pass a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:Got pickle error", "ignore:Using a target size")
def test_what_a_mistake_says(name: str) -> None:
    make, kind, says = MISTAKES[name]
    with pytest.raises(kind) as caught:
        make()
    text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(says, text, re.DOTALL), text


def test_the_best_five_of_three_classes_are_called_a_metric_that_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert model().eval(BATCHES)["top5"] == 1.0
    assert caplog.messages == ["top5 says nothing: of 3 classes all are among the best 5"]


def script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(code))
    return subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_spawn_without_a_main_guard(tmp_path: Path) -> None:
    finished = script(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import torch_sink

        data = TensorDataset(torch.zeros(4, 1))
        list(torch_sink.SinkLoader(DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn")))
        """,
        tmp_path,
    )
    assert finished.returncode != 0
    assert 'if __name__ == "__main__":' in finished.stderr or "if __name__ == '__main__':" in finished.stderr


def test_what_keeps_a_graph_from_being_captured_is_explained() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layers(images) * (1 if images.sum().item() > 0 else 2)

    waiting = loop(Waits())
    waiting.run(BATCHES)
    assert re.search(rf"{re.escape(__file__)}:\d+: aten::_local_scalar_dense reads one element", waiting.explain())


def test_a_method_that_looks_like_an_event(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(torch_sink.Callback):
        def on_epoch_end(self, run_context: Any) -> None:
            pass

    loop().run(BATCHES, callbacks=[Mine()])
    assert caplog.messages == ["Mine.on_epoch_end is no event and is never called; did you mean on_train_epoch_end?"]


def test_a_position_that_is_not_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The epoch comes anew, from its first batch; at an epoch's end nothing is lost, and nothing said."""
    saved, resumed = loop(), loop()
    saved.run(BATCHES, epochs=2, max_steps=6)
    saved.save(tmp_path / "mid")
    assert resumed.resume(tmp_path / "mid") == 6
    assert "after 2 steps of an epoch" in caplog.text
    assert "resume(directory, loader)" in caplog.text
    caplog.clear()
    saved.run(BATCHES)
    saved.save(tmp_path / "end")
    resumed.resume(tmp_path / "end")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        (lambda: torch_sink.Evaluation(TensorDataset(torch.zeros(3))), "samples, not batches"),
        (lambda: torch_sink.Evaluation(BATCHES, ema=True), "keeps no average of the weights"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_the_first_step(evaluation: Callable[[], Any], says: str) -> None:
    mine = loop()
    with pytest.raises((TypeError, torch_sink.SinkError), match=says):
        mine.run(BATCHES, callbacks=[evaluation()])
    assert mine.step_count == 0
