"""Package layout: layers, exports, allowed third-party imports, cycles, sizes."""

import ast
import fnmatch
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxkv.files
from jaxkv.serving.compiling.program_store import TRACED_PACKAGES, UNTRACED
from pallas_kernels.lazy_exports import read_exports
from tests.support.folders import ROOT

# A package imports only itself and the packages listed before it.
PACKAGES = ("pallas_kernels", "jaxkv", "scaling", "experiments")

# Sub-packages of each package by layer, lowest first. A sub-package imports only
# from lower layers.
LAYERS = {
    "pallas_kernels": (
        "devices lazy_exports",
        "layered row_packing quantizing online_softmax",
        "page_ops flash_attention grouped_matmul paged_attention",
        "bench",
    ),
    "jaxkv": (
        "validation",
        "arrays clock files progress",
        "text memory",
        "sampling scheduling",
        "ledger",
        "models workloads",
        "decoding engine simulation",
        "speculation",
        "parallel",
        "serving scoring",
        "server verification",
        "disaggregation",
        "plotting",
        "report",
        "cli",
    ),
    "scaling": (
        "shapes laws corpora",
        "logs costs fits",
        "frontiers training plan calibration curves forecasts",
        "sweeps policy",
        "cli",
    ),
    "experiments": (
        "framework",
        "lab",
        "harness",
        "cli",
        "training counting servers",
        "bench serving decoding examples course",
        "decisions",
    ),
}

MAX_FOLDER_ENTRIES = 14
MAX_PACKAGE_ENTRIES = 25
"""Modules and folders allowed in a folder and at the root of a package."""

# Files that may import a third-party library (or a part of it).
ALLOWED_IMPORTERS = {
    "matplotlib": ("jaxkv/plotting/*", "scaling/cli/*", "experiments/*"),
    "PIL": ("jaxkv/plotting/saving.py",),
    "tyro": ("jaxkv/cli/parsing.py",),
    "flax": (
        "jaxkv/models/layers/*.py",
        "jaxkv/models/transformer.py",
        "scaling/training/architectures.py",
    ),
    "optax": ("scaling/training/optimizers.py", "jaxkv/models/checkpoints.py"),
    "orbax": ("scaling/training/training_loop.py", "jaxkv/engine/snapshots.py"),
    "safetensors": ("jaxkv/models/huggingface/weights.py",),
    "tokenizers": ("jaxkv/text/tokenizer.py", "jaxkv/text/byte_pairs.py"),
    "jinja2": ("jaxkv/text/chat_templates.py",),
    "rich": (
        "jaxkv/cli/console/*",
        "experiments/*",
        "scaling/training/training_loop.py",
    ),
    "pyarrow": ("jaxkv/files/columnar.py",),
    "fastapi": ("jaxkv/server/app.py",),
    "starlette": ("jaxkv/server/app.py",),
    "uvicorn": ("jaxkv/server/http_server.py",),
    "outlines_core": ("jaxkv/sampling/*.py",),
    "cmaes": ("experiments/decisions/policy_search/optimizer.py",),
    "ray": ("scaling/sweeps/executors.py", "jaxkv/disaggregation/cluster.py"),
    "jax.experimental.pallas": (
        "pallas_kernels/paged_attention/hopper/*.py",
        "pallas_kernels/*/*mosaic_gpu.py",
    ),
    # Only files of the user's own cache are unpickled, which hold machine code anyway.
    "pickle": ("jaxkv/serving/compiling/program_store.py",),
}

