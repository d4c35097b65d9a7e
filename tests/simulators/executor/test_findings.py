"""Kernels that are wrong on purpose: what they do is found, and where."""

from __future__ import annotations

import pytest
import torch

from simulators.executor.ptx.findings import Fault, Findings
from simulators.executor.ptx.machine import Options
from simulators.executor.ptx_text import execute, kernel, kinds, launch

pytestmark = pytest.mark.once

SHARED = "shl.b32 %r1, %r92, 2;"
# Every thread stores its number, and loads that of another: 33 threads on, in the next warp.
EXCHANGE = f"""{SHARED} st.shared.b32 [%r1], %r92; bar.sync 0;
    add.s32 %r2, %r92, 33; and.b32 %r2, %r2, 63; shl.b32 %r3, %r2, 2; ld.shared.b32 %r4, [%r3];
    mad.wide.s32 %rd1, %r90, 4, %rd91; st.global.b32 [%rd1], %r4;"""
NEXT_LANE = EXCHANGE.replace("add.s32 %r2, %r92, 33; and.b32 %r2, %r2, 63;", "xor.b32 %r2, %r92, 1;")


def found(body: str, *arguments: torch.Tensor, threads: int = 64, ctas: int = 2, **options: bool) -> set[str]:
    text = kernel(body, parameters=len(arguments), threads=threads)
    return kinds(execute(text, *arguments, ctas=ctas, shared_bytes=256, options=Options(**options)))


def fault(body: str, *arguments: torch.Tensor) -> tuple[str, set[str]]:
    findings = Findings()
    with pytest.raises(Fault) as error:
        launch(kernel(body, parameters=len(arguments), threads=64), arguments, findings, shared_bytes=256).run()
    return str(error.value), kinds(findings)


@pytest.mark.parametrize("random_order", [False, True])
def test_a_barrier_that_is_missing(random_order: bool) -> None:
    made = torch.zeros(128, dtype=torch.int32)
    assert not found(EXCHANGE, made, random_order=random_order)
    assert made[:64].tolist() == [(number + 33) % 64 for number in range(64)]
    raced = found(EXCHANGE.replace("bar.sync 0;", ""), made, random_order=random_order)
    assert raced & {"read after write without barrier", "write after read without barrier"}


def test_a_missing_barrier_gives_other_results_in_some_order() -> None:
    right = [(number + 33) % 64 for number in range(64)]
    results = set()
    for seed in range(8):
        made = torch.zeros(64, dtype=torch.int32)
        text = kernel(EXCHANGE.replace("bar.sync 0;", ""), parameters=1, threads=64)
        execute(text, made, shared_bytes=256, options=Options(seed=seed, races=False))
        results.add(made.tolist() == right)
    assert False in results


def test_a_barrier_of_the_warp_is_enough_within_it() -> None:
    made = torch.zeros(128, dtype=torch.int32)
    assert not found(NEXT_LANE, made)
    assert not found(NEXT_LANE.replace("bar.sync 0;", "bar.warp.sync -1;"), made)
    assert found(NEXT_LANE.replace("bar.sync 0;", ""), made) == {"read after write without barrier"}
    assert found(EXCHANGE.replace("bar.sync 0;", "bar.warp.sync -1;"), made)


def test_a_thread_needs_no_barrier_to_read_its_own() -> None:
    body = f"{SHARED} st.shared.b32 [%r1], %r92; ld.shared.b32 %r2, [%r1]; st.shared.b32 [%r1], %r2;"
    assert not found(body)


def test_a_store_after_others_have_read() -> None:
    body = EXCHANGE + "st.shared.b32 [%r1], 77;"
    made = torch.zeros(128, dtype=torch.int32)
    assert found(body, made, random_order=False) == {"write after read without barrier"}
    assert not found(EXCHANGE + "bar.sync 0; st.shared.b32 [%r1], 77;", made)


def test_all_lanes_read_one_place_that_one_of_them_changes() -> None:
    first = f"{SHARED} setp.eq.s32 %p1, %r92, 0; @%p1 st.shared.b32 [global_smem], 5; bar.sync 0;"
    read = "ld.shared.b32 %r2, [global_smem];"
    change = "@%p1 st.shared.b32 [global_smem], 6;"
    assert found(first + read + change, random_order=False) == {"write after read without barrier"}
    assert found(first + read + "bar.warp.sync -1;" + change, random_order=False) == {
        "write after read without barrier"
    }
    assert not found(first + read + "bar.sync 0;" + change)


def test_threads_that_store_different_values_in_one_place() -> None:
    assert "threads store different values in one place" in found("st.shared.b32 [global_smem], %r92;")
    assert not found("mov.b32 %r5, 9; st.shared.b32 [global_smem], %r5;")


def test_programs_that_store_in_one_place() -> None:
    place = torch.zeros(1, dtype=torch.int32)
    body = "mov.u32 %r1, %ctaid.x; add.s32 %r1, %r1, 1; st.global.b32 [%rd91], %r1;"
    raced = found(body, place)
    assert raced
    assert raced <= {"write after write without barrier", "threads store different values in one place"}
    assert not found("st.global.b32 [%rd91], 7;", place)


