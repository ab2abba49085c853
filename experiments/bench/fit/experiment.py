"""How fast is a bootstrap of the Chinchilla law, and how low are its minima?

All methods fit the same resamples of the same runs, each from the optimum of all runs,
piece by piece in rotation, so that a disturbance affects all methods. The excess of a
resample is its objective, recomputed, above the lowest objective that any method found
for it. The peers are loops over resamples that call SciPy's BFGS, as published
replications do; they differ in the source of the gradient.
"""

import functools
import importlib
import importlib.util
import inspect
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Float, Int
from scipy import optimize

from experiments import lab
from experiments.bench.tables import draw_bars, split_details
from experiments.harness import time_call
from jaxkv.serving import without_program_cache
from scaling import fits, laws
from scaling.fits import (
    FitProblem,
    compiled_minimize,
    make_observations,
    solve_weightings,
)
from scaling.laws import CHINCHILLA, simulate_isoflop_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JAXKV = "jaxkv"
FIRST_CALL = "jaxkv, first call"
DETAILS = ("ratio", "resamples", "points", "above_1e-9")
_REPEATS = 3
DELTA = 1e-3
"""Residual at which the Huber loss changes from quadratic to linear."""


class Config(lab.ConfigRecord):
    """Data and number of fits."""

    num_points: Annotated[int, lab.Range(16)] = 240
    """Runs on the simulated surface, at least 16."""
    num_resamples: int = 4000
    """Resamples that every method fits."""
    num_pieces: int = 4
    """Turns of every method, each with a share of the resamples."""
    slow: bool = True
    """Also time autograd, if it is installed, and finite differences."""
    seed: int = 42
    """Seed of the resamples."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not 1 <= self.num_pieces <= self.num_resamples:
            raise ValueError(
                f"num_pieces={self.num_pieces!r} must be in [1, "
                f"num_resamples={self.num_resamples!r}]"
            )


class FitTimes(lab.ResultTable):
    """Rows of the result, values in this order."""

    method: lab.Texts = lab.column("name of the method")
    seconds: lab.Floats = lab.column(
        "time of all resamples", heading="time", form=lab.format_seconds
    )
    worst_excess: lab.Floats = lab.column("largest excess of a resample", form="{:.1e}")
    ratio: lab.Floats = lab.column(
        "time / jaxkv's", heading="over jaxkv", form="{:.1f}x"
    )
    resamples: lab.Ints = lab.column("number of resamples")
    points: lab.Ints = lab.column("runs per resample")
    above: lab.Ints = lab.column(
        "excesses above 1e-9", heading="above 1e-9", form="{:,}"
    )


REPORTED = ("method", "seconds", "ratio", "worst_excess", "above")

CONFIGS = {
    "real": Config(),
    "quick": Config(num_resamples=1000, num_pieces=1),
    "smoke": Config(num_points=32, num_resamples=20, num_pieces=2),
}


FitTime = TypedDict(
    "FitTime",
    {
        "method": str,
        "seconds": float,
        "worst_excess": float,
        "ratio": float,
        "resamples": int,
        "points": int,
        "above_1e-9": int,
    },
)
"""Time of a method; its values are in the order of `FitTimes`."""


class LossRuns(NamedTuple):
    """Logarithms of parameters, tokens and losses."""

    params: Float[np.ndarray, " n"]
    tokens: Float[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]

    def resample(self, rows: Int[np.ndarray, " drawn"]) -> "LossRuns":
        """Returns the rows of a resample."""
        return LossRuns(*(column[rows] for column in self))


def objective(x: np.ndarray, runs: LossRuns, library: Any = np) -> Any:
    """Returns the Huber loss of the log residuals for `ln A, ln B, ln E, alpha, beta`.

    Args:
      x: coefficients.
      runs: runs to fit.
      library: NumPy, or a compatible library.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, equation 3.
    """
    a, b, e, alpha, beta = (x[i] for i in range(5))
    terms = (a - alpha * runs.params, b - beta * runs.tokens, e + 0 * runs.params)
    top = library.maximum(library.maximum(terms[0], terms[1]), terms[2])
    total = sum(library.exp(term - top) for term in terms)
    size = library.abs(top + library.log(total) - runs.loss)
    losses = library.where(
        size <= DELTA, 0.5 * size * size, DELTA * (size - 0.5 * DELTA)
    )
    return library.sum(losses)


def value_and_gradient(x: np.ndarray, runs: LossRuns) -> tuple[float, np.ndarray]:
    """Returns the objective and its analytic gradient."""
    a, b, e, alpha, beta = x
    terms = np.stack(
        [a - alpha * runs.params, b - beta * runs.tokens, np.full(len(runs.loss), e)]
    )
    top = terms.max(0)
    sizes = np.exp(terms - top)
    total = sizes.sum(0)
    error = top + np.log(total) - runs.loss
    clipped = np.clip(error, -DELTA, DELTA)
    pull = sizes / total * clipped
    slopes = [-(pull[0] @ runs.params), -(pull[1] @ runs.tokens)]
    gradient = np.array([*pull.sum(1), *slopes])
    return float(np.sum(clipped * (error - 0.5 * clipped))), gradient


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[FitTime]:
    """Times all methods on the same pieces; a stopped run has complete pieces."""
    data = simulate_isoflop_runs(config.num_points)
    law = CHINCHILLA
    full = fits.fit(law, data)
    problem = FitProblem(law, make_observations(law, data))
    runs = LossRuns(*(np.log(data[x]) for x in ("num_params", "num_tokens", "loss")))
    start = _logged(np.array([[*full.coefficients.values()]]))[0]
    shape = (config.num_resamples, config.num_points)
    draws = np.random.default_rng(config.seed).integers(0, config.num_points, shape)

    def fit_with_jaxkv(rows: np.ndarray) -> np.ndarray:
        counts = [np.bincount(row, minlength=config.num_points) for row in rows]
        starts = np.tile(full.coordinates, (len(rows), 1))
        ends = solve_weightings(problem, np.array(counts, float), starts)
        centre = problem.runs.centre
        return _logged(laws.coefficients(law, ends.coordinates, centre))

    def bfgs(
        call: Callable[..., object], jac: Callable[..., np.ndarray] | bool | None
    ) -> Callable[[np.ndarray], np.ndarray]:
        def end(row: np.ndarray) -> np.ndarray:
            args = (runs.resample(row),)
            return optimize.minimize(call, start, args=args, method="BFGS", jac=jac).x

        return lambda rows: np.array([*map(end, rows)])

    methods = {JAXKV: fit_with_jaxkv}
    methods["NumPy gradient + SciPy BFGS"] = bfgs(value_and_gradient, True)
    if config.slow and importlib.util.find_spec("autograd") is not None:
        autograd: Any = importlib.import_module("autograd")
        library: Any = importlib.import_module("autograd.numpy")
        gradient = autograd.grad(lambda x, runs: objective(x, runs, library))
        methods["autograd + SciPy BFGS"] = bfgs(objective, gradient)
    if config.slow:  # SciPy's default
        methods["finite differences + SciPy BFGS"] = bfgs(objective, None)
    cached: Any = inspect.unwrap(
        compiled_minimize, stop=lambda x: hasattr(x, "cache_clear")
    )
    cached.cache_clear()
    with without_program_cache():
        first_s, _ = time_call(fit_with_jaxkv, draws)
    ends = {name: np.zeros((0, len(start))) for name in methods}
    seconds = dict.fromkeys(methods, 0.0)
    pieces = np.array_split(draws, config.num_pieces)
    for piece in progress.track(pieces, "resamples", "pieces"):
        for name, method in methods.items():
            progress.show(name)
            repeats = _REPEATS if name == JAXKV else 1
            times = [time_call(method, piece) for _ in range(repeats)]
            seconds[name] += statistics.median(taken for taken, _ in times)
            ends[name] = np.concatenate([ends[name], times[0][1]])
    return _rows(runs, draws, ends, seconds, first_s) if len(ends[JAXKV]) else []


def _rows(
    runs: LossRuns,
    draws: np.ndarray,
    ends: dict[str, np.ndarray],
    seconds: dict[str, float],
    first_s: float,
) -> list[FitTime]:
    num = len(ends[JAXKV])
    samples = [runs.resample(row) for row in draws[:num]]
    objectives = {
        name: np.array([*map(objective, xs, samples)]) for name, xs in ends.items()
    }
    lowest = np.min([*objectives.values()], axis=0)
    done = {name: (name, seconds[name], num) for name in ends}
    done = {JAXKV: done.pop(JAXKV), FIRST_CALL: (JAXKV, first_s, len(draws))} | done
    rows = []
    for method, (name, taken_s, resamples) in done.items():
        excess = objectives[name] - lowest
        row: FitTime = {
            "method": method,
            "seconds": taken_s,
            "worst_excess": float(excess.max()),
            "ratio": taken_s / resamples / (seconds[JAXKV] / num),
            "resamples": resamples,
            "points": len(runs.loss),
            "above_1e-9": int(np.sum(excess > 1e-9)),
        }
        rows.append(row)
    return rows


def plot(ax: "Axes", result: list[FitTime]) -> None:
    """Draws the time of every method."""
    taken = [row["seconds"] for row in result]
    labels = [
        f"{lab.format_seconds(x['seconds'])}, {x['ratio']:,.3g} times" for x in result
    ]
    labels[:1] = [lab.format_seconds(x["seconds"]) for x in result[:1]]
    draw_bars(ax, [row["method"] for row in result], taken, labels)
    title = "Time of all resamples"
    peers = [x["ratio"] for x in result[2:]]
    if peers:
        title = f"{result[0]['resamples']:,} fits: SciPy takes {min(peers):,.0f} to "
        title += f"{max(peers):,.0f} times as long as jaxkv"
    lab.set_labels(ax, title, "time for all resamples [s]", "")


def summary(result: list[FitTime]) -> list[lab.ReportPart]:
    """Tabulates times and excesses."""
    if not result:
        return []
    title = f"{result[0]['resamples']:,} resamples of {result[0]['points']} runs"
    note = (
        "Excess: objective above the lowest one that any method found for a resample. "
        "The first call includes compilation."
    )
    return [
        FitTimes.of([*row.values()] for row in result).sheet(
            title, *REPORTED, note=note
        )
    ]


def _logged(coefficients: np.ndarray) -> np.ndarray:
    """Replaces `A, B, E` by their logarithms."""
    return np.concatenate([np.log(coefficients[:, :3]), coefficients[:, 3:]], 1)


STUDY = lab.Study(
    CONFIGS,
    list,
    run,
    plot,
    summary=summary,
    metrics=functools.partial(split_details, names=("method",), details=DETAILS),
    panels=lab.Panels(1, 1, 2.8),
)
