"""Small kernels, written in PTX, and their execution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from simulators.executor.ptx.findings import Findings
from simulators.executor.ptx.machine import Executable, Launch, Options
from simulators.executor.ptx.program import parse


def kernel(body: str, *, parameters: int, threads: int = 32) -> str:
    """A kernel whose parameters are 64 bits each. Registers need no declaration; %rd91 ... hold the parameters.

    %r90 is the number of the thread in the launch.
    """
    names = [f"kernel_param_{number}" for number in range(parameters)]
    head = ",\n".join(f"\t.param .u64 .ptr .global .align 1 {name}" for name in names)
    loads = "\n".join(f"ld.param.b64 %rd{91 + number}, [{name}];" for number, name in enumerate(names))
    number = f"mov.u32 %r91, %ctaid.x; mov.u32 %r92, %tid.x; mad.lo.s32 %r90, %r91, {threads}, %r92;"
    code = f".loc 1 1 0\n{loads}\n{number}\n.loc 1 2 0\n{body}\nret;"
    return (
        f'.visible .entry kernel(\n{head}\n)\n.reqntid {threads}\n{{\n{code}\n}}\n\t.file\t1 "/somewhere/kernel.py"\n'
    )


def execute(
    text: str,
    *arguments: torch.Tensor | int,
    ctas: int = 1,
    shared_bytes: int = 0,
    options: Options | None = None,
) -> Findings:
    """Runs it; the tensors are changed. Returns what was found. Raises `Fault`, as a launch does."""
    findings = Findings()
    launch(text, arguments, findings, ctas=ctas, shared_bytes=shared_bytes, options=options).run()
    return findings


def launch(
    text: str,
    arguments: Sequence[torch.Tensor | int],
    findings: Findings,
    *,
    ctas: int = 1,
    shared_bytes: int = 0,
    options: Options | None = None,
) -> Launch:
    """A launch that has not begun."""
    return Launch(Executable(parse(text)), (ctas, 1, 1), arguments, shared_bytes, findings, options or Options())


def kinds(findings: Findings) -> set[str]:
    """What was found, without where."""
    return {finding.kind for finding in findings}
