"""An instruction -> a step: a function of a frame, which holds the registers of the warps that run.

A register is an array of unsigned integers, or of bools, [warps, 32], or [warps, 1] where all lanes hold the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .accesses import change, fetch, put
from .arithmetic import LANES, Array
from .memory import spread
from .opcodes import UnknownInstruction, dtype_of, form_of
from .program import Instruction, Program, bits_of, registers_of

if TYPE_CHECKING:
    from .machine import Frame

Registers = dict[str, Array]
Step = Callable[["Frame"], None]
_ADDRESS = re.compile(r"\[(?:%(\w+)|\w+)(?:\+(-?\w+))?\]")
_ATOMIC = ("add", "min", "max", "and", "or", "exch")


def step_of(program: Program, instruction: Instruction) -> Step:
    """What executes one instruction; those that end a block do nothing here."""
    if instruction.ends_block:
        return lambda frame: None
    make = _OTHERS.get(instruction.opcode)
    return make(program, instruction) if make else _computation(instruction)


def _computation(instruction: Instruction) -> Step:
    form = form_of(instruction.name)
    sources = instruction.operands[1:]
    reads = [reader(operand, kind) for operand, kind in zip(sources, form.operands, strict=True)]
    name, *predicate = instruction.written
    write, function = _writer(instruction, name, form.result), form.function

    def step(frame: Frame) -> None:
        write(frame, function(*[read(frame.registers) for read in reads]))

    def step_with_predicate(frame: Frame) -> None:
        value, in_range = function(*[read(frame.registers) for read in reads])
        write(frame, value)
        if predicate:
            frame.registers[predicate[0]] = in_range

    return step_with_predicate if form.has_predicate else step


def reader(operand: str, kind: str) -> Callable[[Registers], Array]:
    """What reads an operand as a type."""
    if not operand.startswith("%"):
        value = _constant(operand, kind)
        return lambda registers: value
    name, dtype = operand[1:], dtype_of(kind)
    if kind == "pred":
        return lambda registers: registers[name]
    if bits_of(name) == 8 * dtype.itemsize:
        return lambda registers: registers[name].view(dtype)
    return lambda registers: registers[name].astype(f"u{dtype.itemsize}").view(dtype)


def _constant(text: str, kind: str) -> Array:
    """ "-12", "0x7770U", "0f3F800000", "0dC069000000000000", or the name of shared memory, which begins at 0."""
    dtype = dtype_of(kind)
    number = int("0x" + text[2:] if text[:2] in ("0f", "0d") else text.replace("global_smem", "0").rstrip("U"), 0)
    if kind == "pred":
        return np.array([[bool(number)]])
    return np.array([[number & ((1 << 8 * dtype.itemsize) - 1)]], f"u{dtype.itemsize}").view(dtype)


def _writer(instruction: Instruction, name: str, kind: str) -> Callable[[Frame, Array], None]:
    """What puts values of a type into a register, or into the lanes of it that the guard names."""
    size = bits_of(name) // 8
    is_signed = kind[0] == "s"

    def bits(value: Array) -> Array:
        if kind == "pred":
            return value
        if value.itemsize == size:
            return value.view(f"u{size}")
        return value.astype(f"i{size}").view(f"u{size}") if is_signed else value.astype(f"u{size}")

    def write(frame: Frame, value: Array) -> None:
        frame.registers[name] = bits(value)

    def write_guarded(frame: Frame, value: Array) -> None:
        registers = frame.registers
        registers[name] = np.where(registers[instruction.guard] == instruction.when, bits(value), registers[name])

    return write_guarded if instruction.guard else write


def _move(program: Program, instruction: Instruction) -> Step:
    target, source = instruction.operands
    if target.startswith("{"):
        return _split(instruction, target, source)
    name = instruction.written[0]
    kind = "pred" if bits_of(name) == 1 else f"b{bits_of(name)}"
    if source.startswith("{"):
        return _join(instruction, name, registers_of(source))
    write = _writer(instruction, name, kind)
    if source.startswith(("%tid", "%ctaid", "%nctaid")):
        return lambda frame: write(frame, frame.special(source[1:]))
    read = reader(source, kind)
    return lambda frame: write(frame, read(frame.registers))


def _split(instruction: Instruction, target: str, source: str) -> Step:
    """ "mov.b64 {%r1,%r2}, %rd3" """
    parts = target.strip("{}").split(",")
    bits = bits_of(source[1:]) // len(parts)
    writes = [
        (np.uint64(bits * place), _writer(instruction, part[1:], f"b{bits}"))
        for place, part in enumerate(parts)
        if part != "_"
    ]

    def step(frame: Frame) -> None:
        whole = frame.registers[source[1:]].astype(np.uint64)
        for shift, write in writes:
            write(frame, (whole >> shift).astype(f"u{bits // 8}"))

    return step


def _join(instruction: Instruction, name: str, parts: list[str]) -> Step:
    """ "mov.b64 %rd3, {%r1,%r2}" """
    size = bits_of(name) // 8
    write = _writer(instruction, name, f"b{8 * size}")

    def step(frame: Frame) -> None:
        whole = np.zeros((1, 1), f"u{size}")
        for place, part in enumerate(parts):
            whole = whole | frame.registers[part].astype(f"u{size}") << np.uint64(place * bits_of(part)).astype(
                f"u{size}"
            )
        write(frame, whole)

    return step


def _address(instruction: Instruction) -> Callable[[Registers], Array]:
    operand = next(operand for operand in instruction.operands if operand.startswith("["))
    name, offset = _ADDRESS.fullmatch(operand).groups()  # type: ignore[union-attr]
    add = np.array([[int(offset or "0", 0)]])
    return (lambda registers: registers[name].astype(np.int64) + add) if name else (lambda registers: add)


def _guard(instruction: Instruction, registers: Registers) -> Array | None:
    return registers[instruction.guard] == instruction.when if instruction.guard else None


def _space(instruction: Instruction) -> str:
    for modifier in instruction.modifiers:
        if modifier.partition("::")[0] in ("global", "shared"):
            return modifier.partition("::")[0]
    raise UnknownInstruction(f"{instruction.name}: the generic address space")


def _bytes(kind: str) -> int:
    return dtype_of(kind).itemsize


def _load(program: Program, instruction: Instruction) -> Step:
    kind = instruction.modifiers[-1]
    if "param" in instruction.modifiers:
        parameter = list(program.parameters).index(instruction.operands[1].strip("[]"))
        write = _writer(instruction, instruction.written[0], kind)
        return lambda frame: write(frame, frame.launch.parameters[parameter].view(dtype_of(kind)))
    address, space, names = _address(instruction), _space(instruction), instruction.operands[0].strip("{}").split(",")
    # What is not loaded keeps its value; what is loaded into a wider register is extended.
    writes = [_writer(instruction._replace(guard=""), name[1:], kind) for name in names]
    size, dtype = _bytes(kind), dtype_of(kind)

    def step(frame: Frame) -> None:
        registers = frame.registers
        access = frame.access(address(registers), _guard(instruction, registers))
        found = fetch(frame, instruction, frame.space(space), access, size, len(names))
        for name, write, values in zip(names, writes, found, strict=True):
            if instruction.guard:
                before = registers[name[1:]].astype(f"u{size}")
                result = spread(before, access.shape).copy()
                result[access.rows, access.lanes % LANES] = values
            else:
                result = values.reshape(access.shape)
            write(frame, result.view(dtype))

    return step


def _store(program: Program, instruction: Instruction) -> Step:
    kind = instruction.modifiers[-1]
    address, space = _address(instruction), _space(instruction)
    reads = [reader(part, f"b{8 * _bytes(kind)}") for part in instruction.operands[1].strip("{}").split(",")]

    def step(frame: Frame) -> None:
        registers = frame.registers
        values = [read(registers) for read in reads]
        at = address(registers)
        if any(value.shape[1] > at.shape[1] for value in values):
            at = spread(at, (frame.count, LANES))
        access = frame.access(at, _guard(instruction, registers))
        put(frame, instruction, frame.space(space), access, [access.of_lanes(value) for value in values])

    return step


def _atomic(program: Program, instruction: Instruction) -> Step:
    name = next((modifier for modifier in instruction.modifiers if modifier in _ATOMIC), None)
    if name is None:
        raise UnknownInstruction(instruction.name)
    kind, address, space = instruction.modifiers[-1], _address(instruction), _space(instruction)
    read = reader(instruction.operands[-1], kind)
    target = next((register for register in instruction.written if register in program.read), None)
    write = _writer(instruction, target, kind) if target else None

    def step(frame: Frame) -> None:
        registers = frame.registers
        # Every lane does it, even where all do the same.
        at = spread(address(registers), (frame.count, LANES))
        access = frame.access(at, _guard(instruction, registers))
        values = access.of_lanes(read(registers))
        before = change(
            frame, instruction, frame.space(space), access, name, values.view(dtype_of(kind)), target is not None
        )
        if write:
            result = np.zeros(access.shape, before.dtype)
            result[access.rows, access.lanes] = before
            write(frame, result)

    return step


def _matrices(program: Program, instruction: Instruction) -> Step:
    """8 x 8 elements of 16 bits each: lane 8 k + i holds the address of row i of matrix k; each lane takes two."""
    if not instruction.name.startswith(f"{instruction.opcode}.sync.aligned.m8n8.x"):
        raise UnknownInstruction(instruction.name)
    address, names = (
        _address(instruction),
        [name for operand in instruction.operands if operand.startswith("{") for name in registers_of(operand)],
    )
    lane = np.arange(LANES)

    def accesses(frame: Frame) -> list[tuple[str, Any]]:
        at = spread(address(frame.registers), (frame.count, LANES))
        return [
            (name, frame.access(at[:, 8 * number + lane // 4] + 4 * (lane % 4), None))
            for number, name in enumerate(names)
        ]

    def load(frame: Frame) -> None:
        for name, access in accesses(frame):
            (values,) = fetch(frame, instruction, frame.space("shared"), access, 4, 1)
            frame.registers[name] = values.reshape(access.shape)

    def store(frame: Frame) -> None:
        for name, access in accesses(frame):
            put(frame, instruction, frame.space("shared"), access, [access.of_lanes(frame.registers[name])])

    return load if instruction.opcode == "ldmatrix" else store


def _barrier(program: Program, instruction: Instruction) -> Step:
    if instruction.name != "bar.warp.sync":
        raise UnknownInstruction(instruction.name)
    return lambda frame: frame.synchronize_warps()


_OTHERS: dict[str, Callable[[Program, Instruction], Step]] = {
    "mov": _move,
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrices,
    "stmatrix": _matrices,
    "bar": _barrier,
}
