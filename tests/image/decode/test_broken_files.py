"""`on_decode_error`: samples of broken files are skipped or replaced, and the rest is what stock code makes of it."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate
from torchvision import transforms

import torch_sink
from image.broken_files import (
    COUNT,
    OPENERS,
    QUIET,
    V1,
    V2,
    Files,
    Stream,
    Together,
    as_list,
    assert_same_batches,
    backend,
    batches,
    break_one,
    broken_reason,
    decoded,
    loaded,
    opened,
    pixels,
    stock_samples,
    tree,
    without_broken,
)
from image.check import assert_same_bits
from torch_sink.image.core.origins import NOTHING_RECORDED
from torch_sink.image.handles.tensor import Handle

pytestmark = [pytest.mark.halved, QUIET]


# --- samples by index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.sampled(2)
def test_skipping_leaves_the_batches_of_stock_code_without_the_broken_samples(
    paths: list[Path], workers: int, batch_size: int
) -> None:
    dataset = tree(paths[0].parents[1])
    options = {"batch_size": batch_size, "num_workers": workers, "shuffle": True}
    stock = stock_samples(dataset, 1, **options)
    broken = sum(sample is None for batch in stock for sample in batch)
    assert COUNT / 4 < broken < COUNT / 2
    assert_same_batches(batches(dataset, "skip", **options), without_broken(stock))
    report = torch_sink.decode_report()
    assert (report.skipped, report.replaced, len(report)) == (broken, 0, broken)
    assert torch.rand(1) != torch.rand(1)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("transform", [V1, V2, pixels], ids=["v1", "v2", "numpy"])
@pytest.mark.sampled(4)
def test_whoever_opens_the_file(paths: list[Path], opener: str, transform: Callable[[Any], Any]) -> None:
    dataset = Files(paths, OPENERS[opener], transform)
    expected = without_broken(stock_samples(dataset, 1, batch_size=6))
    made = batches(dataset, "skip", batch_size=6)
    assert_same_batches(made, expected)
    rest = torch.rand(3)
    stock_samples(dataset, 1, batch_size=6)
    assert torch.equal(rest, torch.rand(3)), "the generator stands where stock code leaves it"


@pytest.mark.filterwarnings("ignore:.*TorchVision are deprecated:DeprecationWarning")
def test_torchvisions_own_decoder(paths: list[Path]) -> None:
    dataset = Files(paths, decoded, V2)
    assert_same_batches(batches(dataset, "skip", batch_size=6), without_broken(stock_samples(dataset, 1, batch_size=6)))


def replaced(samples: list[Any]) -> list[Any]:
    """The samples of a batch with the next good one in the place of each that is None."""
    good = [row for row, sample in enumerate(samples) if sample is not None]
    return [samples[next((other for other in good if other >= row), good[0])] for row in range(len(samples))]


@pytest.mark.parametrize("workers", [0, 2])
def test_replacing_repeats_the_next_good_sample(paths: list[Path], workers: int) -> None:
    dataset = tree(paths[0].parents[1])
    options = {"batch_size": 8, "num_workers": workers, "shuffle": True}
    stock = stock_samples(dataset, 2, **options)
    assert_same_batches(
        batches(dataset, "replace", 2, **options), [default_collate(replaced(samples)) for samples in stock]
    )
    assert torch_sink.decode_report().replaced == sum(sample is None for batch in stock for sample in batch)


def test_a_batch_of_broken_files_alone_is_replaced_by_the_next_good_sample_of_the_dataset(paths: list[Path]) -> None:
    dataset = Files(paths, loaded, V1)
    stock = stock_samples(dataset, 1, batch_size=1)
    made = batches(dataset, "replace", batch_size=1)
    good = [index for index, (sample,) in enumerate(stock) if sample is not None]
    expected = [min((other for other in good if other >= index), default=good[0]) for index in range(COUNT)]
    assert [label.item() for _, label in made] == expected
    for index in good:
        assert_same_bits(made[index][0][0], stock[index][0][0])  # it draws what it draws in stock code


@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.sampled(2)
def test_samples_without_a_batch(paths: list[Path], policy: str, workers: int) -> None:
    dataset = Files(paths, opened, V2)
    stock = [sample for (sample,) in stock_samples(dataset, 1, batch_size=1, num_workers=workers)]
    made = batches(dataset, policy, batch_size=None, num_workers=workers)
    good = [sample for sample in stock if sample is not None]
    if policy == "skip":
        assert_same_batches(made, good)
    else:
        assert len(made) == COUNT
        kept = [made[index] for index, sample in enumerate(stock) if sample is not None]
        assert_same_batches(kept, good)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_datasets_that_give_a_batch_at_once(paths: list[Path], policy: str) -> None:
    """In stock code one broken file costs the whole batch; the samples are asked for one by one then."""
    together, one_by_one = Together(paths, loaded, V1), Files(paths, loaded, V1)
    for dataset, same in (
        (together, one_by_one),
        (Subset(tree(paths[0].parents[1]), range(10, 40)), None),
        (ConcatDataset([together, together]), ConcatDataset([one_by_one, one_by_one])),
    ):
        stock = stock_samples(same or dataset, 4, batch_size=16)
        if policy == "skip":
            assert_same_batches(batches(dataset, policy, 4, batch_size=16), without_broken(stock))
        else:
            expected = [default_collate(replaced(samples)) for samples in stock]
            assert_same_batches(batches(dataset, policy, 4, batch_size=16), expected)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_draws_from_another_bit_generator_of_numpy(
    paths: list[Path], policy: str, bit_generator_of_numpy: Callable[[Any], None]
) -> None:
    """Its state is in no checkpoint: it is only put back."""

    def shifted(image: Any) -> torch.Tensor:
        return transforms.functional.pil_to_tensor(image.resize((8, 8))) + int(np.random.randint(5))

    def drawn(make: Callable[[], Any]) -> Any:
        bit_generator_of_numpy(np.random.PCG64(1))
        return make()

    together = drawn(lambda: batches(Together(paths, loaded, shifted), policy, batch_size=16))
    stock = drawn(lambda: stock_samples(Files(paths, loaded, shifted), 1, batch_size=16))
    expected = without_broken(stock) if policy == "skip" else [default_collate(replaced(batch)) for batch in stock]
    assert_same_batches(together, expected)


def test_own_collate_functions_and_forms_of_samples(paths: list[Path]) -> None:
    class Dicts(Files):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return {"image": image, "label": label, "name": self.paths[index]}

    def collate(samples: list[dict[str, Any]]) -> Any:
        names = [sample.pop("name") for sample in samples]  # writes to the samples
        return torch.stack([sample["image"] for sample in samples]), names

    dataset = Dicts(paths, loaded, V1)
    stock = stock_samples(dataset, 1, batch_size=6)
    made = batches(dataset, "replace", batch_size=6, collate_fn=collate)
    for (images, names), samples in zip(made, stock, strict=True):
        expected = replaced(samples)
        assert names == [sample["name"] for sample in expected]
        assert_same_bits(images, torch.stack([sample["image"] for sample in expected]))


def test_workers_that_stay_for_the_next_pass(paths: list[Path]) -> None:
    dataset = Files(paths, loaded, V1)
    options = {"batch_size": 6, "num_workers": 2, "persistent_workers": True}
    good = sum(broken_reason(path) is None for path in paths)
    with backend("skip"):
        loader = DataLoader(dataset, **options)
        for _ in range(2):
            assert sum(len(labels) for _, labels in loader) == good
    assert torch_sink.decode_report().skipped == 2 * (COUNT - good)


# --- the report


@pytest.mark.parametrize("workers", [0, 2])
def test_the_report_lists_path_and_reason(paths: list[Path], workers: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = {str(path) for path in paths if broken_reason(path) is not None}
    with caplog.at_level(logging.WARNING, "torch_sink"):
        batches(Files(paths, loaded, V1), "skip", batch_size=4, num_workers=workers)
    report = torch_sink.decode_report()
    assert set(report.files) == expected
    assert all(reason for reason in report.files.values())
    assert report
    assert all(f"{path}: " in str(report) for path in expected)
    (record,) = caplog.records
    first, *lines = record.message.splitlines()
    assert first == f"{len(expected)} samples skipped, 0 replaced; {len(expected)} broken files"
    assert len(lines) == 11
    assert lines[-1] == f"  and {len(expected) - 10} more: see torch_sink.decode_report()"


def test_the_report_begins_anew_with_the_backend(paths: list[Path]) -> None:
    batches(Files(paths, loaded, V1), "skip", batch_size=4)
    with pytest.raises(ValueError, match="on_decode_error"):
        torch_sink.set_image_backend("device", on_decode_error="a mistake")
    assert torch_sink.decode_report()
    with torch_sink.image_backend("device", device="cpu"):
        assert not torch_sink.decode_report()
        assert str(torch_sink.decode_report()) == "no broken files"
        assert str(torch_sink.fallback_report()) == NOTHING_RECORDED


class InMemory(Files):
    """What reads a file itself and gives Pillow its bytes."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return V1(Image.open(io.BytesIO(Path(self.paths[index]).read_bytes())).convert("RGB")), index


