"""Writes a tutorial's notebook from its page: the page is the only source.

A page has a notebook if it links it. Python blocks become code cells, and the text
block after one becomes its output; the tests run both. All else is Markdown.

    python docs/make_notebooks.py            # writes docs/tutorials/*.ipynb
    python docs/make_notebooks.py --check    # compares them

With JAXKV_REPO_URL=https://github.com/OWNER/NAME a notebook starts with a badge of
Colab and a cell that installs jaxkv, and its links lead to that repository.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"

_LINK = re.compile(r"^\[This page as a notebook\]\((\w+\.ipynb)\)\.$", re.MULTILINE)
_CODE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n(?:<!-- varies -->\n)?```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_NOTE = (
    "This notebook is generated from the page [{page}]({page}). It runs in a Jupyter "
    "kernel of an environment with jaxkv: `make setup` in the repository makes one in "
    "`.venv`, and `.venv/bin/python -m pip install jupyterlab` adds Jupyter."
)
_TARGET = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{name}/blob/HEAD/{path})"
)


def notebook_pages() -> dict[Path, Path]:
    """Returns the tutorials that have a notebook, by the path of the notebook."""
    return {
        page.with_name(link[1]): page
        for page in sorted(TUTORIALS.glob("*.md"))
        if (link := _LINK.search(page.read_text(encoding="utf-8")))
    }


def make_notebook(page: Path, repository: str = "", is_download: bool = False) -> str:
    """Returns the notebook of a page, as a JSON text of nbformat 4.5.

    A download has no relative links: without a repository, paths replace them.
    """
    text = page.read_text(encoding="utf-8")
    text = _LINK.sub(_NOTE.format(page=page.name), text)
    root = TUTORIALS.parents[1]
    cells: list[dict[str, Any]] = []

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match.groups("")
        path = (page.parent / target).resolve().relative_to(root).as_posix()
        if repository:
            return f"[{label}]({repository}/blob/HEAD/{path}{anchor})"
        return f"{label} (`{path}`)" if is_download else match[0]

    def add(kind: str, source: str, **fields: Any) -> None:
        if source := source.strip("\n"):
            if kind == "markdown":
                source = _TARGET.sub(link, source)
            lines = source.splitlines(keepends=True)
            start = {"cell_type": kind, "id": f"cell-{len(cells):02}", "metadata": {}}
            cells.append({**start, **fields, "source": lines})

    if repository:
        path = page.resolve().relative_to(root).with_suffix(".ipynb").as_posix()
        name = repository.removeprefix("https://github.com/")
        add("markdown", _BADGE.format(name=name, path=path))
        install = f'%pip install --quiet "jaxkv @ git+{repository}"'
        add("code", install, execution_count=None, outputs=[])
    end = 0
    for match in _CODE.finditer(text):
        add("markdown", text[end : match.start()])
        printed = (match["output"] or "").splitlines(keepends=True)
        stream = {"output_type": "stream", "name": "stdout", "text": printed}
        outputs = [stream] if printed else []
        add("code", match["code"], execution_count=None, outputs=outputs)
        end = match.end()
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the notebooks; returns 1 if the check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    is_check = parser.parse_args(arguments).check
    num_wrong = 0
    for path, page in notebook_pages().items():
        made = make_notebook(page, os.environ.get("JAXKV_REPO_URL", ""))
        if not is_check:
            path.write_text(made, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != made:
            num_wrong += 1
            print(f"{path} differs from {page.name}; run `python {__file__}`")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
