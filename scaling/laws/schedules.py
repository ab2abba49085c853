"""Laws of whole training curves under a schedule of the learning rate.

The loss is a power of the area under the learning rate, minus a term that grows as the
rate falls. The area stands for the progress of training, the second term for the noise
of large rates, which decay removes.

    L(t) = L0 + A S(t)^-alpha - B S(t)^-delta sum_k (eta_(k-1) - eta_k) G_k(t)

`S(t)` is the sum of the rates up to step t, warm-up included. `G_k` rises from 0 to 1
after the change of the rate at step k; the laws differ in it, and in delta:

* `multi-power`: `G_k = 1 - (1 + C eta_k^-gamma S_k(t))^-beta`, with `S_k` the sum of
  the rates since step k; delta is 0. Luo et al. 2025, arXiv:2503.12811.
* `annealed-area`: `G_k = 1 - lambda^(t-k)`; delta is 0. The last term is C times the
  annealed area S2 of Tissue et al. 2024, arXiv:2408.11029, with C = B (1 - lambda).
* `fading-multi-power`: the first one with delta fitted. The reduction of the loss by
  the same decay depends on when it begins; delta of public curves is 0.2.

Warm-up counts as a change of the rate, as in the program of Luo et al.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

WARMUP_CELLS = 24
"""Pieces of the warm-up, which is linear from 0 to the rate of the first row."""
MAX_CELLS = 120
"""Changes of the rate of one curve; neighbours are merged beyond it."""
MULTI_POWER_CONSTANTS: dict[str, dict[str, float]] = {
    "25M": dict(
        L0=3.040, A=0.525, alpha=0.508, B=363.788, C=2.066, beta=0.583, gamma=0.641
    ),
    "100M": dict(
        L0=2.651, A=0.601, alpha=0.453, B=437.946, C=2.132, beta=0.598, gamma=0.655
    ),
    "400M": dict(
        L0=2.375, A=0.654, alpha=0.429, B=523.425, C=2.025, beta=0.594, gamma=0.635
    ),
}
"""Coefficients of the multi-power law that Luo et al. publish beside their curves
(github.com/thu-yao-01-luo/MultiPowerLaw, commit 8da9f19)."""


class RateSchedule(NamedTuple):
    """Learning rates at some steps of a run.

    The rate is linear between two rows, and rises linearly from 0 at step 0 to the
    first row. A jump of the rate needs two rows at neighbouring steps.

    Attributes:
      step: steps, ascending and positive.
      rate: learning rates, positive.
    """

    step: Float[np.ndarray | Array, " rows"]
    rate: Float[np.ndarray | Array, " rows"]


class RateChanges(NamedTuple):
    """Changes of the learning rate, from warm-up on, and the areas under it.

    Attributes:
      area: area under the rate at each row.
      step: step of each row.
      drop: decrease of the rate by each change; negative in the warm-up.
      rate: rate at the middle of each change.
      change_area: area under the rate at the middle of each change.
      change_step: step at the middle of each change.
    """

    area: Float[np.ndarray | Array, "*curves rows"]
    step: Float[np.ndarray | Array, "*curves rows"]
    drop: Float[np.ndarray | Array, "*curves cells"]
    rate: Float[np.ndarray | Array, "*curves cells"]
    change_area: Float[np.ndarray | Array, "*curves cells"]
    change_step: Float[np.ndarray | Array, "*curves cells"]


type Number = float | Float[np.ndarray | Array, "..."]
type Response = Callable[
    [Mapping[str, Number], RateChanges], Float[np.ndarray | Array, "*curves rows cells"]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveLaw:
    """A law of whole training curves.

    Attributes:
      name: name on the command line.
      formula: formula in the coefficients' names.
      source: reference.
      shape: names of the coefficients of `response`, which models of all sizes share.
      response: the share `G` of each change of the rate that has taken effect at each
        row.
      fades: True if the second term has the factor `S^-delta`.
    """

    name: str
    formula: str
    source: str
    shape: tuple[str, ...]
    response: Response
    fades: bool = False

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the coefficients, those of one size first."""
        return ("L0", "A", "alpha", "B", *self.shape, *("delta",) * self.fades)


def rate_changes(schedule: RateSchedule) -> RateChanges:
    """Returns the changes of the rate between rows, and the areas.

    Like the other functions of this module it computes in NumPy for NumPy arrays, and
    in JAX for arrays of JAX, where it is differentiable.
    """
    step, rate = schedule
    xp = step.__array_namespace__()
    ramp = (xp.arange(WARMUP_CELLS, dtype=step.dtype) + 0.5) / WARMUP_CELLS
    warmup_area = step[0] * rate[0] / 2
    middle = (rate[1:] + rate[:-1]) / 2
    added = xp.cumsum(xp.diff(step) * middle)
    area = warmup_area + xp.concatenate([0 * added[:1], added])
    rises = -rate[0] / WARMUP_CELLS * xp.ones_like(ramp)
    return RateChanges(
        area,
        step,
        xp.concatenate([rises, -xp.diff(rate)]),
        xp.concatenate([ramp * rate[0], middle]),
        xp.concatenate([ramp**2 * warmup_area, (area[1:] + area[:-1]) / 2]),
        xp.concatenate([ramp * step[0], (step[1:] + step[:-1]) / 2]),
    )


