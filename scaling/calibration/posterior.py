"""A posterior over the coefficients of servers, from latencies that clients measured.

Data are the logarithms of the mean end-to-end time and of the median first-token time
of each stage that is not overloaded. Each is the prediction of a simulation, plus a
discrepancy of the model that all of its stages share, plus noise. The discrepancy is
integrated out; without it, intervals for other models are too narrow.

A simulation is not smooth and takes a tenth of a second. So the fit works on a smooth
surrogate: the steady state of the stage (`steady_state`), times a correction of each
stage that simulations at draws of the posterior determine. Draws come from the normal
approximation at the mode and are resampled by their weights under the surrogate's
posterior; predictions are simulations at these draws.

Sources: Kennedy and O'Hagan 2001, doi:10.1111/1467-9868.00294 (discrepancy);
Rubin 1988, "Using the SIR algorithm to simulate posterior distributions".
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import validation
from scaling import shapes
from scaling.calibration.load_sizes import (
    LoadSizes,
    SizeRange,
    find_size_range,
    outside_variance,
)
from scaling.calibration.measurements import LatencySummary, MeasuredStage
from scaling.calibration.request_noise import (
    RequestNoise,
    find_request_noise,
    tail_factor,
)
from scaling.calibration.server_cost import (
    PRIOR,
    ServerCoefficients,
    ServerCost,
    draw_coefficients,
)
from scaling.calibration.server_stages import (
    StageLatencies,
    make_stage_setup,
    simulate_stage,
)
from scaling.calibration.steady_state import SteadyLoad, find_steady_state
from scaling.costs import find_device

DISCREPANCY = np.array([0.05, 0.08])
"""Standard deviation of a model's discrepancy: of the logarithms of the end-to-end and
the first-token time. Assumed, not fitted: three models do not determine it."""
STAGE_NOISE = np.array([0.015, 0.04])
"""Standard deviation of a stage's noise: load, start-up, and the seed of a window."""

FIT_ROUNDS = 3
"""Times that a fit simulates each stage."""
_DRAWS_PER_ROUND = 8
_NUM_PROPOSALS = 20_000
_MAX_GAUSS_NEWTON = 40
_LONGEST_STEP = 2.0


class ServerPosterior(NamedTuple):
    """Draws of the posterior."""

    deviations: Float[np.ndarray, "draws coefficients"]
    """Coefficients in units of the prior, see `draw_coefficients`."""
    residuals: dict[str, Float[np.ndarray, "draws 2"]]
    """Mean residual of the stages of each model that was fitted, for each draw."""
    num_stages: dict[str, int]
    """Stages of each model."""
    stages: tuple[str, ...]
    """Names of the fitted stages."""
    mode: Float[np.ndarray, " coefficients"]
    corrections: Float[np.ndarray, "stages 2"]
    """Logarithms of simulation over surrogate, by fitted stage."""
    num_effective: float
    """Effective number of the proposals: below a few hundred, the draws repeat."""
    devices: tuple[str, ...]
    """Names of the devices of the fitted stages."""
    fitted_sizes: SizeRange | None = None
    """Smallest and largest sizes of the fitted stages; None if they are unknown."""
    noise: RequestNoise | None = None
    """Noise of requests, which percentiles include; None if it was not fitted."""
    discrepancy: Float[np.ndarray, " 2"] | None = None
    """Discrepancy of a model that was not fitted; None means `DISCREPANCY`."""


