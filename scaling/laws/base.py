"""A scaling law: formula, coefficients, and coordinates for fitting.

A law predicts one number from a few positive inputs, mostly a loss in nats per token.
Reports have its *coefficients*, in natural units. Fits use *coordinates*: the logarithm
of every coefficient that must be positive, and other coefficients unchanged. Because
inputs span decades, fits divide each by its geometric mean first; `shift` is the exact
effect of that on the coordinates.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

type Amount = int | float | np.number | Num[np.ndarray, "..."] | Num[Array, "..."]
"""Parameters, tokens or FLOPs: a number, or an array of them."""
AMOUNTS = "[1e-100, 1e100]"
AMOUNTS_FROM_0 = "[0, 1e100]"
"""Intervals of amounts whose products, ratios and powers are finite."""

type Coordinates = Float[Array, " k"]
"""Coordinates of a law, in order."""
type LogInputs = Float[Array, "inputs n"]
"""Logarithms of the inputs of all points."""
type LogTarget = Float[Array, " n"]
"""Logarithms of the target at all points."""
type Centre = Float[Array, " inputs"]
"""Logarithms of the units of the inputs."""
type LogLoss = Callable[[Coordinates, LogInputs], LogTarget]
type Linearise = Callable[[Coordinates, LogInputs], tuple[LogTarget, list[LogTarget]]]
type Coefficients = Mapping[str, Amount]
"""Coefficients by name, in natural units: numbers, or arrays of them."""


class Coordinate(NamedTuple):
    """Coordinate of one coefficient in a fit.

    Attributes:
      name: name of the coefficient.
      low: smallest value, a logarithm if `log`.
      high: largest value.
      starts: values from which fits start.
      log: True if the coordinate is the logarithm of the coefficient.
      relative: True if low, high and starts are relative to the logarithm of the
        target's typical value, so that they suit losses near 3 and rates near 0.001.
    """

    name: str
    low: float
    high: float
    starts: tuple[float, ...]
    log: bool = False
    relative: bool = False


def scale_coordinate(name: str, *starts: float) -> Coordinate:
    """Returns the size of a term: from a millionth of the target to above it."""
    return Coordinate(name, -14.0, 7.0, starts or (-1.2,), log=True, relative=True)


def exponent_coordinate(name: str, *starts: float) -> Coordinate:
    """Returns an exponent of decay, in (0, 2]."""
    return Coordinate(name, 1e-3, 2.0, starts or (0.1, 0.3, 0.7))


def real_coordinate(name: str, low: float, high: float, *starts: float) -> Coordinate:
    """Returns a coefficient of either sign."""
    return Coordinate(name, low, high, starts)


def positive_coordinate(
    name: str, low: float, high: float, *starts: float
) -> Coordinate:
    """Returns a positive coefficient, not relative to the target; log limits."""
    return Coordinate(name, low, high, starts, log=True)


class TwoPowers(NamedTuple):
    """A loss of the form `floor + (A / N^alpha + B / D^beta)^outer`."""

    A: Amount
    B: Amount
    alpha: Amount
    beta: Amount
    floor: Amount = 0.0
    outer: Amount = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """A law that can be evaluated and fitted.

    Attributes:
      name: name on the command line.
      formula: formula in the coefficients' names, for reports.
      inputs: names of the input columns, all positive.
      coordinates: one for each coefficient, in order.
      source: reference of the law.
      log_loss: (coordinates [k], logarithms of the inputs ["inputs n"]) -> logarithm
        of the target [n].
      shift: (coordinates, centre ["inputs"]) -> the coordinates c with
        `log_loss(c, logs - centre) == log_loss(coordinates, logs)`.
      target: name of the predicted column.
      linearise: `log_loss` with its derivatives, one [n] for each coordinate; None for
        automatic differentiation.
      two_powers: natural coefficients -> the sum of powers of parameters and tokens
        that determines the compute optimum, for laws that have one.
      floor: coefficient that the target approaches, for laws that have one.
      units: groups of inputs, by index, that are divided by one common mean before
        fitting; None for one group each; an input in no group is not divided.
      same_as: name of the law of the same curves, if this one differs from it by the
        names or units of its coefficients alone; `--law all` ranks only the other.
    """

    name: str
    formula: str
    inputs: tuple[str, ...]
    coordinates: tuple[Coordinate, ...]
    source: str
    log_loss: LogLoss
    shift: Callable[[Coordinates, Centre], Coordinates]
    target: str = "loss"
    linearise: Linearise | None = None
    two_powers: Callable[[Coefficients], TwoPowers] | None = None
    floor: str | None = None
    units: tuple[tuple[int, ...], ...] | None = None
    same_as: str = ""

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the coefficients, in order."""
        return tuple(coordinate.name for coordinate in self.coordinates)

    def predict(
        self,
        coefficients: Float[Array | np.ndarray, " k"],
        data: Mapping[str, Any],
    ) -> Float[Array, " n"]:
        """Computes the target from coefficients and columns in natural units.

        Differentiable, and in float64 under `jax.enable_x64(True)`.

        Args:
          coefficients: coefficients in the order of `self.coefficients`; those with
            logarithmic coordinates must be positive.
          data: a positive column for each of `self.inputs`.

        Raises:
          ValueError: a column is missing.
        """
        self.check_columns(data, self.inputs)
        x = jnp.asarray(coefficients)
        logs = [jnp.log(jnp.asarray(data[name], x.dtype)) for name in self.inputs]
        return jnp.exp(self.log_loss(self.encode(x), jnp.stack(logs)))

    def check_columns(self, data: Mapping[str, Any], names: Iterable[str]) -> None:
        """Checks that data has the columns that the law needs.

        Raises:
          ValueError: a column is missing; the message has the columns that exist.
        """
        for name in names:
            if name not in data:
                column_list = ", ".join(data) or "none"
                raise ValueError(
                    f"{self.name} needs a column {name}; there is {column_list}"
                )

    def encode(self, coefficients: Float[Array, " k"]) -> Float[Array, " k"]:
        """Turns coefficients into coordinates."""
        pairs = zip(self.coordinates, coefficients, strict=True)
        return jnp.stack([jnp.log(x) if c.log else x for c, x in pairs])

    def decode(self, coordinates: Float[Array, " k"]) -> Float[Array, " k"]:
        """Turns coordinates into coefficients."""
        pairs = zip(self.coordinates, coordinates, strict=True)
        return jnp.stack([jnp.exp(x) if c.log else x for c, x in pairs])

    def derivatives(
        self, coordinates: Float[Array, " k"], logs: Float[Array, "inputs n"]
    ) -> tuple[Float[Array, " n"], list[Float[Array, " n"]]]:
        """Computes the logarithm of the target and its derivative by coordinate."""
        if self.linearise is not None:
            return self.linearise(coordinates, logs)
        value, push = jax.linearize(lambda x: self.log_loss(x, logs), coordinates)
        rows = jax.vmap(push)(jnp.eye(len(self.coordinates), dtype=coordinates.dtype))
        return value, list(rows)

    def box(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the smallest and the largest coordinates.

        Args:
          level: logarithm of the target's typical value.
        """
        zero = np.array([level if c.relative else 0.0 for c in self.coordinates])
        low = np.array([c.low for c in self.coordinates])
        high = np.array([c.high for c in self.coordinates])
        return zero + low, zero + high

    def centre(
        self, logs: Float[np.ndarray, "inputs n"]
    ) -> Float[np.ndarray, " inputs"]:
        """Returns the logarithms of the units of the inputs in a fit."""
        groups = self.units
        if groups is None:
            groups = tuple((i,) for i in range(len(self.inputs)))
        centre = np.zeros(len(self.inputs))
        for group in groups:
            centre[[*group]] = logs[[*group]].mean()
        return centre

    def starts(self, level: float) -> Float[np.ndarray, "starts k"]:
        """Returns the starts of fits: all combinations of the coordinates' starts."""
        places = [
            [level * c.relative + start for start in c.starts] for c in self.coordinates
        ]
        return np.array(list(itertools.product(*places)))

    def over(self, *inputs: str) -> "Law":
        """Returns the same law with other input columns.

        Args:
          inputs: names, as many as the law's inputs.

        Raises:
          ValueError: the number of names is wrong.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(f"{self.name} takes {len(self.inputs)} columns: {inputs=}")
        return dataclasses.replace(self, inputs=inputs)
