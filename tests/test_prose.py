"""Frequencies of watched and vague words in prose, and of indefinite identifiers.

Prose is docstrings, comments, string literals, TOML and Markdown. Generated reports
(records and `RESULTS.md`) and `LOG.md` are not counted.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

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


def _texts(package: str) -> Iterator[str]:
    """Yields the prose of a package or page, piece by piece."""
    top = ROOT / package
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        if SKIPPED.search(path.as_posix()):
            continue
        if path.suffix in (".md", ".toml"):
            yield path.read_text(encoding="utf-8")
        elif path.suffix == ".py":
            source = io.StringIO(path.read_text(encoding="utf-8"))
            for token in tokenize.generate_tokens(source.readline):
                if token.type in (
                    tokenize.COMMENT,
                    tokenize.STRING,
                    tokenize.FSTRING_MIDDLE,
                ):
                    yield token.string


@pytest.mark.parametrize(
    "package",
    ["jaxkv", "pallas_kernels", "scaling", "experiments", "README.md", "docs"],
)
def test_watched_and_vague_words_are_rare(package: str) -> None:
    words = [
        word.lower()
        for text in _texts(package)
        for word in re.findall(r"[A-Za-z][A-Za-z']*", text)
    ]
    for listed, limit in ((WATCHED, MAX_WATCHED), (VAGUE, MAX_VAGUE)):
        counts = {word: words.count(word) for word in listed if word in words}
        share = 10_000 * sum(counts.values()) / len(words)
        assert share <= limit, (package, share, counts)


FOREIGN = {"Axes", "GenerationMixin", "Scheduler"}
"""Classes of other libraries that the texts name."""


def test_named_attributes_exist() -> None:
    packages = ["jaxkv", "pallas_kernels", "scaling", "experiments"]
    words: dict[str, set[str]] = {}
    for path in (x for package in packages for x in (ROOT / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                words[node.name] = {*re.findall(r"\w+", "\n".join(lines))}
                if {ast.unparse(x) for x in node.bases} - {"NamedTuple", "Protocol"}:
                    words[node.name].add("*")  # may inherit any attribute
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


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Yields every name that a module binds, parameters included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation


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


def _is_tuple_assignment(node: ast.AST) -> bool:
    """Returns True for `a, b = x, y`; swaps and unpacked calls have another form."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    [target, *others] = node.targets
    if others or not isinstance(target, ast.Tuple):
        return False
    return not {ast.unparse(x) for x in target.elts} & {
        ast.unparse(x) for x in node.value.elts
    }


@pytest.mark.parametrize("package", [*MAX_ANY, "tests"])
def test_identifiers_are_nouns(package: str) -> None:
    num_lines = 0
    num_tuples = 0
    names: list[str] = []
    for path in sorted((ROOT / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        num_lines += source.count("\n")
        names += _bindings(tree)
        num_tuples += sum(map(_is_tuple_assignment, ast.walk(tree)))
    indefinite = [name for name in names if name.strip("_") in INDEFINITE]
    assert 100 * len(indefinite) / len(names) <= MAX_INDEFINITE, package
    assert 1000 * num_tuples / num_lines <= MAX_TUPLES, package


@pytest.mark.parametrize(("package", "limit"), MAX_ANY.items())
def test_annotations_are_specific(package: str, limit: float) -> None:
    num_lines = 0
    num_any = 0
    for path in sorted((ROOT / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        num_lines += source.count("\n")
        num_any += sum(map(_count_any, _annotations(ast.parse(source))))
    assert 1000 * num_any / num_lines <= limit, package


def test_a_constant_has_one_meaning() -> None:
    names: list[str] = []
    for package in ("jaxkv", "pallas_kernels", "scaling"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
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
            names += constants
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == SHARED_CONSTANTS
