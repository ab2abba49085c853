"""Hooks of the site's build: included files, and files outside `docs/`.

The pages link files of the repository by relative paths, which work in a checkout and
on a code host. The build adds each linked file to the site: Markdown becomes a page,
Python and TOML become a plain page with the file's text, other files are copied.

A line `--8<-- "PATH"` of a page is replaced by the text of a file of the repository,
whose relative links are kept intact. Each trace of `docs/gallery/` becomes a page of
the viewer, and each notebook a page; the figures of the records are added to
`figures.md`. Entries of the API reference link their source, and those of `jaxkv` show
their section of `api/examples.md`.
"""

import functools
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from make_notebooks import make_notebook, notebook_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from jaxkv.report.viewer import RunTrace, render_viewer
from pallas_kernels.lazy_exports import read_exports

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RECORDS = ROOT / "experiments" / "records"

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
def _figure_list() -> str:
    """Returns a section for each record with a figure: question, command, panels."""
    pattern = r"\[(\w+)\]\([^)]+\)(?: \| |\*\* is )(`[^`]+`)"
    pages = _read(RECORDS.parent / "RESULTS.md") + _read(RECORDS / "README.md")
    commands = dict(re.findall(pattern, pages)[::-1])
    sections = []
    for folder in sorted(path.parent for path in RECORDS.glob("*/figure.png")):
        name = folder.name
        home = f"../experiments/records/{name}"
        source = f"{name}.json"
        line = f"Output of the calculator {name}."
        if (report := folder / "report.md").exists():
            source = report.name
            line = _read(report).splitlines()[0].removeprefix("# ")
        panels = sorted(int(x.stem[7:]) for x in folder.glob("figure-*.png"))
        links = "".join(f", [panel {i}]({home}/figure-{i}.png)" for i in panels)
        text = f"{line} {commands[name]}; [record]({home}/{source}){links}."
        figure = f"![{line}]({home}/figure.png){{ loading=lazy }}"
        sections.append(f"### {name}\n\n{text}\n\n{figure}\n")
    return "\n".join(sections)


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
    return name + ".html" if path.suffix in (".py", ".toml") else name


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
    yield _figure_list(), DOCS


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
    _figure_list.cache_clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds linked files and sources, and the pages of notebooks and of the gallery."""

    def add(name: str, **source: str) -> None:
        inclusion = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, inclusion=inclusion, **source))

    for name, path in (_linked_files() | _source_files()).items():
        if name.endswith(".html"):
            add(name, content=_source_page(path))
        else:
            add(name, abs_src_path=str(path))
    for path in sorted((DOCS / "gallery").glob("*.npz")):
        title = path.stem.replace("_", " ").capitalize()
        content = render_viewer(RunTrace.read(path), title=title)
        add(f"gallery/{path.stem}.html", content=content)
    for path, page in notebook_pages().items():
        name = path.relative_to(DOCS).as_posix()
        if download := files.get_file_from_path(name):
            files.remove(download)
        address = config.repo_url or ""
        add(name, content=make_notebook(page, address, is_download=True))
        text = _notebook_text(page, path.name, address)
        name = name.replace(".ipynb", "_notebook.md")
        add(name, content=_rewrite(text, page.parent, name))
    return files


def _notebook_text(page: Path, name: str, repository: str) -> str:
    """Returns a notebook as Markdown: its cells and outputs in order."""
    parts = [f"---\ntitle: {name}\n---\n[Download {name}]({name})."]
    for cell in json.loads(make_notebook(page, repository))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            printed = "".join("".join(output["text"]) for output in cell["outputs"])
            text = f'```python title="In"\n{text}\n```'
            text += f'\n\n```text title="Out"\n{printed}```' * bool(printed)
        # A badge of another host becomes its label.
        parts.append(re.sub(r"!\[([^\]]*)\]\(https:[^)]*\)", r"\1", text))
    return "\n\n".join(parts) + "\n"


def _source_page(path: Path) -> str:
    """Returns a page with the text of a file; line 7 has the anchor `line-7`."""
    name = path.relative_to(ROOT).as_posix()
    lexer = get_lexer_by_name(path.suffix.removeprefix("."))
    code = highlight(_read(path), lexer, HtmlFormatter(linespans="line"))
    page = _read(DOCS / "source_pages" / "page.html")
    return page.format(name=name, home="../" * name.count("/"), code=code)


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

    markdown = markdown.replace("<!-- figures of the records -->", _figure_list())
    return _INCLUDE.sub(include, _rewrite(markdown, home, name))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keeps the theme from reading the numbers of a repository's host."""
    return output.replace('data-md-component="source"', "")


@functools.cache
def _source_files() -> dict[str, Path]:
    """Returns the files that define the exports of packages, by their site paths."""
    pages = (DOCS / "api").glob("*.md")
    inits = (ROOT / page.stem.replace(".", "/") / "__init__.py" for page in pages)
    homes = (read_exports(path).values() for path in inits if path.exists())
    paths = (ROOT / f"{x.replace('.', '/')}.py" for names in homes for x in names)
    return {f"{x.relative_to(ROOT).as_posix()}.html": x for x in paths if x.exists()}


@functools.cache
def _examples() -> dict[str, str]:
    """Returns the example of each public object of `jaxkv`, by its path."""
    _, *sections = _read(DOCS / "api" / "examples.md").split("\n## ")
    homes = read_exports(ROOT / "jaxkv" / "__init__.py")
    examples = {}
    for name, _, text in (section.partition("\n") for section in sections):
        link = f'<a href="examples.html#{name.lower()}">program of examples</a>'
        examples[f"{homes[name]}.{name}"] = f"**Example**, of the {link}:\n{text}"
    return examples


class PublicNames(griffe.Extension):
    """Limits the API reference to the objects that packages export.

    Griffe does not evaluate the call of `lazy_exports` that lists them, and takes all
    special methods for public. The first objects of `api/index.md` come first, in its
    order; then classes, functions and constants.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Sets the exports of packages; removes special methods; links sources."""
        objects: list[griffe.Object] = [pkg]
        while objects:
            parent = objects.pop()
            if isinstance(parent, griffe.Module) and parent.is_init_module:
                if names := read_exports(Path(str(parent.filepath))):
                    first = [x for x in _first_objects(parent.path) if x in names]
                    kinds = {x: (x.isupper(), x[0].islower(), x) for x in names}
                    others = sorted(names.keys() - first, key=kinds.__getitem__)
                    parent.exports = first + others
            for name, member in [*parent.members.items()]:
                if isinstance(member, griffe.Alias):
                    continue
                is_special = member.is_function and name.startswith("__")
                if is_special and name not in ("__init__", "__call__"):
                    del parent.members[name]
                    continue
                if parent.is_module and member.docstring and not member.is_module:
                    member.docstring.value += _additions(member)
                objects.append(member)


def _first_objects(package: str) -> list[str]:
    """Returns the objects that the page of a package begins with."""
    if package == "jaxkv":
        return [path.rpartition(".")[2] for path in _examples()]
    index = _read(DOCS / "api" / "index.md")
    row = re.search(rf"^\| \[{package}\].* \| (`.*) \|$", index, re.MULTILINE)
    return re.findall(r"\w+", row[1]) if row else []


def _additions(item: griffe.Object) -> str:
    """Returns the example of an object and the link to its source, if it has them."""
    name = Path(str(item.filepath)).relative_to(ROOT).as_posix() + ".html"
    link = f'<a href="../{name}#line-{item.lineno}">Source</a>'
    example = _examples().get(item.path, "").strip()
    return f"\n\n{example}\n\n{link if name in _source_files() else ''}"
