"""Arguments that are tensors: a displacement field travels in the bytes of its batch."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from image.check import assert_same_bits, lazy_batch, run
from torch_sink.image.core.ops import PackedArgument, TensorArgument

ELASTIC = v1.Compose([v1.Resize((13, 19)), v1.ElasticTransform(60.0, 1.0), v1.ToTensor()])
OPENERS = [opener(encoded(61, 47, 1)), opener(encoded(29, 31, 4))]


class _Photographs(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return ELASTIC(OPENERS[index % 2]())


def _arguments(batch: Any, kind: type) -> list[Any]:
    return [
        argument
        for ops in batch.program.packed.contents.programs
        for op in ops
        for argument in op.args
        if type(argument) is kind
    ]


def test_they_are_packed_and_cross_pickle() -> None:
    expected = default_collate(run(ELASTIC, OPENERS, 3)[0])
    with torch_sink.image_backend("device", device="cpu", strict=True):
        batch = lazy_batch(run(ELASTIC, OPENERS, 3)[0])
        assert not _arguments(batch, TensorArgument)
        places = _arguments(batch, PackedArgument)
        assert [place.shape for place in places] == [(1, 13, 19, 2)] * 2
        assert len(batch.program.packed.blob) == places[1].begin + 4 * 13 * 19 * 2
        assert str(batch.plan).count("grid") == 1
        crossed = pickle.loads(pickle.dumps(batch))
        assert len(pickle.dumps(crossed.program.packed.contents.programs)) < 1000
        for made in (batch, crossed):
            assert_same_bits(made.__torch_sink_execute__("cpu")[0], expected)


def test_one_argument_of_many_images_is_packed_once() -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        image = v1.Compose([v1.Resize((13, 19)), v1.PILToTensor()])(OPENERS[0]())
        field = torch.zeros(1, 13, 19, 2)
        moved = v2.functional.elastic(image, field)
        batch = lazy_batch([moved, moved, v2.functional.elastic(image, field)])
        assert len({place.begin for place in _arguments(batch, PackedArgument)}) == 2


def test_later_writes_to_the_tensor_are_not_seen() -> None:
    transform = v1.Compose([v1.Resize((13, 19)), v1.PILToTensor()])
    expected = transform(OPENERS[0]())
    with torch_sink.image_backend("device", device="cpu", strict=True):
        field = torch.zeros(1, 13, 19, 2)
        moved = v1.functional.elastic_transform(transform(OPENERS[0]()), field)
        field.fill_(0.5)
        assert torch.equal(moved.materialize(), expected)


def test_they_come_from_workers() -> None:
    expected = list(DataLoader(_Photographs(), batch_size=4))
    with torch_sink.image_backend("device", device="cpu", strict=True):
        loader = DataLoader(_Photographs(), batch_size=4, num_workers=1, multiprocessing_context="fork")
        made = [batch.to("cpu") for batch in loader]
    assert_same_bits(made[0], expected[0])
