"""The house keeps its shape: floors, faces, doors of libraries, sizes, no circle."""

import ast
import fnmatch
import functools
import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.folders import ROOT

# Each package may import itself and those before it.
PACKAGES = ("pallas_kernels", "jaxkv", "scaling", "experiments")

# The rooms of each package, floor by floor: each imports from floors below alone.
FLOORS = {
    "pallas_kernels": (
        "devices",
        "layered row_packing quantizing online_softmax",
        "page_ops flash_attention grouped_matmul paged_attention",
        "bench",
    ),
    "jaxkv": (
        "arrays clock files progress validation",
        "text memory",
        "sampling scheduling",
        "ledger",
        "models workloads",
        "decoding engine simulation",
        "speculation",
        "parallel",
        "serving",
        "server",
        "disaggregation",
    ),
    "scaling": (
        "locking shapes laws corpora",
        "logs costs fits",
        "frontiers training plan",
        "sweeps",
    ),
    "experiments": (
        "plotting",
        "framework",
        "harness",
        "fitting",
        "cli",
        "training counting",
        "bench serving decoding examples",
    ),
}

MOST_IN_A_FOLDER, MOST_AT_A_ROOT = 14, 20

# The only files that may import a library (or a part of one).
DOORS = {
    "matplotlib": ("experiments/*",),
    "PIL": ("experiments/plotting/style.py",),
    "tyro": ("experiments/cli/main.py", "experiments/cli/parsing.py"),
    "flax": (
        "jaxkv/models/layers.py",
        "jaxkv/models/transformer.py",
        "scaling/training/architectures.py",
    ),
    "optax": ("scaling/training/optimizers.py", "jaxkv/models/checkpoints.py"),
    "orbax": ("scaling/training/train.py", "jaxkv/engine/snapshots.py"),
    "safetensors": ("jaxkv/models/huggingface/weights.py",),
    "tokenizers": ("jaxkv/text/tokenizer.py", "jaxkv/text/byte_pairs.py"),
    "jinja2": ("jaxkv/text/chat_templates.py",),
    "rich": ("experiments/*", "scaling/training/train.py"),
    "pyarrow": ("jaxkv/files/columnar.py",),
    "fastapi": ("jaxkv/server/app.py",),
    "starlette": ("jaxkv/server/app.py",),
    "uvicorn": ("jaxkv/server/http_server.py",),
    "ray": ("scaling/sweeps/executors.py", "jaxkv/disaggregation/cluster.py"),
    "jax.experimental.pallas": (
        "pallas_kernels/paged_attention/hopper/*.py",
        "pallas_kernels/*/*mosaic_gpu.py",
    ),
    # Nothing is ever unpickled.
    "pickle": (),
}

