"""Load stages that would narrow the interval of a prediction, before they are measured.

The posterior's draws give the covariance of the latencies of two loads. With the
discrepancy of the model, which all loads of a model share, and the noise of a stage,
the latencies are taken as jointly normal in their logarithms; measuring one of them
then narrows the other by a known factor, whatever the measured value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from scaling.calibration.load_sizes import (
    LoadSizes,
    find_size_range,
    outside_variance,
)
from scaling.calibration.posterior import (
    STAGE_NOISE,
    ServerPosterior,
    find_latency_factors,
)
from scaling.calibration.server_cost import ServerCoefficients, draw_coefficients
from scaling.calibration.servers import ServerSetup
from scaling.calibration.steady_state import SteadyLoad, find_steady_state

_FULL_BATCH = 0.9
"""Share of `max_num_seqs` above which a load may be overloaded."""


class MeasurementGain(NamedTuple):
    """A load, and what measuring it does to the interval of the target."""

    load: SteadyLoad
    end_to_end: float
    """Width of the interval of the end-to-end time, over that of today."""
    first_token: float
    """The same for the first-token time."""


def rank_measurements(
    posterior: ServerPosterior,
    setup: ServerSetup,
    target: SteadyLoad,
    candidates: Sequence[SteadyLoad],
) -> list[MeasurementGain]:
    """Ranks loads by how much measuring them would narrow a prediction.

    Args:
      posterior: the posterior, with at least 8 draws.
      setup: the server that is predicted and measured.
      target: the load that is predicted.
      candidates: loads that can be measured; overloaded ones are left out.

    Returns:
      The loads, the narrowest intervals first.

    Raises:
      ValueError: the posterior has too few draws.
    """
    num_draws = len(posterior.deviations)
    if num_draws < 8:
        raise ValueError(f"{num_draws} draws of the posterior must be at least 8")
    loads = [target, *candidates]
    stacked = jax.tree.map(lambda *x: jnp.stack(jnp.float32(x)), *loads)
    coefficients = jax.tree.map(jnp.float32, draw_coefficients(posterior.deviations))

    def times(draw: ServerCoefficients, load: SteadyLoad) -> Float[jax.Array, " 2"]:
        state = find_steady_state(load, setup.cost(draw))
        return jnp.log(jnp.stack([state.end_to_end_s, state.first_token_s]))

    over_loads = jax.vmap(times, in_axes=(None, 0))
    logs = jax.jit(jax.vmap(over_loads, in_axes=(0, None)))(coefficients, stacked)
    logs = np.asarray(logs, np.float64)
    middle_s = np.exp(np.median(logs[..., 0], axis=0))
    sizes = [_sizes_of(load, s, setup) for load, s in zip(loads, middle_s, strict=True)]
    name = setup.model.name
    discrepancy = find_latency_factors(posterior, name).spread ** 2 - STAGE_NOISE**2
    centred = logs - logs.mean(axis=0)
    covariance = (centred * centred[:, :1]).sum(axis=0) / (num_draws - 1) + discrepancy
    variance = logs.var(axis=0, ddof=1) + discrepancy + STAGE_NOISE**2
    before = variance[0] + outside_variance(posterior.fitted_sizes, sizes[0])
    gains = []
    for index in range(1, len(loads)):
        if not sizes[index].batch < _FULL_BATCH * setup.max_num_seqs:
            continue
        measured = variance[index] + outside_variance(
            posterior.fitted_sizes, sizes[index]
        )
        wider = posterior.fitted_sizes and find_size_range(
            [*posterior.fitted_sizes, sizes[index]]
        )
        after = variance[0] - covariance[index] ** 2 / measured
        after = after + outside_variance(wider, sizes[0])
        widths = np.sqrt(after / before).tolist()
        gains.append(MeasurementGain(loads[index], *widths))
    # Of about equal gains, the lightest load is first.
    return sorted(
        gains,
        key=lambda gain: (
            round(gain.end_to_end * gain.first_token, 2),
            float(gain.load.rate_per_s),
        ),
    )


def _sizes_of(load: SteadyLoad, end_to_end_s: float, setup: ServerSetup) -> LoadSizes:
    batch = min(float(load.rate_per_s) * end_to_end_s, setup.max_num_seqs)
    return LoadSizes(float(load.prompt_tokens), float(load.answer_tokens), batch)
