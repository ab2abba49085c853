"""Structure of an experiment: registry, runs, run folders, claims, tables, reports."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.framework.claims import (
        NOT_JUDGED,
        Claim,
        Direction,
        MeasuredValue,
        claims_file,
        measured,
    )
    from experiments.framework.report import Excerpts, ReportPart, Sheet
    from experiments.framework.run_folder import SavedRun
    from experiments.framework.study import Experiment, Study
    from experiments.framework.table import (
        Floats,
        Ints,
        ResultRecord,
        ResultTable,
        Texts,
        column,
    )

# Names load on first use: `jaxkv --help` reads the registry, and no arrays.
_HOMES = {
    "claims": "NOT_JUDGED Claim Direction MeasuredValue claims_file measured",
    "report": "Excerpts ReportPart Sheet",
    "run_folder": "SavedRun",
    "study": "Experiment Study",
    "table": "Floats Ints ResultRecord ResultTable Texts column",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "NOT_JUDGED",
    "Claim",
    "Direction",
    "Excerpts",
    "Experiment",
    "Floats",
    "Ints",
    "MeasuredValue",
    "ReportPart",
    "ResultRecord",
    "ResultTable",
    "SavedRun",
    "Sheet",
    "Study",
    "Texts",
    "claims_file",
    "column",
    "config_json",
    "environment",
    "measured",
    "registry",
    "report",
    "run_folder",
    "study",
    "table",
    "units",
    "user_errors",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
