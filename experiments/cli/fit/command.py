"""What do the losses of these runs say about larger ones? `jaxkv fit LOG`.

Fits laws to a log side by side, scores each on runs that it has not seen, and sets the
optimum that each implies beside what isoFLOP curves and training curves say themselves.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.cli.fit.outcomes import Result
from experiments.framework import config_json
from jaxkv import validation
from jaxkv.progress import QUIET, Progress

if TYPE_CHECKING:
    from experiments.framework import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A log, what its columns mean, and what to fit to which rows."""

    log: str
    """CSV with a header, JSON lines, a JSON array, or the folder of a sweep."""
    law: str = "chinchilla"
    """Laws to fit, with commas between them; the first one is what `plan` reads."""
    where: str = ""
    """Rule for the rows to fit, such as 'N <= 4e8 and seed == 0'; the others are held
    out and scored."""
    hold_out: str = ""
    """Rule for the rows to hold out and score."""
    ignore: str = ""
    """Rule for rows to leave out of everything, unread."""
    last_of: str = ""
    """Columns, with commas between them: of rows that agree in them only the one with
    most tokens is read, such as the last checkpoint of each run."""
    best_of: str = ""
    """Columns: of the rows that are left and agree in them only the one with the lowest
    loss is read, such as the best learning rate of each N,D."""
    by: str = ""
    """Columns: rows that agree in them are a group, and each is fitted by itself."""
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
    loss_unit: float = 1.0
    """Nats per token that a 1 means: 0.693147 for bits."""
    count: Literal["total", "non-embedding", "matmul", "active"] = "total"
    """Which parameters the column counts; of a sweep's counts, which one to read."""
    loss_kind: Literal["huber", "lad", "mse"] = "huber"
    """Of a residual: Huber's, its size, or its square."""
    delta: float = 1e-3
    """Residual above which Huber's loss is linear."""
    space: Literal["log", "linear"] = "log"
    """Whether residuals are of the logarithm of the loss or of the loss."""
    fix: tuple[str, ...] = ()
    """Coefficients that are given, as NAME=VALUE, and not fitted."""
    bound: tuple[str, ...] = ()
    """Coefficients to keep in a range, as NAME=LOW:HIGH; either may be left out."""
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
        validation.at_least(self, "bootstrap", low=0)
        validation.within(self, "level", low=0, high=1, ends="()")
        validation.within(self, "tolerance", low=0, high=1, ends="[)")
        if not self.smoothing >= 0:
            raise ValueError(f"{self.smoothing=} must be at least 0")
        if self.where and self.hold_out:
            raise ValueError("both --where and --hold-out; which?")
        for pair in self.columns:
            if not all(pair.partition("=")):
                raise ValueError(f"--columns {pair}: must be INPUT=COLUMN")
        for name in ("last_of", "best_of", "by"):
            if getattr(self, name) and not self.names(name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {getattr(self, name)}: must name a column")
        if len(self.fixed) < len(self.fix) or len(self.bounds) < len(self.bound):
            raise ValueError("--fix and --bound: each coefficient once")

    @property
    def laws(self) -> tuple[str, ...]:
        """Names of the laws, each once."""
        return self.names("law")

    def names(self, field: str) -> tuple[str, ...]:
        """The names in a field that has commas between them, each once."""
        names = (name.strip() for name in getattr(self, field).split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def fixed(self) -> dict[str, float]:
        """Values of the coefficients that are given."""
        pairs = [(pair, *pair.partition("=")) for pair in self.fix]
        return {
            name: _number(value, f"--fix {pair}", "NAME=VALUE")
            for pair, name, _, value in pairs
        }

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Ranges of the coefficients that have one."""
        found = {}
        for pair in self.bound:
            name, _, text = pair.partition("=")
            low, colon, high = text.partition(":")
            flag, form = f"--bound {pair}", "NAME=LOW:HIGH"
            if not colon or not (low or high):
                raise ValueError(f"{flag}: must be {form}")
            found[name] = (
                _number(low, flag, form) if low else -math.inf,
                _number(high, flag, form) if high else math.inf,
            )
        return found


def _number(text: str, flag: str, form: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{flag}: must be {form}, and {text!r} is no finite number")
    return value


def experiment(log: str) -> "Experiment":
    """Describes fits to logs as an experiment, so that they leave a run folder.

    Args:
      log: the log of its config.
    """
    from experiments.cli.fit import drawing, report
    from experiments.framework import study

    fits = study.Study(
        configs={"fit": Config(log=log)},
        result=Result,
        run=run,
        plot=drawing.plot,
        metrics=report.metrics,
        summary=report.summary,
        panels=(2, 2),
        files=lambda result: {"fit.json": result.document},
    )
    question = "What do the losses of these runs say about larger ones?"
    return study.Experiment("fit", question, (fits,))


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Reads the log, fits the laws, and finds the frontiers.

    Once it is stopped it bootstraps no more: fits that have no resamples yet keep the
    intervals of their curvature, and say so.

    Raises:
      ValueError: the log, a rule or a law cannot be used.
    """
    from experiments.cli.fit import grids, groups
    from scaling.fits.fit import predict
    from scaling.laws import published

    chosen = [published.find(name) for name in config.laws]
    if len({law.target for law in chosen}) > 1:
        raise ValueError(f"{config.law}: laws of different targets")
    log = _read(config, chosen)
    is_fitted = np.ones(len(log.runs), bool)
    if config.where:
        is_fitted = log.select(config.where)
    elif config.hold_out:
        is_fitted = ~log.select(config.hold_out)
    if not is_fitted.any():
        raise ValueError(f"{config.log}: the rule leaves no row to fit")
    parts, doubts = groups.fit_parts(config, chosen, log, is_fitted, progress)
    if config.by:  # what cannot be fitted is told of, and not drawn
        there = np.any([part.rows for part in parts], axis=0)
        log, is_fitted = log.take(there), is_fitted[there]
        parts = [part._replace(rows=part.rows[there]) for part in parts]
    progress.show("the objective over the plane")
    num_runs = len(log.runs)
    predicted = np.full((len(chosen), num_runs), np.nan)
    for part in parts:
        mine = {name: column[part.rows] for name, column in log.columns.items()}
        predicted[:, part.rows] = [predict(x, mine)[0] for x in part.fits]
    sizes, curves = grids.curves(parts, log.columns)
    grouped = grids.parabolas_of(parts, is_fitted)
    first = parts[0]
    seen = log.take(first.rows & is_fitted)
    return Result(
        document=config_json.dumps(_document(config, log, parts, is_fitted, doubts)),
        target=chosen[0].target,
        row=np.array([row.number for row in log.raw]),
        **{
            name: log.columns.get(name, np.full(num_runs, np.nan))
            for name in ("num_params", "num_tokens", "flops")
        },
        loss=log.columns[chosen[0].target],
        is_fitted=is_fitted,
        predicted=predicted,
        laws=np.array(config.laws),
        sizes=sizes,
        curves=curves,
        frontier=grids.frontier(parts, log.columns),
        group=grouped.group,
        parabolas=grouped.curves,
        minima=grouped.minima,
        contour=grids.contour(first.fits[0], seen.columns),
    )


def _read(config: Config, chosen: list[Any]) -> Any:
    """Reads what the laws need of the log."""
    from scaling.logs.log import read

    needs = dict.fromkeys(x for law in chosen for x in (*law.inputs, law.target))
    for name in _columns(config).others:
        if name not in needs:
            line = config_json.unknown("input", name, needs)
            raise ValueError(f"--columns {name}: no law here reads it: {line}")
    return read(
        Path(config.log),
        _columns(config),
        needs=needs,
        ignore=config.ignore,
        last_of=config.names("last_of"),
        best_of=config.names("best_of"),
    )


def _columns(config: Config) -> Any:
    from scaling.logs.columns import Columns

    return Columns(
        **{name: getattr(config, name) for name in _MAPPED},
        others=dict(pair.split("=", 1) for pair in config.columns),
    )


_MAPPED = (
    *("n", "d", "c", "loss", "run"),
    *("n_unit", "d_unit", "c_unit", "loss_unit", "count"),
)


def _document(
    config: Config, log: Any, parts: list[Any], is_fitted: np.ndarray, doubts: list[str]
) -> dict[str, Any]:
    """What `fit.json` holds: the first fit, the others, and what they rest on."""
    from experiments.cli.fit import frontiers
    from experiments.cli.fit.laws import ROLLOUT
    from scaling.fits import goodness
    from scaling.fits.fit import to_json
    from scaling.logs.doubts import find
    from scaling.sweeps import folder

    said = []
    for part in parts:
        for fit in part.fits:
            law = fit.find_law()
            about = {"formula": law.formula, "source": law.source}
            about["residual_sizes"] = goodness.measure(fit.residuals)._asdict()
            about |= {"group": part.label} if config.by else {}
            said.append(to_json(fit) | about)
    axis = "compute" if "flops" in log.columns else "input"
    scored = (
        f"Held out: {(~is_fitted).sum()} of {is_fitted.size} runs."
        if not is_fitted.all()
        else f"Held-out errors are of fits to the runs up to {ROLLOUT:g} of the "
        f"largest {axis}, on the others."
    )
    return said[0] | {
        "others": said[1:],
        **({"by": config.by} if config.by else {}),
        "log": config.log,
        "log_warnings": [
            *doubts,
            *find(log, _columns(config), _named(config)),
        ],
        "count": log.count,
        "shape": folder.shape(Path(config.log)),
        "notes": [
            *log.notes,
            *_choices(config, log, is_fitted),
            *(part.say(line) for part in parts for line in part.found.notes),
            *(
                part.say(
                    f"{fit.law}: not scored: too few runs, or too alike, up to "
                    f"{ROLLOUT:g} of the largest {axis}"
                )
                for part in parts
                for fit in part.fits
                if fit.held_out is None
            ),
        ],
        "scored": scored,
        "frontiers": [
            frontiers.to_json(each) | ({"group": part.label} if config.by else {})
            for part in parts
            for each in [*part.found.frontiers, *part.found.windows]
        ],
        "frontier_warnings": [
            part.say(line)
            for part in parts
            for line in (
                *part.found.warnings,
                *(x for fit in part.fits for x in frontiers.against(fit, part.found)),
            )
        ],
        "shift": " ".join(
            part.say(line)
            for part in parts
            if (line := frontiers.expected_shift(part.found))
        ),
    }


def _named(config: Config) -> list[str]:
    """All that the options say of columns."""
    rules = (config.where, config.hold_out, config.ignore)
    picks = (config.last_of, config.best_of, config.by)
    return [x for x in (*rules, *picks, *config.columns) if x]


def _choices(config: Config, log: Any, is_fitted: np.ndarray) -> Iterator[str]:
    """Says what follows from the options and sizes, and may surprise."""
    from experiments.cli.fit import drawing, grids
    from scaling.fits.fit import abridged

    num_fitted, num_rows = int(is_fitted.sum()), is_fitted.size
    if line := abridged(num_fitted):
        yield line
    if num_fitted > (most := grids.MAX_ROWS):
        yield f"the objective over the plane is not drawn: above {most:,} rows"
    if num_rows > (most := drawing.MAX_DOTS):
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
