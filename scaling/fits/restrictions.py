"""Fixed and bounded coefficients.

Restrictions apply to coefficients in natural units, while fitting uses centred
coordinates. Exponents and floors are equal in both. A size is not: its coordinate
depends on the exponents (`Law.shift`), so a law with a restricted size is fitted with
that coordinate in natural units.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import validation
from scaling import laws
from scaling.laws import Law

Bounds = Mapping[str, tuple[float, float]]

_WIDE = 700.0
"""End of a side without bound, as a logarithm or as a number."""


@dataclasses.dataclass(frozen=True)
class Restrictions:
    """Fixed and bounded coefficients, by name, in natural units.

    Attributes:
      fixed: given values; they count as known in intervals and degrees of freedom.
      bounds: smallest and largest values; minus infinity or 0, and infinity, mean no
        bound.
    """

    fixed: Mapping[str, float] = MappingProxyType({})
    bounds: Bounds = MappingProxyType({})

    def __post_init__(self) -> None:
        """Validates the fields, and copies them."""
        fixed = dict(validation.instance("fixed", self.fixed, Mapping))
        bounds = dict(validation.instance("bounds", self.bounds, Mapping))
        for name, (low, high) in bounds.items():
            message = f"{name} in [{low:g}, {high:g}]"
            if name in fixed:
                raise ValueError(f"{message}: it is fixed")
            if not low < high:
                raise ValueError(f"{message}: the first must be below the second")
            bounds[name] = (low, high)
        object.__setattr__(self, "fixed", MappingProxyType(fixed))
        object.__setattr__(self, "bounds", MappingProxyType(bounds))


UNRESTRICTED = Restrictions()


def coordinate_limits(law: Law, restrictions: Restrictions) -> Bounds:
    """Turns restrictions into limits of coordinates.

    Args:
      law: the law.
      restrictions: fixed and bounded coefficients.

    Returns:
      The limits by name, logarithms for logarithmic coordinates; equal for a fixed
      coefficient.

    Raises:
      ValueError: a coefficient does not exist, all are fixed, or a value is outside the
        law's range.
    """
    limits = {}
    for name, value in restrictions.fixed.items():
        _check(law, name, (value, value), f"{name}={value:g}")
        limits[name] = (value, value)
    for name, (low, high) in restrictions.bounds.items():
        _check(law, name, (low, high), f"{name} in [{low:g}, {high:g}]")
        limits[name] = (low, high)
    if {*restrictions.fixed} == {*law.coefficients}:
        raise ValueError(f"{law.name}: all coefficients are fixed: nothing to fit")
    logged = {c.name for c in law.coordinates if c.log}
    return {
        name: (_log(ends[0]), _log(ends[1])) if name in logged else ends
        for name, ends in limits.items()
    }


def _check(law: Law, name: str, ends: tuple[float, float], message: str) -> None:
    """Checks the name and the values of a restriction."""
    coords = {coordinate.name: coordinate for coordinate in law.coordinates}
    if name not in coords:
        raise ValueError(
            f"{message}: {law.name} has no such coefficient; it has {', '.join(coords)}"
        )
    finite_ends = (
        [x for x in ends if not math.isinf(x)] if ends[0] != ends[1] else [*ends]
    )
    if not all(map(math.isfinite, finite_ends)):
        raise ValueError(f"{message}: must be finite")
    coordinate = coords[name]
    is_fixed = ends[0] == ends[1]
    if coordinate.log:
        if min(finite_ends, default=1) < 0 or (is_fixed and ends[0] == 0):
            raise ValueError(f"{message}: must be above 0")
    elif not all(coordinate.low <= x <= coordinate.high for x in finite_ends):
        raise ValueError(
            f"{message}: must be in [{coordinate.low:g}, {coordinate.high:g}]"
        )


def refuse_high_floor(
    law: Law, limits: Bounds, target: Float[np.ndarray, " n"]
) -> None:
    """Checks that the floor may be below some of the data.

    Args:
      law: the law.
      limits: limits of its coordinates, as from `coordinate_limits`.
      target: log targets.

    Raises:
      ValueError: no value of the target is above the floor.
    """
    log_floor = limits.get(law.floor or "", (-math.inf, math.inf))[0]
    if log_floor >= target.max():
        raise ValueError(
            f"{law.floor}={math.exp(log_floor):g} must be in (0, "
            f"{math.exp(target.max()):.6g}): it is above every {law.target}"
        )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def coordinate_box(
    law: Law, level: float, limits: Bounds
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Returns the smallest and the largest coordinates within limits.

    Args:
      law: the law, as from `restrict_law`.
      level: logarithm of the target's typical value.
      limits: limits of some coordinates.
    """
    box_low, box_high = law.box(level)
    for name, (low, high) in limits.items():
        place = law.coefficients.index(name)
        # An open side is the law's own, if the other side allows it.
        bottom = min(box_low[place], high - 1) if math.isinf(low) else low
        top = max(box_high[place], bottom + 1) if math.isinf(high) else high
        box_low[place] = bottom
        box_high[place] = top
    return box_low, box_high