TOP_LEVEL = {
    "GLOSSARY.md",
    *PACKAGES,
    *("tests", ".ci", ".github"),
    *("pyproject.toml", "constraints.txt", ".python-version", ".gitignore"),
    *("Makefile", "README.md", "LICENSE"),
    *("CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "docs"),
}


def sources() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def module_of(path: Path) -> str:
    """The dotted name of a file; of a package, that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TESTS = [*(ROOT / "tests").rglob("test_*.py")]
MODULES = {module_of(path): path for path in sources()}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Every dotted name a file imports, with its line."""
    tree = parsed(path)
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def ours(path: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """The modules of ours that a file imports, or takes a name from."""
    for line, name in imports(path, lazy=lazy):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES:
            yield line, module


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        place = path.relative_to(ROOT)
        later = PACKAGES[PACKAGES.index(place.parts[0]) + 1 :]
        for line, name in imports(path):
            if any(is_in(name, module) for module in (*later, "tests")):
                wrong.append(f"{place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_rooms_import_from_lower_floors_only() -> None:
    wrong = []
    for package, floors in FLOORS.items():
        floor = {name: i for i, names in enumerate(floors) for name in names.split()}
        for module, path in MODULES.items():
            home = module.split(".")
            if home[0] != package or len(home) == 1:
                continue
            assert home[1] in floor, f"{module}: no floor is named for {home[1]}"
            for line, other in ours(path):
                there = other.split(".")
                if there[0] != package or len(there) == 1 or there[1] == home[1]:
                    continue
                if floor[there[1]] >= floor[home[1]]:
                    wrong.append(f"{module}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_the_pages_draw_the_floors() -> None:
    """The page of a package has the floors as a drawing, the lowest at the bottom."""
    for package, floors in FLOORS.items():
        page = (ROOT / package / "README.md").read_text(encoding="utf-8")
        blocks = (x.strip().splitlines() for x in page.split("```")[1::2])
        drawing = next(x for x in blocks if all("|" in line for line in x))
        drawn = [set(line.partition("|")[0].split()) for line in drawing]
        assert drawn[::-1] == [set(names.split()) for names in floors], package


def test_nothing_imports_in_a_circle() -> None:
    # To import a module is to import the packages around it first.
    edges = {}
    for module, path in MODULES.items():
        edges[module] = targets = set()
        for _, other in ours(path, lazy=False):
            while other:
                if not is_in(module, other):
                    targets.add(other)
                other = other.rpartition(".")[0]
    while leaves := [name for name, targets in edges.items() if not targets]:
        for leaf in leaves:
            del edges[leaf]
        for targets in edges.values():
            targets.difference_update(leaves)
    assert not edges, sorted(edges)


def face(module: str) -> set[str]:
    """What a room's `__all__` names: its public things, and its public modules."""
    for node in parsed(MODULES[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


ROOMS = {
    module: face(module)
    for module, path in MODULES.items()
    if path.stem == "__init__" and "." in module
}


def doors(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Each room that a module enters for a name, and what it takes there."""
    parts = name.split(".")
    for depth in range(2, len(parts)):
        room = ".".join(parts[:depth])
        if room in ROOMS and not is_in(module, room):
            yield room, parts[depth]


def test_a_room_is_entered_by_its_face() -> None:
    wrong = []
    for module, path in MODULES.items():
        for line, name in imports(path):
            for room, thing in doors(module, name):
                if thing not in ROOMS[room]:
                    wrong.append(f"{module}:{line} imports {name} past {room}")
            home, there = module.split(".")[:2], name.split(".")
            is_private = there[-1].startswith("_") and there[0] in PACKAGES
            if is_private and there[:2] != home:
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_a_face_names_what_there_is() -> None:
    for room, names in ROOMS.items():
        held = {module.removeprefix(f"{room}.") for module in MODULES}
        module = importlib.import_module(room)
        missing = [x for x in names if x not in held and not hasattr(module, x)]
        assert not missing, (room, missing)


def test_folders_hold_a_dozen_or_so() -> None:
    full = []
    for folder in {path.parent for path in sources()}:
        held = [
            path
            for path in folder.iterdir()
            if (path.suffix == ".py" and path.stem != "__init__")
            or (path / "__init__.py").exists()
        ]
        most = MOST_AT_A_ROOT if folder.parent == ROOT else MOST_IN_A_FOLDER
        if len(held) > most:
            full.append(f"{folder.relative_to(ROOT)} holds {len(held)} of {most}")
    assert not full, full


def test_each_library_has_its_door() -> None:
    wrong = []
    for path in sources():
        place = path.relative_to(ROOT).as_posix()
        for line, name in imports(path):
            for library, doors in DOORS.items():
                if is_in(name, library) and not any(
                    fnmatch.fnmatch(place, door) for door in doors
                ):
                    wrong.append(f"{place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_package_says_what_it_is() -> None:
    undocumented = [
        str(path.relative_to(ROOT))
        for path in sources()
        if not ast.get_docstring(parsed(path))
    ]
    assert not undocumented


def test_constraints_hold_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    assert not [line for line in lines if "://" in line or " @ " in line]
    assert all("==" in line for line in lines)


def test_top_level_holds_only_what_it_should() -> None:
    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    try:
        top = Path(git("rev-parse", "--show-toplevel").strip()).resolve()
        tracked = {
            Path(name).parts[0] for name in git("ls-files", "-z").split("\0")[:-1]
        }
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    if top != ROOT or not tracked:
        pytest.skip("nothing is tracked by git here")
    assert tracked == TOP_LEVEL


def test_tests_stand_where_what_they_test_stands() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in sorted(TESTS)]
    assert not [x for x in tests if not (ROOT / x.parent).is_dir()]
    stems = [path.stem for path in tests]
    assert not [x for x in stems if stems.count(x) > 1]


def test_no_test_file_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        parts = [part for _, name in imports(path) for part in name.split(".")]
        assert not [part for part in parts if part.startswith("test_")], path


PROTOCOL = {"Config", "Result", "run", "plot", "claims", "metrics", "summary", "main"}
"""Names that every experiment, or every script, defines."""


def test_a_public_name_means_one_thing() -> None:
    """No two modules define a public class or function of the same name."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                if not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(module)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice.keys() - PROTOCOL, twice
