"""Files of posteriors, and the posterior of published servers.

The file is JSON. It has the version of the cost model, because a coefficient means the
same in one version only; the values of the coefficients in each draw; and the names and
sizes of the fitted stages, so that a prediction can name its data and its range.
"""

import json
import math
import os
from pathlib import Path

import numpy as np

from jaxkv import validation
from jaxkv.files import read_json, write_atomically
from scaling.calibration.load_sizes import LoadSizes
from scaling.calibration.posterior import ServerPosterior
from scaling.calibration.request_noise import RequestNoise
from scaling.calibration.server_cost import (
    COST_VERSION,
    ServerCoefficients,
    draw_coefficients,
    find_deviations,
)

PUBLISHED_SERVERS = Path(__file__).with_name("vllm_h100.json")
"""Posterior of vLLM servers on H100s, written by `jaxkv calibrate`."""


def save_posterior(path: Path, posterior: ServerPosterior) -> None:
    """Writes a posterior.

    Raises:
      ValueError: the file cannot be written.
    """
    write_atomically(path, format_posterior(posterior))


def format_posterior(posterior: ServerPosterior) -> str:
    """Returns the content of a file of a posterior."""

    def rounded(values: np.ndarray) -> list:
        return [float(f"{x:.6g}") for x in values]

    draws = draw_coefficients(posterior.deviations)
    modes = draw_coefficients(posterior.mode)
    document = {
        "cost_version": COST_VERSION,
        "stages": posterior.stages,
        "devices": posterior.devices,
        "corrections": posterior.corrections.tolist(),
        "num_effective": posterior.num_effective,
        "fitted_sizes": posterior.fitted_sizes
        and [x._asdict() for x in posterior.fitted_sizes],
        "request_noise": posterior.noise
        and {name: rounded(x) for name, x in posterior.noise._asdict().items()},
        "models": {
            name: {
                "num_stages": posterior.num_stages[name],
                "residuals": [rounded(x) for x in residuals.T],
            }
            for name, residuals in posterior.residuals.items()
        },
        "coefficients": {
            name: {"mode": float(mode), "draws": rounded(np.asarray(draw))}
            for name, mode, draw in zip(modes._fields, modes, draws, strict=True)
        },
    }
    return json.dumps(document, indent=1) + "\n"


def load_posterior(path: str | os.PathLike[str] = PUBLISHED_SERVERS) -> ServerPosterior:
    """Reads a posterior that `save_posterior` wrote.

    Raises:
      ValueError: the file cannot be read, is of another version of the cost model, or
        has other coefficients or other numbers of draws.
    """
    path = validation.path("path", path)
    document = read_json(path)
    version = document.get("cost_version")
    if version != COST_VERSION:
        raise ValueError(
            f"{path}: cost_version={version!r} must be {COST_VERSION}; "
            "`jaxkv calibrate` fits it again"
        )
    try:
        models = document["models"]
        columns = document["coefficients"]
        if tuple(columns) != ServerCoefficients._fields:
            raise ValueError(f"coefficients must be {ServerCoefficients._fields}")
        draws, modes = (
            find_deviations(
                ServerCoefficients(*(np.array(x[key], float) for x in columns.values()))
            )
            for key in ("draws", "mode")
        )
        residuals = {
            name: np.array(model["residuals"], float).T
            for name, model in models.items()
        }
        if any(x.shape != (len(draws), 2) for x in residuals.values()):
            raise ValueError(f"residuals must have {len(draws)} draws, as coefficients")
        if not (np.isfinite(draws).all() and np.isfinite(modes).all()):
            raise ValueError("coefficients must be above 0")
        sizes = document.get("fitted_sizes")
        if sizes is not None:
            low, high = (LoadSizes(**x) for x in sizes)
            if not all(0 < x <= y < math.inf for x, y in zip(low, high, strict=True)):
                raise ValueError("fitted_sizes must be above 0, the smallest first")
            sizes = low, high
        noise = document.get("request_noise")
        if noise is not None:
            noise = RequestNoise(
                *(np.array(noise[x], float) for x in RequestNoise._fields)
            )
            if not all(x.shape == (2,) and (x >= 0).all() for x in noise):
                raise ValueError("request_noise must have two numbers of at least 0")
        return ServerPosterior(
            deviations=draws,
            residuals=residuals,
            num_stages={
                name: int(model["num_stages"]) for name, model in models.items()
            },
            stages=tuple(document["stages"]),
            mode=modes,
            corrections=np.array(document["corrections"], float),
            num_effective=float(document["num_effective"]),
            devices=tuple(document["devices"]),
            fitted_sizes=sizes,
            noise=noise,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no posterior of servers: {error}") from None
