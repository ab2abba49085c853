"""Chooses the held-out run and its learning rates, and predicts its loss."""

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from scaling import fits, sweeps
from scaling.fits import from_json, student_t
from scaling.frontiers import bootstrap_frontier, by_parabola, find_run_groups
from scaling.laws import find_law
from scaling.logs import Log
from scaling.sweeps import count_cost, nearest_shape

LAW_NAMES = ("chinchilla", "chinchilla-tied", "kaplan")
"""Laws whose predictions are averaged, weighted by their errors on the larger fitted
runs. The best of them is the law of the report."""
CUTS = (1, 2)
"""Numbers of largest budgets that are held out to choose the law."""
CONVENTIONS = (
    "N: all parameters. D: tokens trained on. C: exact FLOPs, attention counted "
    "causally. Loss: nats per token of held-out windows, the same for every model, at "
    "the best learning rate of each size and length; every run decays its rate to "
    "zero. Size of the held-out run: N* by parabolas through all sizes of a budget, "
    "extrapolated. Its rates, of which the best counts as everywhere: a power of width "
    "and tokens, through the cells' optima, and its neighbours. Its loss: three laws' "
    "fits by Huber's loss on ln L, delta 1e-3, averaged in ln L with weights "
    "1 / error^2, the mean error of their fits without the largest budget, and without "
    "the largest two, on the runs left out. The interval is of a run, from resamples "
    "of the best law with residuals; the spread of seeds, that of the laws about their "
    "average, and the best law's error are added in squares. "
    "Log-linear baseline: a power of C through the parabolas' minima."
)


def choose_law(log: Log, budgets: tuple[float, ...]) -> dict[str, float]:
    """Scores the laws on the largest of the fitted runs.

    Args:
      log: log of a finished sweep.
      budgets: budgets of the sweep.

    Returns:
      The mean of |ln(predicted / observed)| by law, best first; infinite if too few
      runs remain to fit.
    """
    flops = log.columns["flops"]
    rising = sorted(budgets)
    error_by_law = {}
    for name in LAW_NAMES:
        errors = []
        for cut in CUTS:
            larger = flops > math.sqrt(rising[-cut] * rising[-cut - 1])
            with contextlib.suppress(ValueError):  # too few runs remain
                law = find_law(name)
                fit = fits.fit(law, log.take(~larger).columns)
                held_out = fits.score(fit, log.take(larger).columns).held_out
                errors.append(held_out.mean_error if held_out else math.nan)
        error_by_law[name] = float(np.mean(errors)) if errors else math.inf
    return dict(sorted(error_by_law.items(), key=lambda item: item[1]))


def predict_held_out(
    config: Any,
    log: Log,
    rows: Sequence[Mapping[str, Any]],
    document: str,
    errors: dict[str, float],
) -> dict[str, Any]:
    """Chooses the run to hold out and predicts its loss from those of a sweep.

    Args:
      config: config of the experiment.
      log: log of a finished sweep, the best rate of each cell.
      rows: finished runs at every rate.
      document: fitted law in the format of `fit.json`.
      errors: errors by law, from `choose_law`.

    Returns:
      The content of `prediction.json`.

    Raises:
      ValueError: fewer than 2 budgets have a minimum.
    """
    n, d, c, loss = (
        log.columns[x] for x in ("num_params", "num_tokens", "flops", "loss")
    )
    groups = find_run_groups(n, d, c, loss, tolerance=0.1)
    frontier = bootstrap_frontier(
        "parabola", by_parabola(groups), groups.flops, groups.strata
    )
    if (
        frontier.num_params is None
        or frontier.loss is None
        or frontier.num_tokens is None
    ):
        raise ValueError(f"{log.source}: {'; '.join(frontier.warnings)}")
    flops = config.held_out_factor * max(config.budgets)
    size = float(frontier.num_params(np.array([flops]))[0])
    model = nearest_shape(size, num_layers=config.num_layers, seq_len=config.seq_len)
    params, per_token = count_cost(model, config.seq_len)
    batch_tokens = config.batch_size * config.seq_len
    num_steps = round(flops / per_token / batch_tokens)
    num_tokens = num_steps * batch_tokens
    width = model.hidden_size
    rate, powers = sweeps.extrapolate(rows, width, num_tokens)
    fit = from_json(document)
    at = {
        "num_params": np.array([float(params.total)]),
        "num_tokens": np.array([float(num_tokens)]),
        "flops": np.array([per_token * num_tokens]),
    }
    interval = fits.predict(fit, at, "prediction", config.level)
    best, low, high = (float(x[0]) for x in interval)
    by_law = {fit.law: best}
    for name in errors:
        if name != fit.law:
            other = fits.fit(find_law(name), log.columns, cluster=log.labels())
            by_law[name] = float(fits.predict(other, at).loss[0])
    value, between = average_predictions(by_law, errors)
    spread = seed_spread([row.cells for row in log.raw])
    half = student_t(config.level, 10**6) * math.hypot(spread, between)
    half = math.hypot(half, errors[fit.law])
    low = value * math.exp(-math.hypot(math.log(best / low), half))
    high = value * math.exp(math.hypot(math.log(high / best), half))
    largest = c > 0.5 * c.max()
    rates = [rate]
    tried = config.learning_rates
    if len(tried) > 1:  # also the neighbours at the grid's ratio
        ratio = tried[1] / tried[0]
        rates = [float(f"{rate * ratio**i:.4g}") for i in (-1, 0, 1)]
    return {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "conventions": CONVENTIONS,
        "runs_sha256": hashlib.sha256(
            (log.source / "runs.jsonl").read_bytes()
        ).hexdigest(),
        "num_runs": len(log.runs),
        "largest_fitted_flops": float(c.max()),
        "best_fitted_loss": float(loss[largest].min()),
        "width": width,
        "num_params": params.total,
        "num_steps": num_steps,
        "num_tokens": num_tokens,
        "flops": per_token * num_tokens,
        "learning_rate": rate,
        "learning_rates": rates,
        "rate_powers": powers,
        "law": fit.law,
        "predicted": value,
        "low": low,
        "high": high,
        "level": config.level,
        "seed_spread": spread,
        "law_spread": between,
        "rollout_errors": errors,
        "log_linear": float(frontier.loss(at["flops"])[0]),
        "by_law": by_law,
        "size_law": [frontier.num_params.coefficient, frontier.num_params.exponent],
        "token_law": [frontier.num_tokens.coefficient, frontier.num_tokens.exponent],
        "loss_law": [frontier.loss.coefficient, frontier.loss.exponent],
    }


def average_predictions(
    by_law: dict[str, float], errors: dict[str, float]
) -> tuple[float, float]:
    """Averages predictions in ln L, weighted by 1 / error^2.

    Args:
      by_law: predicted losses.
      errors: errors by law, from `choose_law`; if none is finite, weights are equal.

    Returns:
      The average, and the standard deviation of ln L about it.
    """
    logs_ = np.log([*by_law.values()])
    weights = np.array([errors[name] for name in by_law]) ** -2.0
    weights = weights if weights.any() else np.ones(len(logs_))
    mean = float(np.average(logs_, weights=weights))
    spread = math.sqrt(np.average((logs_ - mean) ** 2, weights=weights))
    return math.exp(mean), spread


def seed_spread(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the pooled standard deviation of ln L over seeds; 0 without repeats."""
    cells: dict[str, list[float]] = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(math.log(row["loss"]))
    several = [x for x in cells.values() if len(x) > 1]
    if not several:
        return 0.0
    freedom = sum(len(x) - 1 for x in several)
    return math.sqrt(sum(np.var(x) * len(x) for x in several) / freedom)
