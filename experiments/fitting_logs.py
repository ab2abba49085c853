"""What do the losses of these runs say about larger ones? `jaxkv fit LOG`.

Fits laws to a log side by side, scores each on runs that it has not seen, and sets the
optimum that each implies beside what isoFLOP curves and training curves say themselves.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments import catalogue, documents, style
from experiments.fit_outcomes import Result
from experiments.progress import QUIET, Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A log, what its columns mean, and what to fit to which rows."""

    log: str
    """CSV with a header, JSON lines, or the folder of a sweep."""
    law: str = "chinchilla"
    """Laws to fit, with commas between them; the first one is what `plan` reads."""
    where: str = ""
    """Rule for the rows to fit, such as 'N <= 4e8 and seed == 0'; the others are held
    out and scored."""
    hold_out: str = ""
    """Rule for the rows to hold out and score."""
    ignore: str = ""
    """Rule for rows to leave out of everything, unread."""
    n: str = ""
    """Column of the parameters; found by its name if not given, like those below."""
    d: str = ""
    """Column of the tokens."""
    c: str = ""
    """Column of the FLOPs; of N, D and C two are enough, C = 6ND."""
    loss: str = ""
    """Column of the loss."""
    run: str = ""
    """Column that tells runs apart, where one has several rows."""
    columns: tuple[str, ...] = ()
    """Columns of other inputs of a law, as INPUT=COLUMN or INPUT=COLUMN*UNIT."""
    n_unit: float = 1.0
    """Parameters that a 1 in the column means, such as 1e6."""
    d_unit: float = 1.0
    """Tokens that a 1 means."""
    c_unit: float = 1.0
    """FLOPs that a 1 means."""
    count: Literal["total", "non-embedding", "matmul", "active"] = "total"
    """Which parameters the column counts; of a sweep's counts, which one to read."""
    loss_kind: Literal["huber", "lad", "mse"] = "huber"
    """Of a residual: Huber's, its size, or its square."""
    delta: float = 1e-3
    """Residual above which Huber's loss is linear."""
    space: Literal["log", "linear"] = "log"
    """Whether residuals are of the logarithm of the loss or of the loss."""
    bootstrap: int = 4000
    """Resamples behind the intervals; 0 takes them from the curvature."""
    level: float = 0.9
    """Probability of the intervals."""
    seed: int = 0
    """Of the resamples."""
    tolerance: float = 0.1
    """By how much budgets in one isoFLOP group may differ."""
    smoothing: float = 0.0
    """Decades of FLOPs over which training curves are averaged for their envelope."""

    def __post_init__(self) -> None:
        if not self.laws:
            raise ValueError(f"{self.law=} must name a law")
        if self.bootstrap < 0:
            raise ValueError(f"{self.bootstrap=} must be at least 0")
        if not 0 < self.level < 1:
            raise ValueError(f"{self.level=} must be in (0, 1)")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"{self.tolerance=} must be in [0, 1)")
        if not self.smoothing >= 0:
            raise ValueError(f"{self.smoothing=} must be at least 0")
        if self.where and self.hold_out:
            raise ValueError("both --where and --hold-out; which?")
        for pair in self.columns:
            if not all(pair.partition("=")):
                raise ValueError(f"--columns {pair}: must be INPUT=COLUMN")

    @property
    def laws(self) -> tuple[str, ...]:
        """Names of the laws, each once."""
        names = (name.strip() for name in self.law.split(","))
        return tuple(dict.fromkeys(name for name in names if name))


