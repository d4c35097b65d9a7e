"""What may be wrapped, what comes out, and what a loader says about itself."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import logging
import pickle
import sqlite3
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from sink.numbered import numbered, values
from torch_sink.loop import Evaluation, StepLoop
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


class Shards(IterableDataset):
    """Each worker yields its share of 0 … 11."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        step = 1 if worker is None else worker.num_workers
        return iter(range(0 if worker is None else worker.id, 12, step))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_dataset_with_sharding(num_workers: int) -> None:
    plain = DataLoader(Shards(), batch_size=2, num_workers=num_workers)
    expected = [batch.tolist() for batch in plain]
    with SinkLoader(DataLoader(Shards(), batch_size=2, num_workers=num_workers)) as loader:
        assert [batch.tolist() for batch in loader] == expected
        assert [batch.tolist() for batch in loader] == expected
        with pytest.raises(TypeError, match="batches_per_epoch"):
            len(loader)


def test_generator_function_is_called_once_a_pass() -> None:
    calls = []

    def source() -> Iterator[torch.Tensor]:
        calls.append(threading.current_thread().name)
        yield from numbered(3)

    with SinkLoader(source) as loader:
        assert [values(loader), values(loader)] == [[0, 1, 2], [0, 1, 2]]
        assert len(calls) == 2
        with pytest.raises(TypeError, match="not known"):
            len(loader)


def test_generator_function_draws_in_the_plain_loops_order() -> None:
    def source() -> Iterator[torch.Tensor]:
        for _ in range(5):
            yield torch.rand(2)

    def train(batches: object) -> list[torch.Tensor]:
        return [torch.cat((batch, torch.rand(2))) for batch in batches]

    torch.manual_seed(0)
    expected = train(source()) + train(source())
    torch.manual_seed(0)
    with SinkLoader(source) as loader:
        actual = train(loader) + train(loader)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_function_s_iterator_runs_and_ends_in_the_thread_of_the_loop() -> None:
    """So modes, default device, context variables and what belongs to one thread are those of the plain loop."""
    setting, seen = contextvars.ContextVar("setting", default=0), []

    def source() -> Iterator[torch.Tensor]:
        database = sqlite3.connect(":memory:")  # one thread may use it
        weights = torch.ones(2, 2, requires_grad=True)
        try:
            for _ in range(2):
                batch = weights @ torch.ones(2, 2)
                seen.append((batch.requires_grad, batch.dtype, setting.get(), torch.get_default_device().type))
                yield batch
        finally:
            database.close()
            seen.append(threading.current_thread())

    setting.set(7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), SinkLoader(source) as loader, torch.device("cpu"):
        expected = [*map(torch.clone, source())]
        assert [batch.dtype for batch in loader] == [batch.dtype for batch in expected]
        assert not any(batch.requires_grad for batch in loader)
        next(iter(loader))
    assert seen[:3] == seen[3:6] == seen[6:9]
    assert seen[9:] == [seen[0], threading.current_thread()]


def test_a_generator_object_gives_nothing_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    loader = SinkLoader(batch for batch in numbered(2))
    with caplog.at_level(logging.WARNING, "torch_sink"):
        assert values(loader) == [0, 1]
        assert caplog.text == ""
        assert [values(loader), values(loader)] == [[], []]
    assert "traversed once only: pass the generator function" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_loader_gives_nothing(num_workers: int) -> None:
    """As a DataLoader does; samples that come later are seen in the next pass."""
    for make in (lambda loader: loader, SinkLoader):
        data: list[int] = []
        plain = DataLoader(data, batch_sampler=[], num_workers=num_workers)
        loader = make(plain)
        assert [[*loader], [*loader]] == [[], []]
        data.append(5)
        plain.batch_sampler.append([0])
        assert [batch.tolist() for batch in loader] == [[5]]
        plain.batch_sampler.clear()
        assert [*loader] == []
    assert loader.stats().batches == 1
    assert [*loader.rest()] == []
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_of_many_passes_need_batches(num_workers: int) -> None:
    data = TensorDataset(torch.arange(3))
    source = DataLoader(data, batch_size=4, drop_last=True, num_workers=num_workers)
    with SinkLoader(source, batches_per_epoch=2) as loader, pytest.raises(ValueError, match=r"pass 0.*drop_last"):
        list(loader)
    with pytest.raises(ValueError, match="pass the generator function"):
        list(SinkLoader((batch for batch in numbered(2)), batches_per_epoch=3))


def test_the_rest_of_an_epoch_may_be_followed_by_nothing() -> None:
    batches = numbered(2)
    loader = SinkLoader(batches)
    first = iter(loader)
    assert [int(next(first)), int(next(first))] == [0, 1]
    batches.clear()
    assert values(loader.rest()) == []
    assert values(loader) == []


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