@pytest.mark.parametrize("workers", [0, 2])
def test_images_without_a_name_are_listed_by_their_sample(paths: list[Path], workers: int) -> None:
    files = [path for path in paths if path.is_file()]
    broken = [index for index, path in enumerate(files) if broken_reason(path) is not None]
    batches(InMemory(files, loaded, V1), "skip", batch_size=4, num_workers=workers)
    assert sorted(torch_sink.decode_report().files) == sorted(f"sample {index} of InMemory" for index in broken)


def test_the_fallback_report_shows_broken_files_as_well(paths: list[Path]) -> None:
    with backend("skip"):
        list(DataLoader(Files(paths, loaded, V1), batch_size=4))
        report = torch_sink.fallback_report()
        assert not report
        assert str(report) == f"no fallbacks\n{torch_sink.decode_report()}"


@pytest.mark.once_on_oldest
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_pass_without_one_good_sample_is_an_error(tmp_path: Path, policy: str) -> None:
    """As where the folder is a wrong one."""
    missing = [tmp_path / f"{number}.jpg" for number in range(5)]
    for options in ({"batch_size": 2}, {"batch_size": None}, {"batch_size": 2, "num_workers": 1}):
        with pytest.raises(torch_sink.DecodeError, match=r"0\.jpg.*not one sample of this pass could be made"):
            batches(Files(missing, loaded, V1), policy, **options)


