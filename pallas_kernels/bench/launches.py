"""What a program launches on a GPU, read off the compiler's plan for one not there.

XLA runs a program as a sequence of thunks: kernels, products, copies, loops, branches,
and command buffers, which are CUDA graphs launched as one. The compiler's last dump of
them says what is captured, which the optimised program's text does not; its names lead
back to that text, and there to the named scopes of the source.
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
      kind: as XLA names it, without the k: `CustomKernel`, `CublasLtMatmul`, `Copy`.
      name: its instruction in the optimised program; empty where it has none.
      scope: the source's named scopes around it, joined by slashes.
      trips: of a `While`, where the compiler knows them.
      regions: what runs inside, by the region's name: `condition`, `body`,
        `true_branch`, `branch_0`; "" of a command buffer.
    """

    kind: str
    name: str
    scope: str
    trips: int | None
    regions: dict[str, list[Self]]

    @property
    def launches(self) -> bool:
        """Whether it puts something of its own on the device."""
        return self.kind not in _NO_LAUNCH


def read_plan(folder: Path) -> list[Thunk]:
    """Reads the plan of the one program whose dump lies in a folder.

    Raises:
      ValueError: there is none, or more than one.
    """
    metadata = _one(folder, "*.thunk_metadata.txt")
    text = _one(folder, "*gpu_after_optimizations.txt")
    plan = _one(folder, "*.thunk_sequence_after_thunk_passes.txt")
    return _parse(plan, _annotations(metadata), _instructions(text))


def walk_thunks(
    thunks: Sequence[Thunk], inside: tuple[Thunk, ...] = ()
) -> Iterator[tuple[Thunk, tuple[Thunk, ...]]]:
    """Every thunk with those around it, the outermost first."""
    for thunk in thunks:
        yield thunk, inside
        for held in thunk.regions.values():
            yield from walk_thunks(held, (*inside, thunk))


def _one(folder: Path, pattern: str) -> str:
    found = [*folder.glob(pattern)]
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} files {pattern}, must be 1")
    return found[0].read_text("utf-8")


def _annotations(metadata: str) -> dict[int, str]:
    """Instructions' names by the numbers of thunks."""
    found = {}
    for block in metadata.split("thunk_metadata {")[1:]:
        number = re.search(r"thunk_id: (\d+)", block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if number and name:
            found[int(number[1])] = name[1]
    return found


def _instructions(text: str) -> dict[str, str]:
    """Instructions of an optimised program by name."""
    lines = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", text, re.MULTILINE)
    return dict(lines)


def _parse(
    plan: str, names: Mapping[int, str], instructions: Mapping[str, str]
) -> list[Thunk]:
    """Nests lines by their indentation; headers of regions stand between them."""
    top: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk, str]] = []
    """Indentation, thunk, and the region of it that lines go to now."""
    # An empty region says so, and the next header follows on the same line.
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
    """Which way a program goes where data decides.

    Attributes:
      name: of the route.
      choices: trips of each loop, and the branch of each condition (0 where it is
        false), by the named scope it stands in; a thunk's innermost one counts.
    """

    name: str
    choices: Mapping[str, int]

    def choice(self, thunk: Thunk) -> int:
        """Trips of a loop, or the branch of a condition.

        Raises:
          ValueError: no scope around it is among the choices.
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
    """Everything that one run launches, with how often, and what is around it.

    A loop whose trips the compiler knows, as it does a scan's, counts once, and nobody
    asks for its condition: the counts are those of one step, and of one layer if the
    layers are scanned.

    Args:
      thunks: the plan.
      route: which way it goes.
      times: how often the plan runs.
      inside: what is around it, the outermost first.
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
    """The branch of `lax.cond` that a region is, which its instructions' scopes tell.

    XLA turns an index of two branches into a predicate, either way round.
    """
    others = [name for name in thunk.regions if name != region]
    for name in (region, *others):
        for held, _ in walk_thunks(thunk.regions[name]):
            found = re.match(rf"{re.escape(thunk.scope)}/branch_(\d+)_fun", held.scope)
            if found:
                own = int(found[1])
                return own if name == region else 1 - own
    raise ValueError(f"{thunk.name} does not tell its branches apart")
