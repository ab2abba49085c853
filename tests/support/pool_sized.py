"""Size of the arrays that a program reads, which must not grow with the pool."""

import math
from typing import Any

import jax
import jax.extend

AT_PLACES = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice")
"""Primitives that read or write only some places of an array."""
FREE = ("reshape", "squeeze", "optimization_barrier")
"""Primitives that move no data."""


def largest_look(f: Any, arguments: Any) -> int:
    """Returns the size of the largest array that an operation reads or makes whole.

    The bodies of loops are included. Whether writes are in place is not checked.

    Args:
      f: a function of arrays.
      arguments: shapes of its arguments.
    """
    largest = 0

    def look(jaxpr: Any) -> None:
        nonlocal largest
        for equation in jaxpr.eqns:
            if equation.primitive.name.startswith((*AT_PLACES, *FREE)):
                continue
            inner = list(jax.extend.core.jaxprs_in_params(equation.params))
            for one in inner:
                look(getattr(one, "jaxpr", one))
            if not inner:
                arrays = (*equation.invars, *equation.outvars)
                largest = max(largest, *(math.prod(x.aval.shape) for x in arrays))

    look(jax.make_jaxpr(f)(*arguments).jaxpr)
    return largest
