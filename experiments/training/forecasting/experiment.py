"""Measures forecasts of larger runs on public logs.

Three questions: which share of held-out runs with more compute is inside the 90 %
prediction intervals; how far a part of the runs, chosen by several rules, forecasts the
largest ones; and how far vertices of parabolas are from the optimum of known surfaces.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments import lab
from experiments.training.forecasting import replay
from experiments.training.forecasting.ladder import LADDER
from experiments.training.forecasting.targets import TARGETS
from scaling import fits
from scaling.cli import find_published
from scaling.frontiers import (
    bootstrap_frontier,
    by_parabola,
    by_projection,
    find_run_groups,
    fit_group_surface,
)
from scaling.laws import CHINCHILLA, simulate_isoflop_runs

TABLES = ("losses2026/isoflops.csv", "losses/gadre_c4.csv")
SIMULATED = "simulated"
NAMES = {
    "epochai_chinchilla": "Epoch",
    "ml_scalefit": "Apple",
    "llama_3": "Llama 3",
    "marin_202603": "Marin",
    "misfitting": "misfits",
    "gadre": "Gadre",
    "kyo": "Takano",
}
_MIN_HELD = 2
_MIN_FITTED = 20


class Config(lab.ConfigRecord):
    """Logs and resamples."""

    logs: str = ""
    """Further tables with N, D and loss, separated by commas; or `simulated` alone.
    The public tables are always read, from the folder of published data."""
    num_resamples: lab.PositiveInt = 400
    """Resamples of each fit."""
    num_orders: lab.PositiveInt = 3
    """Random orders of each replay."""


CONFIGS = {
    "real": Config(),
    "smoke": Config(logs=SIMULATED, num_resamples=40, num_orders=1),
}


def read_logs(config: Config) -> dict[str, np.ndarray]:
    """Returns N, D and loss of each log, with and without rows marked as outliers."""
    if config.logs == SIMULATED:
        runs = simulate_isoflop_runs(noise="normal")
        columns = [runs[x][::3] for x in ("num_params", "num_tokens", "loss")]
        return {SIMULATED: np.stack(columns, 1)}
    isoflops, gadre = find_published("logs=''", TABLES)
    logs = {}
    with isoflops.open() as file:
        rows = list(csv.DictReader(file))
    for name in dict.fromkeys(row["experiment"] for row in rows):
        for suffix in ("", ", all rows"):
            logs[name + suffix] = np.array(
                [
                    [float(row[x]) for x in ("params", "tokens", "loss")]
                    for row in rows
                    if row["experiment"] == name
                    and (suffix or row["outlier"] == "False")
                ]
            )
    with gadre.open() as file:
        rows = list(csv.DictReader(file))
    logs["gadre"] = np.array(
        [[float(row[x]) for x in ("N", "D", "loss_c4_val")] for row in rows]
    )
    for path in filter(None, config.logs.split(",")):
        with Path(path).open() as file:
            rows = list(csv.DictReader(file))
        logs[Path(path).stem] = np.array(
            [[float(row[x]) for x in ("N", "D", "loss")] for row in rows]
        )
    return {name: np.unique(runs, axis=0) for name, runs in logs.items()}


def hold_out(runs: np.ndarray) -> dict[str, np.ndarray]:
    """Returns masks of held-out runs with more compute than the remaining ones."""
    flops = 6 * runs[:, 0] * runs[:, 1]
    order = np.argsort(flops)
    budget = np.zeros(len(flops), int)
    budget[order] = np.cumsum(np.diff(np.log(flops[order]), prepend=np.inf) > 0.2)
    num = budget.max() + 1
    masks = {
        "a tenth of the compute": flops > 0.1 * flops.max() * (1 + 1e-9),
        "upper 15 %": flops > np.quantile(flops, 0.85),
    }
    if 4 <= num <= len(flops) / 3:
        masks["last budget"] = budget == num - 1
        masks["last quarter"] = budget >= num - max(1, round(num / 4))
    return masks


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Returns rows of coverage, replays and parabolas; if stopped, those so far."""
    rows: list[lab.Row] = [*_parabola_rows()]
    logs = read_logs(config)
    update = progress.bar("logs", len(logs), "logs")
    for done, (name, runs) in enumerate(logs.items(), 1):
        if progress.stopped:
            return rows
        progress.show(name)
        masks = hold_out(runs)
        for split, mask in masks.items():
            if mask.sum() >= _MIN_HELD and (~mask).sum() >= _MIN_FITTED:
                row = {"part": "coverage", "log": name, "split": split}
                rows.append(row | _coverage(runs, mask, config.num_resamples))
        if "all rows" not in name:
            rows += _replay_rows(name, runs, masks["upper 15 %"], config)
        update(done)
    return rows


