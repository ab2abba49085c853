"""The options of `jaxkv fit`: a log, its columns, the laws, and the rows to fit."""

import dataclasses
import math
from typing import Literal

from jaxkv import validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A log, what its columns mean, and what to fit to which rows."""

    log: str
    """CSV with a header, JSON lines, a JSON array, Parquet, Arrow or .npz, packed or
    not, or the folder of a sweep."""
    law: str = "chinchilla"
    """Laws to fit, with commas between them; the first one is what `plan` reads."""
    where: str = ""
    """Rule for the rows to fit, such as 'N <= 4e8 and seed == 0', in the units that
    --n-unit and others declare; the other rows are held out and scored."""
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
            raise ValueError(f"law={self.law!r} must name a law")
        validation.at_least(self, "bootstrap", low=0)
        validation.within(self, "level", low=0, high=1, ends="()")
        validation.within(self, "tolerance", low=0, high=1, ends="[)")
        validation.at_least(self, "smoothing", low=0)
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
