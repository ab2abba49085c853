"""Experiments as values: a question, and one or more studies that answer it.

A study has its own config, result, run, figure and claims. It is a module with what
`Study` lists: `CONFIGS`, `run(config, progress)`, which says what it returns,
`plot(axes, result)`, and as needed `claims`, `metrics`, `summary`, `files`, `prepare`,
`PANELS`, `PANEL_SIZE_INCHES` and `SWITCH`. An experiment's module is its only study, or
lists them, `STUDIES = (measured, simulated)`; `registry` has its name, its question and
the names of its configs.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.framework import config_json, report, table
from experiments.framework.claims import Claim
from experiments.plotting import style
from jaxkv import files


class Study(NamedTuple):
    """One way to ask an experiment's question.

    Attributes:
      configs: configs by name, all of one type: a frozen keyword-only dataclass, none
        of whose fields is called `config` or `out`: the command line has them.
      result: what `run` returns: a `table.Record` or a NamedTuple class, or `list` of
        rows, which are dicts.
      run: does the work, `run(config, progress) -> result`.
      plot: draws a result on the axes it is given.
      claims: the claims of a result.
      metrics: the numbers of a result, for JSON.
      summary: what to tell a person of a result, before the claims; by default what
        its declarations say, or the metrics as tables where it has none.
      panels: rows and columns of axes of its figure; `plot` gets an array of several.
      panel_size_inches: width and height of each.
      files: further files of a result, as text by name in `run_folder.FILES`.
      prepare: is called before JAX starts its devices, to change its settings.
      switch: the name of a field, and whether it was set, by which older config.json
        files, which have the fields of all studies, ask for this one.
    """

    configs: Mapping[str, Any]
    result: Any
    run: Callable[..., Any]
    plot: Callable[[Any, Any], None]
    claims: Callable[[Any], list[Claim]] = lambda result: []
    metrics: Callable[[Any], dict[str, Any]] = table.metrics
    summary: Callable[[Any], list[report.ReportPart]] | None = None
    panels: tuple[int, int] = (1, 1)
    panel_size_inches: tuple[float, float] = style.PANEL_SIZE_INCHES
    files: Callable[[Any], dict[str, str]] = lambda result: {}
    prepare: Callable[[], None] = lambda: None
    switch: tuple[str, bool] | None = None

    @property
    def config_type(self) -> Any:
        """The class of its configs."""
        return type(next(iter(self.configs.values())))

    @property
    def fields(self) -> set[str]:
        """The names of its config's fields."""
        return {field.name for field in dataclasses.fields(self.config_type)}

    def name_of(self, config: Any) -> str:
        """Returns the name of the shipped config that a config equals, or ""."""
        return next((name for name, x in self.configs.items() if x == config), "")

    def report_parts(self, result: Any) -> list[report.ReportPart]:
        """What to tell a person of a result, before the claims."""
        if self.summary is not None:
            return [*self.summary(result)]
        if self.metrics is table.metrics:
            return table.sheets(result)
        return [*report.metric_sheets(config_json.to_plain(self.metrics(result)))]


class Experiment(NamedTuple):
    """A question, and the studies that answer it.

    Attributes:
      name: as the command line has it.
      question: in a line.
      studies: at least one.
    """

    name: str
    question: str
    studies: tuple[Study, ...]

    @property
    def configs(self) -> dict[str, Any]:
        """The configs of all studies by name, in their order."""
        return {name: x for study in self.studies for name, x in study.configs.items()}

    def study_of(self, config: Any) -> Study:
        """The study that a config is one of."""
        return next(x for x in self.studies if type(config) is x.config_type)

    def config_loads(self, text: str, where: str) -> Any:
        """Reads a config.json, as `config_json.config_loads`, of any of the studies.

        It is of the first that has all of its fields, or else most of them.
        """
        data = files.parse_json(text, where)
        names = {*data} if isinstance(data, dict) else set()
        everyone = set[str]().union(*(study.fields for study in self.studies))
        for study in self.studies:
            field, is_set = study.switch or ("", False)
            if field in names and bool(data[field]) is is_set:
                strange = everyone - study.fields
                data = {name: x for name, x in data.items() if name not in strange}
                return config_json.from_plain(study.config_type, data, where)
        best = max(self.studies, key=lambda study: len(names & study.fields))
        return config_json.from_plain(best.config_type, data, where)


def studies_of(module: Any) -> tuple[Study, ...]:
    """The studies that a module lists, or the one that it is."""
    listed = getattr(module, "STUDIES", [module])
    return tuple(x if isinstance(x, Study) else _of_functions(x) for x in listed)


def _of_functions(module: Any) -> Study:
    functions = ("plot", "claims", "metrics", "summary", "files", "prepare")
    values = ("CONFIGS", "PANELS", "PANEL_SIZE_INCHES", "SWITCH")
    # A module that it imports may have the name of a function, `files` say.
    found = {x: f for x in functions if callable(f := getattr(module, x, None))}
    found |= {x.lower(): getattr(module, x) for x in values if hasattr(module, x)}
    result = typing.get_type_hints(module.run)["return"]
    return Study(result=result, run=module.run, **found)
