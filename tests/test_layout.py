"""The house keeps its shape: imports point one way, each library has one door."""

import ast
import fnmatch
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.folders import ROOT

# Each package may import itself and those before it.
PACKAGES = ("pallas_kernels", "jaxkv", "scaling", "experiments")

# The only files that may import a library (or a part of one).
DOORS = {
    "matplotlib": ("experiments/*",),
    "tyro": ("experiments/cli.py", "experiments/flags.py"),
    "flax": ("jaxkv/layers.py", "jaxkv/models.py", "scaling/architectures.py"),
    "optax": ("scaling/optimizers.py", "jaxkv/checkpoints.py"),
    "orbax": ("scaling/training.py", "jaxkv/snapshots.py"),
    "safetensors": ("jaxkv/hf_weights.py",),
    "tokenizers": ("jaxkv/tokenizing.py", "jaxkv/byte_pairs.py"),
    "jinja2": ("jaxkv/chatting.py",),
    "rich": ("experiments/*", "scaling/training.py"),
    "ray": ("scaling/executing.py",),
    "jax.experimental.pallas": ("pallas_kernels/*_mosaic_gpu.py",),
    # Nothing is ever unpickled.
    "pickle": (),
}

TOP_LEVEL = {
    *PACKAGES,
    *("tests", ".ci", ".github"),
    *("pyproject.toml", "constraints.txt", ".python-version", ".gitignore"),
    *("Makefile", "README.md", "LICENSE"),
}


def sources() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every dotted name a file imports, with its line, lazy imports included."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        place = path.relative_to(ROOT)
        later = PACKAGES[PACKAGES.index(place.parts[0]) + 1 :]
        for line, name in imports(path):
            if any(is_in(name, module) for module in (*later, "tests")):
                wrong.append(f"{place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


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
        if not ast.get_docstring(ast.parse(path.read_text()))
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


def test_no_test_file_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        parts = [part for _, name in imports(path) for part in name.split(".")]
        assert not [part for part in parts if part.startswith("test_")], path
