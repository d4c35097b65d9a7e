"""Every instruction that computes gives what its definition gives, from memory through registers to memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from simulators.executor.definitions import ANYTHING, DEFINITIONS, FORMATS, decode, encode, size_of
from simulators.executor.ptx import opcodes
from simulators.executor.ptx_text import execute, kernel

pytestmark = pytest.mark.once

REGISTERS = {8: "p", 16: "rs", 32: "r", 64: "rd"}
THREADS, CTAS = 64, 4
CASES = THREADS * CTAS
WHOLE = [
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    15,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    -2,
    -128,
    1 << 15,
    (1 << 15) - 1,
    1 << 31,
    (1 << 31) - 1,
    1 << 63,
    (1 << 63) - 1,
]
REAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    255.0,
    255.5,
    65504.0,
    65519.0,
    65520.0,
    65535.5,
    2.0**31,
    -(2.0**31),
    2.0**31 - 128,
    2.0**32,
    2.0**63,
    -(2.0**63),
    1e-45,
    -1e-45,
    2.0**-126,
    2.0**-149,
    3.0e38,
    3.4028234663852886e38,
    16777217.0,
    1 / 3,
    math.inf,
    -math.inf,
    math.nan,
]


def drawn(kind: str, random: np.random.Generator) -> np.ndarray:
    """Bits of values of a type: those at its limits, those near 1, and any."""
    size = size_of(kind)
    any_bits = random.integers(0, 256, (CASES, size // 8), np.uint8).view(f"u{size // 8}")[:, 0]
    if kind == "pred":
        return any_bits & 1
    if kind in FORMATS:
        near = np.ldexp(random.uniform(-2, 2, CASES), random.integers(-12, 12, CASES))
        special = np.array(REAL)[random.integers(0, len(REAL), CASES)]
        values = np.where(random.random(CASES) < 0.5, near, special)
        if kind == "bf16":
            values = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            with np.errstate(over="ignore"):
                values = values.astype(f"f{size // 8}").view(f"u{size // 8}")
    else:
        numbers = np.array([number & ((1 << size) - 1) for number in WHOLE], np.uint64)
        values = numbers[random.integers(0, len(numbers), CASES)].astype(any_bits.dtype)
    return np.where(random.random(CASES) < 0.6, values, any_bits)


def text_of(name: str) -> str:
    """A kernel that computes one instruction on every element of its arguments."""
    definition = DEFINITIONS[name]
    lines = []
    registers = []
    for number, kind in enumerate((*definition.operands, definition.result)):
        size = size_of(kind)
        lines.append(f"mad.wide.s32 %rd{number}, %r90, {size // 8}, %rd{91 + number};")
        register = f"%{REGISTERS[size]}1{number}"
        registers.append(register)
        if number == len(definition.operands):
            break
        if kind == "pred":
            lines.append(f"ld.global.b8 %rs1{number}, [%rd{number}]; setp.ne.b16 {register}, %rs1{number}, 0;")
        else:
            lines.append(f"ld.global.b{size} {register}, [%rd{number}];")
    *operands, result = registers
    lines.append(f"{name} {', '.join([result, *operands])};")
    if definition.result == "pred":
        lines.append(f"selp.b16 %rs19, 1, 0, {result};")
        result = "%rs19"
    lines.append(f"st.global.b{size_of(definition.result)} [%rd{len(operands)}], {result};")
    return kernel("\n".join(lines), parameters=len(registers), threads=THREADS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_an_instruction_computes_what_its_definition_says(name: str) -> None:
    random = np.random.default_rng(len(name))
    definition = DEFINITIONS[name]
    operands = [drawn(kind, random) for kind in definition.operands]
    made = np.zeros(CASES, f"u{size_of(definition.result) // 8}")
    tensors = [torch.from_numpy(values) for values in (*operands, made)]
    assert not execute(text_of(name), *tensors, ctas=CTAS)
    compared = 0
    for case in range(CASES):
        values = [decode(int(bits[case]), kind) for bits, kind in zip(operands, definition.operands, strict=True)]
        wanted = definition.function(*values)
        if wanted is ANYTHING:
            continue
        compared += 1
        found = int(made[case])
        if isinstance(wanted, float) and math.isnan(wanted):
            assert math.isnan(decode(found, definition.result)), values
        else:
            assert found == encode(wanted, definition.result), (values, decode(found, definition.result), wanted)
    assert compared > CASES // 2


def test_every_opcode_has_a_definition() -> None:
    exchanged = {"shfl", "redux", "vote"}  # between lanes: test_warps.py
    assert set(opcodes._FORMS) - exchanged == {name.partition(".")[0] for name in DEFINITIONS} | {"sqrt"}


def test_what_no_table_holds_is_refused() -> None:
    for name in (
        "sin.approx.f32",
        "add.rz.f32",
        "fma.rn.f64",
        "setp.xx.f32",
        "cvt.f32.e4m3",
        "cvt.s32.f32",
        "add.rn.ftz.f32",
    ):
        with pytest.raises(opcodes.UnknownInstruction, match=name.replace(".", r"\.")):
            opcodes.form_of(name)
