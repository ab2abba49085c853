"""The run to foresee: which one, at what learning rate, with what loss; said before."""

import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.training.isoflop.settings import Settings, nearest
from scaling.fits import fit as fits_fit
from scaling.fits import intervals, result
from scaling.fits.fit import predict
from scaling.frontiers import frontier, isoflop
from scaling.frontiers.groups import find_groups
from scaling.laws import published
from scaling.logs.log import read
from scaling.sweeps.grid import count

LAWS = ("chinchilla", "chinchilla-tied", "kaplan")
"""Whose predictions are averaged, each by how well it foretells the larger of the
fitted runs; the best of them is the law of the report."""
CUTS = (1, 2)
"""How many of the largest budgets are kept from the fits that choose the law."""
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


def choose_law(folder: Path, budgets: tuple[float, ...]) -> dict[str, float]:
    """Scores the laws on the largest of the runs that are fitted.

    Args:
      folder: of a finished sweep.
      budgets: its budgets.

    Returns:
      The mean of |ln(predicted / seen)| by law, the best first; infinite where too
      few runs are left to fit.
    """
    columns = read(folder).columns
    flops, rising = columns["flops"], sorted(budgets)
    found = {}
    for name in LAWS:
        errors = []
        for cut in CUTS:
            larger = flops > math.sqrt(rising[-cut] * rising[-cut - 1])
            small, others = (
                {key: column[mask] for key, column in columns.items()}
                for mask in (~larger, larger)
            )
            try:
                fit = fits_fit.fit(published.find(name), small)
            except ValueError:  # too few runs are left
                continue
            told = predict(fit, others).loss
            errors.append(np.abs(np.log(told / others["loss"])).mean())
        found[name] = float(np.mean(errors)) if errors else math.inf
    return dict(sorted(found.items(), key=lambda item: item[1]))


def foresee(
    config: Settings, folder: Path, document: str, errors: dict[str, float]
) -> dict[str, Any]:
    """Chooses the run to foresee and predicts its loss from the runs in a folder.

    Args:
      config: the experiment.
      folder: of a finished sweep.
      document: the law fitted to it, as `fit.json` has it.
      errors: as `choose_law` gives them, of this law and the others.

    Returns:
      What `prediction.json` holds.

    Raises:
      ValueError: fewer than two budgets have a minimum.
    """
    log = read(folder)
    n, d, c, loss = (
        log.columns[x] for x in ("num_params", "num_tokens", "flops", "loss")
    )
    groups = find_groups(n, d, c, loss, tolerance=0.1)
    found = frontier.frontier(
        "parabola", isoflop.by_parabola(groups), groups.flops, groups.strata
    )
    if found.num_params is None or found.loss is None or found.num_tokens is None:
        raise ValueError(f"{folder}: {'; '.join(found.warnings)}")
    flops = config.held_out_factor * max(config.budgets)
    model = nearest(config, float(found.num_params(np.array([flops]))[0]))
    params, per_token = count(model, config.seq_len)
    batch_tokens = config.batch_size * config.seq_len
    num_steps = round(flops / per_token / batch_tokens)
    num_tokens = num_steps * batch_tokens
    rate, powers = learning_rate(rows_of(folder), model.hidden_size, num_tokens)
    fit = result.from_json(document)
    at = {
        "num_params": np.array([float(params.total)]),
        "num_tokens": np.array([float(num_tokens)]),
        "flops": np.array([per_token * num_tokens]),
    }
    told = predict(fit, at, "prediction", config.level)
    best, low, high = (float(x[0]) for x in told)
    by_law = {fit.law: best}
    for name in errors:
        if name != fit.law:
            other = fits_fit.fit(
                published.find(name), log.columns, cluster=log.labels()
            )
            by_law[name] = float(predict(other, at)[0][0])
    value, between = average(by_law, errors)
    spread = seed_spread([row.cells for row in log.raw])
    half = intervals.student(config.level, 10**6) * math.hypot(spread, between)
    half = math.hypot(half, errors[fit.law])
    low = value * math.exp(-math.hypot(math.log(best / low), half))
    high = value * math.exp(math.hypot(math.log(high / best), half))
    largest = c > 0.5 * c.max()
    return {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "conventions": CONVENTIONS,
        "runs_sha256": hashlib.sha256((folder / "runs.jsonl").read_bytes()).hexdigest(),
        "num_runs": len(log.runs),
        "largest_fitted_flops": float(c.max()),
        "best_fitted_loss": float(loss[largest].min()),
        "width": model.hidden_size,
        "num_params": params.total,
        "num_steps": num_steps,
        "num_tokens": num_tokens,
        "flops": per_token * num_tokens,
        "learning_rate": rate,
        "learning_rates": _around(rate, config.learning_rates),
        "rate_powers": powers,
        "law": fit.law,
        "predicted": value,
        "low": low,
        "high": high,
        "level": config.level,
        "seed_spread": spread,
        "law_spread": between,
        "rollout_errors": errors,
        "log_linear": float(found.loss(at["flops"])[0]),
        "by_law": by_law,
        "size_law": [found.num_params.coefficient, found.num_params.exponent],
        "token_law": [found.num_tokens.coefficient, found.num_tokens.exponent],
        "loss_law": [found.loss.coefficient, found.loss.exponent],
    }


