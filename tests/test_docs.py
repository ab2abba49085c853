"""The site: its programs run and print what they show; it builds; it needs no network.

The README's programs are in `test_readme.py`.
"""

import ast
import contextlib
import html
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote, urlsplit

import pytest

import jaxkv
from tests.support import pages
from tests.support.browser import browse
from tests.support.folders import RECORDS, ROOT

DOCS = ROOT / "docs"
QUICK = {"tutorials/scaling_law.md"}
"""Pages whose programs are quick; those of all other pages are thorough or slow."""
SLOW = {
    "api/examples.md",
    "ten_minutes.md",
    "topics/policy_optimisation.md",
    "tutorials/adapters.md",
    "tutorials/constrained_answers.md",
    "tutorials/drafter.md",
    "tutorials/find_a_policy.md",
    "tutorials/kv_layout.md",
    "tutorials/kv_memory.md",
    "tutorials/ladder.md",
    "tutorials/model_family.md",
    "tutorials/policy_to_server.md",
    "tutorials/replay_an_incident.md",
    "tutorials/reward.md",
    "tutorials/schedules.md",
    "tutorials/see_a_run.md",
    "tutorials/snapshots.md",
    "tutorials/speculation.md",
    "tutorials/train_and_serve.md",
}
"""Pages whose programs are slow."""
PACKAGES = {"jaxkv", "pallas_kernels", "scaling", "experiments"}
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
CHECKED_PAGES = """index ten_minutes figures faq support records gallery/copy_on_write
tutorials/policy tutorials/policy_notebook topics/policy_optimisation topics/kv_eviction
api/index api/jaxkv jaxkv/serving/engine.py"""
"""Pages that are loaded in a browser."""

pytestmark = pytest.mark.usefixtures("full_optimization")


def programs() -> Iterator:
    """Yields pages with a program; a notebook replaces a thorough page."""
    for path in sorted(DOCS.rglob("*.md")):
        if any(block.language == "python" for block in pages.fenced_blocks(path)):
            name = path.relative_to(DOCS).as_posix()
            if name not in QUICK and path.with_suffix(".ipynb") in NOTEBOOKS:
                continue
            mark = pytest.mark.slow if name in SLOW else pytest.mark.thorough
            yield pytest.param(name, marks=() if name in QUICK else mark)


