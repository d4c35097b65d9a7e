"""Samples that are taken out of every part of a batch."""

from __future__ import annotations

import torch

from torch_sink.common.containers import select_samples

LEFT = [0, 1, 2, 3, 4, 5, 7]  # of 8 samples


def test_what_stands_beside_a_batch_loses_its_samples() -> None:
    """Two batches of different sizes; one has as many samples as a pair has parts."""
    large, small, labels, names = torch.zeros(len(LEFT), 3), torch.zeros(2, 3), torch.arange(8), list("abcdefgh")
    done = {id(large): 8, id(small): 2}
    found = select_samples({"one": (large, (labels, names)), "other": [small, (1, 2)]}, {8: LEFT, 2: None}, done)
    images, (numbers, letters) = found["one"]
    assert images is large
    assert numbers.tolist() == LEFT
    assert letters == [names[at] for at in LEFT]
    assert found["other"] == [small, (1, 2)]


def test_a_pair_beside_a_batch_of_two() -> None:
    one, labels = torch.zeros(1, 3), torch.arange(2)
    found = select_samples((one, (labels, ["a", "b"]), ("c", "d")), {2: [1]}, {id(one): 2})
    assert found[0] is one
    assert [list(part) for part in found[1]] == [[1], ["b"]]
    assert found[2] == ("d",)
