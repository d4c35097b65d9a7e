"""Without `batches_per_epoch` a SinkLoader iterates as the DataLoader that it wraps: each `iter()` is a new epoch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sink.numbered import numbered, values
from torch_sink.errors import SinkError
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


class Drawing(Dataset):
    """Samples that say which they are, and what the global generator gave."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


def fresh(num_workers: int, seeded: bool) -> DataLoader:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7) if seeded else None
    return DataLoader(Drawing(), batch_size=4, shuffle=True, num_workers=num_workers, generator=generator)


def peek(loader: Iterable[Any]) -> list[Any]:
    """`next(iter(loader))`, as scripts look at one batch before they train."""
    return [next(iter(loader))]


def two_batches(loader: Iterable[Any]) -> list[Any]:
    """A loop that is left by `break`."""
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 2:
            break
    return seen


def nothing(loader: Iterable[Any]) -> list[Any]:
    """An iterator that nobody reads."""
    iter(loader)
    return []


def all_but_the_end(loader: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(iter(loader), 5))


def raising(loader: Iterable[Any]) -> list[Any]:
    """A loop whose body fails."""
    seen = []
    with contextlib.suppress(ZeroDivisionError):
        for batch in loader:
            seen.append(batch)
            _ = 1 // (3 - len(seen))
    return seen


WAYS = [peek, two_batches, nothing, all_but_the_end, raising]


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_equal_those_of_the_data_loader(num_workers: int, seeded: bool) -> None:
    def epochs(loader: Iterable[Any]) -> tuple[list[Any], torch.Tensor]:
        seen = [epoch for way in WAYS for epoch in (way(loader), list(loader), way(loader))]
        return seen, torch.get_rng_state()

    expected, state = epochs(fresh(num_workers, seeded))
    with SinkLoader(fresh(num_workers, seeded)) as loader:
        actual, own_state = epochs(loader)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert torch.equal(own_state, state)


def test_persistent_workers_give_new_epochs_as_well() -> None:
    def orders(loader: Iterable[Any]) -> list[list[int]]:
        return [[batch[0].tolist() for batch in way(loader)] for way in (two_batches, list, peek, list)]

    def persistent() -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        return DataLoader(
            Drawing(), batch_size=4, shuffle=True, num_workers=1, generator=generator, persistent_workers=True
        )

    with SinkLoader(persistent()) as loader:
        assert orders(loader) == orders(persistent())


def nested(loader: SinkLoader) -> None:
    for _ in loader:
        for _ in loader:
            pass


def zipped(loader: SinkLoader) -> None:
    for _ in zip(loader, loader, strict=True):
        pass


@pytest.mark.parametrize("batches_per_epoch", [None, 3])
@pytest.mark.parametrize("use", [nested, zipped])
def test_two_iterators_at_a_time_say_what_to_do(
    use: Callable[[SinkLoader], None], batches_per_epoch: int | None
) -> None:
    with pytest.raises(SinkError, match=r"one iterator at a time\. For nested loops or zip\(\) make one SinkLoader"):
        use(SinkLoader(numbered(4), batches_per_epoch=batches_per_epoch))


def test_two_loaders_over_one_source_can_be_nested() -> None:
    source = DataLoader(range(4))
    outer, inner = SinkLoader(source), SinkLoader(source)
    assert [(int(a), int(b)) for a in outer for b in inner] == list(itertools.product(range(4), range(4)))
    assert [(int(a), int(b)) for a, b in zip(outer, inner, strict=True)] == [(i, i) for i in range(4)]


def test_rest_goes_on_where_a_loop_was_left() -> None:
    loader = SinkLoader(numbered(5))
    assert values(two_batches(loader)) == [0, 1]
    assert values(loader.rest()) == [2, 3, 4]
    assert values(loader.rest()) == [0, 1, 2, 3, 4]
    assert values(two_batches(loader)) == [0, 1]
    assert values(loader) == [0, 1, 2, 3, 4]


def test_rest_goes_on_behind_a_batch_that_failed() -> None:
    class Failing(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index + 0 // (index - 2)

    with SinkLoader(DataLoader(Failing())) as loader:
        seen = []
        with pytest.raises(ZeroDivisionError):
            seen.extend(values(loader))
        assert values(loader.rest()) == [3]


def test_only_the_first_iter_after_loading_gives_the_rest() -> None:
    source = numbered(4)
    saved = SinkLoader(source)
    two_batches(saved)
    loader = SinkLoader(source)
    loader.load_state_dict(saved.state_dict())
    assert values(loader) == [2, 3]
    assert values(loader) == [0, 1, 2, 3]
    loader.load_state_dict(saved.state_dict())
    assert values(peek(loader)) == [2]
    assert values(loader) == [0, 1, 2, 3]


def test_a_loaded_state_survives_an_interrupt_of_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SinkLoader(numbered(4))
    two_batches(saved)
    loader = SinkLoader(numbered(4))
    loader.load_state_dict(saved.state_dict())

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loader._resuming, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert values(loader) == [2, 3]


def test_a_length_of_epochs_that_is_taken_away_ends_the_endless_traversal() -> None:
    loader = SinkLoader(numbered(5), batches_per_epoch=3)
    assert values(loader) == [0, 1, 2]
    loader.batches_per_epoch = None
    assert values(loader) == [0, 1, 2, 3, 4]


def test_a_whole_pass_leaves_the_traversal_where_it_was() -> None:
    saved = SinkLoader(numbered(4))
    two_batches(saved)
    loader = SinkLoader(numbered(4))
    loader.load_state_dict(saved.state_dict())
    with loader._whole_pass():
        assert values(loader) == [0, 1, 2, 3]
    assert values(loader) == [2, 3], "the loaded state"
    two_batches(loader)
    with loader._whole_pass():
        assert values(loader) == [0, 1, 2, 3]
    assert values(loader.rest()) == [2, 3]
    two_batches(loader)
    with loader._whole_pass():
        assert values(loader) == [0, 1, 2, 3]
    assert values(loader) == [0, 1, 2, 3], "a new epoch, as without the pass in between"
