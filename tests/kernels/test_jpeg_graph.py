"""The decoding of JPEG files as a CUDA graph: captured once, replayed for batches of any files that fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from image.check import kernels_on
from image.jpeg_files import stock

from kernels.jpeg_cases import (
    GraphInputs,
    golden_coefficients,
    new_decoder,
    open_clean_files,
    pack_files,
    pixels_of,
    results,
)
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LaneShape


@pytest.mark.cuda
@pytest.mark.parametrize("shape", LANE_SHAPES, ids=str)
def test_a_captured_batch_decodes_others(shape: LaneShape) -> None:
    files = list(open_clean_files().values())
    with kernels_on("cuda"):
        largest, *others = [(some, *pack_files(some, shape.bits)) for some in (files, files[::-3], files[:1])]
        decoder = new_decoder(largest[1].capacity, shape)
        memory = GraphInputs.of_capacity(largest[1].capacity)
        decoder.load(largest[1], memory.holding(largest[2]))
        decoder.launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.launch()
        for chosen, batch, inputs in (*others, largest):
            decoder.load(batch, memory.holding(inputs))
            graph.replay()
            pixels = pixels_of(decoder, chosen, batch)
            for file, found, image in zip(chosen, results(decoder, batch), pixels, strict=True):
                assert found.status == 0
                np.testing.assert_array_equal(found.coefficients, golden_coefficients(file))
                assert torch.equal(image, stock(file.source.data, file.source.mode))
