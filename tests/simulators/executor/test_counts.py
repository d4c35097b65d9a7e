"""What is counted of a launch: instructions, sectors and wavefronts, against what they are by hand."""

from __future__ import annotations

import pytest
import torch

from simulators.executor.ptx.counts import Counts
from simulators.executor.ptx.findings import Findings
from simulators.executor.ptx.machine import Options
from simulators.executor.ptx_text import kernel, launch

pytestmark = pytest.mark.once


def counted(body: str, memory: torch.Tensor, *, ctas: int = 1, random_order: bool = False) -> Counts:
    options = Options(counts=True, random_order=random_order)
    text = kernel(body, parameters=1, threads=64)
    started = launch(text, [memory], Findings(), ctas=ctas, shared_bytes=8192, options=options)
    started.run()
    assert started.counts is not None
    return started.counts


@pytest.mark.parametrize(
    ("step", "sectors", "wavefronts"), [(0, 1, 1), (1, 1, 1), (4, 4, 1), (8, 8, 2), (32, 32, 8), (128, 32, 32)]
)
def test_accesses_to_tensors(step: int, sectors: int, wavefronts: int) -> None:
    """32 lanes that are `step` bytes apart: sectors of 32 bytes, lines of 128."""
    memory = torch.zeros(64 * 128 + 128, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 128 :]
    body = f"mad.wide.s32 %rd1, %r92, {step}, %rd91; ld.global.b8 %rs1, [%rd1];"
    found = counted(body, memory)
    assert found.requests == {"ld.global": 2}
    assert found.sectors == {"ld.global": 2 * sectors}
    assert found.wavefronts == {"ld.global": 2 * wavefronts}


@pytest.mark.parametrize(("step", "wavefronts"), [(0, 1), (4, 1), (8, 2), (12, 1), (64, 16), (128, 32)])
def test_conflicts_in_shared_memory(step: int, wavefronts: int) -> None:
    """Lanes of a warp that are `step` bytes apart: 32 banks of 4 bytes, and a word that several read is read once."""
    body = f"and.b32 %r1, %r92, 31; mul.lo.s32 %r2, %r1, {step}; ld.shared.b32 %r3, [%r2];"
    found = counted(body, torch.zeros(1))
    assert found.requests == {"ld.shared": 2}
    assert found.wavefronts == {"ld.shared": 2 * wavefronts}


def test_wide_accesses_to_shared_memory() -> None:
    body = "and.b32 %r1, %r92, 31; shl.b32 %r2, %r1, 4; ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r2];"
    assert counted(body, torch.zeros(1)).wavefronts == {"ld.shared": 2 * 4}


@pytest.mark.parametrize("random_order", [False, True])
def test_instructions_of_a_loop(random_order: bool) -> None:
    """The first warp goes round 3 times, the second 5 times, in each of 7 programs."""
    body = """shr.u32 %r1, %r92, 5; mad.lo.s32 %r2, %r1, 2, 3;
        $L_loop: sub.s32 %r2, %r2, 1; setp.gt.s32 %p1, %r2, 0; @%p1 bra $L_loop;"""
    found = counted(body, torch.zeros(1), ctas=7, random_order=random_order)
    assert found.instructions["sub.s32"] == found.instructions["bra"] == 7 * (3 + 5)
    assert found.instructions["shr.u32"] == 7 * 2
