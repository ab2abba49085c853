"""Reads a log, fits the laws to it, and assembles the result."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxkv.progress import QUIET, Progress
from jaxkv.report import dumps
from jaxkv.validation import format_unknown_name
from scaling.cli.fit import drawing, grids, report
from scaling.cli.fit.config import ALL_LAWS, FitConfig
from scaling.cli.fit.groups import ROLLOUT, FitGroup, fit_groups
from scaling.cli.fit.result import LogFits
from scaling.fits import describe_thinning, measure_goodness, predict, to_json
from scaling.laws import LAWS, Law, find_law
from scaling.logs import SIZE_COLUMNS, Log, LogColumns, find_doubts, mentions, read_log
from scaling.sweeps import shared_shape


def fit_log(config: FitConfig, progress: Progress = QUIET) -> LogFits:
    """Reads the log, fits the laws, and finds the frontiers.

    A stopped run starts no more bootstraps: fits without resamples keep the intervals
    of their curvature, with a warning.

    Raises:
      ValueError: the log, a rule or a law cannot be used.
    """
    if config.laws == (ALL_LAWS,):
        if config.by:
            raise ValueError("--law all and --by exclude each other")
        extra = {pair.partition("=")[0] for pair in config.columns}
        names = {"num_params", "num_tokens", "flops", *extra}
        chosen = [
            law
            for law in LAWS.values()
            if law.target == "loss" and {*law.inputs} <= names and not law.same_as
        ]
    else:
        chosen = [find_law(name) for name in config.laws]
    if len({law.target for law in chosen}) > 1:
        raise ValueError(f"{config.law}: laws of different targets")
    log = _read_log(config, chosen)
    is_fitted = np.ones(len(log.runs), bool)
    if config.where:
        is_fitted = log.select(config.where)
    elif config.hold_out:
        is_fitted = ~log.select(config.hold_out)
    if not is_fitted.any():
        raise ValueError(f"{config.log}: the rule selects no row to fit")
    parts, unfitted = fit_groups(config, chosen, log, is_fitted, progress)
    chosen = [fit.find_law() for fit in parts[0].fits]
    if config.by:  # groups without a fit are listed, and not drawn
        is_drawn = np.any([part.rows for part in parts], axis=0)
        log = log.take(is_drawn)
        is_fitted = is_fitted[is_drawn]
        parts = [part._replace(rows=part.rows[is_drawn]) for part in parts]
    progress.show("contour of the objective")
    num_runs = len(log.runs)
    predicted = np.full((len(chosen), num_runs), np.nan)
    for part in parts:
        selected = {name: column[part.rows] for name, column in log.columns.items()}
        predicted[:, part.rows] = [predict(x, selected).loss for x in part.fits]
    sizes, curves = grids.loss_curves(parts, log.columns)
    grouped = grids.find_parabolas(parts, is_fitted)
    first = parts[0]
    fitted_log = log.take(first.rows & is_fitted)
    unknown = np.full(num_runs, np.nan)
    return LogFits(
        document=dumps(_document(config, log, parts, is_fitted, unfitted)),
        target=chosen[0].target,
        row=np.array([row.number for row in log.raw]),
        **{name: log.columns.get(name, unknown) for name in SIZE_COLUMNS},
        loss=log.columns[chosen[0].target],
        is_fitted=is_fitted,
        predicted=predicted,
        laws=np.array([law.name for law in chosen]),
        sizes=sizes,
        curves=curves,
        frontier=grids.optimum_curve(parts, log.columns),
        group=grouped.group,
        parabolas=grouped.curves,
        minima=grouped.minima,
        contour=grids.objective_contour(first.fits[0], fitted_log.columns),
    )


def _read_log(config: FitConfig, chosen: list[Law]) -> Log:
    """Reads the columns of the log that the laws need."""
    needs = dict.fromkeys(x for law in chosen for x in (*law.inputs, law.target))
    columns = _columns(config)
    for name in columns.others:
        if name not in needs:
            line = format_unknown_name("input", name, needs)
            raise ValueError(f"--columns {name}: no law has this input: {line}")
    return read_log(
        Path(config.log),
        columns,
        needs=needs,
        ignore=config.ignore,
        last_of=config.names("last_of"),
        best_of=config.names("best_of"),
    )


def _columns(config: FitConfig) -> LogColumns:
    names = ("n", "d", "c", "loss", "run", "n_unit", "d_unit", "c_unit", "loss_unit")
    return LogColumns(
        **{name: getattr(config, name) for name in (*names, "count")},
        others=dict(pair.split("=", 1) for pair in config.columns),
    )


def _document(
    config: FitConfig,
    log: Log,
    parts: list[FitGroup],
    is_fitted: np.ndarray,
    unfitted: list[str],
) -> dict[str, object]:
    """Returns the content of `fit.json`: all fits, their data, notes and frontiers."""
    first, *others = (
        to_json(fit)
        | {
            "formula": fit.find_law().formula,
            "source": fit.find_law().source,
            "residual_sizes": measure_goodness(fit.residuals)._asdict(),
            **({"group": part.label} if config.by else {}),
        }
        for part in parts
        for fit in part.fits
    )
    axis = "compute" if "flops" in log.columns else "input"
    rolled_out = f"up to {ROLLOUT:g} of the largest {axis}"
    scored = f"Held out: {(~is_fitted).sum()} of {is_fitted.size} runs."
    if is_fitted.all():
        scored = f"Held-out errors: fits to the runs {rolled_out}, scored on the rest."
    # All options that name columns.
    rules = (config.where, config.hold_out, config.ignore)
    picks = (config.last_of, config.best_of, config.by)
    used = [x for x in (*rules, *picks, *config.columns) if x]
    fit_log = log.take(is_fitted)
    notes = []
    frontiers = []
    warnings = []
    shifts = []
    for part in parts:
        group = {"group": part.label} if config.by else {}
        notes += map(part.label_line, part.frontier_set.notes)
        every = [*part.frontier_set.frontiers, *part.frontier_set.windows]
        frontiers += [report.frontier_json(frontier) | group for frontier in every]
        warnings += map(part.label_line, part.frontier_set.warnings)
        warnings += map(
            part.label_line, report.disjoint_intervals(part.fits, part.frontier_set)
        )
        if shift := report.expected_shift(part.frontier_set):
            shifts.append(part.label_line(shift))
    notes += [
        part.label_line(
            f"{fit.law}: not scored: too few or too similar runs {rolled_out}"
        )
        for part in parts
        for fit in part.fits
        if fit.held_out is None
    ]
    return first | {
        "others": others,
        **({"by": config.by} if config.by else {}),
        "log": config.log,
        "log_warnings": [*unfitted, *find_doubts(fit_log, _columns(config), used)],
        "count": log.count,
        "shape": shared_shape(Path(config.log)),
        "notes": [*log.notes, *_choices(config, log, is_fitted), *notes],
        "scored": scored,
        "frontiers": frontiers,
        "frontier_warnings": warnings,
        "shift": " ".join(shifts),
    }


def _choices(config: FitConfig, log: Log, is_fitted: np.ndarray) -> Iterator[str]:
    """Yields sentences about consequences of the options and sizes."""
    num_fitted = int(is_fitted.sum())
    num_rows = is_fitted.size
    if line := describe_thinning(num_fitted):
        yield line
    if num_fitted > (limit := grids.MAX_GRID_ROWS):
        yield f"the contour of the objective is not drawn: more than {limit:,} rows"
    if num_rows > (limit := drawing.MAX_DOTS):
        yield f"the figure has dots for {limit:,} of {num_rows:,} rows"
    rules_text = " ".join((config.where, config.hold_out, config.ignore))
    for name, unit in log.units.items():
        if mentions(rules_text, name):
            yield f"rules compare {name} times {unit:g}, the unit of its flag"
    if is_fitted.all() and (rule := config.where or config.hold_out):
        yield f"the rule {rule!r} holds out no run"
    fit_log = log.take(is_fitted)
    num_raw = sum(row.cells.get("decayed") is False for row in fit_log.raw)
    if 0 < num_raw < num_fitted:
        yield f"{num_raw} of {num_fitted} runs ended before their learning rate decayed"
    if not log.has_one_row_per_run:
        yield (
            f"{len({*log.runs})} runs in {len(log.runs)} rows: all rows are fitted, "
            "and the bootstrap resamples runs"
        )
