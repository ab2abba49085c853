"""Bytes that a compiled program sends, by the collectives in its text.

The bytes of a device are those of an operation's operands, times the trips of the loops
around it, times a factor of its kind (`Collective.sent`): for x bytes over p devices a
ring sends 2 (p-1)/p x for an all-reduce, (p-1) x for an all-gather of parts of x,
(p-1)/p x for a reduce-scatter or an all-to-all, and x for a permute.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_DTYPE_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
_HLO_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$")
_ARRAY_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[a-z]\d+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      kind: one of `COLLECTIVE_KINDS`.
      shapes: element type and shape of each operand.
      devices: number of devices that exchange data; 1 if none is sent.
      trips: number of executions in one run of the program.
      is_sure: True if the text determines `trips`; a loop with a data-dependent number
        of trips, or a branch, counts once.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    devices: int
    trips: int
    is_sure: bool

    def sent(self, *, rank: int = 0) -> float:
        """Returns the bytes that a device sends.

        With `rank` above 0, only tensors of at least that rank count, and only floating
        vectors: this excludes counters and flags, and with 2 also data of vectors.
        """
        size = 0
        for kind, sides in self.shapes:
            is_floating = len(sides) > 1 or kind[0] in "fb"
            if rank == 0 or (len(sides) >= rank and is_floating):
                digits = re.match(r"[a-z]+(\d+)", kind)
                width = max(1, int(digits.group(1)) // 8) if digits else 1
                size += _DTYPE_BYTES.get(kind, width) * math.prod(sides)
        p = self.devices
        size = size * self.trips
        if p == 1:
            return 0.0
        if self.kind == "collective-permute":
            return float(size)
        if self.kind == "all-gather":
            return float((p - 1) * size)
        return (1 + (self.kind == "all-reduce")) * (p - 1) / p * size


def find_collectives(text: str) -> list[Collective]:
    """Lists the collectives of a compiled program, given `compiled.as_text()`.

    Raises:
      ValueError: the text has no program.
    """
    bodies: dict[str, list[str]] = {}
    entry = ""
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and "=" not in line[:3]:
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%").split("(")[0]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and line.startswith("  "):
            bodies[name].append(line)
    if not entry:
        raise ValueError("text must be that of a compiled program: no ENTRY in it")
    return list(_walk(bodies, entry, 1, True))


def _walk(
    bodies: dict[str, list[str]], name: str, trips: int, is_sure: bool
) -> Iterator[Collective]:
    shapes: dict[str, str] = {}
    for line in bodies.get(name, ()):
        match = _HLO_INSTRUCTION.match(line)
        if match is None:
            continue
        result, shape, kind, operand_text = match.groups()
        shapes[result] = shape
        base = kind.removesuffix("-start")
        if base in COLLECTIVE_KINDS:
            operands = tuple(
                (kind, tuple(int(x) for x in sides.split(",") if x))
                for part in re.findall(r"%([\w.-]+)", operand_text.split(")")[0])
                for kind, sides in _ARRAY_SHAPE.findall(shapes.get(part, ""))
            )
            yield Collective(base, operands, _devices(line), trips, is_sure)
            continue
        if kind == "while":
            trip_match = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            inner = trips * int(trip_match.group(1)) if trip_match else trips
            sure = is_sure and trip_match is not None
        else:
            inner = trips
            sure = is_sure and kind != "conditional"
        called = [called_names for _, called_names in _CALLED.findall(line)]
        for called_names in _BRANCHES.findall(line):
            called += [part.strip().lstrip("%") for part in called_names.split(",")]
        for callee in called:
            yield from _walk(bodies, callee, inner, sure)


def _devices(line: str) -> int:
    """Returns the number of devices that exchange data."""
    # HLO writes groups in three ways: by mesh axes, by counts, one by one.
    by_axes = r"replica_groups=mesh\[(.*?)\] \{(.*?)\}"
    if (mesh_match := re.search(by_axes, line)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh_match.group(1)))
        names = re.findall(r"'(\w+)'", mesh_match.group(2))
        return math.prod(int(sizes[name]) for name in names)
    if (mesh_match := re.search(r"replica_groups=\[\d+,(\d+)\]", line)) is not None:
        return int(mesh_match.group(1))
    if (mesh_match := re.search(r"replica_groups=\{\{([\d,]*)\}", line)) is not None:
        return len(mesh_match.group(1).split(","))
    if "source_target_pairs=" in line:
        return 2
    raise ValueError(f"no devices are named in {line.strip()[:300]!r}")