@pytest.mark.parametrize("page", [*programs()])
def test_a_program_runs_and_prints_the_shown_output(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, printed = pages.run_blocks(DOCS / page)
    wrong = pages.wrong_outputs(DOCS / page, printed)
    assert not wrong, "\n\n".join(wrong)
    if DOCS / page in pages.tutorials():
        figure = pages.figure_path(DOCS / page).name
        assert pages.is_same_figure(DOCS / page, tmp_path / figure)


def test_tutorials_end_in_a_figure() -> None:
    assert len(pages.tutorials()) > 20
    for page in pages.tutorials():
        image = pages.shown_figure(page)
        assert image is not None, f"{page.name}: the last block must write a figure"
        figure = pages.figure_path(page)
        assert (page.parent / image["path"]).resolve() == figure
        assert 1_000 < figure.stat().st_size < 80_000, figure
        assert 60 < len(image["alt"]) < 250, image["alt"]
        last = [x for x in pages.fenced_blocks(page) if x.language == "python"][-1]
        assert f'"{figure.name}"' in last.text


def test_figures_are_compared(tmp_path) -> None:
    page = DOCS / "ten_minutes.md"
    text = pages.figure_path(page).read_text(encoding="utf-8")
    for old, new, is_same in (("", "", True), ("token", "page", False)):
        written = tmp_path / "ten_minutes.svg"
        written.write_text(text.replace(old, new), encoding="utf-8")
        assert pages.is_same_figure(page, written) == is_same


def test_names_that_programs_import_exist() -> None:
    """A quick test, since most programs run in the thorough and slow suites only."""
    absent = []
    num = 0
    for path in sorted(DOCS.rglob("*.md")):
        for block in pages.fenced_blocks(path):
            if block.language != "python":
                continue
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    if node.module.partition(".")[0] not in PACKAGES:
                        continue
                    module = importlib.import_module(node.module)
                    num += len(node.names)
                    absent += [
                        f"{path.name}: {node.module}.{x.name}"
                        for x in node.names
                        if not hasattr(module, x.name)
                        and not importlib.util.find_spec(f"{node.module}.{x.name}")
                    ]
    assert num > 50
    assert not absent


def notebook_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_", DOCS / "make_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_notebooks_are_made_from_their_pages() -> None:
    script = notebook_script()
    notebooks = script.notebook_pages()
    assert sorted(notebooks) == NOTEBOOKS
    for path, page in notebooks.items():
        notebook = script.make_notebook(page)
        is_equal = path.read_text(encoding="utf-8") == notebook
        assert is_equal, f"{path.name}: run `python docs/make_notebooks.py`"
        assert len(notebook.encode()) < 100_000
        code = [x for x in json.loads(notebook)["cells"] if x["cell_type"] == "code"]
        blocks = pages.fenced_blocks(page)
        python = [x.text.strip("\n") for x in blocks if x.language == "python"]
        assert ["".join(x["source"]) for x in code] == python
        outputs = [x for cell in code for x in cell["outputs"]]
        assert len(outputs) == sum(x.language == "text" for x in blocks)


def test_links_of_a_downloaded_notebook_lead_to_the_repository() -> None:
    script = notebook_script()
    page = DOCS / "tutorials" / "policy.md"
    for repository in ("https://github.com/owner/name", ""):
        notebook = script.make_notebook(page, repository, is_download=True)
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", notebook)
        assert all(x.startswith("https:") for x in links)
        paths = {x.partition("/blob/HEAD/")[2] for x in links}
        assert ("docs/api/jaxkv.scheduling.md" in paths) == bool(repository)
        assert all((ROOT / x).exists() for x in paths)
        assert ("%pip install" in notebook) == bool(repository)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_its_outputs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        output = io.StringIO()
        with contextlib.redirect_stdout(output), pages.user_promotion():
            exec(compile(source, f"{path.name}, {cell['id']}", "exec"), space)
        for shown in cell["outputs"]:
            expected = "".join(shown["text"])
            assert pages.is_same_output(expected, output.getvalue())
    figure = path.with_suffix(".svg").name
    assert pages.is_same_figure(path.with_suffix(".md"), tmp_path / figure)


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        ("a 1.00 s\n", "a   1.01 s\n", True),
        ("a 1.00 s\n", "a   1.1 s\n", False),
        ("1,024 tokens", "1024 tokens\n", True),
        ("1 2 3", "1 2", False),
        ("loss 1\n...\n", "loss 1\nloss 2\n", True),
        ("loss 1\n...\n", "rate 1\nloss 2\n", False),
    ],
)
def test_outputs_are_compared(shown: str, printed: str, is_same: bool) -> None:
    assert pages.is_same_output(shown, printed) == is_same


def test_a_shown_output_may_vary(tmp_path) -> None:
    page = tmp_path / "page.md"
    block = "```python\nprint(1)\n```\n\n"
    text = "```text\n2\n```\n"
    page.write_text(block + "It prints:\n\n" + text)
    _, printed = pages.run_blocks(page)
    assert printed == ["1\n"]
    assert len(pages.wrong_outputs(page, printed)) == 1
    page.write_text(block + "<!-- varies -->\n" + text)
    assert not pages.wrong_outputs(page, printed)


INTERNAL = ("cli", "report", "validation")
"""Packages that other packages and the experiments use, which are no API."""


