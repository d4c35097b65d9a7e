"""Branches, barriers, exchanges between lanes, vectors and atomic operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simulators.executor.ptx.findings import Fault, Findings
from simulators.executor.ptx.machine import Options
from simulators.executor.ptx_text import execute, kernel, kinds, launch

pytestmark = pytest.mark.once

ORDERS = [Options(random_order=False), *(Options(random_order=True, seed=seed) for seed in range(3))]
NOTED = "mad.wide.s32 %rd80, %r90, 4, %rd91; mad.wide.s32 %rd81, %r90, 4, %rd92;"


def on_lanes(instruction: str, values: torch.Tensor) -> torch.Tensor:
    """What each lane of a warp has in %r2 after an instruction, with its value in %r1 and its number in %r90."""
    made = torch.zeros_like(values)
    body = f"{NOTED} ld.global.b32 %r1, [%rd80]; {instruction} st.global.b32 [%rd81], %r2;"
    assert not execute(kernel(body, parameters=2), values, made)
    return made


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles(mode: str, width: int) -> None:
    """As CUDA's guide tells `__shfl_up_sync` and its kin: within parts of `width` lanes."""
    values = torch.arange(100, 132, dtype=torch.int32)
    for by in (0, 1, 5, 16):
        limits = (32 - width) << 8 | (0 if mode == "up" else 31)
        made = on_lanes(f"shfl.sync.{mode}.b32 %r2, %r1, {by}, {limits}, -1;", values)
        for lane in range(32):
            first = lane // width * width
            source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first + by % width}[mode]
            is_there = first <= source if mode == "up" else source < first + width
            assert made[lane] == values[source if is_there else lane], (mode, width, by, lane)


def test_a_shuffle_says_whether_the_lane_was_there() -> None:
    body = "shfl.sync.down.b32 %r3|%p1, %r1, 30, 31, -1; selp.b32 %r2, 1, 0, %p1;"
    assert on_lanes(body, torch.zeros(32, dtype=torch.int32)).tolist() == [1, 1, *[0] * 30]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add.s32", np.sum),
        ("max.s32", np.max),
        ("min.s32", np.min),
        ("or.b32", np.bitwise_or.reduce),
        ("and.b32", np.bitwise_and.reduce),
    ],
)
def test_reductions(name: str, function: object) -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(-(2**26), 2**26, 32, np.int32))
    made = on_lanes(f"redux.sync.{name} %r2, %r1, -1;", values)
    assert set(made.tolist()) == {int(function(values.numpy()))}  # type: ignore[operator]


def test_a_ballot_has_a_bit_for_each_lane() -> None:
    values = torch.tensor([1 if lane in (0, 3, 31) else 0 for lane in range(32)], dtype=torch.int32)
    made = on_lanes("setp.ne.b32 %p1, %r1, 0; vote.sync.ballot.b32 %r2, %p1, -1;", values)
    assert set(made.tolist()) == {1 + 8 - (1 << 31)}


def test_a_register_that_nobody_wrote_holds_garbage() -> None:
    made = torch.zeros(32, dtype=torch.int32)
    on_some = "setp.lt.s32 %p1, %r90, 10; @%p1 mov.u32 %r2, 7; st.global.b32 [%rd81], %r2;"
    assert not execute(kernel(NOTED + on_some, parameters=2), made, made)
    assert made[:10].tolist() == [7] * 10
    assert made[10:].unique().numel() == 22


def test_only_whole_warps_exchange() -> None:
    with pytest.raises(Exception, match="whole warps"):
        on_lanes("redux.sync.add.s32 %r2, %r1, 15;", torch.zeros(32, dtype=torch.int32))


def test_vectors_and_halves() -> None:
    values, made = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = """mad.wide.s32 %rd1, %r90, 16, %rd91; mad.wide.s32 %rd2, %r90, 16, %rd92;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+0];
        mov.b64 %rd3, {%r1, %r2}; mov.b64 {%r5, _}, %rd3; mov.b32 {%rs1, %rs2}, %r4; mov.b32 %r6, {%rs2, %rs1};
        st.global.v4.b32 [%rd2], {%r4, %r3, %r5, %r6};"""
    assert not execute(kernel(body, parameters=2), values, made)
    rows = values.view(32, 4)
    turned = (rows[:, 3] << 16) | (rows[:, 3] >> 16)
    assert torch.equal(made.view(32, 4), torch.stack([rows[:, 3], rows[:, 2], rows[:, 0], turned], 1))