# --- switching


@pytest.mark.once_on_oldest
def test_iterators_keep_the_policy_with_which_they_were_made(paths: list[Path]) -> None:
    dataset = Files(paths, loaded, V1)
    for workers in (0, 1):
        with backend("skip"):
            iterator = iter(DataLoader(dataset, batch_size=4, num_workers=workers))
        assert sum(len(labels) for _, labels in iterator) == sum(broken_reason(path) is None for path in paths)
    with pytest.raises(OSError, match="Is a directory"):
        list(DataLoader(dataset, batch_size=4))


@pytest.mark.parametrize("wrong", ["ignore", "", None])
def test_wrong_policies_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"on_decode_error=.*'raise', 'skip', 'replace'"):
        torch_sink.set_image_backend("device", device="cpu", on_decode_error=wrong)
    with pytest.raises(ValueError, match="belong to the 'device' backend"):
        torch_sink.set_image_backend("PIL", on_decode_error="skip")
    assert torch_sink.get_image_backend() == "PIL"


def test_the_policy_travels_to_workers_that_are_spawned() -> None:
    with backend("skip"):
        worker_loop = pickle.loads(pickle.dumps(torch.utils.data._utils.worker._worker_loop))
        (recording,) = worker_loop.features
        assert recording.settings.on_decode_error == "skip"