@validation.checks_numbers(num_draws=2, seed=validation.SEEDS)
def fit_posterior(
    stages: Sequence[MeasuredStage],
    *,
    num_draws: int = 32,
    seed: int = 0,
    on_simulated: Callable[[], None] = lambda: None,
) -> ServerPosterior:
    """Fits the coefficients to measured stages; overloaded ones are left out.

    Args:
      stages: the stages, with latencies.
      num_draws: draws of the posterior, at least 2.
      seed: random seed.
      on_simulated: called `FIT_ROUNDS` times for each kept stage, after its simulation.

    Raises:
      ValueError: no stage is left, a stage has no latencies, or a number is out of
        range.
    """
    num_draws = validation.integer("num_draws", num_draws, low=2)
    steady_stages = [stage for stage in stages if not stage.is_overloaded]
    if not steady_stages:
        raise ValueError("stages must have at least one that is not overloaded")
    data = np.log([_targets(stage) for stage in steady_stages])
    whole_s = np.exp(data[:, 0]).tolist()
    sizes = list(map(LoadSizes.of_stage, steady_stages, whole_s))
    models = [shapes.describe_checkpoint(stage.model).name for stage in steady_stages]
    surrogate = jax.jit(make_surrogate(steady_stages))
    jacobian = jax.jit(jax.jacfwd(surrogate))
    batched = jax.jit(jax.vmap(surrogate))
    whitener = _make_whitener(models)
    rng = np.random.default_rng(seed)
    mode = np.zeros(len(PRIOR))
    corrections = np.zeros_like(data)
    tails = np.zeros_like(data)
    for _ in range(FIT_ROUNDS):
        mode, factor = _find_mode(
            surrogate, jacobian, data - corrections, whitener, mode
        )
        near = mode + rng.normal(size=(_DRAWS_PER_ROUND, mode.size)) @ factor.T
        near[0] = mode
        simulated = np.empty((_DRAWS_PER_ROUND, *data.shape))
        for i, stage in enumerate(steady_stages):
            simulated[:, i], tails[i] = _simulate_targets(stage, near)
            on_simulated()
        errors = np.log(simulated) - np.asarray(batched(jnp.float32(near)))
        corrections = np.median(errors, axis=0)
    mode, factor = _find_mode(surrogate, jacobian, data - corrections, whitener, mode)
    normal = rng.normal(size=(_NUM_PROPOSALS, mode.size))
    proposals = mode + normal @ factor.T
    residuals = data - corrections - np.asarray(batched(jnp.float32(proposals)))
    misfits = _whiten(whitener, residuals)
    log_weight = -0.5 * (
        np.sum(misfits**2, axis=1)
        + np.sum(proposals**2, axis=1)
        - np.sum(normal**2, axis=1)
    )
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    chosen = rng.choice(len(weight), num_draws, p=weight)
    by_model = {
        name: residuals[chosen][:, [model == name for model in models]].mean(axis=1)
        for name in dict.fromkeys(models)
    }
    return ServerPosterior(
        deviations=proposals[chosen],
        residuals=by_model,
        num_stages={name: models.count(name) for name in by_model},
        stages=tuple(stage.name for stage in steady_stages),
        mode=mode,
        corrections=corrections,
        num_effective=float(1 / np.sum(weight**2)),
        devices=tuple(
            {find_device(stage.device).name: None for stage in steady_stages}
        ),
        fitted_sizes=find_size_range(sizes),
        noise=find_request_noise(
            np.array(list(map(_measured_tails, steady_stages))), tails
        ),
    )


@validation.checks_numbers(seed=validation.SEEDS)
def predict_stage(
    stage: MeasuredStage, posterior: ServerPosterior, *, seed: int = 0
) -> StageLatencies:
    """Predicts a stage with each draw of the posterior, by simulation.

    The spread over draws includes the discrepancy of the model, which is smaller for a
    model that was fitted, the noise of a stage, and the distance of its load from the
    fitted ones, which `find_outside_sizes` names. The measured latencies of the stage
    are not read.
    """
    latencies = simulate_stage(stage, draw_coefficients(posterior.deviations))
    name = shapes.describe_checkpoint(stage.model).name
    sizes = LoadSizes.of_stage(stage, float(np.median(latencies.end_to_end_s.mean)))
    (factor,) = find_latency_factors(posterior, name, sizes).draw(seed=seed)
    scales = draw_noise_scales(posterior, seed=seed)
    summaries = []
    for summary, kind in zip(latencies, (0, 1, 0), strict=True):
        tail = tail_factor(summary.p99, summary.median, 0.99, scales[:, kind])
        summary = summary._replace(p99=summary.p99 * tail)
        summaries.append(LatencySummary(*(x * factor[:, kind] for x in summary)))
    return StageLatencies(*summaries)


@validation.checks_numbers(seed=validation.SEEDS)
def draw_noise_scales(
    posterior: ServerPosterior, *, seed: int = 0
) -> Float[np.ndarray, "draws 2"]:
    """Draws scales of the noise of requests, one for each draw; 0 without a noise."""
    num = len(posterior.deviations)
    if posterior.noise is None:
        return np.zeros((num, 2))
    scale, doubt = posterior.noise
    spread = LatencyFactors(np.tile(np.log(scale), (num, 1)), doubt)
    return spread.draw(seed=seed + 1)[0]


