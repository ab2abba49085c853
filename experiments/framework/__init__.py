"""What an experiment is: its registry, runs, folders, claims and reports."""

from experiments.framework.claims import Claim as Claim
from experiments.framework.claims import Ours as Ours
from experiments.framework.claims import beside as beside
from experiments.framework.claims import judge as judge
from experiments.framework.claims import ours as ours
from experiments.framework.report import Excerpts as Excerpts
from experiments.framework.report import Part as Part
from experiments.framework.report import Sheet as Sheet
from experiments.framework.report import Verdicts as Verdicts
from experiments.framework.run_folder import Run as Run
from experiments.framework.study import Experiment as Experiment
from experiments.framework.study import Study as Study
from experiments.framework.table import Floats as Floats
from experiments.framework.table import Ints as Ints
from experiments.framework.table import Record as Record
from experiments.framework.table import Table as Table
from experiments.framework.table import Texts as Texts
from experiments.framework.table import column as column
from jaxkv.progress import QUIET as QUIET
from jaxkv.progress import Progress as Progress
from jaxkv.progress import Quiet as Quiet

__all__ = [
    "QUIET",
    "Claim",
    "Excerpts",
    "Experiment",
    "Floats",
    "Ints",
    "Ours",
    "Part",
    "Progress",
    "Quiet",
    "Record",
    "Run",
    "Sheet",
    "Study",
    "Table",
    "Texts",
    "Verdicts",
    "beside",
    "column",
    "config_json",
    "environment",
    "judge",
    "ours",
    "refused",
    "registry",
    "report",
    "run_folder",
    "study",
    "table",
    "units",
]