def experiment(log: str) -> catalogue.Experiment:
    """Describes fits to logs as an experiment, so that they leave a run folder.

    Args:
      log: the log of its config.
    """
    from experiments import fit_drawing, fit_telling

    return catalogue.Experiment(
        name="fit",
        question="What do the losses of these runs say about larger ones?",
        configs={"fit": Config(log=log)},
        result_type=Result,
        run=run,
        plot=fit_drawing.plot,
        claims=lambda result: [],
        metrics=fit_telling.metrics,
        summary=fit_telling.summary,
        panels=(2, 2),
        panel_size_inches=style.PANEL_SIZE_INCHES,
        files=lambda result: {"fit.json": result.document},
    )


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Reads the log, fits the laws, and finds the frontiers.

    Once it is stopped it bootstraps no more: fits that have no resamples yet keep the
    intervals of their curvature, and say so.

    Raises:
      ValueError: the log, a rule or a law cannot be used.
    """
    from experiments import fit_frontiers, fit_grids, fit_laws
    from scaling import fitting, laws, log_columns, logs

    chosen = [laws.find(name) for name in config.laws]
    needs = dict.fromkeys(x for law in chosen for x in (*law.inputs, law.target))
    if len({law.target for law in chosen}) > 1:
        raise ValueError(f"{config.law}: laws of different targets")
    columns = log_columns.Columns(
        **{name: getattr(config, name) for name in _MAPPED},
        others=dict(pair.split("=", 1) for pair in config.columns),
    )
    log = logs.read(Path(config.log), columns, needs=needs, ignore=config.ignore)
    is_fitted = np.ones(len(log.runs), bool)
    if config.where:
        is_fitted = log.select(config.where)
    elif config.hold_out:
        is_fitted = ~log.select(config.hold_out)
    if not is_fitted.any():
        raise ValueError(f"{config.log}: the rule leaves no row to fit")
    seen, others = log.take(is_fitted), log.take(~is_fitted)
    fits = [*fit_laws.fit_all(config, chosen, seen, others, progress)]
    found = fit_frontiers.find(
        seen,
        tolerance=config.tolerance,
        smoothing=config.smoothing,
        resamples=config.bootstrap,
        level=config.level,
        seed=config.seed,
        progress=progress,
    )
    progress.show("the objective over the plane")
    predicted = np.stack([fitting.predict(fit, log.columns)[0] for fit in fits])
    sizes, curves = fit_grids.curves(fits[0], log.columns)
    grouped = fit_grids.parabolas_of(found, len(seen.runs))
    group = np.full(len(log.runs), -1)
    group[is_fitted] = grouped.group
    return Result(
        document=documents.dumps(_document(config, log, fits, found, is_fitted)),
        target=chosen[0].target,
        row=np.array([row.number for row in log.raw]),
        **{name: log.columns[name] for name in ("num_params", "num_tokens", "flops")},
        loss=log.columns[chosen[0].target],
        is_fitted=is_fitted,
        predicted=predicted,
        laws=np.array(config.laws),
        sizes=sizes,
        curves=curves,
        frontier=fit_grids.frontier(fits[0], log.columns),
        group=group,
        parabolas=grouped.curves,
        minima=grouped.minima,
        contour=fit_grids.contour(fits[0], seen.columns),
    )


_MAPPED = ("n", "d", "c", "loss", "run", "n_unit", "d_unit", "c_unit", "count")


def _document(
    config: Config, log: Any, fits: list[Any], found: Any, is_fitted: np.ndarray
) -> dict[str, Any]:
    """What `fit.json` holds: the first fit, the others, and what they rest on."""
    from experiments import fit_frontiers
    from experiments.fit_laws import ROLLOUT
    from scaling import fitting, goodness, run_records

    said = []
    for fit in fits:
        law = fit.find_law()
        measured = goodness.measure(fit.residuals)._asdict()
        said.append(
            fitting.to_json(fit)
            | {"formula": law.formula, "source": law.source, "residual_sizes": measured}
        )
    scored = (
        f"Held out: {(~is_fitted).sum()} of {is_fitted.size} runs."
        if not is_fitted.all()
        else f"Held-out errors are of fits to the runs up to {ROLLOUT:g} of the "
        "largest compute, on the others."
    )
    return said[0] | {
        "others": said[1:],
        "log": config.log,
        "count": log.count,
        "shape": run_records.shape(Path(config.log)),
        "notes": [
            *log.notes,
            *_choices(config, log, is_fitted),
            *found.notes,
            *(
                f"{fit.law}: not scored: too few runs, or too alike, up to "
                f"{ROLLOUT:g} of the largest compute"
                for fit in fits
                if fit.held_out is None
            ),
        ],
        "scored": scored,
        "frontiers": [
            fit_frontiers.to_json(each) for each in [*found.frontiers, *found.windows]
        ],
        "frontier_warnings": [
            *found.warnings,
            *(line for fit in fits for line in fit_frontiers.against(fit, found)),
        ],
        "shift": fit_frontiers.expected_shift(found),
    }


def _choices(config: Config, log: Any, is_fitted: np.ndarray) -> Iterator[str]:
    """Says what follows from the options and sizes, and may surprise."""
    from experiments import fit_drawing, fit_grids
    from scaling import fitting

    num_fitted, num_rows = int(is_fitted.sum()), is_fitted.size
    if line := fitting.abridged(num_fitted):
        yield line
    if num_fitted > (most := fit_grids.MAX_ROWS):
        yield f"the objective over the plane is not drawn: above {most:,} rows"
    if num_rows > (most := fit_drawing.MAX_DOTS):
        yield f"the figure's dots are {most:,} of {num_rows:,} rows"
    if is_fitted.all() and (rule := config.where or config.hold_out):
        yield f"the rule {rule!r} holds out no run"
    num_raw = sum(row.cells.get("decayed") is False for row in log.raw)
    if 0 < num_raw < len(log.raw):
        yield f"{num_raw} of {len(log.raw)} runs ended before their rate was decayed"
    if not log.has_one_row_per_run:
        yield (
            f"{len({*log.runs})} runs in {len(log.runs)} rows: all rows are fitted, "
            "and resamples draw runs"
        )