def merge_changes(changes: RateChanges) -> RateChanges:
    """Merges neighbouring changes into at most `MAX_CELLS`; omits those of zero."""
    cells = np.stack(changes[2:])
    cells = cells[:, cells[0] != 0]
    size = -(-max(cells.shape[1] - WARMUP_CELLS, 1) // (MAX_CELLS - WARMUP_CELLS))
    starts = np.arange(WARMUP_CELLS, cells.shape[1], size)
    starts = np.concatenate([np.arange(WARMUP_CELLS), starts])
    drop = np.add.reduceat(cells[0], starts)
    counts = np.diff(np.append(starts, cells.shape[1]))
    merged = np.add.reduceat(cells[1:], starts, axis=1) / counts
    return RateChanges(*changes[:2], drop, *merged)


def annealing_term(
    law: CurveLaw, coefficients: Mapping[str, Number], changes: RateChanges
) -> Float[np.ndarray | Array, "*curves rows"]:
    """Returns `sum_k (eta_(k-1) - eta_k) G_k` at each row."""
    share = law.response(coefficients, changes)
    return (changes.drop[..., None, :] * share).sum(-1)


def combine_terms(
    coefficients: Mapping[str, Number],
    area: Float[np.ndarray | Array, "*n"],
    term: Float[np.ndarray | Array, "*n"],
) -> Float[np.ndarray | Array, "*n"]:
    """Returns `L0 + A area^-alpha - B area^-delta term`."""
    c = coefficients
    if "delta" in c:
        term = term * area ** -c["delta"]
    return c["L0"] + c["A"] * area ** -c["alpha"] - c["B"] * term


def curve_losses(
    law: CurveLaw, coefficients: Mapping[str, float], schedule: RateSchedule
) -> Float[np.ndarray, " rows"]:
    """Returns the loss at each row of a schedule, in nats per token.

    Args:
      law: a law of `CURVE_LAWS`.
      coefficients: a number for each of `law.coefficients`.
      schedule: steps and rates.

    Raises:
      ValueError: a coefficient is missing.
    """
    for name in law.coefficients:
        if name not in coefficients:
            raise ValueError(f"{law.name} needs a coefficient {name}")
    rows = (np.asarray(x, np.float64) for x in schedule)
    changes = merge_changes(rate_changes(RateSchedule(*rows)))
    term = annealing_term(law, coefficients, changes)
    return np.asarray(combine_terms(coefficients, changes.area, term))


def _multi_power(c: Mapping[str, Number], changes: RateChanges) -> np.ndarray | Array:
    gap = changes.area[..., :, None] - changes.change_area[..., None, :]
    scale = (c["C"] * changes.rate ** -c["gamma"])[..., None, :]
    return 1 - (1 + scale * _positive(gap)) ** -c["beta"]


def _annealed_area(c: Mapping[str, Number], changes: RateChanges) -> np.ndarray | Array:
    gap = changes.step[..., :, None] - changes.change_step[..., None, :]
    return 1 - c["lambda"] ** _positive(gap)


def _positive(x: np.ndarray | Array) -> np.ndarray | Array:
    """Returns x where it is positive, else 0."""
    return (x + abs(x)) / 2


_LUO = "Luo et al. 2025, arXiv:2503.12811"
MULTI_POWER = CurveLaw(
    name="multi-power",
    formula="L0 + A S^-alpha - B sum (eta_(k-1) - eta_k) "
    "(1 - (1 + C eta_k^-gamma S_k)^-beta)",
    source=_LUO,
    shape=("C", "beta", "gamma"),
    response=_multi_power,
)
FADING_MULTI_POWER = dataclasses.replace(
    MULTI_POWER,
    name="fading-multi-power",
    formula="L0 + A S^-alpha - B S^-delta sum (eta_(k-1) - eta_k) "
    "(1 - (1 + C eta_k^-gamma S_k)^-beta)",
    source=f"{_LUO}, with the factor S^-delta of this project",
    fades=True,
)
ANNEALED_AREA = CurveLaw(
    name="annealed-area",
    formula="L0 + A S^-alpha - B (1 - lambda) S2, "
    "S2 = sum_(i <= t) sum_(k <= i) (eta_(k-1) - eta_k) lambda^(i-k)",
    source="Tissue et al. 2024, arXiv:2408.11029, with lambda fitted",
    shape=("lambda",),
    response=_annealed_area,
)
CURVE_LAWS = {law.name: law for law in (FADING_MULTI_POWER, MULTI_POWER, ANNEALED_AREA)}
"""Laws of whole curves by name."""
