"""Hooks of the site's build: included files, and files outside `docs/`.

The pages link files of the repository by relative paths, which work in a checkout and
on a code host. The build adds each linked file to the site: Markdown becomes a page,
Python and TOML become a page with the file's text, other files are copied.

A line `--8<-- "PATH"` of a page is replaced by the text of a file of the repository,
whose relative links are kept intact. Each trace of `docs/gallery/` becomes a page of
the viewer.
"""

import functools
import itertools
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from jaxkv.report.viewer import RunTrace, render_viewer
from pallas_kernels.lazy_exports import read_exports

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_INCLUDE = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Changes the parts of a Markdown text that are not fenced code."""
    parts = []
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _includes() -> dict[Path, str]:
    """Returns the page of the site that includes each file of the repository."""
    return {
        (ROOT / name).resolve(): page.relative_to(DOCS).as_posix()
        for page in DOCS.rglob("*.md")
        for name in _INCLUDE.findall(_read(page))
    }


def _site_path(path: Path) -> str | None:
    """Returns the path of a file in the site; None if the site cannot contain it."""
    if path.is_dir():
        path /= "README.md"
    if path in (included := _includes()):
        return included[path]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if not path.is_relative_to(ROOT) or not path.is_file():
        return None
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    return name + ".md" if path.suffix in (".py", ".toml") else name


def _targets(text: str, home: Path) -> Iterator[Path]:
    """Yields the files that a text in a folder links to."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        path = match[3].partition("#")[0]
        if path and ":" not in path:
            yield (home / path).resolve()


def _page_texts() -> Iterator[tuple[str, Path]]:
    """Yields the texts of all pages, with the folders that their links start from."""
    for page in sorted(DOCS.rglob("*.md")):
        yield _read(page), page.parent
    for path in _includes():
        if path.exists():
            yield _read(path), path.parent


def _linked_files() -> dict[str, Path]:
    """Returns the files outside `docs/` that pages link to, by their site paths."""
    found: dict[str, Path] = {}
    texts = [*_page_texts()]
    while texts:
        for path in _targets(*texts.pop()):
            file = path / "README.md" if path.is_dir() else path
            name = _site_path(file)
            if name is None or name in found or file.is_relative_to(DOCS):
                continue
            if (DOCS / name).exists():
                continue
            found[name] = file
            if file.suffix == ".md":
                texts.append((_read(file), file.parent))
    return found


def _rewrite(text: str, home: Path, page: str) -> str:
    """Rewrites the links of a text in a folder for a page of the site."""

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        name = _site_path((home / path).resolve())
        if name is None:
            return match[0]  # MkDocs reports the broken link
        relative = posixpath.relpath(name, posixpath.dirname(page) or ".")
        return f"{mark}[{label}]({relative}{hash_}{anchor})"

    return _outside_code(text, lambda part: _LINK.sub(link, part))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Reads the pages again, as `mkdocs serve` builds more than once."""
    _includes.cache_clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside `docs/` that pages link to, and the gallery's pages."""
    for name, path in _linked_files().items():
        inclusion = InclusionLevel.NOT_IN_NAV
        if name.endswith(".md") and path.suffix != ".md":
            title = name.removesuffix(".md")
            language = path.suffix.removeprefix(".").replace("py", "python")
            text = f"# {title}\n\n````{language}\n{_read(path)}````\n"
            file = File.generated(config, name, content=text, inclusion=inclusion)
        else:
            file = File.generated(
                config, name, abs_src_path=str(path), inclusion=inclusion
            )
        files.append(file)
    inclusion = InclusionLevel.NOT_IN_NAV
    for path in sorted((DOCS / "gallery").glob("*.npz")):
        title = path.stem.replace("_", " ").capitalize()
        content = render_viewer(RunTrace.read(path), title=title)
        name = f"gallery/{path.stem}.html"
        files.append(File.generated(config, name, content=content, inclusion=inclusion))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Leaves notebooks out of the links to the previous and the next page."""
    pages = [page for page in nav.pages if page.file.is_documentation_page()]
    for page, next_page in itertools.pairwise(pages):
        page.next_page = next_page
        next_page.previous_page = page
    return nav


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Includes files, and rewrites links to files outside `docs/`."""
    name = page.file.src_uri
    home = (ROOT if page.file.generated_by else DOCS).joinpath(name).parent
    if page.file.generated_by:
        page.meta.setdefault("search", {"exclude": True})

    def include(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        return _rewrite(_read(path), path.parent, name)

    return _INCLUDE.sub(include, _rewrite(markdown, home, name))


class PublicNames(griffe.Extension):
    """Limits the API reference to the objects that packages export.

    Griffe does not evaluate the call of `lazy_exports` that lists them, and takes all
    submodules and all special methods for public.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Sets the exports of packages; removes special methods."""
        objects: list[griffe.Object] = [pkg]
        while objects:
            parent = objects.pop()
            if isinstance(parent, griffe.Module) and parent.is_init_module:
                if names := read_exports(Path(str(parent.filepath))):
                    parent.exports = [*names]
            for name, member in [*parent.members.items()]:
                if isinstance(member, griffe.Alias):
                    continue
                if member.is_module and parent.exports:
                    member.public = name in parent.exports
                is_special = member.is_function and name.startswith("__")
                if is_special and name not in ("__init__", "__call__"):
                    del parent.members[name]
                else:
                    objects.append(member)
