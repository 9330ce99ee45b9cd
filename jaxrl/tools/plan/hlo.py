"""Read the collectives of a compiled program from the text of its HLO."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxrl.models.expert_exchange import FURTHER

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>\S+) = (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})"
    r"(?P<start>-start)?\((?P<rest>.*)$"
)
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)


class Inner(NamedTuple):
    """Say how often a loop runs in one trip of another, where both numbers depend on the data.

    Attributes:
        given: trips of a loop over what a block of the sampler is given: chunks of prompts, and
            pages to copy.
        pages: trips of a loop over pages of rows; JAX's name of it has the scope "attention".
        alone: nothing counts but what runs in the loops of `given`.
    """

    given: int = 1
    pages: int = 1
    alone: bool = False


ONCE = Inner()


@dataclass(frozen=True)
class Collective:
    """Describe one collective instruction.

    Attributes:
        kind: one of `KINDS`.
        array: type of the result, as in the HLO.
        size: bytes of the whole array: what an all-gather gives, what a reduce-scatter or an
            all-reduce takes, what one device sends in the other two.
        group: the devices of one group, numbered as in the mesh.
        times: executions per run of the program, once per trip of a loop without a fixed count;
            where such loops are in one another, of the outermost.
        fixed: whether all loops around it have fixed counts.
        source: the operation of the JAX program.
    """

    kind: str
    array: str
    size: int
    group: tuple[int, ...]
    times: int
    fixed: bool
    source: str

    @property
    def moved(self) -> float:
        """Return the bytes that one device sends in one execution, on a ring.

        (n - 1) / n of the array; twice that for an all-reduce; all of it for a permute.
        """
        n = len(self.group)
        factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return self.size * factor.get(self.kind, (n - 1) / n)


def collectives(text: str, inner: Inner = ONCE) -> list[Collective]:
    """Return the collectives of an optimised HLO module, `compiled.as_text()`.

    The TPU compiler writes a reduce-scatter as an all-reduce and a slice, fused under a name that
    says so, and an asynchronous collective once for its start and again for each fusion that it
    overlaps with: these count as what they are, and once.
    """
    blocks = computations(text)
    return [
        found
        for name, times, fixed in executions(blocks, inner)
        for line in blocks[name]
        if (found := _parse(line, name, blocks[name], times, fixed))
    ]


def computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation by name; that of the entry is "ENTRY"."""
    blocks: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = "ENTRY" if head[1] else head[2]
            blocks[name] = []
        elif line.rstrip() == "}":
            name = None
        elif name:
            blocks[name].append(line)
    return blocks


def executions(
    blocks: dict[str, list[str]], inner: Inner = ONCE
) -> Iterator[tuple[str, int, bool]]:
    """Yield of each call of a computation its name, how often it runs, whether that is fixed."""
    todo = [("ENTRY", 1, True, not inner.alone)]
    while todo:
        name, times, fixed, counts = todo.pop()
        if counts:
            yield name, times, fixed
        for line in blocks[name]:
            if loop := _WHILE.search(line):
                if FURTHER in source_of(line):
                    continue  # of loads that are not even
                trips = _trips(line, blocks[loop[1]], blocks[loop[2]])
                known, begins = trips is not None, False
                if not known and not fixed:
                    begins = "attention" not in source_of(line)
                    trips = inner.given if begins else inner.pages
                runs = times * (1 if trips is None else trips)
                todo.append((loop[2], runs, fixed and known, counts or begins))
                continue
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            todo += [(other, times, fixed, counts) for other in called if other in blocks]


def _trips(line: str, condition: list[str], body: list[str]) -> int | None:
    """Return the iterations of a loop that counts from 0 to a constant; None for any other."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    constants = [
        c for text in condition for c in re.findall(r"= [su]32\[\]\S* constant\((\d+)\)", text)
    ]
    compares = [text for text in condition if "direction=LT" in text]
    if not len(constants) == len(compares) == 1:
        return None
    return -(-int(constants[0]) // _step(condition, body))


def _step(condition: list[str], body: list[str]) -> int:
    """Return by how much a trip raises the element of the loop's tuple that the condition reads.

    A product that XLA splits into windows, one for each device, does two of them in a trip.
    """
    read = re.search(r"get-tuple-element\(.*index=(\d+)", "\n".join(condition))
    new = next((re.search(r" tuple\((.*?)\)", text) for text in body if "ROOT" in text), None)
    if read is None or new is None:
        return 1  # the counter is all there is
    counter = re.findall(r"%([\w.\-]+)", new[1])[int(read[1])]
    sums = (re.match(rf"\s*%{re.escape(counter)} = .* add\((.*?)\)", text) for text in body)
    terms = re.findall(r"%([\w.\-]+)", next((found[1] for found in sums if found), ""))
    for term in terms:
        for text in body:
            if by := re.match(rf"\s*%{re.escape(term)} = [su]32\S* constant\((\d+)\)", text):
                return int(by[1])
    return 1


def _parse(
    line: str, computation: str, block: list[str], times: int, fixed: bool
) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if match is None or ("chain_id=" in line and not _starts(match["name"], block)):
        return None
    kind, group = match["kind"], _group(line)
    size = size_of(match["type"])
    if kind == "reduce-scatter":
        size *= len(group)
    elif match["start"] and kind == "all-gather":  # its type holds the operand as well
        size = size * len(group) // (len(group) + 1)
    elif match["start"] and kind == "collective-permute":
        size //= 2
    if kind == "all-reduce" and "reduce-scatter" in computation:
        kind = "reduce-scatter"
    array = re.sub(r"\{[^}]*\}", "", match["type"])
    return Collective(kind, array, size, group, times, fixed, source_of(line))


def source_of(line: str) -> str:
    """Return the operation of the JAX program that an instruction is of, "jit(f)/while/body/add".

    "" = not known.
    """
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""


def _starts(name: str, block: list[str]) -> bool:
    """Return whether an asynchronous collective starts here, and not in an earlier instruction."""
    return any("AsyncCollectiveStart" in line and f"%{name})" in line for line in block)


def size_of(text: str) -> int:
    """Return the bytes of the arrays of a type, "(f32[2,3]{1,0}, s32[])": 28."""
    return sum(map(_bytes, _ARRAY.findall(text)))


def _bytes(array: tuple[str, str]) -> int:
    dtype, dims = array
    bits = 8 if dtype == "pred" else int(match[0]) if (match := _BITS.search(dtype)) else 0
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def _integers(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",")] if text else []


def _group(line: str) -> tuple[int, ...]:
    """Return the devices of the first group: a list, an iota, a mesh, or the pairs of a permute."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(int(d) for d in listed[1].split(","))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, reshape, axes = map(_integers, iota.groups())
        ids = np.arange(math.prod(reshape)).reshape(reshape)
        return tuple(ids.transpose(axes or None).reshape(shape)[0].tolist())
    if mesh := _MESH.search(line):
        sizes = {n: int(size) for n, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        over = re.findall(r"'(\w+)'", mesh[4])
        ids = np.arange(math.prod(sizes.values()))
        if mesh[2]:  # devices in another order
            ids = ids.reshape(_integers(mesh[2])).transpose(_integers(mesh[3]) or None)
        ids = ids.reshape(tuple(sizes.values()))
        return tuple(ids[tuple(slice(None) if n in over else 0 for n in sizes)].ravel().tolist())
    pairs = re.findall(
        r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2].partition("}}")[0] + "}"
    )
    return tuple(sorted({int(d) for pair in pairs for d in pair}))
