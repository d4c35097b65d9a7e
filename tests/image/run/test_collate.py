"""Batches of handles: every form of sample, in the loader and in collate functions that scripts write themselves."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils import collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener, encoded, opener, write_classes
from image.check import assert_same_bits, device_in_use, runs_kernels
from image.worker_data import Structured, stacking_collate, train_transform
from torch_sink.image.core.ops import InPlaceOp, Op
from torch_sink.image.decode import jpeg_proof
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.handles.tensor import LazyTensor
from torch_sink.image.program.block import Contents, Packed, Packing
from torch_sink.image.program.block import _sealed as sealed_contents
from torch_sink.image.run.batch import LazyBatch

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("images"), 7)


def leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        yield from (leaf for value in batch.values() for leaf in leaves(value))
    elif isinstance(batch, (list, tuple)):
        yield from (leaf for value in batch for leaf in leaves(value))
    else:
        yield batch


def stock_and_lazy(make: Callable[[], Any]) -> tuple[Any, Any]:
    results = []
    for name, settings in (("PIL", {}), ("device", {"device": device_in_use()})):
        with torch_sink.image_backend(name, **settings):
            torch.manual_seed(21)
            results.append(make())
    return results[0], results[1]


def assert_same_structure(made: Any, expected: Any) -> None:
    """Equal containers and equal values; images are executed by moving them to the device."""
    if isinstance(expected, torch.Tensor):
        if expected.ndim == 4:
            assert (type(made) is LazyBatch) == runs_kernels()
        assert_same_bits(made.to(device_in_use()).cpu(), expected)
    elif isinstance(expected, dict):
        assert type(made) is type(expected)
        assert made.keys() == expected.keys()
        for key in expected:
            assert_same_structure(made[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(made) is type(expected)
        assert len(made) == len(expected)
        for one, other in zip(made, expected, strict=True):
            assert_same_structure(one, other)
    else:
        assert made == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", ["bare", "dict", "namedtuple", "nested"])
def test_forms_of_samples(folder: Path, form: str, workers: int) -> None:
    context = "fork" if workers else None

    def batches() -> list[Any]:
        dataset = Structured(str(folder), form)
        return list(DataLoader(dataset, batch_size=3, num_workers=workers, multiprocessing_context=context))

    expected, made = stock_and_lazy(batches)
    assert len(made) == 3
    assert_same_structure(made, expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_stacks(folder: Path, workers: int) -> None:
    def batches() -> list[Any]:
        return list(
            DataLoader(
                ImageFolder(str(folder), train_transform()),
                batch_size=4,
                collate_fn=stacking_collate,
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            )
        )

    expected, made = stock_and_lazy(batches)
    assert_same_structure(made, expected)


def test_the_loop_of_a_plain_script(folder: Path) -> None:
    def train() -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(1296, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(2):
            for images, target in DataLoader(ImageFolder(str(folder), train_transform()), batch_size=3, shuffle=True):
                images = images.to("cpu", non_blocking=True)
                loss = torch.nn.functional.cross_entropy(model(images), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    expected, made = stock_and_lazy(train)
    assert_same_structure(made, expected)


def test_ten_crops_stacked_in_the_transform(folder: Path) -> None:
    crops = v1.Compose(
        [
            v1.Resize((24, 26)),
            v1.TenCrop(20),
            v1.Lambda(lambda views: torch.stack([v1.ToTensor()(view) for view in views])),
        ]
    )
    expected, made = stock_and_lazy(lambda: next(iter(DataLoader(ImageFolder(str(folder), crops), batch_size=2)))[0])
    assert_same_bits(made.to(device_in_use()).cpu(), expected)


def test_ten_crops_in_a_worker(folder: Path) -> None:
    crops = v1.Compose(
        [v1.Resize(24), v1.FiveCrop(20), lambda views: torch.stack([v1.ToTensor()(view) for view in views])]
    )
    expected, made = stock_and_lazy(
        lambda: next(
            iter(
                DataLoader(ImageFolder(str(folder), crops), batch_size=2, num_workers=1, multiprocessing_context="fork")
            )
        )[0]
    )
    assert_same_bits(made.to(device_in_use()).cpu(), expected)


def images(count: int = 3) -> list[torch.Tensor]:
    return [F.to_tensor(F.resize(opener(encoded(40 + seed, 30, seed))(), [14, 15])) for seed in range(count)]


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "metadata": lambda b: (b.shape, b.dtype, len(b), b.size(0), b.size(), b.ndim, b.dim(), b.numel(), b.device.type),
    "arithmetic": lambda b: [b + 1, b * b, 1 - b],
    "index": lambda b: [b[0], b[1:], b[torch.tensor([2, 0])], b[:, 0]],
    "iteration": lambda b: [*b],
    "conversions": lambda b: [b.half(), b.float(), b.to(torch.bfloat16), b.double(), b.cpu(), b.numpy().sum()],
    "memory format": lambda b: [
        b.to(memory_format=torch.channels_last),
        b.contiguous(memory_format=torch.channels_last),
    ],
    "move and convert": lambda b: [b.to("cpu", torch.float16), b.to(torch.zeros(1, dtype=torch.float64))],
    "copies": lambda b: [b.to("cpu", copy=True), b.to("cpu", torch.half, False, True), b.to(torch.half, False, True)],
    "attributes": lambda b: [name in dir(b) for name in ("shape", "plan_b", "numpy")],
    "in place": lambda b: [b.mul_(2), b + 0, b.mul_(2) is b, operator.iadd(b, 1) is b, b],
    "in place, of another shape": lambda b: [b.unsqueeze_(0).shape, b.resize_(2, 2).shape, b.ndim, len(b), b],
    "gradients": lambda b: [b.requires_grad_() is b, b.requires_grad, (b * 2).sum().backward(), b.grad],
    "printing": lambda b: [repr(b), str(b), f"{b.mean():.5f}"],
    "chunks": lambda b: [*b.chunk(2), *b.split(1), torch.cat([b, b]), b.clone(), b.detach()],
    "module": lambda b: torch.nn.AvgPool2d(2)(b),
    "copied": lambda b: torch.zeros(b.shape).copy_(b),
    "pinned or not": lambda b: b.pin_memory() + 0 if torch.accelerator.is_available() else b + 0,
    "nested collate": lambda b: default_collate([b, b]),
}


@pytest.mark.parametrize("use", USES)
def test_a_batch_is_a_tensor_to_whoever_asks(use: str) -> None:
    expected, made = stock_and_lazy(lambda: USES[use](default_collate(images())))
    for one, other in zip(leaves(made), leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            # A stack of batches is recorded, and a call in place returns what it was called on.
            assert use.startswith(("in place", "nested collate")) or type(one) is not LazyBatch
            assert_same_bits(one.materialize() if type(one) in (LazyBatch, LazyTensor) else one, other)
        else:
            assert one == other


def test_a_look_changes_nothing() -> None:
    """Debuggers and messages of assertions print what they find, also where stock code may not run."""
    expected = [repr(images(1)[0]), repr(default_collate(images()))]
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        handle, batch = images(1)[0], default_collate(images())
        assert [repr(handle), repr(batch)] == expected
        assert handle.is_recording
        if runs_kernels():
            assert batch.is_recording
        assert not torch_sink.fallback_report()


def test_tensors_among_handles() -> None:
    def mixed() -> torch.Tensor:
        first, second, third = images()
        return default_collate([first, second * 1, third, torch.full((3, 14, 15), 0.25)])

    expected, made = stock_and_lazy(mixed)
    assert_same_structure(made, expected)
    expected, made = stock_and_lazy(lambda: default_collate([torch.zeros(3, 14, 15), *images(2)]))
    assert_same_structure(made, expected)


def test_handles_that_were_read_before() -> None:
    def read() -> torch.Tensor:
        handles = images()
        handles[1].mul_(3.0)
        return default_collate(handles)

    expected, made = stock_and_lazy(read)
    assert_same_structure(made, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_keeps_its_values_when_its_samples_change(when: str) -> None:
    """Ordinary tensors among handles, and handles that were read, are copied as `torch.stack` copies them."""

    def changed() -> torch.Tensor:
        read, waiting = images(2)
        values = read.mul_(1)
        buffer = torch.full((3, 14, 15), 0.25)
        if when == "before":
            buffer.fill_(0.5)
        batch = default_collate([read, buffer, waiting])
        values.zero_()
        buffer.fill_(7)
        return batch

    expected, made = stock_and_lazy(changed)
    assert_same_structure(made, expected)


def test_finished_tensors_of_any_kind_lie_in_one_block_of_memory() -> None:
    """Whatever their strides and however their bytes fall, so that a worker sends one descriptor for all of them."""
    kinds = [
        torch.rand(2, 3, 5)[:, ::2],
        torch.rand(3, 0, 2),
        torch.rand(4).double(),
        torch.rand(3).half(),
        torch.ones(5) > 0,
    ]
    sources: list[Source] = [FinishedSource(tensor.contiguous() if tensor.ndim != 3 else tensor) for tensor in kinds]
    packed = Packing([*sources, FinishedSource(torch.tensor(3, dtype=torch.uint8)), *sources]).write((), ())
    entries = packed.contents.entries
    assert len(entries) == len(kinds) + 1
    assert not any(isinstance(part, torch.Tensor) for entry in entries for part in entry)
    for place, tensor in enumerate(kinds):
        source = packed.sources()[place]
        assert isinstance(source, FinishedSource)
        assert_same_bits(source.tensor, tensor.contiguous())


def test_a_sample_that_wants_a_gradient_keeps_it() -> None:
    def with_gradient() -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.rand(3, 14, 15, requires_grad=True)
        default_collate([images(1)[0], weight]).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected, made = stock_and_lazy(with_gradient)
    assert_same_bits(made, expected)


def test_images_that_a_dataset_keeps_are_made_once_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = default_collate(images())
    made: list[Any] = []
    monkeypatch.setattr(
        EncodedSource, "decode", lambda self, decode=EncodedSource.decode: made.append(1) or decode(self)
    )
    with torch_sink.image_backend("device", device=device_in_use()):
        kept = images()
        for _ in range(4):
            assert_same_bits(default_collate(kept).to(device_in_use()).cpu(), expected)
    if not runs_kernels():
        assert len(made) == len(kept)


def test_images_of_different_sizes_raise_what_stack_raises() -> None:
    def ragged() -> tuple[type, str]:
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
            torch.stack([F.to_tensor(array_opener(5, 4)()), F.to_tensor(array_opener(4, 5)())])
        return type(caught.value), str(caught.value)

    expected, made = stock_and_lazy(ragged)
    assert made == expected


def test_stack_on_another_dimension_and_into_a_tensor() -> None:
    expected, made = stock_and_lazy(lambda: torch.stack(images(), 1))
    assert_same_bits(made, expected)
    expected, made = stock_and_lazy(lambda: torch.stack(images(), out=torch.empty(3, 3, 14, 15)))
    assert_same_bits(made, expected)


def test_the_same_file_in_two_modes() -> None:
    """One has to be read as RGB and made gray, the other as gray: packed together, both stay what they are."""

    def two_modes() -> torch.Tensor:
        image = opener(encoded(33, 21, 2), None)()
        return torch.stack([F.to_tensor(F.to_grayscale(image.convert("RGB"))), F.to_tensor(image.convert("L"))])

    expected, made = stock_and_lazy(two_modes)
    assert_same_bits(made.to(device_in_use()).cpu(), expected)


def test_the_same_file_twice_is_packed_once(folder: Path) -> None:
    with torch_sink.image_backend("device", device="meta"):
        dataset = ImageFolder(str(folder), train_transform())
        batch = default_collate([dataset[0][0], dataset[1][0], dataset[0][0]])
        assert len(batch.program.packed.contents.entries) == 2
        assert batch.program.packed.entry_of_image == [0, 1, 0]
        handle = F.to_tensor(F.resize(array_opener(9, 8)(), [4, 4]))
        views = default_collate([F.hflip(handle), F.vflip(handle), handle])
        assert len(views.program.packed.contents.entries) == 1


def test_what_a_batch_is_already_makes_nothing() -> None:
    """As diffusers' training scripts collate: `stack(...).to(memory_format=contiguous_format).float()`."""
    with torch_sink.image_backend("device", device="meta", strict=True):
        batch = default_collate(images())
        assert batch.to(memory_format=torch.contiguous_format).float() is batch
        assert batch.contiguous() is batch
        assert batch.to(torch.float32) is batch
        for changed in (
            lambda: batch.to(torch.float32, copy=True),
            lambda: batch.to(torch.float32, False, True),
            lambda: batch.contiguous(memory_format=torch.channels_last),
            lambda: batch.float(memory_format=torch.channels_last),
            lambda: default_collate([F.pil_to_tensor(opener(encoded(40, 30))())]).float(),
        ):
            with pytest.raises(torch_sink.SinkError, match='device="meta"'):
                changed()


