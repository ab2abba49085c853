"""Experiments as values: a question, and one or more studies that answer it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv import files
from jaxkv.plotting import PANEL_SIZE_INCHES, Panels
from jaxkv.report import parts, plain_json, tables
from jaxkv.report.claims import Claim

SMOKE = "smoke"
"""Name of the config whose runs are too small for claims about published sizes."""


class Study(NamedTuple):
    """A study: one method of answering an experiment's question.

    Attributes:
      configs: configs by name, all of one type: a frozen keyword-only dataclass. No
        field may be named `config` or `out`, which are flags of the command line.
      result: return type of `run`: a `tables.ResultRecord`, a NamedTuple class, or
        `list` for rows that are dicts.
      run: function that does the work, `run(config, progress) -> result`.
      plot: draws a result on given axes.
      claims: returns the claims of a result.
      summary: returns the parts of the report before the claims; by default the tables
        declared by the result's columns, or else the metrics as tables.
      metrics: returns the numbers of a result for JSON.
      panels: rows, columns and height of the figure's panels; `plot` gets an array of
        axes if there are several.
      files: returns further files of a result, as text by name in `run_folder.FILES`.
      prepare: called before JAX initializes its devices, to change its settings.
      has_steps: True if `run` logs the numbers of steps by `progress.log`.
      switch: name of a field and its truth value that select this study for an older
        config.json that has the fields of all studies.
    """

    configs: Mapping[str, Any]
    result: Any
    run: Callable[..., Any]
    plot: Callable[[Any, Any], None]
    claims: Callable[[Any], list[Claim]] = lambda result: []
    summary: Callable[[Any], Sequence[parts.ReportPart]] | None = None
    metrics: Callable[[Any], dict[str, Any]] = tables.metrics
    panels: Panels = Panels(width_inches=PANEL_SIZE_INCHES[0])
    files: Callable[[Any], dict[str, str]] = lambda result: {}
    prepare: Callable[[], None] = lambda: None
    switch: tuple[str, bool] | None = None
    has_steps: bool = False

    @property
    def config_type(self) -> Any:
        """Class of the configs."""
        return type(next(iter(self.configs.values())))

    @property
    def fields(self) -> set[str]:
        """Names of the config's fields."""
        return {field.name for field in dataclasses.fields(self.config_type)}

    def name_of(self, config: object) -> str:
        """Returns the name of the shipped config that equals a config, or ""."""
        return next((name for name, x in self.configs.items() if x == config), "")

    def report_parts(self, result: object) -> list[parts.ReportPart]:
        """Returns the parts of the report before the claims."""
        if self.summary is not None:
            return [*self.summary(result)]
        if self.metrics is tables.metrics:
            return tables.sheets(result)
        return [*parts.metric_sheets(plain_json.to_plain(self.metrics(result)))]


class Experiment(NamedTuple):
    """A question, and the studies that answer it.

    Attributes:
      name: name on the command line.
      question: research question, one line.
      studies: studies, at least one.
    """

    name: str
    question: str
    studies: tuple[Study, ...]

    @property
    def configs(self) -> dict[str, Any]:
        """Configs of all studies by name, in order."""
        return {name: x for study in self.studies for name, x in study.configs.items()}

    def study_of(self, config: object) -> Study:
        """Returns the study that a config belongs to."""
        return next(x for x in self.studies if type(config) is x.config_type)

    def config_loads(self, text: str, where: str) -> Any:
        """Reads a config.json of any of the studies, see `plain_json.config_loads`.

        The config belongs to the study that shares the most fields with the file, the
        first one if several share equally many.
        """
        data = files.parse_json(text, where)
        names = {*data} if isinstance(data, dict) else set()
        all_fields = set[str]().union(*(study.fields for study in self.studies))
        for study in self.studies:
            field, is_set = study.switch or ("", False)
            if field in names and bool(data[field]) is is_set:
                strange = all_fields - study.fields
                data = {name: x for name, x in data.items() if name not in strange}
                return plain_json.from_plain(study.config_type, data, where)
        best = max(self.studies, key=lambda study: len(names & study.fields))
        return plain_json.from_plain(best.config_type, data, where)