def test_a_guarded_load_keeps_what_it_does_not_load() -> None:
    body = """setp.lt.s32 %p1, %r90, 10; mov.u32 %r2, 7; @%p1 ld.global.b32 { %r2 }, [ %rd80 + 0 ];
        @!%p1 mov.u32 %r2, 8; setp.lt.s32 %p2, %r90, 20; @%p2 mov.u32 %r2, 9; @!%p1 st.global.b32 [%rd81], %r2;"""
    made = torch.zeros(32, dtype=torch.int32)
    assert not execute(kernel(NOTED + body, parameters=2), torch.arange(10, dtype=torch.int32), made)
    assert made.tolist() == [0] * 10 + [9] * 10 + [8] * 12


def test_narrow_loads_are_extended() -> None:
    values = torch.tensor([-3] * 32, dtype=torch.int8)
    body = """cvt.s64.s32 %rd1, %r90; add.s64 %rd2, %rd91, %rd1; mad.wide.s32 %rd3, %r90, 4, %rd92;
        ld.global.s8 %rs1, [%rd2]; ld.global.u8 %rs2, [%rd2]; mov.b32 %r1, {%rs1, %rs2}; st.global.b32 [%rd3], %r1;"""
    made = torch.zeros(32, dtype=torch.int32)
    assert not execute(kernel(body, parameters=2), values, made)
    assert set(made.tolist()) == {0x00FDFFFD}


COLLATZ = """ld.global.b32 %r1, [%rd80]; mov.b32 %r2, 0;
$L_loop: and.b32 %r3, %r1, 1; setp.eq.b32 %p1, %r3, 0; redux.sync.add.s32 %r4, %r1, -1;
    setp.eq.b32 %p2, %r4, 32; @%p2 bra $L_end;
    shr.u32 %r5, %r1, 1; mad.lo.s32 %r6, %r1, 3, 1; selp.b32 %r7, %r5, %r6, %p1;
    setp.eq.b32 %p3, %r1, 1; selp.b32 %r1, %r1, %r7, %p3; selp.b32 %r8, 0, 1, %p3; add.s32 %r2, %r2, %r8;
    bra.uni $L_loop;
$L_end: st.global.b32 [%rd81], %r2;"""


