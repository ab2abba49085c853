"""The experiments there are: one module per question, found without importing them.

An experiment is a module of this package with, at its top level:

    the first line of the docstring    the question it answers
    class Config                       a frozen keyword-only dataclass
    CONFIGS = {"smoke": Config(...)}   a dict literal; the first entry is the default
    def run(config, progress=QUIET) -> Result
                                       the work, see `jaxkv.progress`; a `Result` is a
                                       NamedTuple of arrays, numbers and strings, or
                                       of such NamedTuples, or a list of dicts (rows)
    def plot(ax, result) -> None       draws on the axes it is given

and, where they have something to say,

    def claims(result) -> list[Claim]  published numbers held against ours
    def metrics(result) -> dict        what its JSON document shows
    def summary(result) -> list[Part]  what a person is told, see `reporting.py`; the
                                       metrics as tables by default
    PANELS = (rows, columns)           more than one panel: `plot` gets an array
    PANEL_SIZE_INCHES = (3.4, 2.4)     another size for each
    def files(result) -> dict          text of further files, by name in `store.FILES`

`Config` must not use the names `config` and `out`: the command line has them.
"""

import ast
import importlib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.framework import config_json, report
from experiments.plotting import style

_NEEDED = {"Config", "CONFIGS", "run", "plot"}


class Entry(NamedTuple):
    """What is known of an experiment from its text alone.

    Attributes:
      name: the module's name in this package.
      question: the first line of its docstring.
      configs: the names in its `CONFIGS`, the default first.
    """

    name: str
    question: str
    configs: tuple[str, ...]


class Experiment(NamedTuple):
    """An imported experiment, its optional parts filled in.

    Attributes:
      name: the module's name in this package.
      question: the first line of its docstring.
      configs: configs by name, the default first; all of one type.
      result_type: what `run` returns: a NamedTuple class, or `list` for rows.
      run: does the work, `run(config, progress) -> result`.
      plot: draws a result on given axes.
      claims: the claims of a result.
      metrics: the numbers of a result.
      summary: what to tell a person of a result, before the claims.
      panels: rows and columns of axes of its figure.
      panel_size_inches: width and height of each.
      files: further files of a result, as text by name.
    """

    name: str
    question: str
    configs: dict[str, Any]
    result_type: Any
    run: Callable[..., Any]
    plot: Callable[[Any, Any], None]
    claims: Callable[[Any], list[Any]]
    metrics: Callable[[Any], dict[str, Any]]
    summary: Callable[[Any], list[report.Part]]
    panels: tuple[int, int]
    panel_size_inches: tuple[float, float]
    files: Callable[[Any], dict[str, str]] = lambda result: {}


def entries(folder: Path | None = None) -> list[Entry]:
    """Lists the experiments of a folder by name, reading text only.

    Nothing is imported, so this takes milliseconds however heavy the experiments are.

    Args:
      folder: where to look; this package by default.

    Returns:
      One entry per module that has all parts of an experiment, sorted by name.
    """
    paths = sorted((folder or Path(__file__).parent).glob("*.py"))
    found = (_entry(path.stem, ast.parse(path.read_text("utf-8"))) for path in paths)
    return [entry for entry in found if entry]


def find(name: str) -> Entry:
    """Returns the entry of an experiment.

    Args:
      name: its name; hyphens may stand for underscores.

    Raises:
      ValueError: there is no such experiment; the line gives the nearest names.
    """
    stem = name.replace("-", "_")
    path = Path(__file__).with_name(f"{stem}.py")
    if stem.isidentifier() and path.exists():
        entry = _entry(stem, ast.parse(path.read_text("utf-8")))
        if entry is not None:
            return entry
    known = [entry.name for entry in entries()]
    raise ValueError(config_json.unknown("experiment", name, known))


def load(name: str) -> Experiment:
    """Imports an experiment.

    Args:
      name: its name, as `find` takes it.

    Raises:
      ValueError: there is no such experiment; the line gives the nearest names.
    """
    entry = find(name)
    return of_module(importlib.import_module(f"experiments.{entry.name}"))


def of_module(module: Any) -> Experiment:
    """Reads an experiment off its module."""
    metrics = getattr(module, "metrics", lambda result: {})

    def tables(result: Any) -> list[report.Part]:
        return [*report.metric_sheets(config_json.plain(metrics(result)))]

    return Experiment(
        name=module.__name__.rpartition(".")[2],
        question=_first_line(module.__doc__),
        configs=module.CONFIGS,
        result_type=typing.get_type_hints(module.run)["return"],
        run=module.run,
        plot=module.plot,
        claims=getattr(module, "claims", lambda result: []),
        metrics=metrics,
        summary=getattr(module, "summary", tables),
        panels=getattr(module, "PANELS", (1, 1)),
        panel_size_inches=getattr(module, "PANEL_SIZE_INCHES", style.PANEL_SIZE_INCHES),
        files=getattr(module, "files", lambda result: {}),
    )


def _entry(name: str, tree: ast.Module) -> Entry | None:
    """Reads an entry off a module's syntax tree; `None` if it is no experiment."""
    tops: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            tops[node.name] = node
        elif isinstance(node, ast.Assign):
            tops |= {x.id: node.value for x in node.targets if isinstance(x, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            tops[node.target.id] = node.value or node
    configs = tops.get("CONFIGS")
    if not tops.keys() >= _NEEDED or not isinstance(configs, ast.Dict):
        return None
    keys = tuple(
        key.value
        for key in configs.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )
    return Entry(name, _first_line(ast.get_docstring(tree)), keys)


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]
