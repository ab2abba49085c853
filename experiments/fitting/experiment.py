"""What do the losses of these runs say about larger ones? `jaxkv fit LOG`.

Fits laws to a log side by side, scores each on runs that it has not seen, and sets the
optimum that each implies beside what isoFLOP curves and training curves say themselves.
"""

from experiments.fitting import drawing, fitting, report
from experiments.fitting.config import Config
from experiments.framework import Experiment, Study


def experiment(log: str) -> Experiment:
    """Describes fits to logs as an experiment, so that they leave a run folder.

    Args:
      log: the log of its config.
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
    question = "What do the losses of these runs say about larger ones?"
    return Experiment("fit", question, (fits,))
