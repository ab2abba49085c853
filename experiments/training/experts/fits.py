"""Laws of dense models and mixtures, and how exact their routing is."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkv.models import moe
from scaling.fits import fit as fits_fit
from scaling.fits.fit import compare, predict
from scaling.laws import published


class Fitted(NamedTuple):
    """What was fitted to the runs, see `experts.Result`."""

    flops: np.ndarray
    curves: np.ndarray
    slopes: np.ndarray
    ratio: np.ndarray


NOTHING = Fitted(
    np.zeros(0), np.full((2, 0, 3), np.nan), np.full((2, 3), np.nan), np.full(3, np.nan)
)


def fit_both(
    kind: np.ndarray, flops: np.ndarray, loss: np.ndarray, *, num_resamples: int
) -> Fitted:
    """Fits a power law of compute to each kind, `dense` and `mixture`."""
    law, fits = published.find("power").over("flops"), []
    for name in ("dense", "mixture"):
        used = kind == name
        data = {"flops": flops[used], "loss": loss[used]}
        fits.append(fits_fit.fit(law, data, loss="mse", bootstrap=num_resamples))
    grid = np.geomspace(flops.min(), flops.max(), 50)
    curves, slopes = [], []
    for fit in fits:
        at = predict(fit, {"flops": grid}, "confidence")
        curves.append(np.stack([at.loss, at.low, at.high], axis=1))
        low, high = fit.intervals["b"]
        slopes.append([-fit.coefficients["b"], -high, -low])
    ratio = np.full(3, np.nan)
    try:
        both = compare(fits[1], fits[0])
    except ValueError:  # no loss that both reached
        pass
    else:
        middle = len(both.loss) // 2
        ratio = np.array([both.ratio[middle], both.low[middle], both.high[middle]])
    return Fitted(grid, np.stack(curves), np.array(slopes), ratio)


def routing_error(router: np.ndarray, *, top_k: int) -> float:
    """Holds the shares of a router against the lecture's formula, in float64.

    Args:
      router: its weights, `[experts, hidden]`.
      top_k: experts of a token.

    Returns:
      The largest difference over 4,096 random inputs: of expert i among the chosen T,
      g_i = p_i / sum_{j in T} p_j with p = softmax(W x).
    """
    x = np.random.default_rng(0).normal(size=(4096, router.shape[1])).astype("f4")
    scores = (x.astype("f8") @ router.T.astype("f8")).astype("f4")
    routing = moe.route(jnp.asarray(scores), top_k=top_k, renormalise=True)
    p = np.exp(scores.astype("f8"))
    p /= p.sum(axis=1, keepdims=True)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :top_k]
    wanted = np.zeros_like(p)
    of_chosen = np.take_along_axis(p, chosen, axis=1)
    of_chosen /= of_chosen.sum(axis=1, keepdims=True)
    np.put_along_axis(wanted, chosen, of_chosen, axis=1)
    ours = np.zeros_like(p)
    np.put_along_axis(ours, np.asarray(routing.expert), np.asarray(routing.share), 1)
    return float(np.abs(ours - wanted).max())
