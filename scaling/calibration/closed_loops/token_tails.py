"""Percentiles of the time between tokens: steps that feed prompts make the tail.

In a closed loop of N requests of m tokens N / m prompts begin in a step on average.
Their number in one step has a Poisson distribution. A step with k of them takes a
decode step, plus k times the time of a prompt, plus a constant, since it runs without a
recorded graph. Steps have lognormal noise, by device: hosts and clients differ. All
requests that run see each step, so percentiles over tokens are those over steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

from scaling.calibration.closed_loops.measured_servers import MeasuredServer
from scaling.calibration.closed_loops.pooled_fit import LoopPrediction

TAIL_LEVELS = (0.9, 0.95, 0.99)
"""Percentiles of the time between tokens."""
_PROMPT_COUNTS = np.arange(24)
_BISECTIONS = 18
_TAIL_MEDIANS = np.log([1.0, 10e-3, 0.1])
_DEVICE_SPREAD = 0.7
_ERROR = 0.3


class TokenTail(NamedTuple):
    """Coefficients of the time between tokens."""

    prompt: float
    """Time of a prompt in a step, over that which the mean time per token has."""
    prompt_step_s: float
    """Additional time of a step with prompts in s."""
    noise: dict[str, float]
    """Standard deviation of the logarithm of a step's time by device; "" for others."""


def fit_token_tail(
    servers: Sequence[MeasuredServer], load: LoopPrediction
) -> TokenTail:
    """Fits the coefficients to measured percentiles, by relative error.

    Args:
      servers: servers with `is_median_step` and `token_tail_s`.
      load: predicted times per token, and requests that run.
    """
    devices = sorted({x.device.name for x in servers})
    places = [devices.index(x.device.name) for x in servers]
    steps = _describe_steps(servers, load)
    measured = np.log([x.token_tail_s for x in servers])

    def residuals(deviations: np.ndarray) -> np.ndarray:
        prompt, step_s, shared = np.exp(_TAIL_MEDIANS + deviations[:3])
        noise = shared * np.exp(_DEVICE_SPREAD * deviations[3:])
        errors = np.log(_find_percentiles(steps, prompt, step_s, noise[places]))
        errors = np.clip((errors - measured) / _ERROR, -3.0, 3.0)
        return np.append(errors, deviations)

    start = np.zeros(3 + len(devices))
    mode = optimize.least_squares(residuals, start, diff_step=1e-3).x
    prompt, step_s, shared = map(float, np.exp(_TAIL_MEDIANS + mode[:3]))
    effects = np.exp(_DEVICE_SPREAD * mode[3:]).tolist()
    noise = {name: shared * x for name, x in zip(devices, effects, strict=True)}
    return TokenTail(prompt, step_s, noise | {"": shared})


def predict_token_tails(
    servers: Sequence[MeasuredServer], load: LoopPrediction, tail: TokenTail
) -> Float[np.ndarray, "servers 3"]:
    """Returns the percentiles `TAIL_LEVELS` of the time between tokens in s.

    Args:
      servers: servers with `is_median_step`; their measured times are not used.
      load: predicted times per token, and requests that run.
      tail: the coefficients.
    """
    noise = [tail.noise.get(x.device.name, tail.noise[""]) for x in servers]
    steps = _describe_steps(servers, load)
    return _find_percentiles(steps, tail.prompt, tail.prompt_step_s, np.array(noise))


class _Steps(NamedTuple):
    decode_s: Float[np.ndarray, " servers"]
    prompt_s: Float[np.ndarray, " servers"]
    prompts: Float[np.ndarray, " servers"]
    """Mean prompts that begin in a step."""


def _describe_steps(servers: Sequence[MeasuredServer], load: LoopPrediction) -> _Steps:
    answers = np.array([x.answer_tokens for x in servers])
    decode_s = load.median_s[:, 0]
    others = np.maximum(load.num_running - 1, 1.0)
    prompt_s = (load.mean_token_s - decode_s) * answers / others
    return _Steps(decode_s, prompt_s, load.num_running / answers)


def _find_percentiles(
    steps: _Steps,
    prompt: float,
    prompt_step_s: float,
    noise: Float[np.ndarray, " servers"],
) -> Float[np.ndarray, "servers 3"]:
    """Returns percentiles of the mixture over numbers of prompts, by bisection."""
    k = _PROMPT_COUNTS
    mean = steps.prompts[:, None]
    weight = np.exp(k * np.log(mean) - mean - special.gammaln(k + 1))
    weight /= weight.sum(axis=1, keepdims=True)
    seconds = steps.decode_s[:, None] + (k > 0) * prompt_step_s
    log_s = np.log(seconds + prompt * k * steps.prompt_s[:, None])
    levels = np.array(TAIL_LEVELS)
    low = np.repeat(log_s[:, :1] - 1.0, len(levels), axis=1)
    high = np.repeat(log_s[:, -1:] + 6 * noise[:, None], len(levels), axis=1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        z = (middle[:, :, None] - log_s[:, None]) / noise[:, None, None]
        share = np.sum(weight[:, None] * special.ndtr(z), axis=2)
        low = np.where(share < levels, middle, low)
        high = np.where(share < levels, high, middle)
    return np.exp((low + high) / 2)
