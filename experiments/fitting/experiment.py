"""Which loss do these runs predict for larger ones? `jaxkv fit LOG`.

Fits laws to a log, scores each on held-out runs, and compares the optimum that each law
implies with the optima of isoFLOP curves and training curves.
"""

from experiments.fitting import drawing, fitting, report
from experiments.fitting.config import Config
from experiments.framework import Experiment, Study


def experiment(log: str) -> Experiment:
    """Returns fits to logs as an experiment, so that they write a run folder.

    Args:
      log: log of the config.
    """
    fits = Study(
        configs={"fit": Config(log=log)},
        result=fitting.Result,
        run=fitting.run,
        plot=drawing.plot,
        metrics=report.metrics,
        summary=report.summary,
        panels=(2, 2),
        files=lambda result: {"fit.json": result.document},
    )
    question = "Which loss do these runs predict for larger ones?"
    return Experiment("fit", question, (fits,))