Pair = collections.namedtuple("Pair", "left right")


def test_structures_and_plain_values_pass_unchanged() -> None:
    image = torch.rand(2, 3)
    batch = {"sample": Sample(image, "a"), "pair": Pair(image, [1, "two"]), "ordered": collections.OrderedDict(x=image)}
    (out,) = list(SinkLoader([batch]))
    assert out is batch


def test_image_batches_get_dtype_and_layout_and_the_rest_does_not() -> None:
    batch = {
        "sample": Sample(torch.rand(2, 3, 8, 8), "a"),
        "pair": Pair(torch.rand(2, 3, 8, 8), [torch.arange(2), torch.rand(2, 4)]),
        "ordered": collections.OrderedDict(mask=torch.zeros(2, 1, 8, 8, dtype=torch.uint8)),
    }
    (out,) = list(SinkLoader([batch], dtype=torch.bfloat16, memory_format=torch.channels_last))
    for image, original in ((out["sample"].image, batch["sample"].image), (out["pair"].left, batch["pair"].left)):
        assert image.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(image, original.to(torch.bfloat16), rtol=0, atol=0)
    assert out["pair"].right[0] is batch["pair"].right[0]
    assert out["pair"].right[1] is batch["pair"].right[1]
    assert out["ordered"]["mask"] is batch["ordered"]["mask"]
    assert (type(out["sample"]), type(out["pair"])) == (Sample, Pair)
    assert type(out["ordered"]) is collections.OrderedDict


def test_cpu_batches_are_not_copied() -> None:
    batches = numbered(3)
    assert all(out is batch for out, batch in zip(SinkLoader(batches), batches, strict=True))