def restrict_law(law: Law, limits: Bounds, centre: Float[np.ndarray, " inputs"]) -> Law:
    """Returns the law to fit: the same one, unless a size is restricted.

    Args:
      law: the law.
      limits: limits of its coordinates.
      centre: logarithms of the units of its inputs.

    Returns:
      The law, or one of the same coefficients whose restricted sizes are coordinates in
      natural units; its `Law.shift` maps its coordinates to natural ones.
    """
    if not limits:
        return law
    names = law.coefficients
    places = tuple(place for place in _moved(law, centre) if names[place] in {*limits})
    return _with_natural(law, places, tuple(map(float, centre))) if places else law


def _moved(law: Law, centre: Float[np.ndarray, " inputs"]) -> list[int]:
    """Returns the coordinates that centring changes."""
    rng = np.random.default_rng(0)  # random values, so that no shift cancels by chance
    natural = np.exp(rng.uniform(0.1, 0.5, (1, len(law.coefficients))))
    moved = laws.coordinates(law, natural, centre + rng.uniform(1, 2))
    logged = np.array([coordinate.log for coordinate in law.coordinates])
    before = np.where(logged, np.log(natural), natural)
    return [*map(int, np.flatnonzero(~np.isclose(moved, before)[0]))]


@functools.lru_cache(maxsize=16)
def _with_natural(law: Law, places: tuple[int, ...], centre: tuple[float, ...]) -> Law:
    """Returns the law with the coordinates at some indices in natural units."""

    def centred(x: Float[Array, " k"]) -> Float[Array, " k"]:
        # Each coordinate is itself plus a function of other coordinates, and these
        # chains are no longer than the number of coordinates.
        solution = x
        for _ in places:
            natural = law.shift(solution, -jnp.asarray(centre))
            for i in places:
                solution = solution.at[i].add(x[i] - natural[i])
        return solution

    def shift(x: Float[Array, " k"], by: Float[Array, " inputs"]) -> Float[Array, " k"]:
        return law.shift(centred(x), by)

    coordinates = [*law.coordinates]
    for i in places:
        coordinates[i] = coordinates[i]._replace(low=-_WIDE, high=_WIDE, relative=False)
    return dataclasses.replace(
        law,
        coordinates=tuple(coordinates),
        log_loss=lambda x, logs: law.log_loss(centred(x), logs),
        shift=shift,
        linearise=None,
    )


def to_restricted(
    law: Law,
    restricted: Law,
    coordinates: Float[np.ndarray, "problems k"],
    centre: Float[np.ndarray, " inputs"],
) -> Float[np.ndarray, "problems k"]:
    """Turns coordinates of a law into those of its restricted form."""
    if restricted is law:
        return coordinates
    natural = laws.coefficients(law, coordinates, centre)
    new_coordinates = coordinates.copy()
    pairs = zip(law.coordinates, restricted.coordinates, strict=True)
    for i, (before, now) in enumerate(pairs):
        if before != now:
            new_coordinates[:, i] = np.log(natural[:, i]) if now.log else natural[:, i]
    return new_coordinates


def from_restricted(
    law: Law,
    restricted: Law,
    coordinates: Float[np.ndarray, "problems k"],
    centre: Float[np.ndarray, " inputs"],
) -> Float[np.ndarray, "problems k"]:
    """Turns coordinates of a restricted law into those of the original law."""
    if restricted is law:
        return coordinates
    natural = laws.coefficients(restricted, coordinates, centre)
    return laws.coordinates(law, natural, centre)
