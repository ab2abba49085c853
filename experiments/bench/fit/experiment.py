"""How fast is a bootstrap of the Chinchilla law, and does each resample end lower?

Everyone fits the same resamples of the same runs, each from the optimum of all runs,
piece by piece in turns, so that a disturbance hits everyone. A resample's excess is how
far its objective, computed anew, is above the lowest that anybody found for it.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from experiments.bench.fit import peers
from experiments.bench.fit.peers import Runs
from experiments.framework import Part, Sheet, Study, units
from experiments.plotting import style
from experiments.training.fit_coverage import surfaces
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.fits import fit as fits_fit
from scaling.fits import levenberg_marquardt, observe
from scaling.laws import evaluation, published

OURS, FIRST = "jaxkv", "jaxkv, first call"
ROW = ("method", "seconds", "worst_excess")
_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is fitted, and how often."""

    num_points: int = 240
    """Runs on the simulated surface, at least 16."""
    num_resamples: int = 4000
    """Resamples that everyone fits."""
    num_pieces: int = 4
    """Turns that everyone has, each on its share of the resamples."""
    slow: bool = True
    """Whether to time autograd, if it is installed, and finite differences, too."""
    seed: int = 42
    """Of the resamples."""

    def __post_init__(self) -> None:
        """Refuses what cannot be measured."""
        validation.at_least(self, "num_points", low=16)
        if not 1 <= self.num_pieces <= self.num_resamples:
            raise ValueError(
                f"{self.num_pieces=} must be in [1, {self.num_resamples=}]"
            )


CONFIGS = {
    "real": Config(),
    "quick": Config(num_resamples=1000, num_pieces=1),
    "smoke": Config(num_points=32, num_resamples=20, num_pieces=2),
}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Times everyone, piece by piece; ended early, it has whole pieces."""
    data, law = surfaces.runs(config.num_points), published.CHINCHILLA
    full = fits_fit.fit(law, data)
    problem = levenberg_marquardt.Problem(law, observe(law, data))
    runs = Runs(*(np.log(data[x]) for x in ("num_params", "num_tokens", "loss")))
    start = _logged(np.array([[*full.coefficients.values()]]))[0]
    shape = (config.num_resamples, config.num_points)
    drawn = np.random.default_rng(config.seed).integers(0, config.num_points, shape)

    def ours(rows: np.ndarray) -> np.ndarray:
        counts = [np.bincount(row, minlength=config.num_points) for row in rows]
        starts = np.tile(full.coordinates, (len(rows), 1))
        ends = levenberg_marquardt.solve(problem, np.array(counts, float), starts)
        centre = problem.seen.centre
        return _logged(evaluation.coefficients(law, ends.coordinates, centre))

    rivals = [*peers.everyone()][: None if config.slow else 1]

    def loop(fit: Callable) -> Callable[[np.ndarray], np.ndarray]:
        return lambda rows: np.array([fit(start, runs.drawn(row)) for row in rows])

    everyone = {OURS: ours} | {name: loop(fit) for name, fit in rivals}
    levenberg_marquardt.multistart.compiled.cache_clear()
    with _compiling_anew():
        first_s, _ = _time(ours, drawn)
    found = {name: list[np.ndarray]() for name in everyone}
    seconds = dict.fromkeys(everyone, 0.0)
    pieces = np.array_split(drawn, config.num_pieces)
    for piece in progress.track(pieces, "resamples", "pieces"):
        for name, method in everyone.items():
            progress.show(name)
            repeats = _REPEATS if name == OURS else 1
            times = [_time(method, piece) for _ in range(repeats)]
            seconds[name] += statistics.median(taken for taken, _ in times)
            found[name].append(times[0][1])
    return _rows(runs, drawn, found, seconds, first_s)


def _rows(
    runs: Runs,
    drawn: np.ndarray,
    found: dict[str, list[np.ndarray]],
    seconds: dict[str, float],
    first_s: float,
) -> list[dict[str, Any]]:
    if not found[OURS]:
        return []
    ends = {name: np.concatenate(parts) for name, parts in found.items()}
    done = drawn[: len(ends[OURS])]
    samples = [runs.drawn(row) for row in done]
    objectives = {
        name: np.array([*map(peers.objective, xs, samples)])
        for name, xs in ends.items()
    }
    lowest = np.min([*objectives.values()], axis=0)
    ours_s = seconds[OURS]

    def row(method: str, name: str, taken: float, num: int) -> dict[str, Any]:
        excess = objectives[name] - lowest
        return {
            "method": method,
            "seconds": taken,
            "worst_excess": float(excess.max()),
            "ratio": taken / num / (ours_s / len(done)),
            "resamples": num,
            "points": len(runs.loss),
            "above_1e-9": int(np.sum(excess > 1e-9)),
        }

    rows = [row(name, name, seconds[name], len(done)) for name in found]
    return [rows[0], row(FIRST, OURS, first_s, len(drawn)), *rows[1:]]


def plot(ax: Any, result: list[dict[str, Any]]) -> None:
    """Draws the seconds of everyone."""
    colors = style.colors()
    names = [row["method"] for row in result]
    taken = [row["seconds"] for row in result]
    looks = [colors[5] if name in (OURS, FIRST) else "0.7" for name in names]
    bars = ax.barh(range(len(names)), taken, 0.7, color=looks)
    labels = [f"{units.seconds(x['seconds'])}, {x['ratio']:.3g}x" for x in result]
    ax.bar_label(bars, labels, fontsize=6, padding=2)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="seconds for all resamples")
    if taken:
        ax.set_xlim(min(taken) / 2, max(taken) * 20)


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives the rows, and apart from them what was fitted and how it compares."""
    details = [{k: v for k, v in row.items() if k not in ROW[1:]} for row in result]
    return {"rows": [{k: row[k] for k in ROW} for row in result], "details": details}


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells times and excesses, side by side."""
    if not result:
        return []
    heads = ["method", "time", "over ours", "worst excess", "above 1e-9"]
    lines = [
        (
            row["method"],
            units.seconds(row["seconds"]),
            f"{row['ratio']:.1f}x",
            f"{row['worst_excess']:.1e}",
            f"{row['above_1e-9']:,}",
        )
        for row in result
    ]
    title = f"{result[0]['resamples']:,} resamples of {result[0]['points']} runs"
    note = (
        "excess: objective above the lowest that anybody found for a resample; the "
        "first call compiles."
    )
    return [Sheet(title, heads, lines, note)]


@contextlib.contextmanager
def _compiling_anew() -> Generator[None]:
    """Keeps programs of earlier runs out of reach: a first call compiles."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def _logged(coefficients: np.ndarray) -> np.ndarray:
    """Turns `A, B, E` into their logarithms."""
    return np.concatenate([np.log(coefficients[:, :3]), coefficients[:, 3:]], 1)


def _time(
    method: Callable[[np.ndarray], np.ndarray], rows: np.ndarray
) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    found = method(rows)
    return time.perf_counter() - start, found


STUDIES = (
    Study(
        configs=CONFIGS,
        result=list,
        run=run,
        plot=plot,
        metrics=metrics,
        summary=summary,
    ),
)
