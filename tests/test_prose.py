"""Frequencies of watched and vague words in the prose of the packages.

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

MAX_WATCHED, MAX_VAGUE = 5.0, 15.0
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
    for listed, most in ((WATCHED, MAX_WATCHED), (VAGUE, MAX_VAGUE)):
        found = {word: words.count(word) for word in listed if word in words}
        share = 10_000 * sum(found.values()) / len(words)
        assert share <= most, (package, share, found)


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