class LatencyFactors(NamedTuple):
    """Log-normal factors of the latencies of a model, for each draw of a posterior.

    Column 0 is for the end-to-end and the inter-token time, column 1 for the
    first-token time.
    """

    mean: Float[np.ndarray, "draws 2"]
    """Mean of the logarithm."""
    spread: Float[np.ndarray, " 2"]
    """Standard deviation of the logarithm."""

    def draw(self, num: int = 1, *, seed: int = 0) -> Float[np.ndarray, "num draws 2"]:
        """Draws `num` factors for each draw of the posterior.

        They are quantiles in random order: independent draws would shift the median of
        64 by 2 %.
        """
        size = num * len(self.mean)
        levels = (np.arange(size) + 0.5) / size
        quantiles = np.array([NormalDist().inv_cdf(x) for x in levels])
        rng = np.random.default_rng(seed)
        normal = np.stack([rng.permutation(quantiles) for _ in range(2)], axis=1)
        normal = normal.reshape(num, *self.mean.shape)
        return np.exp(self.mean + self.spread * normal)


def find_latency_factors(
    posterior: ServerPosterior, model: str, sizes: LoadSizes | None = None
) -> LatencyFactors:
    """Returns the factors by which simulated latencies of a model are uncertain.

    They include the discrepancy of the model, given the residuals of its stages if it
    was fitted, the noise of a stage, and `EXTRAPOLATION` for sizes outside those of the
    fitted stages.

    Args:
      posterior: the posterior.
      model: name of the model's shape.
      sizes: sizes of the load; None means that they are among the fitted ones.
    """
    mean = np.zeros((len(posterior.deviations), 2))
    assumed = posterior.discrepancy
    variance = (DISCREPANCY if assumed is None else assumed) ** 2
    if model in posterior.residuals:
        # The discrepancy given the residuals of the model's stages.
        share = variance / (variance + STAGE_NOISE**2 / posterior.num_stages[model])
        mean = share * posterior.residuals[model]
        variance = variance * (1 - share)
    if sizes is not None:
        variance = variance + outside_variance(posterior.fitted_sizes, sizes)
    return LatencyFactors(mean, np.sqrt(variance + STAGE_NOISE**2))


def take_draws(posterior: ServerPosterior, num: int) -> ServerPosterior:
    """Returns a posterior with the first `num` draws, which are independent.

    Raises:
      ValueError: there are fewer draws.
    """
    num_available = len(posterior.deviations)
    num = validation.integer(
        "num", num, low=1, below=num_available + 1, hint=f"in [1, {num_available}]"
    )
    return posterior._replace(
        deviations=posterior.deviations[:num],
        residuals={name: x[:num] for name, x in posterior.residuals.items()},
    )


def leave_out(
    stages: Sequence[MeasuredStage], by: Literal["model", "load"]
) -> Iterator[tuple[list[MeasuredStage], list[MeasuredStage]]]:
    """Yields stages to fit, and stages to predict; overloaded ones are in neither.

    Args:
      stages: the stages.
      by: "model" leaves out all stages of one model at a time, "load" one stage.
    """
    validation.choice("by", by, ("model", "load"))
    steady_stages = [stage for stage in stages if not stage.is_overloaded]
    names = [
        shapes.describe_checkpoint(stage.model).name if by == "model" else stage.name
        for stage in steady_stages
    ]
    for name in dict.fromkeys(names):
        is_out = [x == name for x in names]
        pairs = list(zip(steady_stages, is_out, strict=True))
        yield [x for x, out in pairs if not out], [x for x, out in pairs if out]


def make_surrogate(
    stages: Sequence[MeasuredStage],
) -> Callable[[Float[Array, " coefficients"]], Float[Array, "stages 2"]]:
    """Returns the function from deviations to the logarithms of both times by stage."""
    zero = ServerCoefficients(*(0.0 for _ in PRIOR))
    costs = [make_stage_setup(stage).cost(zero) for stage in stages]
    loads = [SteadyLoad.of(stage) for stage in stages]
    numbers = jax.tree.map(lambda *x: jnp.stack(x), *zip(loads, costs, strict=True))
    median, spread = (jnp.float32(x) for x in zip(*PRIOR.values(), strict=True))

    def surrogate(
        deviations: Float[Array, " coefficients"],
    ) -> Float[Array, "stages 2"]:
        coefficients = ServerCoefficients(*(median * jnp.exp(spread * deviations)))

        def one(load: SteadyLoad, cost: ServerCost) -> Float[Array, " 2"]:
            state = find_steady_state(load, cost._replace(coefficients=coefficients))
            return jnp.log(jnp.stack([state.end_to_end_s, state.first_token_s]))

        return jax.vmap(one)(*numbers)

    return surrogate


