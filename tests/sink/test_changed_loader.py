"""Attributes of a DataLoader that are set after it was wrapped hold from the next pass on, as without a SinkLoader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_sink
from torch_sink import SinkLoader, StepLoop

pytestmark = [
    pytest.mark.halved,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]  # which torchdata calls
COUNT = 12
Change = Callable[[Any], object]


class Drawing(Dataset):
    """Sample i is i, and a draw of the generator of the process that makes it."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def negative(samples: list[torch.Tensor]) -> torch.Tensor:
    return -torch.stack(samples)


def seeded_with_777(worker: int) -> None:
    torch.manual_seed(777 + worker)


def has(**attributes: Any) -> Change:
    return lambda loader: [setattr(loader, name, value) for name, value in attributes.items()]


def draws_from(seed: int) -> Change:
    return lambda loader: has(generator=torch.Generator().manual_seed(seed))(loader)


def shuffles_from(seed: int) -> Change:
    return lambda loader: setattr(loader.sampler, "generator", torch.Generator().manual_seed(seed))


def pairs(loader: Any) -> None:
    """As libraries do it that go around what a DataLoader refuses."""
    object.__setattr__(loader, "batch_sampler", BatchSampler(range(6), 2, drop_last=False))


NONE: Change = has()
# What is set before each pass, and after its first batch.
SCRIPTS: dict[str, list[tuple[Change, Change]]] = {
    "functions": [(has(collate_fn=negative), has(worker_init_fn=seeded_with_777)), (NONE, has(collate_fn=torch.stack))],
    "generators": [(draws_from(5), NONE), (NONE, shuffles_from(6)), (shuffles_from(7), draws_from(8))],
    "more workers": [(NONE, has(num_workers=2, prefetch_factor=3)), (NONE, has(num_workers=1))],
    "other workers": [(has(num_workers=1, prefetch_factor=2), NONE), (has(num_workers=0), has(num_workers=1))],
    "batches": [(NONE, pairs), (lambda loader: setattr(loader.batch_sampler, "batch_size", 3), NONE)],
}


def made_by(loader: Any, used: Any, script: list[tuple[Change, Change]]) -> list[Any]:
    made = []
    for before, inside in [*script, (NONE, NONE), (NONE, NONE)]:
        before(loader)
        for number, batch in enumerate(used):
            made.append(batch.tolist())
            if number == 0:
                inside(loader)
    return made


def check(script: str, kind: Any, num_workers: int) -> None:
    made = []
    for wraps in (False, True):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(1)
        loader = kind(Drawing(), batch_size=4, shuffle=True, generator=generator, num_workers=num_workers)
        used = SinkLoader(loader) if wraps else loader
        made.append((made_by(loader, used, SCRIPTS[script]), torch.rand(1).item(), generator.get_state().tolist()))
        if wraps:
            used.close()
    assert made[0] == made[1]


@pytest.mark.parametrize(("kind", "num_workers"), [(DataLoader, 0), (DataLoader, 1), (StatefulDataLoader, 1)])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.sampled(8)
def test_the_next_pass_goes_by_what_was_set(script: str, kind: Any, num_workers: int) -> None:
    check(script, kind, num_workers)


@pytest.mark.usefixtures("on_a_ring")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_ring_is_filled_by_more_or_fewer_workers(num_workers: int) -> None:
    check("other workers", DataLoader, num_workers)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.usefixtures("on_a_ring")
def test_only_batches_of_workers_are_read_where_they_are_pinned() -> None:
    """Without workers they may be the dataset's own memory, which it writes to again."""
    source = DataLoader(Drawing(), 4, num_workers=1)
    with SinkLoader(source) as loader:
        seen = []
        for change in (NONE, has(num_workers=0, pin_memory=True), has(num_workers=1, prefetch_factor=2)):
            change(source)
            seen.append({loader._slots.reads_pinned for _ in loader})
    assert seen == [{True}, {False}, {True}]


