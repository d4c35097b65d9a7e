"""The warps of a launch, each with its own place in the program, in lockstep or in an order that is drawn.

Warps of all CTAs that stand at the same block run it together. In lockstep the one at the lowest block goes first. In a
drawn order half of the warps go ahead as far as the barriers let them, then the others do: what is not held by a barrier
comes at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .arithmetic import LANES, Array
from .counts import Counts
from .findings import Fault, Findings
from .memory import Access, GlobalMemory, SharedMemory, Space, spread
from .program import Instruction, Program, bits_of
from .shadow import ONE_BARRIER, ONE_SYNC, WARP_SHIFT
from .steps import Registers, Step, step_of

_ENDED = 1 << 30


@dataclass
class Options:
    """How a launch is executed.

    Attributes:
        random_order: of the CTAs and their warps.
        races: looked for, and bytes of shared memory that are read before they are written.
        counts: made of instructions and accesses.
        warps: how many run together at most; more are quicker and take more memory.
        seed: of what is drawn: the order, and the garbage in shared memory.
    """

    random_order: bool = True
    races: bool = True
    counts: bool = False
    warps: int = 2048
    seed: int = 0


class Executable:
    """A program whose blocks become steps when they are first run.

    Attributes:
        program: the program.
        blocks: the steps of those that have been run.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks: dict[int, list[Step]] = {}

    def steps(self, block: int) -> list[Step]:
        """Those of one block."""
        if block not in self.blocks:
            instructions = self.program.blocks[block].instructions
            self.blocks[block] = [step_of(self.program, instruction) for instruction in instructions]
        return self.blocks[block]


