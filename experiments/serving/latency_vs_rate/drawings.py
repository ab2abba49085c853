"""Curves and histograms that the papers draw.

`drawings.toml` has the coordinates of their vector graphics. They give what the texts
do not print: distributions of lengths, loads that a system sustains, and, by latencies
at low load, the times of steps.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv.workloads import Histogram, LatencyCurve, Pair
from scaling.costs import LinearCost

LOW_LOAD = 1.5
"""Latencies up to this multiple of the lowest one are those of low load."""


@functools.cache
def _read() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("drawings.toml").read_text("utf-8"))


def drawn_law(data: str, law: Pair) -> Pair:
    """Returns a law with the lengths of figure 11 and the bounds of another one.

    Args:
      data: `ShareGPT` or `Alpaca`.
      law: bounds on the lengths.
    """
    prompt, output = (
        Histogram(**(part | {"counts": tuple(part["counts"])}))
        for part in _read()["lengths"][data].values()
    )
    bounds = {"max_prompt": law.max_prompt, "max_length": law.max_length}
    return Pair(prompt=prompt, output=output, **bounds, keeps_means=law.keeps_means)


def drawn_curves(panel: str) -> dict[str, LatencyCurve]:
    """Returns latency against rate by system; `panel` is `12a` to `14f`, or `17`."""
    return {
        system: LatencyCurve(*np.array(points).T)
        for system, points in _read()["curves"][panel].items()
    }


def drawn_example(name: str) -> LatencyCurve:
    """Returns a curve of DistServe's figure 1: P90 in s against requests/s.

    Args:
      name: `prefill`, `both_first`: times to the first token; `decode`, `both_between`:
        times per output token.
    """
    return LatencyCurve(*np.array(_read()["distserve"][name]).T)


def drawn_rate(curve: LatencyCurve, bound: float) -> float:
    """Returns the rate at which a drawn line reaches a latency; NaN if it does not."""
    rates, latency = curve
    over = np.flatnonzero(latency > bound)
    if not over.size or not over[0]:
        return np.nan
    ends = slice(over[0] - 1, over[0] + 1)
    return float(np.interp(bound, latency[ends], rates[ends]))


def drawn_ratio(panel: str, other: str, bound: float) -> float:
    """Returns the load of the paged system over another's, by the drawn lines."""
    curves = drawn_curves(panel)
    paged, rate = (drawn_rate(curves[system], bound) for system in ("paged", other))
    return paged / rate


def highest_ratio(panel: str, other: str, bounds: tuple[float, float]) -> float:
    """Returns the largest `drawn_ratio` at bounds in an interval."""
    ratios = [drawn_ratio(panel, other, x) for x in np.linspace(*bounds, 33)]
    return float(np.nanmax(ratios))


class LowLoad(NamedTuple):
    """Latencies of a server that has no queue, and the mean lengths of its requests.

    Attributes:
      rates: loads in requests/s.
      latency: mean latency in s a token at each.
      prompt: tokens of a prompt that run with each request, 0 if elsewhere.
      output: tokens of an answer.
      context: tokens that a running request attends to.
      waiting: steps that a request waits for each token of its answer.
    """

    rates: Float[np.ndarray, " loads"]
    latency: Float[np.ndarray, " loads"]
    prompt: float
    output: float
    context: float
    waiting: float


def low_load(panel: str, law: Pair) -> LowLoad:
    """Returns the points of a panel without a queue, over all systems.

    They are the lower envelope of the points up to `LOW_LOAD` times the lowest latency:
    a system at a lower rate and a higher latency has a queue. A request waits half a
    step for its first one.
    """
    curves = drawn_curves(panel)
    curves.pop("FasterTransformer", None)  # its batches are not continuous
    points = np.concatenate([np.stack(curve, axis=1) for curve in curves.values()])
    points = points[points[:, 1] <= LOW_LOAD * points[:, 1].min()]
    points = points[np.lexsort(points.T[::-1])]
    lowest_after = np.minimum.accumulate(points[::-1, 1])[::-1]
    rates, latency = points[points[:, 1] <= lowest_after].T
    lengths = law.draw(np.random.default_rng(0), 100_000)
    prompt, output = (x.astype(float) for x in lengths)
    age = float(np.mean(output**2) / 2 / output.mean())
    return LowLoad(
        rates,
        latency,
        prompt.mean(),
        output.mean(),
        prompt.mean() + age,
        float(np.mean(0.5 / output)),
    )


def fit_steps(load: LowLoad, cost: LinearCost) -> LinearCost:
    """Returns a cost model with the constant and the cost of a sequence fitted.

    By Little's law rate x output tokens x step time sequences run at once. Costs of
    attended tokens and of prompts stay as they are.

    Args:
      load: latencies without a queue.
      cost: the other coefficients.
    """
    step_s = load.latency / (1 + load.waiting)
    running = load.rates * load.output * step_s
    token_s = float(cost.decode[1])
    prompt_s = float(cost.prefill[1])
    rest_s = step_s - token_s * running * load.context
    rest_s = rest_s - prompt_s * load.prompt * load.rates * step_s
    columns = np.stack([np.ones_like(running), running], axis=1)
    constant, sequence = np.linalg.lstsq(columns, rest_s)[0]
    decode = jnp.array([constant, token_s, sequence], jnp.float32)
    prefill = jnp.array([constant, prompt_s, 0.0], jnp.float32)
    return cost._replace(prefill=prefill, decode=decode, decode_large=decode)