def test_a_program_reads_what_another_one_writes() -> None:
    places = torch.zeros(2, dtype=torch.int32)
    body = """mov.u32 %r1, %ctaid.x; xor.b32 %r2, %r1, 1; mad.wide.s32 %rd1, %r1, 4, %rd91; mad.wide.s32 %rd2, %r2, 4, %rd91;
        st.global.b32 [%rd1], 5; bar.sync 0; ld.global.b32 %r3, [%rd2]; st.global.b32 [%rd92], 1;"""
    raced = found(body, places, torch.zeros(1, dtype=torch.int32))
    assert raced
    assert raced <= {"read after write without barrier", "write after read without barrier"}


def test_programs_that_make_the_same_table_read_it() -> None:
    """Each stores all of it and reads its own, with a barrier in between."""
    table = torch.zeros(64, dtype=torch.int32)
    body = """mad.wide.s32 %rd1, %r92, 4, %rd91; mul.lo.s32 %r1, %r92, 3; st.global.b32 [%rd1], %r1; bar.sync 0;
        xor.b32 %r2, %r92, 33; mad.wide.s32 %rd2, %r2, 4, %rd91; ld.global.b32 %r3, [%rd2];"""
    assert not found(body, table, ctas=5)
    assert table.tolist() == list(range(0, 192, 3))
    assert found(body.replace("bar.sync 0;", ""), table.zero_(), ctas=5)
    assert found(body.replace("%r92, 3;", "%r91, 3;"), table.zero_(), ctas=5)


def test_atomic_and_plain_accesses_that_no_barrier_orders() -> None:
    place = torch.zeros(1, dtype=torch.int32)
    add = "red.global.gpu.relaxed.add.u32 [%rd91], 1;"
    assert not found(add, place)
    assert found(add + "ld.global.b32 %r1, [%rd91];", place)
    store = "setp.eq.s32 %p1, %r90, 0; @%p1 st.global.b32 [%rd91], 100;"
    assert found(store + add, place)
    in_shared = f"{SHARED} setp.eq.s32 %p1, %r92, 0; @%p1 st.shared.b32 [global_smem], 0; bar.sync 0; red.shared.add.u32 [global_smem], 1;"
    assert not found(in_shared)
    assert found(in_shared.replace("bar.sync 0;", ""), random_order=False) == {
        "atomic operation after write without barrier"
    }
    assert found(in_shared + "ld.shared.b32 %r2, [global_smem];")
    assert not found(in_shared + "bar.sync 0; ld.shared.b32 %r2, [global_smem];")


def test_shared_memory_that_nobody_wrote() -> None:
    body = f"{SHARED} ld.shared.b32 %r2, [%r1];"
    assert found(body) == {"read before it is written"}
    assert found(f"{SHARED} red.shared.add.u32 [%r1], 1;") == {"read before it is written"}
    assert not found(f"{SHARED} st.shared.b32 [%r1], 0; ld.shared.b32 %r2, [%r1];")


def test_shared_memory_is_garbage_at_first() -> None:
    made = torch.zeros(64, dtype=torch.int32)
    body = f"{SHARED} ld.shared.b32 %r2, [%r1]; mad.wide.s32 %rd1, %r90, 4, %rd91; st.global.b32 [%rd1], %r2;"
    found(body, made, ctas=1)
    assert made.unique().numel() > 32


@pytest.mark.parametrize("step", [1, -1])
def test_an_access_out_of_bounds(step: int) -> None:
    memory = torch.zeros(3 * 64, dtype=torch.int32)
    middle = memory[64:128]
    body = "mad.wide.s32 %rd1, %r92, 4, %rd91; st.global.b32 [%rd1], 7;"
    assert not found(body, middle)
    outside = body.replace("%rd1], 7", f"%rd1+{4 * step}], 7")
    message, kind = fault(outside, middle)
    assert kind == {"out of bounds"}
    assert "kernel.py:2, st.global.b32: out of bounds: 1 lanes, the first at byte" in message
    assert memory.sum() == 64 * 7
    guarded = "setp.lt.s32 %p1, %r92, 63; setp.gt.s32 %p2, %r92, 0; and.pred %p3, %p1, %p2;" + outside.replace(
        "st.", "@%p3 st."
    )
    assert not found(guarded, middle)


def test_out_of_bounds_in_shared_memory() -> None:
    message, kind = fault("shl.b32 %r1, %r92, 2; st.shared.b32 [%r1+4], 0;")
    assert kind == {"out of bounds"}
    assert "byte 256 of 256 of shared memory" in message


def test_an_address_of_nothing() -> None:
    assert fault("mov.b64 %rd1, 64; ld.global.b32 %r1, [%rd1];")[1] == {"out of bounds"}


def test_an_address_between_two_elements() -> None:
    message, kind = fault("ld.global.b32 %r1, [%rd91+2];", torch.zeros(4, dtype=torch.int32))
    assert kind == {"misaligned"}
    assert "4 bytes at" in message
    assert fault("ld.global.v2.b32 {%r1, %r2}, [%rd91+4];", torch.zeros(4, dtype=torch.int32))[1] == {"misaligned"}


def test_views_of_one_tensor_are_one_memory() -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    body = "mad.wide.s32 %rd1, %r92, 4, %rd91; ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd92], 3;"
    assert "write after read without barrier" in found(body, memory, memory[5:], ctas=1)
    assert memory[5] == 3


def test_a_finding_names_kernel_line_and_instruction() -> None:
    text = kernel(f"{SHARED} ld.shared.b32 %r2, [%r1];", parameters=0)
    (finding,) = execute(text, shared_bytes=256)
    assert str(finding) == "kernel, kernel.py:2, ld.shared.b32: read before it is written"