def collatz(number: int) -> int:
    return 0 if number == 1 else 1 + collatz(number // 2 if number % 2 == 0 else 3 * number + 1)


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_warps_of_one_launch_leave_a_loop_at_different_times(options: Options) -> None:
    values, made = torch.arange(1, 513, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    assert not execute(kernel(NOTED + COLLATZ, parameters=2, threads=128), values, made, ctas=4, options=options)
    assert made.tolist() == [collatz(number) for number in values.tolist()]


TABLE = """shr.u32 %r1, %r90, 5; brx.idx %r1, $L_table;
$L_zero: mov.b32 %r2, 10; bra.uni $L_end;
$L_one: mov.b32 %r2, 11; bra.uni $L_end;
$L_two: mov.b32 %r2, 12;
$L_end: st.global.b32 [%rd80], %r2; bra.uni $L_done;
$L_table: .branchtargets $L_zero, $L_two, $L_one, $L_two;
$L_done:"""


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_a_table_of_targets(options: Options) -> None:
    made = torch.zeros(128, dtype=torch.int32)
    text = kernel("mad.wide.s32 %rd80, %r90, 4, %rd91;" + TABLE, parameters=1, threads=128)
    assert not execute(text, made, options=options)
    assert made.view(4, 32)[:, 0].tolist() == [10, 12, 11, 12]


def test_lanes_that_go_different_ways_are_refused() -> None:
    findings = Findings()
    text = kernel("setp.lt.s32 %p1, %r90, 5; @%p1 bra $L_end; mov.b32 %r1, 0;\n$L_end:", parameters=0)
    with pytest.raises(Fault, match=r"kernel\.py:2, bra: lanes of a warp go different ways"):
        launch(text, [], findings).run()
    assert len(findings) == 1


@pytest.mark.parametrize("kind", ["global", "shared"])
@pytest.mark.parametrize("name", ["add", "max", "min", "or", "and"])
def test_atomic_operations_in_any_order(kind: str, name: str) -> None:
    values = torch.from_numpy(np.random.default_rng(1).integers(-999, 999, 256, np.int32))
    start = -1 if name == "and" else 0
    total = torch.full((1,), start, dtype=torch.int32)
    dtype = "b32" if name in ("or", "and") else "s32"
    to, before, after = "%rd92", "", ""
    if kind == "shared":
        to = "global_smem"
        before = f"mov.b32 %r9, {start}; setp.eq.s32 %p1, %r92, 0; @%p1 st.shared.b32 [global_smem], %r9; bar.sync 0;"
        after = (
            f"bar.sync 0; ld.shared.b32 %r4, [global_smem]; @%p1 red.global.gpu.relaxed.{name}.{dtype} [%rd92], %r4;"
        )
    body = f"mad.wide.s32 %rd80, %r90, 4, %rd91; ld.global.b32 %r1, [%rd80]; {before} red.{kind}.{name}.{dtype} [{to}], %r1; {after}"
    assert not execute(kernel(body, parameters=2, threads=64), values, total, ctas=4, shared_bytes=4)
    ufunc = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}[name]
    assert total.item() == ufunc.reduce(values.numpy(), initial=start)


def test_an_atomic_operation_returns_what_was_there() -> None:
    counter, places = torch.tensor([5], dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    body = (
        "atom.global.gpu.relaxed.add.u32 %r1, [%rd91], 2; mad.wide.s32 %rd1, %r90, 4, %rd92; st.global.b32 [%rd1], %r1;"
    )
    orders = []
    for seed in (1, 2):
        counter.fill_(5)
        options = Options(seed=seed)
        assert not execute(kernel(body, parameters=2, threads=64), counter, places, ctas=4, options=options)
        assert counter.item() == 5 + 2 * 256
        assert sorted(places.tolist()) == list(range(5, 5 + 2 * 256, 2))
        orders.append(places.tolist())
    assert orders[0] != orders[1]


def test_matrices_in_shared_memory() -> None:
    """Lane l stores 16 bits at (l // 4, 2 * (l % 4)) of each matrix of 8 x 8; the rows are where the lanes say."""
    values, made = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = """mad.wide.s32 %rd80, %r90, 16, %rd91; mad.wide.s32 %rd81, %r90, 16, %rd92; shl.b32 %r10, %r90, 4;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd80];
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r10], {%r1, %r2, %r3, %r4}; bar.sync 0;
        ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r10]; st.global.v4.b32 [%rd81], {%r5, %r6, %r7, %r8};"""
    assert not execute(kernel(body, parameters=2), values, made, shared_bytes=512)
    assert torch.equal(made.view(4, 8, 4), values.view(8, 4, 4).permute(2, 0, 1))
    again = torch.zeros(128, dtype=torch.int32)
    body = body.replace(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r10], {%r1, %r2, %r3, %r4}",
        "st.shared.v4.b32 [%r10], {%r1, %r2, %r3, %r4}",
    )
    body = body.replace(
        "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r10]",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r10]",
    )
    assert not execute(kernel(body, parameters=2), made, again, shared_bytes=512)
    assert torch.equal(again, values)


def test_numbers_as_parameters() -> None:
    made = torch.zeros(32, dtype=torch.int64)
    body = "mad.wide.s32 %rd1, %r90, 8, %rd91; add.s64 %rd2, %rd92, %rd93; st.global.b64 [%rd1], %rd2;"
    assert not execute(kernel(body, parameters=3), made, -12345)  # the third is missing, which is 0
    assert set(made.tolist()) == {-12345}


def test_warps_that_end_early_are_found_where_others_wait() -> None:
    findings = Findings()
    text = kernel("setp.lt.s32 %p1, %r90, 32; @%p1 bra $L_end; bar.sync 0;\n$L_end:", parameters=0, threads=64)
    with pytest.raises(Fault, match="barrier that not all warps reach"):
        launch(text, [], findings).run()
    assert kinds(findings) == {"barrier that not all warps reach"}