def _around(rate: float, grid: tuple[float, ...]) -> list[float]:
    """A rate and, if a grid has several, its neighbours at the grid's ratio."""
    if len(grid) < 2:
        return [rate]
    ratio = grid[1] / grid[0]
    return [float(f"{rate * ratio**i:.4g}") for i in (-1, 0, 1)]


def average(by_law: dict[str, float], errors: dict[str, float]) -> tuple[float, float]:
    """Averages predictions in ln L, each with weight 1 / error^2.

    Args:
      by_law: the losses.
      errors: of each law elsewhere, as `choose_law` gives them; where none is known,
        all count alike.

    Returns:
      The average, and the standard deviation of ln L about it.
    """
    logs_ = np.log([by_law[name] for name in by_law])
    weights = np.array([errors[name] for name in by_law]) ** -2.0
    weights = weights if weights.any() else np.ones(len(logs_))
    mean = float(np.average(logs_, weights=weights))
    spread = math.sqrt(np.average((logs_ - mean) ** 2, weights=weights))
    return math.exp(mean), spread


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Reads the runs of a sweep that are done, at every learning rate."""
    lines = (folder / "runs.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["status"] == "done"]


def optimal_rates(rows: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Finds the best learning rate of every cell that has one between others.

    Returns:
      Width, tokens and rate; by a parabola in the rate's logarithm through the best
      and its two neighbours, on the first seed.
    """
    first = min(row["seed"] for row in rows)
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["seed"] == first:
            cells.setdefault(row["cell"], []).append(row)
    found = []
    for each in cells.values():
        each.sort(key=lambda row: row["learning_rate"])
        losses = [row["loss"] for row in each]
        at = int(np.argmin(losses))
        if not 0 < at < len(each) - 1:
            continue
        x = np.log([row["learning_rate"] for row in each[at - 1 : at + 2]])
        bend, slope, _ = np.polyfit(x - x[1], losses[at - 1 : at + 2], 2)
        rate = math.exp(x[1] - slope / (2 * bend)) if bend > 0 else math.exp(x[1])
        found.append((each[0]["hidden_size"], each[0]["num_tokens"], rate))
    return found


def learning_rate(
    rows: list[dict[str, Any]], width: int, num_tokens: int
) -> tuple[float, tuple[float, float]]:
    """Extrapolates the best learning rate: a power of the width times one of tokens.

    Source: the form is that of Li et al. 2025 (Step Law), arXiv:2503.04715.

    Returns:
      The rate; and the two exponents. Where fewer than three widths and two lengths
      have an optimum, that of the nearest cell by tokens, in proportion to 1 / width.
    """
    found = optimal_rates(rows)
    if len({w for w, _, _ in found}) >= 3 and len({d for _, d, _ in found}) >= 2:
        w, d, rate = np.log(np.array(found, float)).T
        design = np.stack([np.ones(len(w)), w, d], 1)
        constant, of_width, of_tokens = np.linalg.lstsq(design, rate, rcond=None)[0]
        value = constant + of_width * math.log(width) + of_tokens * math.log(num_tokens)
        return float(f"{math.exp(value):.4g}"), (float(of_width), float(of_tokens))
    best = min(rows, key=lambda row: (abs(row["num_tokens"] - num_tokens), row["loss"]))
    scale = best["hidden_size"] / width
    return float(f"{best['learning_rate'] * scale:.4g}"), (-1.0, 0.0)


def seed_spread(rows: list[Any]) -> float:
    """Pools the standard deviation of ln L over seeds; 0 if nothing was repeated."""
    cells: dict[str, list[float]] = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(math.log(row["loss"]))
    several = [x for x in cells.values() if len(x) > 1]
    if not several:
        return 0.0
    freedom = sum(len(x) - 1 for x in several)
    return math.sqrt(sum(np.var(x) * len(x) for x in several) / freedom)
