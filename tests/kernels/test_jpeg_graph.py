"""The decoding of JPEG files as a CUDA graph: captured once, replayed for batches of any files that fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from image.check import kernels_on

from kernels.jpeg_cases import Decoder, golden_coefficients, open_clean_files
from torch_sink.image.decode.jpeg_batch import pack_jpegs
from torch_sink.triton_kernels.jpeg.entropy import LANE_SHAPES, LaneShape


@pytest.mark.cuda
@pytest.mark.parametrize("shape", LANE_SHAPES, ids=str)
def test_a_captured_batch_decodes_others(shape: LaneShape) -> None:
    files = list(open_clean_files().values())
    largest, *others = [(some, pack_jpegs(some, shape.bits)) for some in (files, files[::-3], files[:1])]
    with kernels_on("cuda"):
        decoder = Decoder(largest[1], shape)
        decoder.load(largest[1])
        decoder.launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.launch()
        for chosen, batch in (*others, largest):
            decoder.load(batch)
            graph.replay()
            for file, found in zip(chosen, decoder.results(batch), strict=True):
                assert found.status == 0
                np.testing.assert_array_equal(found.coefficients, golden_coefficients(file))
