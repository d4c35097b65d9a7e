"""What PTX instructions compute, in whole numbers and fractions, one value at a time: a definition to test against.

Integers are Python's, and wrap around where they are put into a register. What is computed of floats is a fraction,
rounded once.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

ANYTHING = object()  # the result of what PTX leaves undefined


class Format(NamedTuple):
    """A type of floats: how `struct` calls it, bits of its significand, exponents of its smallest and largest steps."""

    code: str
    bits: int
    smallest: int
    largest: int


FORMATS = {
    "f16": Format("<e", 11, -24, 5),
    "bf16": Format("", 8, -133, 120),
    "f32": Format("<f", 24, -149, 104),
    "f64": Format("<d", 53, -1074, 971),
}


class Definition(NamedTuple):
    """One instruction on numbers of Python.

    Attributes:
        operands: their types.
        result: its type.
        function: of the operands.
    """

    operands: tuple[str, ...]
    result: str
    function: Callable[..., Any]


DEFINITIONS: dict[str, Definition] = {}


def size_of(kind: str) -> int:
    """Bits in memory: "s32" -> 32. A predicate lies in a byte."""
    return 8 if kind == "pred" else 32 if kind == "s16x2" else int(kind.lstrip("bsuf"))


def decode(bits: int, kind: str) -> Any:
    """What a register holds."""
    if kind == "pred":
        return bool(bits)
    if kind == "bf16":
        return decode(bits << 16, "f32")
    if kind in FORMATS:
        return struct.unpack(FORMATS[kind].code, bits.to_bytes(size_of(kind) // 8, "little"))[0]
    is_negative = kind in ("s16", "s32", "s64") and bits >> (size_of(kind) - 1)
    return bits - (1 << size_of(kind)) if is_negative else bits


def encode(value: Any, kind: str) -> int:
    """The bits of a result that is no NaN."""
    if kind == "bf16":
        return encode(value, "f32") >> 16
    if kind in FORMATS:
        return int.from_bytes(struct.pack(FORMATS[kind].code, value), "little")
    return int(value) & ((1 << size_of(kind)) - 1)


def rounded(exact: Fraction, kind: str) -> float:
    """The nearest number of a type, of two the even one."""
    form = FORMATS[kind]
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length() - form.bits
    exponent = max(exponent, form.smallest)
    if abs(exact) >= Fraction(2) ** (exponent + form.bits):
        exponent += 1
    steps = round(exact / Fraction(2) ** exponent)
    if abs(steps) * Fraction(2) ** exponent >= Fraction(2) ** (form.largest + form.bits):
        return math.inf if exact > 0 else -math.inf
    return math.copysign(float(steps * Fraction(2) ** exponent), -1 if exact < 0 else 1)


def in_fractions(kind: str, function: Callable[..., Any]) -> Callable[..., float]:
    """A function of floats: of fractions where there are some, rounded once; else, and for signs of zero, of floats."""

    def compute(*values: float) -> float:
        if not all(map(math.isfinite, values)):
            return function(*values)
        try:
            exact = function(*map(Fraction, values))
        except ZeroDivisionError:
            numerator, divisor = values
            return math.nan if numerator == 0 else math.copysign(math.inf, numerator) * math.copysign(1, divisor)
        return rounded(exact, kind) if exact else function(*values)

    return compute


def _quotient(a: Any, b: Any) -> Any:
    if isinstance(a, float) and b == 0:  # 0 / 0 was found above
        return math.nan if math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def define(names: str, signature: str, function: Callable[..., Any]) -> None:
    """Adds instructions: {} in their names is each of the types before the colon, T in the signature too.

    For instance define("add.{}", "s16 s32: T T -> T", operator.add).
    """
    kinds, _, types = signature.rpartition(":")
    for kind in kinds.split() or [""]:
        operands, result = types.replace("2T", _doubled(kind)).replace("T", kind).split("->")
        bound = in_fractions(kind, function) if kind in FORMATS and function in _ROUNDED else function
        DEFINITIONS[names.format(kind)] = Definition(tuple(operands.split()), result.strip(), bound)


def _doubled(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}" if kind[1:].isdigit() else kind


def _fused(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


_ROUNDED = (operator.add, operator.sub, operator.mul, _quotient, _fused)


def _cut_quotient(a: int, b: int) -> Any:
    return ANYTHING if b == 0 else math.trunc(Fraction(a, b))


def _cut_remainder(a: int, b: int) -> Any:
    return ANYTHING if b == 0 else a - b * math.trunc(Fraction(a, b))


def _in_halves(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda a, b: function(a >> 16, b >> 16) << 16 | function(a & 0xFFFF, b & 0xFFFF) & 0xFFFF


def _extract(value: int, begin: int, length: int, is_signed: bool, bits: int = 32) -> int:
    digits = [
        value >> min(at, bits - 1) & 1 if is_signed or at < bits else 0
        for at in range(begin & 255, (begin & 255) + (length & 255))
    ]
    digits = digits[:bits]
    sign = digits[-1] if digits and is_signed else 0
    return sum(digit << at for at, digit in enumerate(digits)) - (sign << len(digits))


def _permute(a: int, b: int, selector: int) -> int:
    pool = struct.pack("<II", a, b)
    chosen = []
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = pool[nibble & 7]
        chosen.append(0xFF * (byte >> 7) if nibble & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


def _extreme(choose: Callable[..., float], nan_wins: bool) -> Callable[[float, float], float]:
    def function(a: float, b: float) -> float:
        numbers = [value for value in (a, b) if not math.isnan(value)]
        if not numbers or (nan_wins and len(numbers) < 2):
            return math.nan
        return choose(numbers, key=lambda value: (value, math.copysign(1, value)))

    return function


def _to_whole(round_to: Callable[[Any], Any], kind: str, of: str) -> Callable[[float], int]:
    size = size_of(kind)
    low, high = (-(1 << (size - 1)), (1 << (size - 1)) - 1) if kind[0] == "s" else (0, (1 << size) - 1)

    def function(value: float) -> int:
        if math.isnan(value):
            return 1 << (size - 1) if of == "f64" or size == 64 else 0
        if math.isinf(value):
            return high if value > 0 else low
        return min(max(round_to(Fraction(value)), low), high)

    return function


def _whole_float(value: float) -> float:
    return value if not math.isfinite(value) else math.copysign(float(math.floor(value)), value)


def _without_subnormals(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def _fill() -> None:
    integers, bits = "s16 s32 s64", "b16 b32 b64"
    for name, function in (("add", operator.add), ("sub", operator.sub)):
        define(name + ".{}", f"{integers}: T T -> T", function)
        define(name + ".rn.{}", "f32 f64: T T -> T", function)
        define(name + ".s16x2", "s16x2 s16x2 -> s16x2", _in_halves(function))
    define("mul.lo.{}", f"{integers}: T T -> T", operator.mul)
    define("mul.wide.{}", "s16 u16 s32 u32: T T -> 2T", operator.mul)
    define("mul.hi.{}", "s32 u32: T T -> T", lambda a, b: a * b >> 32)
    define("mul.rn.{}", "f32 f64: T T -> T", operator.mul)
    define("mad.lo.{}", f"{integers}: T T T -> T", _fused)
    define("mad.wide.{}", "s16 u16 s32 u32: T T 2T -> 2T", _fused)
    define("fma.rn.{}", "f32: T T T -> T", _fused)
    define("div.{}", "s32 u32: T T -> T", _cut_quotient)
    define("rem.{}", "s32 u32: T T -> T", _cut_remainder)
    define("div.rn.{}", "f32 f64: T T -> T", _quotient)
    for name, choose in (("min", min), ("max", max)):
        define(name + ".{}", "u16 u32 s32 s64: T T -> T", choose)
        define(name + ".{}", "f32 f64: T T -> T", _extreme(choose, nan_wins=False))
        define(name + ".NaN.{}", "f32: T T -> T", _extreme(choose, nan_wins=True))
    define("neg.{}", "s32 f32 f64: T -> T", operator.neg)
    define("abs.{}", "s32 f32 f64: T -> T", abs)
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        define(name + ".{}", f"{bits} pred: T T -> T", function)
    define("not.{}", f"{bits}: T -> T", operator.invert)
    define("not.pred", "pred -> pred", operator.not_)
    define("shl.{}", f"{bits}: T u32 -> T", lambda a, by: a << by if by < 64 else 0)
    define("shr.{}", "s32 s64 u16 u32 u64: T u32 -> T", lambda a, by: a >> min(by, 64))
    define("shf.l.wrap.b32", "b32 b32 u32 -> b32", lambda low, high, by: (high << 32 | low) << by % 32 >> 32)
    define("shf.r.wrap.b32", "b32 b32 u32 -> b32", lambda low, high, by: (high << 32 | low) >> by % 32)
    define("bfe.u32", "u32 u32 u32 -> u32", lambda *values: _extract(*values, False))
    define("bfe.u64", "u64 u32 u32 -> u64", lambda *values: _extract(*values, False, 64))
    define("bfe.s32", "s32 u32 u32 -> s32", lambda *values: _extract(*values, True))
    define("prmt.b32", "b32 b32 b32 -> b32", _permute)
    define("popc.b32", "b32 -> u32", lambda a: bin(a).count("1"))
    define("selp.{}", f"{bits} f32 f64: T T pred -> T", lambda a, b, first: a if first else b)
    _fill_comparisons()
    _fill_conversions()


def _fill_comparisons() -> None:
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        compare = getattr(operator, name)
        kinds = "b16 b32 b64" if name in ("eq", "ne") else "s32 u32 s64"
        define(f"setp.{name}.{{}}", f"{kinds}: T T -> pred", compare)

        def unordered(a: float, b: float, compare: Callable[[float, float], bool] = compare) -> bool:
            return math.isnan(a) or math.isnan(b) or compare(a, b)

        def ordered(a: float, b: float, compare: Callable[[float, float], bool] = compare) -> bool:
            return not math.isnan(a) and not math.isnan(b) and compare(a, b)

        define(f"setp.{name}.{{}}", "f32 f64: T T -> pred", ordered)
        define(f"setp.{name}u.{{}}", "f32 f64: T T -> pred", unordered)
    define("setp.nan.{}", "f32 f64: T T -> pred", lambda a, b: math.isnan(a) or math.isnan(b))
    define("setp.num.{}", "f32 f64: T T -> pred", lambda a, b: not (math.isnan(a) or math.isnan(b)))


def _converted(kind: str) -> Callable[[Any], Any]:
    def function(value: Any) -> Any:
        if isinstance(value, float) and (not math.isfinite(value) or value == 0):
            return value
        return rounded(Fraction(value), kind)

    return function


def _fill_conversions() -> None:
    for to, of in (("u32", "u16"), ("u16", "u32"), ("u16", "u64"), ("u32", "u64"), ("u64", "u32"), ("s32", "s16"),
                   ("s64", "s32"), ("s64", "s16"), ("u64", "u16"), ("s16", "s32")):  # fmt: skip
        define(f"cvt.{to}.{of}", f"{of} -> {to}", lambda a: a)
    for to, of in (("f32", "s32"), ("f32", "u32"), ("f32", "u16"), ("f32", "s16"), ("f32", "s64"), ("f32", "u64"),
                   ("f64", "s32"), ("f64", "s64"), ("f64", "u32"), ("f32", "f64"), ("f16", "f32"),
                   ("bf16", "f32")):  # fmt: skip
        define(f"cvt.rn.{to}.{of}", f"{of} -> {to}", _converted(to))
    for to, of in (("f64", "f32"), ("f32", "f16"), ("f32", "bf16")):
        define(f"cvt.{to}.{of}", f"{of} -> {to}", lambda a: a)
    for how, round_to in (("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil), ("rni", round)):
        for to in ("s32", "u32", "u16", "s64"):
            for of in ("f32", "f64"):
                define(f"cvt.{how}.{to}.{of}", f"{of} -> {to}", _to_whole(round_to, to, of))
    define("cvt.rmi.f64.f64", "f64 -> f64", _whole_float)
    define("cvt.rmi.f32.f32", "f32 -> f32", _whole_float)
    define("cvt.rmi.ftz.f32.f32", "f32 -> f32", lambda a: _whole_float(_without_subnormals(a)))


_fill()


def names_of(opcodes: Iterable[str]) -> list[str]:
    """The defined instructions of some opcodes."""
    chosen = set(opcodes)
    return [name for name in DEFINITIONS if name.partition(".")[0] in chosen]