def _targets(stage: MeasuredStage) -> tuple[float, float]:
    if stage.end_to_end_s is None or stage.first_token_s is None:
        raise ValueError(f"{stage.name} has no latencies to fit")
    return stage.end_to_end_s.mean, stage.first_token_s.median


def _simulate_targets(
    stage: MeasuredStage, deviations: Float[np.ndarray, "draws coefficients"]
) -> tuple[Float[np.ndarray, "draws 2"], Float[np.ndarray, " 2"]]:
    """Returns the fitted times by simulation, and the tails at the first draw."""
    latencies = simulate_stage(stage, draw_coefficients(deviations))
    end_to_end = latencies.end_to_end_s
    first = latencies.first_token_s
    targets = np.stack([end_to_end.mean, first.median], axis=1)
    return targets, np.array([_tail(x)[0] for x in (end_to_end, first)])


def _measured_tails(stage: MeasuredStage) -> list[float]:
    assert stage.end_to_end_s is not None
    assert stage.first_token_s is not None
    return [float(_tail(x)) for x in (stage.end_to_end_s, stage.first_token_s)]


def _tail(summary: LatencySummary) -> Float[np.ndarray, "*draws"]:
    """Returns the logarithm of P99 over the median."""
    return np.asarray(np.log(np.asarray(summary.p99) / summary.median))


def _make_whitener(models: Sequence[str]) -> Float[np.ndarray, "2 stages stages"]:
    """Returns, for both times, W with W^T W the inverse covariance of the residuals."""
    same = np.equal.outer(models, models).astype(float)
    covariances = [
        tau**2 * same + sigma**2 * np.eye(len(models))
        for tau, sigma in zip(DISCREPANCY, STAGE_NOISE, strict=True)
    ]
    return np.stack([np.linalg.inv(np.linalg.cholesky(x)) for x in covariances])


def _whiten(
    whitener: Float[np.ndarray, "2 stages stages"],
    residuals: Float[np.ndarray, "*draws stages 2"],
) -> Float[np.ndarray, "*draws residuals"]:
    """Returns independent residuals of variance 1, of all stages and both times."""
    white_residuals = np.einsum("kij,...jk->...ik", whitener, residuals)
    return white_residuals.reshape(*residuals.shape[:-2], -1)


def _find_mode(
    surrogate: Callable[[Array], Array],
    jacobian: Callable[[Array], Array],
    data: Float[np.ndarray, "stages 2"],
    whitener: Float[np.ndarray, "2 stages stages"],
    start: Float[np.ndarray, " coefficients"],
) -> tuple[
    Float[np.ndarray, " coefficients"], Float[np.ndarray, "coefficients coefficients"]
]:
    """Finds the mode by Gauss-Newton steps, each halved until it improves the fit.

    Returns:
      The mode, and a factor of the covariance of the normal approximation there.
    """

    def errors(at: np.ndarray) -> np.ndarray:
        residuals = data - np.asarray(surrogate(jnp.float32(at)), np.float64)
        return np.concatenate([_whiten(whitener, residuals), -at])

    def slopes(at: np.ndarray) -> np.ndarray:
        derivatives = np.asarray(jacobian(jnp.float32(at)), np.float64)
        rows = _whiten(whitener, np.moveaxis(derivatives, -1, 0)).T
        return np.concatenate([rows, np.eye(at.size)])

    at = start
    error = errors(start)
    for _ in range(_MAX_GAUSS_NEWTON):
        step, *_ = np.linalg.lstsq(slopes(at), error, rcond=None)
        step *= min(1.0, _LONGEST_STEP / np.linalg.norm(step))
        trials = [at + step * 0.5**k for k in range(12)]
        better = (x for x in trials if np.sum(errors(x) ** 2) < np.sum(error**2))
        if (trial := next(better, None)) is None:
            break
        at = trial
        before = error
        error = errors(trial)
        if np.sum(before**2) - np.sum(error**2) < 1e-6:
            break
    matrix = slopes(at)
    return at, np.linalg.cholesky(np.linalg.inv(matrix.T @ matrix))