def shuffled(num_workers: int = 1, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(Drawing(), 4, shuffle=True, generator=generator, num_workers=num_workers, **options)


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def test_persistent_workers_go_on_as_they_were_started() -> None:
    plain, wrapped = shuffled(persistent_workers=True), shuffled(persistent_workers=True)
    with SinkLoader(wrapped) as loader:
        assert lists(loader) == lists(plain)
        for one in (plain, wrapped):
            has(collate_fn=negative, num_workers=2, prefetch_factor=4)(one)
        assert lists(loader) == lists(plain)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_across_passes(num_workers: int) -> None:
    """Passes of three batches in epochs of two: a pass that is under way stays as it was begun."""
    plain, wrapped = shuffled(num_workers), shuffled(num_workers)
    torch.manual_seed(3)
    expected = lists(plain)
    plain.collate_fn = negative
    expected += lists(plain)
    torch.manual_seed(3)
    with SinkLoader(wrapped, batches_per_epoch=2, slots=2) as loader:
        made = lists(loader)
        wrapped.collate_fn = negative
        made += lists(loader)
        state = loader.state_dict()
        assert made + lists(loader) == expected
    wrapped = shuffled(num_workers)
    wrapped.collate_fn = negative
    with SinkLoader(wrapped, batches_per_epoch=2) as loader:
        loader.load_state_dict(state)
        assert lists(loader) == expected[4:]


def test_what_a_data_loader_refuses_stays_refused() -> None:
    wrapped = shuffled(0)
    loader = SinkLoader(wrapped)
    for one in (wrapped, loader):
        with pytest.raises(ValueError, match="should not be set after"):
            one.dataset = Drawing()
    has(timeout=5)(loader)  # not without workers, says its iterator
    with pytest.raises((ValueError, AssertionError)):
        iter(wrapped)
    with pytest.raises((ValueError, AssertionError)):
        iter(loader)


def test_a_state_that_is_loaded_by_the_wrapped_loader() -> None:
    saved = StatefulDataLoader(Drawing(), 4, num_workers=1)
    batches = iter(saved)
    next(batches)
    state, rest = saved.state_dict(), lists(batches)
    loader = StatefulDataLoader(Drawing(), 4, num_workers=1)
    with SinkLoader(loader) as used:
        whole = lists(used)
        loader.load_state_dict(state)
        assert [[row[0] for row in batch] for batch in lists(used)] == [[row[0] for row in batch] for batch in rest]
        assert len(lists(used)) == len(whole) == 3


# --- the length of an iterable dataset


class TooMany(IterableDataset):
    """Says 3 and gives 5."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5.0).reshape(5, 1))


def warned_of(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(one.message).split(" was reported")[1] for one in seen if "Length of Iterable" in str(one.message)]


@pytest.mark.parametrize("backend", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.sampled(4)
def test_a_length_that_is_wrong_is_warned_of_as_without(kind: Any, num_workers: int, backend: bool) -> None:
    def once(used: Any) -> list[list[str]]:
        passes = [warned_of(lambda: list(used)), warned_of(lambda: [len(used), list(used)])]
        return [*passes, warned_of(lambda: list(used))]

    def loader() -> Any:
        return kind(TooMany(), batch_size=1, num_workers=num_workers)

    expected = once(loader())
    assert [len(one) for one in expected] == [0, 2, 2]
    with torch_sink.image_backend("device" if backend else "PIL"), SinkLoader(loader()) as used:
        assert once(used) == expected


@pytest.mark.filterwarnings("ignore:Length of Iterable")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_warning_comes_twice_after_a_resume(num_workers: int) -> None:
    def loader() -> SinkLoader:
        wrapped = DataLoader(TooMany(), batch_size=1, num_workers=num_workers)
        assert len(wrapped) == 3
        return SinkLoader(wrapped)

    with loader() as used:
        batches = iter(used)
        for _ in range(4):
            next(batches)
        state = used.state_dict()
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert len(warned_of(lambda: list(resumed))) == 1


def test_a_loop_asks_for_the_length_without_a_warning() -> None:
    model = nn.Linear(1, 1)
    loop = StepLoop(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), mode="eager")
    rows = DataLoader(TooMany(), batch_size=1, collate_fn=lambda samples: (samples[0], samples[0]))
    assert warned_of(lambda: loop.run(rows, epochs=2)) == []
    assert loop.step_count == 10
