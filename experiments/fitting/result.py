"""What comes out of fitting a log: arrays to draw and tell from, as a folder keeps."""

from typing import NamedTuple

import numpy as np

from experiments.framework import ResultRecord, column


class PlotCurve(NamedTuple):
    """A line to draw, or several in one array, with gaps that are not numbers."""

    x: np.ndarray
    y: np.ndarray


class Contour(ResultRecord):
    """The objective of the first law over the plane of two coefficients."""

    x_name: str = column("the first coefficient; empty where there is no such plane")
    y_name: str = column("the second")
    x: np.ndarray = column("values of the first")
    y: np.ndarray = column("values of the second")
    objective: np.ndarray = column(
        "over its least value, at each of them; empty where there were too many rows"
    )
    x_samples: np.ndarray = column("where the resamples have it")
    y_samples: np.ndarray = column("the second")


class Result(ResultRecord):
    """What was read, fitted and found."""

    document: str = column("`fit.json`, as text")
    target: str = column('what the laws predict, mostly "loss"')
    row: np.ndarray = column("of the file, by run")
    num_params: np.ndarray = column("of each run")
    num_tokens: np.ndarray = column("of each")
    flops: np.ndarray = column("of each")
    loss: np.ndarray = column("of each, or whatever the target is")
    is_fitted: np.ndarray = column("whether a run was fitted, or held out")
    predicted: np.ndarray = column("by law and run")
    laws: np.ndarray = column("their names")
    sizes: np.ndarray = column("the sizes in `curves`")
    curves: PlotCurve = column("the first law against compute, a row for each size")
    frontier: PlotCurve = column("the first law's optimum against compute")
    group: np.ndarray = column("the isoFLOP group of each run, -1 for none")
    parabolas: PlotCurve = column("through them, a row for each group")
    minima: PlotCurve = column("of them; not numbers where there is none")
    contour: Contour = column("of the first law's objective")