def test_meta_records_only() -> None:
    with torch_sink.image_backend("device", device="meta"):
        batch = default_collate(images())
        assert "plan" in dir(batch)
        assert batch.to("meta", torch.float16, False, True).dtype == torch.float16
        assert batch.to(device="meta", copy=True).shape == batch.shape
        assert type(batch) is LazyBatch
        assert (tuple(batch.shape), batch.dtype) == ((3, 3, 14, 15), torch.float32)
        assert batch.to("meta").shape == batch.shape
        for use in (lambda: batch.to("cpu"), lambda: batch + 1, lambda: batch.__torch_sink_execute__("cpu")):
            with pytest.raises(torch_sink.SinkError, match='device="meta"'):
                use()


def test_contents_cross_to_another_process_as_they_were_without_python_code_for_each_call() -> None:
    calls = Op("pil.crop", ((0, 0, 8, 8),)), InPlaceOp("normalize", ((0.5,), (0.5,), True)), Op("v1.hflip")
    source = next(source for source, _ in jpeg_proof.cases() if source.header.scan is not None)
    contents = Packing([source]).write([calls], ()).contents
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        sealed = sealed_contents(contents)
    finally:
        sys.setprofile(None)
    assert called.count("__getnewargs__") == 1  # of the call in place
    opened = Packed(torch.frombuffer(bytearray(sealed), dtype=torch.uint8), None, (0, len(sealed))).contents
    assert opened == contents
    assert [list(map(type, ops)) for ops in opened.programs] == [[Op, InPlaceOp, Op]]


