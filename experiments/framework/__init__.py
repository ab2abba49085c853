"""What an experiment is: its registry, runs, folders, claims and reports."""

from experiments.framework.claims import Claim as Claim
from experiments.framework.claims import judge as judge
from experiments.framework.registry import Experiment as Experiment
from experiments.framework.report import Excerpts as Excerpts
from experiments.framework.report import Part as Part
from experiments.framework.report import Sheet as Sheet
from experiments.framework.report import Verdicts as Verdicts
from experiments.framework.run_folder import Run as Run

__all__ = [
    "Claim",
    "Excerpts",
    "Experiment",
    "Part",
    "Run",
    "Sheet",
    "Verdicts",
    "config_json",
    "environment",
    "judge",
    "refused",
    "registry",
    "report",
    "run_folder",
    "units",
]
