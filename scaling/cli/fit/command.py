"""`jaxkv fit LOG`: which loss do these runs predict for larger ones?

Fits laws to a log, scores each on held-out runs, and compares the optimum that each law
implies with the optima of isoFLOP curves and training curves. With `--law schedule`,
the log has whole training curves (`scaling.cli.curves`); with `--law downstream` or
`--law hyperparameters`, metrics of tasks, or learning rates and batch sizes
(`scaling.cli.forecasts`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxkv import files
from jaxkv.cli import CommandOutput, is_word, parse_changes, run_study, value_of
from jaxkv.plotting import Panels
from jaxkv.report import Experiment, Study, config_loads
from scaling.cli.curves import CurveFitConfig, curve_experiment, names_curve_laws
from scaling.cli.fit import drawing, fitting, report
from scaling.cli.fit.config import FitConfig
from scaling.cli.fit.result import LogFits
from scaling.cli.forecasts import (
    DOWNSTREAM,
    HYPERPARAMETERS,
    DownstreamConfig,
    HyperparameterConfig,
    downstream_experiment,
    hyperparameter_experiment,
)

type _Config = FitConfig | CurveFitConfig | DownstreamConfig | HyperparameterConfig


def main(args: list[str]) -> CommandOutput:
    """Runs `fit LOG [OPTIONS]`; the fit of a sweep goes to `fit/` in its folder.

    Raises:
      ValueError: LOG is missing, or an option is invalid.
    """
    log = args[0] if is_word(args) else ""
    flags = args[1:] if log else args
    file = value_of(flags, "--config")
    law = value_of(flags, "--law") or ""
    if file is not None:
        law = law or str(files.read_json(file).get("law", ""))
    kind = _config_type(law)
    base: _Config = kind(log=log)
    if file is not None:
        base = config_loads(kind, files.read_text(file), file)
        base = dataclasses.replace(base, log=log or base.log)
    config, out, max_seconds = parse_changes(
        base,
        flags,
        "jaxkv fit LOG",
        "LOG is a CSV or JSON, gzipped or not, or the folder of a sweep; with --law "
        "schedule a table of training curves, with --law downstream of runs with "
        "metrics of tasks, with --law hyperparameters of runs with rates and batches.",
        "LOG/fit for a sweep, or a new one under runs/",
    )
    if not config.log:
        raise ValueError("LOG is missing: a CSV, JSON, or the folder of a sweep")
    is_sweep = kind is FitConfig and out is None and Path(config.log).is_dir()
    if is_sweep:
        out = Path(config.log) / "fit"
    experiment = _EXPERIMENTS[kind](config.log)
    answer = run_study(experiment, config, out, max_seconds)
    if is_sweep and out is not None:  # where `plan --law SWEEP/fit.json` looks
        text = files.read_text(out / "fit.json")
        files.write_atomically(Path(config.log) / "fit.json", text)
    return answer.lift_metrics()


def _config_type(law: str) -> type[_Config]:
    """Returns the config of the laws that `--law` names."""
    if names_curve_laws(law):
        return CurveFitConfig
    special = {DOWNSTREAM: DownstreamConfig, HYPERPARAMETERS: HyperparameterConfig}
    return special.get(law.strip(), FitConfig)


def fit_experiment(log: str) -> Experiment:
    """Returns fits to logs as an experiment, so that they write a run folder.

    Args:
      log: log of the config.
    """
    fits = Study(
        configs={"fit": FitConfig(log=log)},
        result=LogFits,
        run=fitting.fit_log,
        plot=drawing.plot,
        metrics=report.metrics,
        summary=report.summary,
        panels=Panels(2, 2),
        files=lambda result: {"fit.json": result.document},
    )
    question = "Which loss do these runs predict for larger ones?"
    return Experiment("fit", question, (fits,))


_EXPERIMENTS: Mapping[type[_Config], Callable[[str], Experiment]] = {
    FitConfig: fit_experiment,
    CurveFitConfig: curve_experiment,
    DownstreamConfig: downstream_experiment,
    HyperparameterConfig: hyperparameter_experiment,
}