@pytest.mark.parametrize("line", range(1, 8))
def test_two_threads_open_what_crossed_to_this_process(line: int) -> None:
    """Another thread opens it, too, before the given line is run here."""
    contents = Contents((), ((Op("v1.hflip"),),), [7])
    sealed = sealed_contents(contents)
    packed = Packed(torch.frombuffer(bytearray(sealed), dtype=torch.uint8), None, (0, len(sealed)))
    lines = itertools.count(1)

    def at_each_line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and next(lines) == line:
            with ThreadPoolExecutor(1) as other:
                assert other.submit(lambda: packed.contents).result() == contents
        return at_each_line

    code = Packed.contents.fget.__code__  # type: ignore[attr-defined]
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: at_each_line if frame.f_code is code else None)
    try:
        assert packed.contents == contents
    finally:
        sys.settrace(before)


def function(name: str) -> Callable[..., Any]:
    return lambda batch, *, collate_fn_map=None: (name, torch.stack(batch))


MAPS: dict[str, Callable[[dict[Any, Any]], dict[Any, Any]]] = {
    "one for tensors": lambda plain: {**plain, torch.Tensor: function("tensor")},
    "one for images": lambda plain: {**plain, tv_tensors.Image: function("image")},
    "one for all of torchvision's": lambda plain: {tv_tensors.TVTensor: function("any"), **plain},
    "one for everything": lambda plain: {object: function("everything"), **plain},
    "several types in one": lambda plain: {(tv_tensors.Mask, tv_tensors.Image): function("several"), **plain},
    "none for tensors": lambda plain: {kind: made for kind, made in plain.items() if kind is not torch.Tensor},
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("convert", [v1.ToTensor, v2.ToImage])
def test_maps_of_collate_functions(name: str, convert: Callable[[], Any]) -> None:
    """Made while the backend is on, of torch's own: images go where torch sends those of stock code."""

    def make() -> tuple[str, Any]:
        images = [convert()(opener(encoded(40, 30, seed))()) for seed in (1, 2)]
        try:
            made = collate.collate(images, collate_fn_map=MAPS[name](collate.default_collate_fn_map))
        except TypeError as error:
            return str(error), torch.zeros(0)
        return made if isinstance(made, tuple) else ("stacked", made)

    (expected, stock), (found, values) = stock_and_lazy(make)
    assert found == expected
    assert_same_bits(values.to(device_in_use()).cpu(), stock)
