"""Count what a TPU program computes and moves, from the text of its HLO: products, bytes, sorts.

The compiler's own cost analysis takes the body of a loop once; here it counts as often as it runs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl.tools.plan import hlo

# What writes in place into its first operand, and which operand it writes.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
KERNEL = "tpu_custom_call"  # a Pallas kernel: its operands are seen, not what it does with them
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # 2**64 - n: none
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_NAMES = re.compile(r"%([\w.\-]+)")
# Nothing moves for these, or what they run counts by itself.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id")
    + ("while", "conditional", "call", "after-all", "custom-call")
)


class Instruction(NamedTuple):
    """Hold one line of a computation; `rest` is its text from the operands on."""

    name: str
    type: str
    kind: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Return the names of what it reads."""
        return _NAMES.findall(self.rest.partition(")")[0])

    @property
    def shape(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the dims of its first result."""
        found = _ARRAY.search(self.type)
        assert found, self.type
        return found[1], tuple(int(n) for n in found[2].split(",") if n)


Block = dict[str, Instruction]


@dataclass(frozen=True)
class Counted:
    """Describe what one instruction of a program costs on one device.

    Attributes:
        kind: as in the HLO; "product" for a dot or a convolution.
        array: dtypes and dims of its result; of a product "left x right -> result" dtypes.
        amount: bytes of the result of one execution; of a product its FLOPs.
        times: executions per run of the program, once per trip of a loop without a fixed count.
        fixed: whether all loops around it have fixed counts.
        source: the operation of the JAX program.
    """

    kind: str
    array: str
    amount: float
    times: int
    fixed: bool
    source: str

    def total(self, trips: int) -> float:
        """Return the amount of all executions, with `trips` of each loop whose count varies."""
        return self.amount * self.times * (1 if self.fixed else trips)


@dataclass(frozen=True)
class Totals:
    """Hold the sums of a program on one device.

    Attributes:
        cycles: the compiler's estimates; it has none for kernels, sorts and large scatters.
        moved: bytes read from and written to the device's main memory, without those of kernels.
        kernel_moved: bytes of the operands and results of kernels, as if each were read whole.
        products: FLOPs by "left x right -> result".
    """

    cycles: float
    moved: float
    kernel_moved: float
    products: dict[str, float]

    @property
    def flops(self) -> float:
        """Return the FLOPs of all products outside of kernels."""
        return sum(self.products.values())


class Program:
    """Read a compiled program, `compiled.as_text()`.

    Args:
        trips: of its loops whose number depends on the data.
        inner: of such loops within them.
    """

    def __init__(self, text: str, trips: int = 1, inner: hlo.Inner = hlo.ONCE) -> None:
        lines = hlo.computations(text)
        self._blocks = {
            name: {
                found["name"]: Instruction(
                    *(found[key] for key in ("name", "type", "kind", "rest"))
                )
                for line in block
                if (found := _INSTRUCTION.match(line))
            }
            for name, block in lines.items()
        }
        self._runs = list(hlo.executions(lines, inner))
        self._trips = trips
        # what a fusion calls is one pass over its operands: it moves nothing by itself
        self._inside = set(_CALLS.findall(text))

    def totals(self) -> Totals:
        """Return the sums of the whole program."""
        cycles = moved = kernels = 0.0
        products: dict[str, float] = {}
        for one in self.products():
            products[one.array] = products.get(one.array, 0.0) + one.total(self._trips)
        for name, times, fixed in self._runs:
            if name in self._inside:
                continue
            runs = times * (1 if fixed else self._trips)
            for instruction in self._blocks[name].values():
                cycles += runs * sum(map(int, _CYCLES.findall(instruction.rest)))
                moved += runs * self._moved(instruction, self._blocks[name])
                if f'custom_call_target="{KERNEL}"' in instruction.rest:
                    kernels += runs * _whole(instruction, self._blocks[name])
        return Totals(cycles, moved, kernels, products)

    def products(self) -> list[Counted]:
        """Return the matrix products outside of kernels."""
        return [
            Counted(
                "product",
                _types(one, block),
                _flops(one, block),
                times,
                fixed,
                hlo.source_of(one.rest),
            )
            for one, block, times, fixed in self._each()
            if one.kind in ("dot", "convolution")
        ]

    def find(self, kinds: tuple[str, ...], least: float = 0) -> list[Counted]:
        """Return the instructions of some kinds whose results have `least` bytes or more."""
        return [
            Counted(
                one.kind, _arrays(one.type), _bytes(one.type), times, fixed, hlo.source_of(one.rest)
            )
            for one, _, times, fixed in self._each()
            if one.kind in kinds and _bytes(one.type) >= least
        ]

    def _each(self) -> Iterator[tuple[Instruction, Block, int, bool]]:
        for name, times, fixed in self._runs:
            for instruction in self._blocks[name].values():
                yield instruction, self._blocks[name], times, fixed

    def _moved(self, one: Instruction, block: Block) -> float:
        """Return the bytes of main memory that one execution reads and writes."""
        if one.kind in _FREE or one.kind.endswith("-start"):
            return 0.0
        if one.kind.endswith("-done"):  # to fast memory, or from one place to another
            return _bytes(one.type) * (1 if "S(1)" in one.type else 2)
        called = _CALLS.search(one.rest) if one.kind == "fusion" else None
        body = self._blocks[called[1]] if called else {one.name: one}
        names = dict(enumerate(one.operands))
        if called:
            parameters = (x for x in body.values() if x.kind == "parameter")
            names = {int(x.rest.partition(")")[0]): x.name for x in parameters}
        read = sum(
            min(_main_bytes(block[given].type), _read(names[number], body))
            for number, given in enumerate(one.operands)
            if given in block and number in names
        )
        within = body if called else block
        kept = sum(  # of what is updated in place
            _bytes(x.type) - _bytes(within[x.operands[UPDATES[x.kind]]].type)
            for x in body.values()
            if x.kind in UPDATES and x.operands[UPDATES[x.kind]] in within
        )
        return read + max(_main_bytes(one.type) - kept, 0.0)


def _whole(kernel: Instruction, block: Block) -> float:
    operands = (block[name].type for name in kernel.operands if name in block)
    return sum(map(_main_bytes, (kernel.type, *operands)))


def _read(name: str, body: Block) -> float:
    """Return the bytes that a computation reads of an operand; without end if the whole of it."""
    total = 0.0
    for user in body.values():
        if name not in user.operands or user.name == name:
            continue
        if user.kind in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += _bytes(user.type)
        elif user.kind == "bitcast":
            total += _read(user.name, body)
        elif user.kind not in UPDATES or user.operands[0] != name:
            return math.inf
    return total


def _arrays(text: str) -> str:
    return re.sub(r"\{[^}]*\}", "", text)


def _bytes(text: str) -> int:
    return hlo.size_of(text)


def _main_bytes(text: str) -> int:
    """Return the bytes of those arrays of a type that are in main memory."""
    return sum(
        hlo.size_of(f"{dtype}[{dims}]")
        for dtype, dims, layout in _ARRAY.findall(text)
        if not re.search(r"S\([1-9]\)", layout)
    )


def _types(one: Instruction, block: Block) -> str:
    """Return the dtypes of a product: "bf16 x bf16 -> f32"."""
    left, right = (block[name].shape[0] for name in one.operands[:2])
    return f"{left} x {right} -> {one.shape[0]}"


def _flops(one: Instruction, block: Block) -> float:
    """Return the FLOPs of a dot or a convolution: 2 for each product of two numbers."""
    left, right = (block[name].shape[1] for name in one.operands[:2])
    result = one.shape[1]
    if one.kind == "dot":
        over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
        summed = [left[int(dim)] for dim in over[1].split(",")] if over and over[1] else []
        return 2.0 * math.prod(result) * math.prod(summed)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    assert labels, one.rest
    lefts, rights, results = labels.groups()
    pairs = math.prod(
        _pairs(int(dim), left[lefts.index(dim)], result[results.index(dim)], one.rest)
        for dim in results
        if dim.isdigit()
    )
    return (
        2.0
        * result[results.index("b")]
        * result[results.index("f")]
        * pairs
        * (right[rights.index("i")])
    )


def _pairs(dim: int, size: int, results: int, text: str) -> int:
    """Return how many numbers meet along a dim of a convolution, padding left out.

    The TPU compiler writes a batch dim of a product as a dim of the window, dilated or padded so
    that each number meets one.
    """
    window = re.search(r"window=\{([^}]*)\}", text)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}

    def of(name: str, otherwise: str) -> str:
        return fields[name].split("x")[dim] if name in fields else otherwise

    low = int(of("pad", "0_0").split("_")[0])
    stride, dilated = int(of("stride", "1")), int(of("lhs_dilate", "1"))
    taps = np.arange(int(of("size", "1"))) * int(of("rhs_dilate", "1"))
    place = np.arange(results)[:, None] * stride + taps - low
    inside = (place >= 0) & (place <= (size - 1) * dilated) & (place % dilated == 0)
    return int(inside.sum())
