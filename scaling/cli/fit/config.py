"""Options of `jaxkv fit`: a log, its columns, the laws, and the rows to fit."""

import math
from typing import Annotated, Literal

from jaxkv.validation import ConfigRecord, NonNegativeFloat, NonNegativeInt, Range

ALL_LAWS = "all"
"""Value of `--law` that fits all laws of the log's columns, and ranks them."""


class FitConfig(ConfigRecord):
    """A log, the meaning of its columns, and the laws to fit to its rows."""

    log: str
    """CSV with a header, JSON lines, a JSON array, Parquet, Arrow or .npz, compressed
    or not, or the folder of a sweep."""
    law: str = "chinchilla"
    """Laws to fit, separated by commas, or all, ranked by held-out error; `jaxkv plan`
    reads the first one."""
    where: str = ""
    """Rule for the rows to fit, such as 'N <= 400M and seed == 0': N, D, C and L after
    --n-unit and so on, or columns of the file; all other rows are held out and
    scored."""
    hold_out: str = ""
    """Rule for the rows to hold out and score."""
    ignore: str = ""
    """Rule for rows to ignore completely, over the columns of the file."""
    last_of: str = ""
    """Columns for whose values only the last row is read, that with the most tokens,
    such as the last checkpoint of each run; separated by commas."""
    best_of: str = ""
    """Columns for whose values only the best row is read, that with the lowest loss of
    the remaining ones, such as the best learning rate of each N,D."""
    by: str = ""
    """Columns whose values are groups; each group is fitted separately."""
    n: str = ""
    """Column of the parameters; found by name if not given, like the columns below."""
    d: str = ""
    """Column of the tokens."""
    c: str = ""
    """Column of the FLOPs; two of N, D and C are enough, since C = 6ND."""
    loss: str = ""
    """Column of the loss."""
    run: str = ""
    """Column that identifies runs with several rows."""
    columns: tuple[str, ...] = ()
    """Columns of other inputs of a law, as INPUT=COLUMN or INPUT=COLUMN*UNIT."""
    n_unit: float = 1.0
    """Parameters per unit of the column, such as 1e6."""
    d_unit: float = 1.0
    """Tokens per unit."""
    c_unit: float = 1.0
    """FLOPs per unit."""
    loss_unit: float = 1.0
    """Nats per token per unit: 0.693147 for bits."""
    count: Literal["total", "non-embedding", "matmul", "active"] = "total"
    """Parameters that the column counts; for a sweep, the count to read."""
    loss_kind: Literal["huber", "lad", "mse"] = "huber"
    """Loss of a residual: Huber, absolute value, or square."""
    delta: float = 1e-3
    """Residual above which the Huber loss is linear."""
    space: Literal["log", "linear"] = "log"
    """Residuals of the logarithm of the loss, or of the loss."""
    fix: tuple[str, ...] = ()
    """Coefficients with given values, as NAME=VALUE, which are not fitted."""
    bound: tuple[str, ...] = ()
    """Bounds of coefficients, as NAME=LOW:HIGH; LOW or HIGH may be empty."""
    bootstrap: NonNegativeInt = 4000
    """Bootstrap resamples for the intervals; 0 uses the curvature instead."""
    level: Annotated[float, Range(0, 1, "()")] = 0.9
    """Probability of the intervals."""
    seed: int = 0
    """Seed of the resamples."""
    tolerance: Annotated[float, Range(0, 1, "[)")] = 0.1
    """Largest relative difference of budgets within one isoFLOP group."""
    smoothing: NonNegativeFloat = 0.0
    """Decades of FLOPs over which training curves are averaged for their envelope."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.bootstrap == 1:
            raise ValueError("bootstrap=1 must be 0 or at least 2 resamples")
        if not self.laws:
            raise ValueError(f"law={self.law!r} must name a law")
        if self.where and self.hold_out:
            raise ValueError("--where and --hold-out must not be given together")
        for pair in self.columns:
            if not all(pair.partition("=")):
                raise ValueError(f"--columns {pair}: must be INPUT=COLUMN")
        for name in ("last_of", "best_of", "by"):
            if getattr(self, name) and not self.names(name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {getattr(self, name)}: must name a column")
        if len(self.fixed) < len(self.fix) or len(self.bounds) < len(self.bound):
            raise ValueError("--fix and --bound must name each coefficient once")

    @property
    def laws(self) -> tuple[str, ...]:
        """Names of the laws, without duplicates."""
        return self.names("law")

    def names(self, field: str) -> tuple[str, ...]:
        """Returns the comma-separated names in a field, without duplicates."""
        names = (name.strip() for name in getattr(self, field).split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def fixed(self) -> dict[str, float]:
        """Values of the given coefficients."""
        pairs = [(pair, *pair.partition("=")) for pair in self.fix]
        return {
            name: _number(value, f"--fix {pair}", "NAME=VALUE")
            for pair, name, _, value in pairs
        }

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Bounds of coefficients."""
        ranges = {}
        for pair in self.bound:
            name, _, text = pair.partition("=")
            low, colon, high = text.partition(":")
            flag = f"--bound {pair}"
            form = "NAME=LOW:HIGH"
            if not colon or not (low or high):
                raise ValueError(f"{flag}: must be {form}")
            ranges[name] = (
                _number(low, flag, form) if low else -math.inf,
                _number(high, flag, form) if high else math.inf,
            )
        return ranges


def _number(text: str, flag: str, form: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{flag}: must be {form} with a finite number, not {text!r}")
    return value