def test_each_package_has_a_page_of_the_reference() -> None:
    packages = ["jaxkv", "jaxkv.decoding", "jaxkv.scoring", "jaxkv.report.viewer"]
    for name in ("jaxkv", "scaling", "pallas_kernels"):
        folders = (x.parent.name for x in (ROOT / name).glob("*/__init__.py"))
        packages += [f"{name}.{x}" for x in folders if x not in INTERNAL]
    held = {path.stem for path in (DOCS / "api").glob("*.md")} - {"index", "examples"}
    assert held == set(packages)
    listed = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in packages:
        page = (DOCS / "api" / f"{name}.md").read_text(encoding="utf-8")
        assert page == f"# {name}\n\n::: {name}\n"
        assert f"]({name}.md)" in listed
        first = re.findall(rf"\({name}\.md\).* \| (`.*`) \|\n", listed)
        objects = re.findall(r"\w+", "".join(first))
        assert {*objects} <= {*dir(importlib.import_module(name))}
        assert f"- api/{name}.md\n" in config


def test_each_public_object_of_jaxkv_has_an_example() -> None:
    text = (DOCS / "api" / "examples.md").read_text(encoding="utf-8")
    examples = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert sorted(examples) == sorted(jaxkv.__all__)
    for name, example in examples.items():
        assert re.search(rf"```python\n[^`]*\b{name}\b", example), name


def test_the_questions_have_all_refusals_of_the_support_matrix() -> None:
    support = (DOCS / "support.md").read_text(encoding="utf-8")
    faq = (DOCS / "faq.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\d+\. (`.*`)$", support, re.MULTILINE)
    rows = re.findall(r"^\| [A-Z].*\? \| (`.*`) \| .*\. \|$", faq, re.MULTILINE)
    assert sorted(rows) == sorted(lines) != []


def test_formulas_are_written_for_the_site_and_a_code_host() -> None:
    for path in DOCS.glob("topics/*.md"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
        assert (path.stem == "index") == ("## Formulas" not in text)
        # Blocks are paragraphs of their own, and no formula is left open.
        blocks = re.findall(r"(?<=\n\n)\$\$\n[^$]+\n\$\$\n(?=\n)", text)
        assert 2 * len(blocks) == text.count("$$"), path.name
        assert text.replace("$$", "").count("$") % 2 == 0, path.name


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jaxkv.__version__}\n" in citation
    assert jaxkv.__version__ == metadata.version("jaxkv")
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    entry = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,?$", page, re.MULTILINE))
    assert entry.keys() == {"author", "title", "version", "year", "license"}
    fields = f'title: "{entry["title"]}"', f"- name: {entry['author']}"
    fields += f"version: {entry['version']}", f"license: {entry['license']}"
    assert all(f"{field}\n" in citation for field in fields)


def test_asterisks_are_emphasis_or_escaped() -> None:
    """Markdown reads "N* ~ C^a and D*" as emphasis, and drops the asterisks."""
    wrong = []
    for folder in ("docs", "jaxkv", "scaling", "pallas_kernels"):
        for path in (ROOT / folder).rglob("*.md"):
            text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text("utf-8"), flags=re.S)
            text = re.sub(r"^ *\* ", "", text, flags=re.MULTILINE)
            text = re.sub(r"\*\*[^*]+\*\*", "", text)
            text = re.sub(r"(?<![\w*\\])\*[^\s*][^*]*[^\s*\\]\*(?!\w)", "", text)
            rows = re.findall(r".*(?<!\\)\*.*", text)
            wrong += [f"{path.relative_to(ROOT)}: {row}" for row in rows]
    assert not wrong


# The built site