def _coverage(runs: np.ndarray, mask: np.ndarray, num_resamples: int) -> lab.Row:
    """Fits the remaining runs, and counts held-out ones inside their intervals."""
    names = ("num_params", "num_tokens", "loss")
    fitted, held = (
        dict(zip(names, part.T, strict=True)) for part in (runs[~mask], runs[mask])
    )
    result = fits.fit(CHINCHILLA, fitted)
    result = fits.bootstrap(result, fitted, num_resamples=num_resamples)
    forecast = fits.predict(result, held, "prediction")
    narrow = fits.predict(
        result._replace(forecast_variance=(0.0, 0.0)), held, "prediction"
    )
    inside, inside_narrow = (
        int(((x.low <= held["loss"]) & (held["loss"] <= x.high)).sum())
        for x in (forecast, narrow)
    )
    return {
        "held out": int(mask.sum()),
        "inside": inside,
        "inside without forecasts": inside_narrow,
        "width": float(np.median(np.log(forecast.high / forecast.low))),
    }


def _replay_rows(
    name: str, runs: np.ndarray, mask: np.ndarray, config: Config
) -> Iterator[lab.Row]:
    pool = replay.make_replay_pool(runs, mask)
    everything = np.ones(pool.flops.size, bool)
    full = pool.error(replay.fit_selected(pool, everything))
    for rule in replay.RULES:
        seeds = range(config.num_orders if rule == "random" else 1)
        outcomes = np.array(
            [
                replay.replay_rule(pool, rule, config.num_resamples, seed)
                for seed in seeds
            ]
        ).mean(0)
        for share, (_, error, num_runs) in zip(
            replay.SHARES, outcomes.tolist(), strict=True
        ):
            row = {"part": "replay", "log": name, "rule": rule, "share": share}
            yield row | {"error": error, "full error": full, "runs": num_runs}


def _parabola_rows() -> Iterator[lab.Row]:
    """Compares parabolas and projection on surfaces without noise."""
    flops = np.repeat(np.geomspace(1e18, 1e21, 7), 9)
    places = np.tile(np.linspace(-1, 1, 9), 7)
    for alpha, beta in ((0.34, 0.34), (0.34, 0.28), (0.5, 0.25)):
        a = beta / (alpha + beta)
        ratio = (alpha * 400 / (beta * 400)) ** (1 / (alpha + beta))
        best = ratio * (flops / 6) ** a
        for half_width in (0.5, 1.0, 1.5):
            for centre, drift in ((0.0, 0.0), (0.4, 0.0), (0.0, 0.1)):
                shift = centre + drift * np.log10(flops / 10**19.5)
                num_params = best * 10 ** (half_width * places + shift)
                num_tokens = flops / (6 * num_params)
                loss = 1.7 + 400 * num_params**-alpha + 400 * num_tokens**-beta
                groups = find_run_groups(num_params, num_tokens, flops, loss)
                surface = fit_group_surface(groups)
                row = {
                    "part": "parabola",
                    "alpha": alpha,
                    "beta": beta,
                    "half width": half_width,
                    "off centre": centre,
                    "drift": drift,
                }
                for method, find in (
                    ("parabola", by_parabola(groups)),
                    ("projection", by_projection(groups, surface)),
                ):
                    estimate = bootstrap_frontier(
                        method, find, groups.flops, groups.strata
                    )
                    sizes = estimate.minima.num_params[0]
                    off = np.log10(sizes / (ratio * (groups.flops / 6) ** a))
                    law = estimate.num_params
                    row[f"{method}: N*"] = float(10 ** np.nanmean(off) - 1)
                    row[f"{method}: a"] = np.nan if law is None else law.exponent - a
                yield row


def _part(result: list[lab.Row], part: str) -> list[lab.Row]:
    return [row for row in result if row["part"] == part]


def coverage_by_log(result: list[lab.Row]) -> dict[str, tuple[int, int, int]]:
    """Returns held-out runs, those inside, and those inside without forecasts."""
    counts: dict[str, tuple[int, int, int]] = {}
    for row in _part(result, "coverage"):
        first = row["log"].partition(",")[0].partition("__")[0]
        name = NAMES.get(first, first)
        before = counts.get(name, (0, 0, 0))
        keys = ("held out", "inside", "inside without forecasts")
        counts[name] = tuple(x + row[key] for x, key in zip(before, keys, strict=True))
    return counts


def median_ratios(result: list[lab.Row]) -> dict[str, dict[float, float]]:
    """Returns by rule and share the median over logs of error over full error."""
    ratios: dict[str, dict[float, list[float]]] = {}
    for row in _part(result, "replay"):
        shares = ratios.setdefault(row["rule"], {})
        shares.setdefault(row["share"], []).append(row["error"] / row["full error"])
    return {
        rule: {share: float(np.median(x)) for share, x in shares.items()}
        for rule, shares in ratios.items()
    }