@pytest.mark.slow
def test_workers_that_are_spawned(paths: list[Path]) -> None:
    dataset = Files(paths[:12], loaded, V1)
    expected = without_broken(stock_samples(dataset, 1, batch_size=6))
    made = batches(dataset, "skip", batch_size=6, num_workers=1, multiprocessing_context="spawn")
    assert [labels.tolist() for _, labels in made] == [labels.tolist() for _, labels in expected]


# --- by the thousand


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_broken_files(tmp_path: Path, seed: int) -> None:
    """Each is there if stock code can decode it, with stock code's bits, and reported if not."""
    r = random.Random(seed)
    paths = [tmp_path / f"{number:05}.jpg" for number in range(3000)]
    for path in paths:
        path.write_bytes(break_one(r))
    for load in OPENERS.values():
        dataset = Files(paths, load, V1)
        options = {"batch_size": 32, "num_workers": 2}
        stock = stock_samples(dataset, seed, **options)
        assert_same_batches(batches(dataset, "skip", seed, **options), without_broken(stock))
        broken = {index for index, sample in enumerate(itertools.chain(*stock)) if sample is None}
        # A file that is not JPEG has no name any more when its user has closed it.
        names = {str(path): index for index, path in enumerate(paths)}
        names |= {f"sample {index} of Files": index for index in range(len(paths))}
        assert {names[name] for name in torch_sink.decode_report().files} == broken
        assert len(broken) > 500
        torch.manual_seed(seed)
        expected = list(DataLoader(Stream(paths, load, V1, goes_on=True), batch_size=None))
        assert_same_batches(batches(Stream(paths, load, V1, goes_on=True), "skip", seed, batch_size=None), expected)


@pytest.mark.slow
def test_odd_files(tmp_path: Path) -> None:
    """Odd and broken files of other people's collections."""
    named = os.environ.get("TORCH_SINK_ODD_JPEGS")
    if not named:
        pytest.skip("TORCH_SINK_ODD_JPEGS names no folder")
    paths = sorted(path for path in Path(named).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    dataset = Files(paths, opened, V1)
    assert_same_batches(batches(dataset, "skip", batch_size=4), without_broken(stock_samples(dataset, 1, batch_size=4)))


def test_the_collate_function_sees_no_placeholder(paths: list[Path]) -> None:
    for batch in batches(Files(paths, loaded, V1), "skip", batch_size=5, collate_fn=as_list):
        assert all(len(sample) == 2 for sample in batch)


def zipped(samples: list[Any]) -> tuple[Any, ...]:
    """As detection collates: images of any size stay apart."""
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("transform", [V1, V2, transforms.PILToTensor()], ids=["v1", "v2", "ragged"])
@pytest.mark.sampled(6)
def test_images_that_no_collate_function_stacks(paths: list[Path], transform: Any, policy: str, workers: int) -> None:
    """Without a device a worker makes their pixels, after the samples were collated; in this process, who reads them."""
    dataset = Files(paths, loaded, transform)
    stock = stock_samples(dataset, 1, batch_size=6, num_workers=workers)
    kept = [[sample for sample in samples if sample is not None] for samples in stock]
    expected = [zipped(samples) for samples in kept] if policy == "skip" else [zipped(replaced(s)) for s in stock]
    made = batches(dataset, policy, batch_size=6, num_workers=workers, collate_fn=zipped)
    assert len(made) == len(expected) > 0
    for (images, indices), (stock_images, stock_indices) in zip(made, expected, strict=True):
        assert indices == stock_indices
        for image, stock_image in zip(images, stock_images, strict=True):
            assert not (workers and isinstance(image, Handle))
            assert_same_bits(image.materialize() if isinstance(image, Handle) else image, stock_image)
