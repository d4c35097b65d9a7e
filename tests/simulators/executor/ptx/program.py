"""PTX text -> basic blocks of instructions, and which registers live on from one block to the next."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_REGISTER = re.compile(r"%(p|rs|r|rd)(\d+)\b")
_GUARD = re.compile(r"@(!?)%(p\d+)\s+")
_COMMAS_OUTSIDE = re.compile(r",(?![^{\[]*[}\]])")
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_STATEMENT = re.compile(r"\s*(?:([$\w]+):(?!:)|([^;]+);)")
BITS = {"p": 1, "rs": 16, "r": 32, "rd": 64}


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: with its modifiers, for instance "mul.wide.s32".
        operands: "%r5", "{%r1,%r2}", "[%rd3+4]" or a number, without spaces; what is written comes first.
        guard: the predicate under which it is executed, "" for always.
        when: what the predicate must be.
        line: of the kernel's source, "tail.py:61".
    """

    name: str
    operands: tuple[str, ...]
    guard: str
    when: bool
    line: str

    @property
    def opcode(self) -> str:
        """The name without modifiers."""
        return self.name.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """What follows the first dot of the name."""
        return tuple(self.name.split(".")[1:])

    @property
    def ends_block(self) -> bool:
        """Where a warp goes next, or when, is not said by the order of instructions."""
        return self.opcode in ("bra", "brx", "ret") or self.name == "bar.sync"

    @property
    def written(self) -> list[str]:
        """Registers that it writes."""
        if self.opcode in ("st", "stmatrix", "red", "bar") or self.ends_block:
            return []
        return registers_of(self.operands[0])

    @property
    def read(self) -> list[str]:
        """Registers that it reads. Where it is guarded, what it does not write keeps its value."""
        operands = self.operands[1:] if self.written else self.operands
        found = [register for operand in operands for register in registers_of(operand)]
        return [*found, self.guard, *self.written] if self.guard else found


class Block(NamedTuple):
    """Instructions that a warp executes one after the other.

    Attributes:
        instructions: the last one may branch, wait or end.
        next: numbers of the blocks that may follow, in the order of a table of targets; a branch that is taken first.
        inputs: registers that are read before they are written.
        outputs: registers that are written and that a later block reads.
    """

    instructions: tuple[Instruction, ...]
    next: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def end(self) -> Instruction:
        """Its last instruction."""
        return self.instructions[-1]


@dataclass(frozen=True)
class Program:
    """One compiled kernel.

    Attributes:
        name: of the kernel.
        parameters: {name: bits}, in their order.
        threads: of one program of Triton's, a CTA.
        blocks: the first is where every warp begins.
    """

    name: str
    parameters: dict[str, int]
    threads: int
    blocks: tuple[Block, ...]

    @cached_property
    def warps(self) -> int:
        """Of a CTA."""
        return self.threads // 32

    @cached_property
    def read(self) -> frozenset[str]:
        """Registers that anything reads."""
        unguarded = (item._replace(guard="") for block in self.blocks for item in block.instructions)
        return frozenset(name for item in unguarded for name in item.read)


def registers_of(operand: str) -> list[str]:
    """ "[%rd3+4]" -> ["rd3"]."""
    return [kind + number for kind, number in _REGISTER.findall(operand)]


def bits_of(register: str) -> int:
    """ "rd3" -> 64."""
    return BITS[register.rstrip("0123456789")]


def parse(text: str) -> Program:
    """The one kernel of a text."""
    head, _, body = text.partition("\n{\n")
    name = re.search(r"\.visible \.entry (\w+)\(", head)[1]  # type: ignore[index]
    threads = int(re.search(r"\.reqntid (\d+)", head)[1])  # type: ignore[index]
    parameters = {name: int(bits) for bits, name in re.findall(r"\.param \.[a-z](\d+) .*?(\w+_param_\d+)", head)}
    files = dict(re.findall(r'\.file\s+(\d+)\s+"[^"]*?([^/"]+)"', text))
    labels, tables, code = _statements(body.partition("\n}\n")[0], files)
    return Program(name, parameters, threads, _blocks(labels, tables, code))


def _statements(body: str, files: dict[str, str]) -> tuple[dict[str, int], dict[str, list[str]], list[Instruction]]:
    """{label: number of the instruction it stands before}, {table: labels} and the instructions."""
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    code: list[Instruction] = []
    line, label = "", ""
    for piece in re.split(r"(\.loc\s[^\n]*)\n", re.sub(r"//[^\n]*", "", body)):
        if location := _LOCATION.match(piece):
            line = f"{files.get(location[1], '?')}:{location[2]}"
            continue
        for found, statement in _STATEMENT.findall(piece):
            if found:
                label = found
                labels[label] = len(code)
            elif statement.strip().startswith(".branchtargets"):
                tables[label] = re.findall(r"\$\w+", statement)
            elif not statement.strip().startswith("."):
                code.append(_instruction(statement.strip(), line))
    return labels, tables, code


def _instruction(text: str, line: str) -> Instruction:
    guard = _GUARD.match(text)
    name, *rest = text[guard.end() if guard else 0 :].split(maxsplit=1)
    operands = [re.sub(r"\s+", "", part) for part in _COMMAS_OUTSIDE.split(rest[0])] if rest else []
    return Instruction(name, tuple(operands), guard[2] if guard else "", not (guard and guard[1]), line)


def _blocks(labels: dict[str, int], tables: dict[str, list[str]], code: list[Instruction]) -> tuple[Block, ...]:
    targets = {target for table in tables.values() for target in table}
    targets |= {instruction.operands[0] for instruction in code if instruction.opcode == "bra"}
    starts = {labels[target] for target in targets} | {0}
    starts |= {number + 1 for number, instruction in enumerate(code) if instruction.ends_block}
    first = sorted(start for start in starts if start < len(code))
    number_of = {start: number for number, start in enumerate(first)}

    def following(number: int, end: Instruction) -> tuple[int, ...]:
        if end.opcode == "ret":
            return ()
        if end.opcode == "brx":
            return tuple(number_of[labels[target]] for target in tables[end.operands[1]])
        taken = (number_of[labels[end.operands[0]]],) if end.opcode == "bra" else ()
        return taken if taken and not end.guard else (*taken, number + 1)

    pieces = [tuple(code[begin:end]) for begin, end in zip(first, [*first[1:], len(code)], strict=True)]
    return _with_registers([(piece, following(number, piece[-1])) for number, piece in enumerate(pieces)])


def _with_registers(pieces: list[tuple[tuple[Instruction, ...], tuple[int, ...]]]) -> tuple[Block, ...]:
    """Finds what lives from block to block: from the last to the first, until nothing is added."""
    reads: list[set[str]] = []
    writes: list[set[str]] = []
    for instructions, _ in pieces:
        read: set[str] = set()
        written: set[str] = set()
        for instruction in instructions:
            read |= set(instruction.read) - written
            written |= set(instruction.written)
        reads.append(read)
        writes.append(written)
    live = [set(read) for read in reads]
    after = [set[str]() for _ in pieces]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(pieces))):
            after[number] = set().union(*(live[follower] for follower in pieces[number][1]))
            needed = reads[number] | (after[number] - writes[number])
            changed |= needed != live[number]
            live[number] = needed
    return tuple(
        Block(instructions, following, tuple(sorted(reads[number])), tuple(sorted(writes[number] & after[number])))
        for number, (instructions, following) in enumerate(pieces)
    )