class Launch:
    """One launch.

    Args:
        executable: the kernel.
        grid: CTAs in x, y and z.
        arguments: tensors on the CPU and numbers, as many as the program has parameters; missing ones are 0.
        shared_bytes: of each CTA.
        findings: where to put what is found.
        options: how.
        elsewhere: tensors that the kernel is told the addresses of in some table.
    """

    def __init__(
        self,
        executable: Executable,
        grid: tuple[int, int, int],
        arguments: Sequence[torch.Tensor | int | float],
        shared_bytes: int,
        findings: Findings,
        options: Options,
        elsewhere: Sequence[torch.Tensor] = (),
    ) -> None:
        self.executable, self.program, self.grid = executable, executable.program, grid
        self.shared_bytes, self.findings, self.options = shared_bytes, findings, options
        self.random = np.random.default_rng(options.seed)
        self.counts = Counts(self.program) if options.counts else None
        self.looks_for_races_of = self.program.warps if options.races else None
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        self.memory = GlobalMemory([*tensors, *elsewhere], self.looks_for_races_of)
        self.parameters = _encoded(arguments, self.program)

    def run(self) -> None:
        """Executes all CTAs. Raises `Fault` where it cannot go on."""
        ctas = math.prod(self.grid)
        order = self.random.permutation(ctas) if self.options.random_order else np.arange(ctas)
        together = max(1, self.options.warps // self.program.warps)
        with np.errstate(all="ignore"):
            for begin in range(0, ctas, together):
                Chunk(self, order[begin : begin + together]).run()


def _encoded(arguments: Sequence[torch.Tensor | int | float], program: Program) -> list[Array]:
    encoded = []
    given = [*arguments, *[0] * len(program.parameters)]
    for argument, bits in zip(given, program.parameters.values(), strict=False):
        if isinstance(argument, torch.Tensor):
            argument = argument.data_ptr()
        if isinstance(argument, float):
            encoded.append(np.array([[argument]], f"f{bits // 8}").view(f"u{bits // 8}"))
        else:
            encoded.append(np.array([[int(argument) & ((1 << bits) - 1)]], f"u{bits // 8}"))
    return encoded


class Chunk:
    """CTAs that run together. All arrays have one entry a warp.

    Attributes:
        cta: its number in the launch.
        rank: which warp of its CTA it is.
        block: where it stands.
        waits: at a barrier.
        stamps: for the shadow.
        registers: those that live from block to block.
    """

    def __init__(self, launch: Launch, ctas: Array) -> None:
        self.launch, self.warps = launch, launch.program.warps
        self.cta = np.repeat(ctas, self.warps)
        self.rank = np.tile(np.arange(self.warps), len(ctas))
        self.place = np.repeat(np.arange(len(ctas)), self.warps)
        self.block = np.zeros(len(self.cta), np.int64)
        self.waits = np.zeros(len(self.cta), bool)
        self.stamps = (self.cta * self.warps + self.rank + 1) << WARP_SHIFT
        self.registers: Registers = {}
        self.shared = SharedMemory(len(ctas), launch.shared_bytes, launch.looks_for_races_of, launch.random)
        self._ahead = self._drawn()

    def run(self) -> None:
        """Until every warp has ended."""
        while True:
            ready = (self.block < _ENDED) & ~self.waits
            if ready.any():
                self._run_block(self._chosen(ready))
            elif not self._release():
                return

    def _chosen(self, ready: Array) -> Array:
        """The warps that run now; all stand at the same block."""
        if self.launch.options.random_order:
            if not (ready & self._ahead).any():
                self._ahead = self._drawn()
            if (ready & self._ahead).any():
                ready = ready & self._ahead
        return ready & (self.block == self.block[ready].min())

    def _drawn(self) -> Array:
        return self.launch.random.random(len(self.cta)) < 0.5

    def _release(self) -> bool:
        """Lets CTAs go on whose warps all wait at a barrier. Returns whether there are any."""
        waiting = self.waits.reshape(-1, self.warps)
        if not waiting.any():
            return False
        if (waiting.any(1) & ~waiting.all(1)).any():
            at = int(self.block[self.waits][0]) - 1
            raise self.launch.findings.fail(
                "barrier that not all warps reach",
                self.launch.program.name,
                self.launch.program.blocks[at].end,
                "some of them have ended",
            )
        self.stamps[self.waits] += ONE_BARRIER
        self.waits[:] = False
        return True

    def _run_block(self, chosen: Array) -> None:
        rows = None if chosen.all() else np.flatnonzero(chosen)
        number = int(self.block[chosen][0])
        block = self.launch.program.blocks[number]
        frame = Frame(self, rows, {name: self._picked(self._register(name), rows) for name in block.inputs})
        for step in self.launch.executable.steps(number):
            step(frame)
        if self.launch.counts is not None:
            self.launch.counts.block(number, frame.count)
        for name in block.outputs:
            self._keep(name, frame.registers[name], rows, frame.count)
        self._go_on(frame, block.end, block.next, chosen)

    def _register(self, name: str) -> Array:
        """One that nobody has written holds garbage."""
        if name not in self.registers:
            bits = bits_of(name)
            drawn = self.launch.random.integers(0, 1 << min(bits, 63), (len(self.cta), LANES), np.uint64)
            self.registers[name] = drawn.astype(bool if bits == 1 else f"u{bits // 8}")
        return self.registers[name]

    def _go_on(self, frame: Frame, end: Instruction, following: tuple[int, ...], chosen: Array) -> None:
        if end.opcode == "ret":
            self.block[chosen] = _ENDED
        elif end.opcode == "bra" and end.guard:
            taken = frame.uniform(frame.registers[end.guard] == end.when, end)
            self.block[chosen] = np.where(taken, *following)
        elif end.opcode == "brx":
            self.block[chosen] = np.array(following)[frame.uniform(frame.registers[end.operands[0][1:]], end)]
        else:
            self.block[chosen] = following[0]
            self.waits[chosen] = end.name == "bar.sync"

    @staticmethod
    def _picked(register: Array, rows: Array | None) -> Array:
        return register if rows is None else register[rows]

    def _keep(self, name: str, value: Array, rows: Array | None, count: int) -> None:
        value = spread(value, (count, value.shape[1]))
        if rows is None:
            self.registers[name] = value.view()  # another register may be the same array: see `base` below
            return
        kept = self.registers.get(name)
        lanes = max(value.shape[1], 1 if kept is None else kept.shape[1])
        if kept is None:
            kept = np.zeros((len(self.cta), lanes), value.dtype)
        elif kept.shape[1] < lanes or not kept.flags.writeable or kept.base is not None:
            kept = spread(kept, (len(self.cta), lanes)).copy()
        kept[rows] = value
        self.registers[name] = kept


@dataclass
class Frame:
    """Some warps of a chunk while they run one block.

    Attributes:
        chunk: theirs.
        rows: which of its warps; None for all.
        registers: theirs, [warps, 32 or 1].
        count: how many warps.
        stamps: theirs.
    """

    chunk: Chunk
    rows: Array | None
    registers: Registers
    count: int = field(init=False)
    stamps: Array = field(init=False)

    def __post_init__(self) -> None:
        self.stamps = self.chunk._picked(self.chunk.stamps, self.rows)
        self.count = len(self.stamps)

    @property
    def launch(self) -> Launch:
        """The launch of its chunk."""
        return self.chunk.launch

    def special(self, name: str) -> Array:
        """The register "tid.x", "ctaid.y" or "nctaid.z"."""
        kind, axis = name[:-2], "xyz".index(name[-1])
        if kind == "tid":
            rank = self.chunk._picked(self.chunk.rank, self.rows)[:, None]
            return (rank * LANES + np.arange(LANES)).astype(np.uint32) if axis == 0 else np.zeros((1, 1), np.uint32)
        if kind == "nctaid":
            return np.full((1, 1), self.launch.grid[axis], np.uint32)
        number = self.chunk._picked(self.chunk.cta, self.rows)[:, None]
        return (number // math.prod(self.launch.grid[:axis]) % self.launch.grid[axis]).astype(np.uint32)

    def space(self, name: str) -> Space:
        """ "global" or "shared" memory."""
        if name == "global":
            return self.launch.memory
        return self.chunk.shared.of(self.chunk._picked(self.chunk.place, self.rows))

    def access(self, addresses: Array, guard: Array | None) -> Access:
        """What the lanes touch whose guard is set."""
        return Access.of(addresses, guard, self.count)

    def synchronize_warps(self) -> None:
        """What a lane did is seen by the others of its warp from now on."""
        self.chunk.stamps[slice(None) if self.rows is None else self.rows] += ONE_SYNC
        self.stamps = self.chunk._picked(self.chunk.stamps, self.rows)

    def uniform(self, value: Array, instruction: Instruction) -> Array:
        """The value of each warp. Lanes that differ would go different ways, which is not executed here."""
        if (value != value[:, :1]).any():
            raise self.fault("lanes of a warp go different ways", instruction, "")
        return spread(value[:, 0], (self.count,))

    def note(self, kind: str, instruction: Instruction) -> None:
        """Counts a finding; "" is none."""
        if kind:
            self.launch.findings.note(kind, self.launch.program.name, instruction)

    def fault(self, kind: str, instruction: Instruction, detail: str) -> Fault:
        """Counts a finding, and returns what to raise."""
        return self.launch.findings.fail(kind, self.launch.program.name, instruction, detail)

    def count_access(self, instruction: Instruction, access: Access, size: int) -> None:
        """Counts an access, where counts are made."""
        if self.launch.counts is not None:
            self.launch.counts.access(instruction, access, size)