def test_several_loaders_at_once() -> None:
    def make(offset: int) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(offset, offset + 20)), batch_size=2, num_workers=1)

    with SinkLoader(make(0)) as first, SinkLoader(make(100)) as second:
        pairs = [(int(a[0][0]), int(b[0][0]), int(c[0][0])) for a, b, c in zip(first, second, make(200), strict=True)]
    assert pairs == [(i, i + 100, i + 200) for i in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batches_per_epoch": 0}, ValueError, "batches_per_epoch=0"),
        ({"batches_per_epoch": -1}, ValueError, "None for one pass"),
        ({"sink_size": 2}, TypeError, "SinkLoader has no argument 'sink_size'; pass batches_per_epoch="),
        ({"batches_per_epoch": 2.0}, TypeError, "batches_per_epoch=2.0 is a float; pass an int"),
        ({"batches_per_epoch": True}, TypeError, "batches_per_epoch=True is a bool; pass an int"),
        ({"slots": 0}, ValueError, "slots=0"),
        ({"slots": "3"}, TypeError, "slots='3' is a str; pass an int"),
        ({"max_bytes": -1}, ValueError, "max_bytes=-1"),
        ({"dtype": "float16"}, TypeError, "dtype must be a torch.dtype"),
        ({"dtype": torch.int32}, ValueError, "floating-point"),
        ({"memory_format": torch.preserve_format}, ValueError, "channels_last"),
        ({"on_decode_error": "ignore"}, ValueError, "'skip'"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds=0"),
        ({"timeout_seconds": "1"}, TypeError, "timeout_seconds='1' is a str; pass a number"),
        ({"device": "nonsense"}, ValueError, "is not a device"),
        ({"device": "meta"}, ValueError, "'cpu' or 'cuda'"),
        ({"device": "cuda:99"}, ValueError, "is not there"),
    ],
)
def test_argument_errors(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SinkLoader(numbered(1), **options)


def test_a_loader_that_is_neither_iterable_nor_callable() -> None:
    with pytest.raises(TypeError, match="iterable of batches or a function"):
        SinkLoader(3)


def test_attributes_of_the_wrapped_loader() -> None:
    source = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    loader = SinkLoader(source)
    assert (loader.loader, loader.dataset, loader.batch_size) == (source, source.dataset, 4)
    with pytest.raises(AttributeError, match="no_such_thing"):
        loader.no_such_thing  # noqa: B018


def test_repr_states_the_plan() -> None:
    assert repr(SinkLoader(numbered(1), batches_per_epoch=7, device="cpu")) == (
        "SinkLoader(list, batches_per_epoch=7, device='cpu', slots=3 of references to the loader's own tensors)"
    )


def test_slot_is_not_static_on_the_cpu() -> None:
    loader = SinkLoader(numbered(2), device="cpu", slots=5)
    batches = iter(loader)
    next(batches)
    assert (loader.slot_index, loader.ring_slots) == (None, 5)


def test_at_most_slots_batches_exist() -> None:
    made = []
    with SinkLoader(DataLoader(TensorDataset(torch.arange(50)), num_workers=1), slots=2) as loader:
        fill = loader._slots.fill
        loader._slots.fill = lambda slot, batch: made.append(slot) or fill(slot, batch)
        for consumed, _ in enumerate(loader):
            assert len(made) <= consumed + 2


@pytest.mark.parametrize("wraps", [False, True])
def test_a_batch_that_the_user_dropped_is_gone_when_the_next_one_is_made(wraps: bool) -> None:
    batches: list[Any] = []
    alive = []

    def collate(samples: list[Any]) -> Any:
        alive.append(sum(batch() is not None for batch in batches))
        made = torch.zeros(4)
        batches.append(weakref.ref(made))
        return [made] if wraps else made

    for batch in SinkLoader(DataLoader(range(5), 1, collate_fn=collate), device="cpu"):
        del batch
    assert alive == [0] * 5


def test_paused_parks_the_producer() -> None:
    with SinkLoader(DataLoader(TensorDataset(torch.arange(64)), num_workers=1)) as loader:
        fill = loader._slots.fill
        inside = []
        loader._slots.fill = lambda slot, batch: inside.append(slot) or fill(slot, batch)
        batches = iter(loader)
        next(batches)
        with loader._paused(), loader._paused():
            before = len(inside)
            ready = len(loader._producer.ready)
            for _ in range(ready):
                next(batches)
            threading.Event().wait(0.3)
            assert len(inside) == before
        assert len(values(batches)) == 63 - ready


def seed_with_777(worker: int) -> None:
    torch.manual_seed(777 + worker)


class Draw(torch.utils.data.Dataset):
    """One draw of the worker's generator a sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.rand(())


def test_an_attribute_of_the_wrapped_loader_is_set_there() -> None:
    """As Lightning does it under `seed_everything(seed, workers=True)`."""
    plain = DataLoader(Draw(), batch_size=2, num_workers=1)
    with SinkLoader(DataLoader(Draw(), batch_size=2, num_workers=1)) as loader:
        for one in (plain, loader):
            one.worker_init_fn = seed_with_777
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
        assert loader.loader.worker_init_fn is seed_with_777
        loader.batches_per_epoch, loader.note = 1, "mine"
        assert not hasattr(loader.loader, "batches_per_epoch")
        assert not hasattr(loader.loader, "note")
        with pytest.raises(ValueError, match="should not be set after"):
            loader.batch_size = 4


def test_what_lightning_looks_at_first_draws_nothing_and_keeps_a_loaded_position() -> None:
    def _check_dataloader_iterable(loader: SinkLoader) -> None:
        iter(loader)

    def shuffled() -> SinkLoader:
        return SinkLoader(DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(3)))  # type: ignore[arg-type]

    with shuffled() as loader, shuffled() as looked_at:
        _check_dataloader_iterable(looked_at)
        assert [batch.item() for batch in looked_at] == [batch.item() for batch in loader]
        next(iter(loader))
        state, rest = loader.state_dict(), [batch.item() for batch in loader.rest()]
        looked_at.load_state_dict(state)
        _check_dataloader_iterable(looked_at)
        assert [batch.item() for batch in looked_at] == rest


class Returning(IterableDataset):
    """A generator that ends with a value."""

    def __iter__(self) -> Generator[int, None, str]:
        yield from range(3)
        return "that was all"


class ReturningLoader(DataLoader):
    def __iter__(self) -> Generator[int, None, str]:
        yield from super().__iter__()
        return "that was all"


@pytest.mark.parametrize("loader", [DataLoader(Returning(), batch_size=None), ReturningLoader(range(3), None)])
def test_a_generator_may_end_with_a_value(loader: DataLoader) -> None:
    assert list(SinkLoader(loader)) == list(loader) == [0, 1, 2]


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_copy_is_refused_with_what_to_do(send: Callable[[Any], Any]) -> None:
    loader = SinkLoader(numbered(2))
    next(iter(loader))
    with pytest.raises(TypeError, match=r"cannot be pickled or copied.*sink\.loader.*sink\.state_dict"):
        send(loader)
    assert values(loader) == [0, 1]


NAMES = "epoch position paused set_aside start_over whole_pass rehearsal give_back number_next_pass static_batches"


def test_a_program_may_keep_numbers_of_its_own_on_it() -> None:
    """As on a DataLoader, under any name that the reference does not list."""
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    loader, model = SinkLoader(DataLoader(data, batch_size=4)), nn.Linear(2, 1)
    for name in NAMES.split():
        assert not hasattr(loader, name)
        setattr(loader, name, 3)
    loop = StepLoop(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert loop.run(loader, epochs=2, callbacks=[Evaluation([(torch.ones(2, 2), torch.ones(2, 1))])]).steps == 4
    loop.evaluate(loader)
    assert {getattr(loader, name) for name in NAMES.split()} == {3}
