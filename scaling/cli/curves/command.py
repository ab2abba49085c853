"""The run folder of `jaxkv fit CURVES --law schedule`."""

from jaxkv.plotting import Panels
from jaxkv.report import Experiment, Study
from scaling.cli.curves import drawing, study
from scaling.cli.curves.config import CurveFitConfig


def curve_experiment(log: str) -> Experiment:
    """Returns fits to training curves as an experiment.

    Args:
      log: log of the config.
    """
    fits = Study(
        configs={"curves": CurveFitConfig(log=log)},
        result=study.CurveFits,
        run=study.fit_curve_file,
        plot=drawing.plot,
        metrics=study.metrics,
        summary=study.summary,
        panels=Panels(2, 2),
        files=study.result_files,
    )
    question = "Which loss does another schedule of the learning rate reach?"
    return Experiment("fit", question, (fits,))
