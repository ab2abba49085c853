"""Files of fits of tables of servers, and their use for one server.

The file is JSON. It has the version of the cost model, the mode and the covariance of
the coefficients and effects, the groups and the sizes of the fitted rows, and the
shares of power, and the tail of the time between tokens.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import validation
from jaxkv.files import read_json
from scaling.calibration.closed_loops.loop_calibration import (
    LOOP_DISCREPANCY,
    LoopCalibration,
)
from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.pooled_fit import (
    EFFECTS,
    LoopFit,
    count_parameters_of,
    draw_loop_coefficients,
)
from scaling.calibration.closed_loops.power import PowerShares
from scaling.calibration.closed_loops.token_tails import TokenTail
from scaling.calibration.load_sizes import LoadSizes
from scaling.calibration.posterior import ServerPosterior
from scaling.calibration.server_cost import (
    Scalar,
    ServerCoefficients,
    find_deviations,
)

PUBLISHED_LOOPS = Path(__file__).parents[1] / "public_servers.json"
"""Fits of public servers, written by `jaxkv calibrate`."""
LOOP_VERSION = 3
"""Version of the coefficients of closed loops: raised when one changes its meaning."""
LOOP_FILE = "closed loops"
"""Kind of the file, under the key `kind`."""
_RATES = ("product", "weight", "attention", "prompt_kv", "link")
_OVERHEADS = ("reduce", "layer", "mixture_layer", "step", "sequence")


def format_loops(calibration: LoopCalibration) -> str:
    """Returns the content of a file of fits."""

    def rounded(values: np.ndarray) -> list[float]:
        return [float(f"{x:.8g}") for x in values]

    document = {"kind": LOOP_FILE, "loop_version": LOOP_VERSION}
    for name in ("dense", "mixture"):
        fit: LoopFit | None = getattr(calibration, name)
        document[name] = fit and {
            "num_rows": fit.num_rows,
            "models": fit.models,
            "groups": fit.groups,
            "sizes": [x._asdict() for x in fit.sizes],
            "mode": rounded(fit.mode),
            "covariance": [rounded(x) for x in fit.covariance],
        }
    document["power"] = calibration.power and calibration.power._asdict()
    document["tail"] = calibration.tail and calibration.tail._asdict()
    return json.dumps(document) + "\n"


def load_loops(path: str | os.PathLike[str] = PUBLISHED_LOOPS) -> LoopCalibration:
    """Reads a file that `jaxkv calibrate TABLE --out FILE.json` wrote.

    Raises:
      ValueError: the file cannot be read, has another form or version, or its numbers
        do not fit its groups.
    """
    path = validation.path("path", path)
    document = read_json(path)
    version = document.get("loop_version")
    if version != LOOP_VERSION:
        raise ValueError(
            f"{path}: loop_version={version!r} must be {LOOP_VERSION}; `jaxkv "
            "calibrate TABLE --out FILE.json` fits it again"
        )
    try:
        power = document["power"]
        tail = document["tail"]
        calibration = LoopCalibration(
            dense=_read_fit(document["dense"]),
            mixture=_read_fit(document["mixture"]),
            power=None if power is None else PowerShares(**power),
            tail=None if tail is None else TokenTail(**tail),
        )
        if calibration.power and not all(0 <= x < math.inf for x in calibration.power):
            raise ValueError("power must be at least 0")
        if calibration.tail is not None:
            prompt, step_s, noise = calibration.tail
            if not all(0 < x < math.inf for x in (prompt, step_s, *noise.values())):
                raise ValueError("tail must be above 0")
            if "" not in noise:
                raise ValueError("tail must have a noise of other devices")
        if not (calibration.dense or calibration.mixture):
            raise ValueError("there is neither a dense fit nor one of mixtures")
        return calibration
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no fit of servers: {error}") from None


def _read_fit(document: dict[str, Any] | None) -> LoopFit | None:
    if document is None:
        return None
    groups = {kind: tuple(document["groups"][kind]) for kind in EFFECTS}
    low, high = (LoadSizes(**x) for x in document["sizes"])
    if not all(0 < x <= y < math.inf for x, y in zip(low, high, strict=True)):
        raise ValueError("sizes must be above 0, the smallest first")
    fit = LoopFit(
        mode=np.array(document["mode"], float),
        covariance=np.array(document["covariance"], float),
        groups=groups,
        models=tuple(document["models"]),
        num_rows=int(document["num_rows"]),
        sizes=(low, high),
    )
    num = count_parameters_of(groups)
    if fit.mode.shape != (num,) or fit.covariance.shape != (num, num):
        raise ValueError(f"mode and covariance must be of {num} parameters")
    if not np.isfinite(fit.mode).all() or not (np.diag(fit.covariance) > 0).all():
        raise ValueError("mode must be finite, and variances above 0")
    return fit


@validation.checks_numbers(num=2, seed=validation.SEEDS)
def draw_loop_posterior(
    server: MeasuredServer, calibration: LoopCalibration, *, num: int, seed: int = 0
) -> ServerPosterior:
    """Draws the coefficients of a server for simulations of any load.

    The factor of the time per token (`pace`) is part of the rates and overheads. The
    discrepancy is that of models which tables do not have.

    Args:
      server: a dense model in 16 bits; its load is not read.
      calibration: the fits.
      num: draws, at least 2.
      seed: random seed.

    Raises:
      ValueError: the model is a mixture, or weights do not have 16 bits.
    """
    if server.model.experts is not None or server.weight_format != "bf16":
        raise ValueError(
            f"{server.model.name} in {server.weight_format}: a fit of tables is "
            "simulated for dense models in 16 bits; jaxkv calibrate TABLE --predict "
            "predicts other servers"
        )
    fit = calibration.fit_of(server)
    draws = draw_loop_coefficients(server, fit, num=num, seed=seed)
    coefficients = fold_pace(draws.server, draws.pace)
    deviations = find_deviations(coefficients)
    return ServerPosterior(
        deviations=deviations,
        residuals={},
        num_stages={},
        stages=(f"{fit.num_rows:,} rows of tables",),
        mode=np.median(deviations, axis=0),
        corrections=np.zeros((1, 2)),
        num_effective=float(num),
        devices=fit.groups["device"],
        fitted_sizes=fit.sizes,
        discrepancy=np.array(LOOP_DISCREPANCY[False]),
    )


def fold_pace(server: ServerCoefficients, pace: Scalar) -> ServerCoefficients:
    """Returns the coefficients with which each step takes `pace` times as long."""
    rates = {
        name: getattr(server, name) / pace for name in map("{}_share".format, _RATES)
    }
    times = {
        name: getattr(server, name) * pace for name in map("{}_s".format, _OVERHEADS)
    }
    return server._replace(**rates, **times)
