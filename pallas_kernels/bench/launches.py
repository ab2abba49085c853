"""Reads the launches of a GPU program from the compiler's dump, without a GPU.

XLA runs a program as a sequence of thunks: kernels, products, copies, loops, branches,
and command buffers, which are CUDA graphs. The last dump of the thunks shows which are
captured in a command buffer; the text of the optimized program does not. Names of
thunks lead to instructions of that text, and these to the named scopes of the source.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

LOOPS = ("While", "Conditional")
_NO_LAUNCH = {*LOOPS, "CommandBuffer", "AsyncStart", "AsyncDone", "DynamicSliceFusion"}
_THUNK = re.compile(r"( *)(\d+): k(\w+)")
_REGION = re.compile(r"( *)(\w+):\s*$")


class Thunk(NamedTuple):
    """One entry of the compiler's plan.

    Attributes:
      kind: XLA's name without the leading k: `CustomKernel`, `CublasLtMatmul`, `Copy`.
      name: instruction in the optimized program; empty if there is none.
      scope: named scopes of the source, joined by slashes.
      trips: trip count of a `While`, if the compiler knows it.
      regions: nested thunks by the region's name: `condition`, `body`, `true_branch`,
        `branch_0`; "" for a command buffer.
    """

    kind: str
    name: str
    scope: str
    trips: int | None
    regions: dict[str, list[Self]]

    @property
    def launches(self) -> bool:
        """True if the thunk itself launches work on the device."""
        return self.kind not in _NO_LAUNCH


def read_plan(folder: Path) -> list[Thunk]:
    """Reads the plan of the program that was dumped to a folder.

    Raises:
      ValueError: the folder holds no dump, or more than one.
    """
    metadata = _one(folder, "*.thunk_metadata.txt")
    text = _one(folder, "*gpu_after_optimizations.txt")
    plan = _one(folder, "*.thunk_sequence_after_thunk_passes.txt")
    return _parse(plan, _annotations(metadata), _instructions(text))


def walk_thunks(
    thunks: Sequence[Thunk], inside: tuple[Thunk, ...] = ()
) -> Iterator[tuple[Thunk, tuple[Thunk, ...]]]:
    """Yields every thunk with its enclosing thunks, the outermost first."""
    for thunk in thunks:
        yield thunk, inside
        for held in thunk.regions.values():
            yield from walk_thunks(held, (*inside, thunk))


def _one(folder: Path, pattern: str) -> str:
    matches = [*folder.glob(pattern)]
    if len(matches) != 1:
        raise ValueError(f"{folder} holds {len(matches)} files {pattern}, must be 1")
    return matches[0].read_text("utf-8")


def _annotations(metadata: str) -> dict[int, str]:
    """Returns instruction names by thunk number."""
    names = {}
    for block in metadata.split("thunk_metadata {")[1:]:
        number = re.search(r"thunk_id: (\d+)", block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if number and name:
            names[int(number[1])] = name[1]
    return names


def _instructions(text: str) -> dict[str, str]:
    """Returns the instructions of an optimized program by name."""
    lines = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", text, re.MULTILINE)
    return dict(lines)


def _parse(
    plan: str, names: Mapping[int, str], instructions: Mapping[str, str]
) -> list[Thunk]:
    """Builds the tree of thunks from the indentation and the region headers."""
    top: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk, str]] = []
    """Indentation, thunk, and its current region."""
    # An empty region reads "No thunks.", and the next header follows on the same line.
    for line in plan.replace("No thunks.", "\n").splitlines():
        if match := _THUNK.match(line):
            indent = len(match[1])
            while open_thunks and open_thunks[-1][0] >= indent:
                open_thunks.pop()
            number = int(match[2])
            name = names.get(number, "") if number else ""
            thunk = _thunk(match[3], name, instructions.get(name, ""))
            if open_thunks:
                _, around, region = open_thunks[-1]
                around.regions.setdefault(region, []).append(thunk)
            else:
                top.append(thunk)
            open_thunks.append((indent, thunk, ""))
        elif match := _REGION.match(line):
            # The first region of a loop is not indented: it follows the loop's line.
            indent = len(match[1]) - 2
            while match[1] and open_thunks[-1][0] > indent:
                open_thunks.pop()
            depth, thunk, _ = open_thunks.pop()
            open_thunks.append((depth, thunk, match[2]))
            thunk.regions.setdefault(match[2], [])
    return top


def _thunk(kind: str, name: str, instruction: str) -> Thunk:
    scope = re.search(r'op_name="([^"]*)"', instruction)
    trips = re.search(r'known_trip_count[^}]*"n":"(\d+)"', instruction)
    return Thunk(
        kind,
        name,
        scope[1] if scope else "",
        int(trips[1]) if trips else None,
        regions={},
    )


class Route(NamedTuple):
    """Assumed trip counts and branches of a program whose control flow is data.

    Attributes:
      name: name of the route.
      choices: trips of each loop, and branch of each condition (0 for false), by named
        scope; the innermost scope of a thunk that is a key applies.
    """

    name: str
    choices: Mapping[str, int]

    def choice(self, thunk: Thunk) -> int:
        """Returns the trips of a loop, or the branch of a condition.

        Raises:
          ValueError: no scope of the thunk is a key of `choices`.
        """
        for scope in reversed(thunk.scope.split("/")):
            if scope in self.choices:
                return self.choices[scope]
        raise ValueError(f"{thunk.kind} {thunk.name} in {thunk.scope} has no choice")


def executed_launches(
    thunks: Sequence[Thunk],
    route: Route,
    times: int = 1,
    inside: tuple[Thunk, ...] = (),
) -> Iterator[tuple[Thunk, int, tuple[Thunk, ...]]]:
    """Yields the launches of one run, with their counts and enclosing thunks.

    The body of a loop with a known trip count, such as a scan, counts once, and its
    condition not at all: counts are those of one step, and of one layer if the layers
    are scanned.

    Args:
      thunks: the plan.
      route: trip counts and branches.
      times: executions of the plan.
      inside: enclosing thunks, the outermost first.
    """
    for thunk in thunks:
        if thunk.launches:
            yield thunk, times, inside
        for region, held in thunk.regions.items():
            if often := _trips(thunk, region, route):
                yield from executed_launches(
                    held, route, times * often, (*inside, thunk)
                )


def _trips(thunk: Thunk, region: str, route: Route) -> int:
    if thunk.kind == "While":
        is_condition = region == "condition"
        if thunk.trips is not None:
            return int(not is_condition)
        return route.choice(thunk) + is_condition
    if thunk.kind == "Conditional":
        return int(_branch(thunk, region) == route.choice(thunk))
    return 1


def _branch(thunk: Thunk, region: str) -> int:
    """Returns the branch of `lax.cond` of a region, read from instruction scopes.

    XLA turns an index of two branches into a predicate, in either order.
    """
    others = [name for name in thunk.regions if name != region]
    for name in (region, *others):
        for held, _ in walk_thunks(thunk.regions[name]):
            match = re.match(rf"{re.escape(thunk.scope)}/branch_(\d+)_fun", held.scope)
            if match:
                branch = int(match[1])
                return branch if name == region else 1 - branch
    raise ValueError(f"{thunk.name} has no instruction that identifies a branch")
