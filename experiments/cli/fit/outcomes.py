"""What comes out of fitting a log: arrays to draw and tell from, as a folder keeps."""

from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """A line to draw, or several in one array, with gaps that are not numbers."""

    x: np.ndarray
    y: np.ndarray


class Contour(NamedTuple):
    """The objective of the first law over the plane of two coefficients.

    Attributes:
      x_name: the first coefficient; empty where there is no such plane.
      y_name: the second.
      x: values of the first.
      y: values of the second.
      objective: over its least value, at each of them; empty where there were too many
        rows to compute it.
      x_samples: where the resamples have it.
      y_samples: the second.
    """

    x_name: str
    y_name: str
    x: np.ndarray
    y: np.ndarray
    objective: np.ndarray
    x_samples: np.ndarray
    y_samples: np.ndarray


class Result(NamedTuple):
    """What was read, fitted and found.

    Attributes:
      document: `fit.json`, as text.
      target: what the laws predict, mostly "loss".
      row: of the file, by run.
      num_params: of each run.
      num_tokens: of each.
      flops: of each.
      loss: of each, or whatever the target is.
      is_fitted: whether a run was fitted, or held out.
      predicted: by law and run.
      laws: their names.
      sizes: the sizes in `curves`.
      curves: the first law against compute, a row for each size.
      frontier: the first law's optimum against compute.
      group: the isoFLOP group of each run, -1 for none.
      parabolas: through them, a row for each group.
      minima: of them; not numbers where there is none.
      contour: of the first law's objective.
    """

    document: str
    target: str
    row: np.ndarray
    num_params: np.ndarray
    num_tokens: np.ndarray
    flops: np.ndarray
    loss: np.ndarray
    is_fitted: np.ndarray
    predicted: np.ndarray
    laws: np.ndarray
    sizes: np.ndarray
    curves: Curve
    frontier: Curve
    group: np.ndarray
    parabolas: Curve
    minima: Curve
    contour: Contour
