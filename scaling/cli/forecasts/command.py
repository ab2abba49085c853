"""The run folders of `jaxkv fit LOG --law downstream` and `--law hyperparameters`."""

from jaxkv.plotting import Panels
from jaxkv.report import Experiment, Study
from scaling.cli.forecasts import downstream, drawing, hyperparameters
from scaling.cli.forecasts.config import DownstreamConfig, HyperparameterConfig


def downstream_experiment(log: str) -> Experiment:
    """Returns fits to tasks as an experiment.

    Args:
      log: log of the config.
    """
    fits = Study(
        configs={"tasks": DownstreamConfig(log=log)},
        result=downstream.ForecastFits,
        run=downstream.fit_task_file,
        plot=drawing.plot_tasks,
        metrics=downstream.metrics,
        summary=downstream.summary,
        panels=Panels(2, 2),
        files=downstream.task_files,
    )
    question = "Which accuracy do larger runs reach on downstream tasks?"
    return Experiment("fit", question, (fits,))


def hyperparameter_experiment(log: str) -> Experiment:
    """Returns fits to tuned runs as an experiment.

    Args:
      log: log of the config.
    """
    fits = Study(
        configs={"rates": HyperparameterConfig(log=log)},
        result=downstream.ForecastFits,
        run=hyperparameters.fit_tuned_file,
        plot=drawing.plot_rates,
        metrics=hyperparameters.metrics,
        summary=hyperparameters.summary,
        panels=Panels(2, 2),
        files=hyperparameters.surface_files,
    )
    question = "Which learning rate and batch size are best for a larger run?"
    return Experiment("fit", question, (fits,))