class Links(HTMLParser):
    """Anchors and links of a built page; links whose targets are loaded at once."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src", "srcset", "data", "poster"):
                (self.links if tag == "a" else self.loaded).add(value)
            elif value and name == "style":
                self.loaded.update(css_targets(value))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.loaded.update(css_targets(data))


def css_targets(text: str) -> list[str]:
    references = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
    return [a or b for a, b in references if not a.startswith(("data:", "#"))]


def is_external(target: str) -> bool:
    return bool(urlsplit(target).netloc) or target.startswith("//")


def test_the_figures_page_has_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mkdocs", "griffe", "pygments"):
        pytest.importorskip(module)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    text = importlib.import_module("hooks")._figure_list()
    for path in RECORDS.glob("*/figure.png"):
        assert f"### {path.parent.name}\n" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; the extra `docs` has it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    # A download would fail: no proxy listens at this port.
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    built = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def built_pages(site) -> dict[Path, Links]:
    return {path: Links(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site, built_pages):
    loaded = {
        f"{path.relative_to(site)}: {target}"
        for path, page in built_pages.items()
        for target in page.loaded
        if is_external(target)
    }
    for path in site.rglob("*.css"):
        targets = css_targets(path.read_text(encoding="utf-8"))
        loaded |= {f"{path.name}: {x}" for x in targets if is_external(x)}
    assert not loaded
    # The theme's program loads a library from another host for diagrams of this class.
    for path in built_pages:
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_search_works_from_the_file_system(site, built_pages):
    """Without a server, a page can load scripts, and neither JSON nor workers."""
    name, _, index = (site / "search/search_index.js").read_text().partition(" = ")
    assert name == "var __index"
    titles = {document["title"] for document in json.loads(index)["docs"]}
    pages = {path.stem: path.read_text("utf-8") for path in DOCS.glob("topics/*.md")}
    assert len(pages) > 20
    assert {
        text.splitlines()[0].removeprefix("# ") for text in pages.values()
    } <= titles
    for path, page in built_pages.items():
        # The viewer's pages and source files have no search.
        is_themed = any("assets/javascripts" in x for x in page.loaded)
        if is_themed and path.name != "404.html":
            shims = [x for x in page.loaded if x.endswith("iframe-worker.js")]
            assert [(path.parent / x).resolve() for x in shims] == [
                site / "iframe-worker.js"
            ]


@pytest.mark.slow
def test_a_search_in_a_browser_has_results(site, tmp_path):
    page = browse(f"{(site / 'index.html').as_uri()}?q=online+softmax", tmp_path)
    results = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', page)
    assert any("topics/flash_attention.html" in x for x in results)


@pytest.mark.slow
def test_pages_fit_two_widths_and_are_labelled(site, tmp_path):
    """No overflow at 1280 and 390 px; contrast of WCAG AA; images and links."""
    names = [f"{name}.html" for name in CHECKED_PAGES.split()]
    address = (ROOT / "tests/support/site_check.html").as_uri()
    fragment = quote(json.dumps([f"{site.as_uri()}/", names]))
    # Frames of files may be read only with this flag.
    page = browse(f"{address}#{fragment}", tmp_path, "--allow-file-access-from-files")
    [report] = re.findall(r'<pre id="faults">(.+?)</pre>', page, re.DOTALL)
    checks = json.loads(html.unescape(report))
    # Dark colours are inspected at one width; two pages have no such scheme.
    assert checks["num_inspected"] == 3 * len(names) - 2
    assert not checks["faults"], "\n".join(checks["faults"])


@pytest.mark.slow
def test_links_inside_the_site_have_targets(site, built_pages):
    broken = []
    for path, page in built_pages.items():
        if path.name == "404.html":
            continue  # its links start from the root of a web server
        for target in sorted(page.links | page.loaded):
            parts = urlsplit(target)
            if is_external(target) or parts.scheme:
                continue
            file = path
            if parts.path:
                file = (path.parent / unquote(parts.path)).resolve()
            if file.is_dir():
                file /= "index.html"
            anchors = built_pages[file].anchors if file in built_pages else None
            is_missing = not file.exists()
            if anchors is not None and parts.fragment:
                is_missing |= unquote(parts.fragment) not in anchors
            if is_missing:
                broken.append(f"{path.relative_to(site)}: {target}")
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_the_reference_has_all_public_names(site, built_pages):
    for source in sorted((DOCS / "api").glob("*.md")):
        name = source.stem
        module = ROOT.joinpath(*name.split(".")) / "__init__.py"
        if name == "index" or not module.exists():
            continue
        page = built_pages[site / "api" / f"{name}.html"]
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign):
                continue
            if ast.unparse(node.targets[0]) == "__all__":
                missing = {f"{name}.{x}" for x in ast.literal_eval(node.value)}
                assert not missing - page.anchors