TOP_LEVEL = {
    *("GLOSSARY.md", "mkdocs.yml"),
    *PACKAGES,
    *("tests", ".ci", ".github"),
    *("pyproject.toml", "constraints.txt", ".python-version", ".gitignore"),
    *("Makefile", "README.md", "LICENSE"),
    *("CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "docs"),
}


def source_files() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def module_name(path: Path) -> str:
    """Returns the dotted module name of a file; for `__init__.py`, of its package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TESTS = [*(ROOT / "tests").rglob("test_*.py")]
DOCS_SCRIPTS = [*(ROOT / "docs").glob("*.py")]
MODULES = {module_name(path): path for path in source_files()}


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def statements(body: list[Any]) -> Iterator[ast.AST]:
    """Yields the statements, those in functions and branches included."""
    for node in body:
        yield node
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []))


@functools.cache
def imports(path: Path, *, lazy: bool = True) -> list[tuple[int, str]]:
    """Returns line and dotted name of every import; lazy ones (in functions) too."""
    tree = syntax_tree(path)
    entries = []
    for node in statements(tree.body) if lazy else tree.body:
        if isinstance(node, ast.Import):
            entries += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            entries += [(node.lineno, name) for name in names]
    return entries


def is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def imported_modules(path: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Yields the line and module of every import from the packages of this tree."""
    for line, name in imports(path, lazy=lazy):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES:
            yield line, module


def test_packages_import_only_earlier_packages() -> None:
    wrong = []
    for path in source_files():
        place = path.relative_to(ROOT)
        later = PACKAGES[PACKAGES.index(place.parts[0]) + 1 :]
        for line, name in imports(path):
            if any(is_inside(name, module) for module in (*later, "tests")):
                wrong.append(f"{place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_sub_packages_import_only_lower_layers() -> None:
    wrong = []
    for package, layers in LAYERS.items():
        layer = {name: i for i, names in enumerate(layers) for name in names.split()}
        for module, path in MODULES.items():
            home = module.split(".")
            if home[0] != package or len(home) == 1:
                continue
            assert home[1] in layer, f"{module}: no layer lists {home[1]}"
            for line, other in imported_modules(path):
                target = other.split(".")
                if target[0] != package or len(target) == 1 or target[1] == home[1]:
                    continue
                if layer[target[1]] >= layer[home[1]]:
                    wrong.append(f"{module}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_readmes_list_the_layers() -> None:
    """The README of a package lists its layers in a code block, the lowest last."""
    for package, layers in LAYERS.items():
        page = (ROOT / package / "README.md").read_text(encoding="utf-8")
        blocks = (x.strip().splitlines() for x in page.split("```")[1::2])
        listing = next(x for x in blocks if all("|" in line for line in x))
        listed = [set(line.partition("|")[0].split()) for line in listing]
        assert listed[::-1] == [set(names.split()) for names in layers], package


def test_imports_have_no_cycles() -> None:
    # Importing a module first imports the packages that contain it.
    edges = {}
    for module, path in MODULES.items():
        edges[module] = targets = set()
        for _, other in imported_modules(path, lazy=False):
            while other:
                if not is_inside(module, other):
                    targets.add(other)
                other = other.rpartition(".")[0]
    while leaves := [name for name, targets in edges.items() if not targets]:
        for leaf in leaves:
            del edges[leaf]
        for targets in edges.values():
            targets.difference_update(leaves)
    assert not edges, sorted(edges)


EXPERIMENTS = "experiments"
"""Packages that list modules, which the registry of experiments imports by name, too;
all other packages list objects."""


def exported_names(module: str) -> set[str]:
    """Returns the public names of a sub-package."""
    for node in syntax_tree(MODULES[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set(read_exports(MODULES[module]))


EXPORTS = {
    module: exported_names(module)
    for module, path in MODULES.items()
    if path.stem == "__init__" and "." in module
}


def entered_packages(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields each sub-package that a module imports from, with the imported name."""
    parts = name.split(".")
    for depth in range(2, len(parts)):
        package = ".".join(parts[:depth])
        is_own = MODULES[module].stem == "__init__" and is_inside(package, module)
        if package in EXPORTS and not is_own and not is_inside(module, package):
            yield package, parts[depth]


def test_sub_packages_are_imported_through_their_exports() -> None:
    wrong = []
    for module, path in MODULES.items():
        for line, name in imports(path):
            for package, member in entered_packages(module, name):
                if member not in EXPORTS[package]:
                    wrong.append(f"{module}:{line}: {package} does not export {name}")
            home = module.split(".")[:2]
            target = name.split(".")
            is_private = target[-1].startswith("_") and target[0] in PACKAGES
            if is_private and target[:2] != home:
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def defined_names(path: Path) -> set[str]:
    """Returns the names of a module that a statement outside of functions binds."""
    bound_names = {name.rpartition(".")[2] for _, name in imports(path, lazy=False)}
    for node in syntax_tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound_names.add(node.name)
        else:
            names = (x for x in ast.walk(node) if isinstance(x, ast.Name))
            bound_names |= {x.id for x in names if isinstance(x.ctx, ast.Store)}
    return bound_names


def test_exported_names_exist() -> None:
    for package, names in EXPORTS.items():
        modules = {module.removeprefix(f"{package}.") for module in MODULES}
        homes = read_exports(MODULES[package])
        for name, home in homes.items():
            assert name in defined_names(MODULES[home]), (package, name)
        if homes:
            # A module of the name would replace the object once it is imported.
            assert not names & modules, package
        else:
            assert not names or package.startswith(f"{EXPERIMENTS}."), package
            assert names <= modules | defined_names(MODULES[package]), package
    for name in jaxkv.files.__all__:
        assert getattr(jaxkv.files, name) is not None


def test_imported_names_exist() -> None:
    """A type checker accepts any name of a package that has a `__getattr__`."""
    wrong = []
    for path in [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *DOCS_SCRIPTS]:
        for line, name in imports(path):
            package, _, member = name.rpartition(".")
            exports = EXPORTS.get(package)
            if exports and member not in exports and name not in MODULES:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_folders_have_a_limited_number_of_entries() -> None:
    full = []
    for folder in {path.parent for path in source_files()}:
        entries = [
            path
            for path in folder.iterdir()
            if (path.suffix == ".py" and path.stem != "__init__")
            or (path / "__init__.py").exists()
        ]
        is_package = folder.parent == ROOT
        limit = MAX_PACKAGE_ENTRIES if is_package else MAX_FOLDER_ENTRIES
        if len(entries) > limit:
            place = folder.relative_to(ROOT)
            full.append(f"{place}: {len(entries)} entries, at most {limit}")
    assert not full, full


def test_third_party_libraries_are_imported_only_where_allowed() -> None:
    wrong = []
    for path in source_files():
        place = path.relative_to(ROOT).as_posix()
        for line, name in imports(path):
            for library, files in ALLOWED_IMPORTERS.items():
                if is_inside(name, library) and not any(
                    fnmatch.fnmatch(place, file) for file in files
                ):
                    wrong.append(f"{place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_programs_of_an_engine_are_traced_from_the_files_of_their_keys() -> None:
    wrong = []
    for path in source_files():
        place = path.relative_to(ROOT).parts
        if place[0] not in TRACED_PACKAGES or place[1] in {*UNTRACED, "__init__.py"}:
            continue
        for line, name in imported_modules(path):
            if name.startswith("jaxkv.") and name.split(".")[1] in UNTRACED:
                wrong.append(f"{'/'.join(place)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_docstring() -> None:
    undocumented = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if not ast.get_docstring(syntax_tree(path))
    ]
    assert not undocumented


def test_constraints_pin_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    assert not [line for line in lines if "://" in line or " @ " in line]
    assert all("==" in line for line in lines)


def test_top_level_has_only_the_listed_entries() -> None:
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
        pytest.skip("the tree has no files tracked by git")
    assert tracked == TOP_LEVEL


def test_test_folders_mirror_the_packages() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in sorted(TESTS)]
    assert not [x for x in tests if not (ROOT / x.parent).is_dir()]
    # Stems are unique: `conftest.py` assigns tests to workers by stem.
    stems = [path.stem for path in tests]
    assert not [x for x in stems if stems.count(x) > 1]


def test_no_test_file_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        parts = [part for _, name in imports(path) for part in name.split(".")]
        assert not [part for part in parts if part.startswith("test_")], path


PROTOCOL = {
    "Config",
    "Result",
    "run",
    "plot",
    "claims",
    "files",
    "metrics",
    "summary",
    "main",
}
"""Names that every experiment or script defines."""


OF_TWO_PACKAGES = {"score"}
"""Names that callers write with their package: `jaxkv.score`, `fits.score`."""


def test_public_names_are_defined_once() -> None:
    """No two modules define a public class or function of the same name."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in syntax_tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                if not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not twice.keys() - PROTOCOL - OF_TWO_PACKAGES, twice
