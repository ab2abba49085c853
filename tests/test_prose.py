"""Frequencies of watched and vague words in prose, and of indefinite identifiers.

Prose is docstrings, comments, string literals, TOML and Markdown. Generated reports
(records and `RESULTS.md`) and `LOG.md` are not counted.
"""

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

WATCHED = (
    "who whom nobody anybody somebody everybody whoever beside behind stand stands "
    "stood tell tells told say says said wishes rests likewise whither whatever lies "
    "lays anew alike"
).split()
"""Words that personify a system or replace a precise term."""
VAGUE = ["what", "nothing", "others", "alone"]

MAX_WATCHED = 5.0
MAX_VAGUE = 15.0
"""Occurrences allowed per 10,000 words."""

SKIPPED = re.compile(r"experiments/(records/.+/report\.md|RESULTS\.md|LOG\.md)$")


@functools.cache
def _texts(package: str) -> list[str]:
    """Returns the prose of a package or page, piece by piece."""
    top = ROOT / package
    texts = []
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        if SKIPPED.search(path.as_posix()):
            continue
        if path.suffix in (".md", ".toml"):
            texts.append(path.read_text(encoding="utf-8"))
        elif path.suffix == ".py":
            source = io.StringIO(path.read_text(encoding="utf-8"))
            for token in tokenize.generate_tokens(source.readline):
                if token.type in (
                    tokenize.COMMENT,
                    tokenize.STRING,
                    tokenize.FSTRING_MIDDLE,
                ):
                    texts.append(token.string)
    return texts


@pytest.mark.parametrize(
    "package",
    ["jaxkv", "pallas_kernels", "scaling", "experiments", "README.md", "docs"],
)
def test_watched_and_vague_words_are_rare(package: str) -> None:
    words = Counter(
        word.lower()
        for text in _texts(package)
        for word in re.findall(r"[A-Za-z][A-Za-z']*", text)
    )
    for listed, limit in ((WATCHED, MAX_WATCHED), (VAGUE, MAX_VAGUE)):
        counts = {word: words[word] for word in listed if word in words}
        share = 10_000 * sum(counts.values()) / words.total()
        assert share <= limit, (package, share, counts)


FOREIGN = {"Axes", "GenerationMixin", "Scheduler"}
"""Classes of other libraries that the texts name."""


def test_named_attributes_exist() -> None:
    packages = ["jaxkv", "pallas_kernels", "scaling", "experiments"]
    words: dict[str, set[str]] = {}
    for package in packages:
        for module in _modules(package):
            words |= module.classes
    unknown = [
        f"{name}.{attribute}"
        for package in [*packages, "README.md", "docs"]
        for text in _texts(package)
        for name, attribute in re.findall(
            r"`(?:\w+\.)*([A-Z]\w*[a-z]\w*)\.(\w+)[`(]", text
        )
        if name not in FOREIGN and not words.get(name, set()) & {"*", attribute}
    ]
    assert not unknown


# Identifiers.

INDEFINITE = frozenset(
    "found known given kept asked made own here there gone some many each whole seen "
    "way rest most least mine theirs drawn".split()
)
"""Participles and determiners: names that do not say what a value is."""
MAX_INDEFINITE = 0.5
"""Percentage of all bindings."""
MAX_TUPLES = 3.0
"""Assignments `a, b = x, y` of separate values, per 1,000 lines."""
MAX_ANY = {
    "jaxkv": 5.0,
    "pallas_kernels": 5.0,
    "scaling": 5.0,
    "experiments": 5.0,
}
"""`Any` in annotations, per 1,000 lines; the aim is 5, and these may only fall."""
SHARED_CONSTANTS = frozenset(
    "D GREY HEAD_SIZE MAX_FILE_BYTES MIN_COMPILE_TIME_S N NO_SEQUENCE PAGE_SIZE "
    "REPLACEMENT STEPS_PER_CALL SWEEPS TRAININGS".split()
)
"""Constants that several files of the library define, with one meaning."""


class _Module(NamedTuple):
    """Counts of a file. Its syntax tree is not kept, since all of them are large."""

    num_lines: int
    names: list[str]
    """Every name that the module binds, parameters included."""
    num_tuples: int
    num_any: int
    classes: dict[str, set[str]]
    """Words of each class; `*` if it may inherit any attribute."""
    constants: set[str]


@functools.cache
def _modules(package: str) -> list[_Module]:
    return [_read_module(path) for path in sorted((ROOT / package).rglob("*.py"))]


def _read_module(path: Path) -> _Module:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    names = []
    annotations = []
    num_tuples = 0
    classes = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
            annotations.append(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
            annotations.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            names.append(node.name)
            words = re.findall(
                r"\w+", "\n".join(lines[node.lineno - 1 : node.end_lineno])
            )
            inherits = {ast.unparse(x) for x in node.bases} - {"NamedTuple", "Protocol"}
            classes[node.name] = {*words, *("*" if inherits else "")}
        elif isinstance(node, ast.Assign):
            num_tuples += _is_tuple_assignment(node)
        elif isinstance(node, ast.alias) and node.asname:
            names.append(node.asname)
    num_any = sum(map(_count_any, filter(None, annotations)))
    targets = [
        node.targets[0] if isinstance(node, ast.Assign) else node.target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    constants = {
        name.id.strip("_")
        for target in targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id.strip("_").isupper()
    }
    num_lines = source.count("\n")
    return _Module(num_lines, names, num_tuples, num_any, classes, constants)


def _count_any(annotation: ast.expr) -> int:
    """Counts `Any`, and `PyTree` without the type of its leaves."""
    nodes = [*ast.walk(annotation)]
    typed = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}
    return sum(
        isinstance(node, ast.Name)
        and node.id in ("Any", "PyTree")
        and id(node) not in typed
        for node in nodes
    )


def _is_tuple_assignment(node: ast.Assign) -> bool:
    """Returns True for `a, b = x, y`; swaps and unpacked calls have another form."""
    if not isinstance(node.value, ast.Tuple):
        return False
    [target, *others] = node.targets
    if others or not isinstance(target, ast.Tuple):
        return False
    return not {ast.unparse(x) for x in target.elts} & {
        ast.unparse(x) for x in node.value.elts
    }


@pytest.mark.parametrize("package", [*MAX_ANY, "tests"])
def test_identifiers_are_nouns(package: str) -> None:
    modules = _modules(package)
    num_lines = sum(module.num_lines for module in modules)
    num_tuples = sum(module.num_tuples for module in modules)
    names = [name for module in modules for name in module.names]
    indefinite = [name for name in names if name.strip("_") in INDEFINITE]
    assert 100 * len(indefinite) / len(names) <= MAX_INDEFINITE, package
    assert 1000 * num_tuples / num_lines <= MAX_TUPLES, package


@pytest.mark.parametrize(("package", "limit"), MAX_ANY.items())
def test_annotations_are_specific(package: str, limit: float) -> None:
    modules = _modules(package)
    num_lines = sum(module.num_lines for module in modules)
    num_any = sum(module.num_any for module in modules)
    assert 1000 * num_any / num_lines <= limit, package


def test_a_constant_has_one_meaning() -> None:
    names = [
        name
        for package in ("jaxkv", "pallas_kernels", "scaling")
        for module in _modules(package)
        for name in module.constants
    ]
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == SHARED_CONSTANTS
