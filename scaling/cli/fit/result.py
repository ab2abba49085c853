"""LogFits of a fit to a log: arrays for the figure, and the document."""

from typing import NamedTuple

import numpy as np

from jaxkv.report import ResultRecord, column


class PlotCurve(NamedTuple):
    """A curve, or several in one array, with NaN as gaps."""

    x: np.ndarray
    y: np.ndarray


class Contour(ResultRecord):
    """Objective of the first law over the plane of two coefficients."""

    x_name: str = column("name of the first coefficient; empty without a contour")
    y_name: str = column("name of the second coefficient")
    x: np.ndarray = column("values of the first coefficient")
    y: np.ndarray = column("values of the second coefficient")
    objective: np.ndarray = column(
        "objective divided by its minimum, by x and y; empty for too many rows"
    )
    x_samples: np.ndarray = column("first coefficient of the resamples")
    y_samples: np.ndarray = column("second coefficient of the resamples")


class LogFits(ResultRecord):
    """Data, fits and frontiers."""

    document: str = column("content of `fit.json`")
    target: str = column('quantity that the laws predict, by default "loss"')
    row: np.ndarray = column("row of the file, by run")
    num_params: np.ndarray = column("parameters of each run")
    num_tokens: np.ndarray = column("tokens of each run")
    flops: np.ndarray = column("compute of each run")
    loss: np.ndarray = column("target of each run")
    is_fitted: np.ndarray = column("True for fitted runs, False for held-out ones")
    predicted: np.ndarray = column("prediction by law and run")
    laws: np.ndarray = column("names of the laws")
    sizes: np.ndarray = column("model sizes of `curves`")
    curves: PlotCurve = column("first law against compute, a row per size")
    frontier: PlotCurve = column("optimum of the first law against compute")
    group: np.ndarray = column("isoFLOP group of each run, -1 for none")
    parabolas: PlotCurve = column("parabola of each group, a row per group")
    minima: PlotCurve = column("minimum of each parabola; NaN for none")
    contour: Contour = column("contour of the first law's objective")