def plot(axes: np.ndarray, result: list[lab.Row]) -> None:
    """Draws coverage by log, and errors against shares of compute."""
    left, right = axes
    counts = coverage_by_log(result)
    names = [*counts]
    places = np.arange(len(names))
    for shift, part, label, color in (
        (-0.2, 2, "without errors of forecasts", lab.ORANGE),
        (0.2, 1, "with them", lab.BLUE),
    ):
        shares = [100 * counts[name][part] / counts[name][0] for name in names]
        left.bar(places + shift, shares, 0.38, color=lab.colors()[color], label=label)
    lab.draw_reference_line(left, 90, "nominal")
    left.set_xticks(places, names)
    left.legend(loc="lower right")
    lab.set_labels(
        left,
        "Held-out larger runs inside 90 % intervals",
        "",
        "runs inside [%]",
        ylim=(0, 105),
    )
    marks = ("o", "s", "^", "D", "v")
    tints = (lab.BLUE, lab.ORANGE, lab.GREEN, lab.RED, lab.PURPLE)
    ratios = median_ratios(result)
    for (rule, shares), mark, tint in zip(ratios.items(), marks, tints, strict=False):
        look = {"marker": mark, "markersize": 6}
        x = [100 * share for share in shares]
        lab.draw_curve(right, x, [*shares.values()], tint, rule, **look)
    lab.draw_reference_line(right, 1.0, "all runs")
    right.legend()
    right.set_xscale("log")
    right.set_xticks([100 * share for share in replay.SHARES])
    right.xaxis.set_major_formatter("{x:g}")
    right.minorticks_off()
    lab.set_labels(
        right,
        "Median error of the largest runs",
        "share of the compute [%]",
        "error / error of all runs [1]",
    )


@lab.claims_file(__file__).judge
def claims(result: list[lab.Row]) -> Iterator[lab.MeasuredValue]:
    """Judges coverage by log, the replay at a fifth of the compute, and parabolas."""
    counts = coverage_by_log(result)
    few = SIMULATED in counts
    for name, (held_out, inside, _) in counts.items():
        yield lab.measured(
            "covers", inside / held_out, differs=few or held_out < 40, log=name
        )
    ratios = median_ratios(result)
    if ratios:
        ours = ratios.pop(replay.OURS)[0.2]
        rule = min(ratios, key=lambda rule: ratios[rule][0.2])
        yield lab.measured("next", ours, differs=few)
        yield lab.measured("best", ours / ratios[rule][0.2], differs=few, rule=rule)
    for row in _part(result, "parabola"):
        if row["off centre"] == row["drift"] == 0 and row["half width"] == 1:
            yield lab.measured("exact", abs(row["projection: a"]), **row)


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Returns tables of coverage, replays and parabolas."""
    counts = coverage_by_log(result)
    parts: list[lab.ReportPart] = [
        lab.Sheet(
            "held-out larger runs inside 90 % intervals",
            ["log", "held out", "inside", "without errors of forecasts"],
            [
                [
                    name,
                    str(num),
                    f"{inside} ({inside / num:.0%})",
                    f"{narrow / num:.0%}",
                ]
                for name, (num, inside, narrow) in counts.items()
            ],
        )
    ]
    rows = _part(result, "replay")
    by_log: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells = by_log.setdefault((row["log"], row["rule"]), [])
        cells.append(f"{row['error'] / row['full error']:.2f}")
    lines = [[log, rule, *cells] for (log, rule), cells in by_log.items()]
    lines += [
        ["median", rule, *(f"{x:.2f}" for x in shares.values())]
        for rule, shares in median_ratios(result).items()
    ]
    heads = ["log", "rule", *(f"{x:.0%} of compute" for x in replay.SHARES)]
    note = "Error of the largest 15 % of the runs over that of a fit to all others."
    parts.append(lab.Sheet("replays", heads, lines, note))
    keys = ("alpha", "beta", "half width", "off centre", "drift")
    estimates = ("parabola: N*", "parabola: a", "projection: N*", "projection: a")
    lines = [
        [
            *(f"{row[key]:g}" for key in keys),
            *(
                f"{100 * row[x]:+.1f} %" if "N*" in x else f"{row[x]:+.4f}"
                for x in estimates
            ),
        ]
        for row in _part(result, "parabola")
    ]
    note = (
        "Seven budgets of nine sizes without noise. Width and centre are in decades of "
        "N; the centre drifts by so many decades for each decade of compute."
    )
    parts.append(lab.Sheet("bias of parabolas", [*keys, *estimates], lines, note))
    return parts


STUDIES = (
    lab.Study(CONFIGS, list, run, plot, claims, summary, panels=lab.Panels(2, 1)),
    LADDER,
    TARGETS,
)
"""Forecasts on public logs, a forecast beforehand, and its truth."""
