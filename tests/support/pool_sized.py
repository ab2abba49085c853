"""How much of its arrays a program looks at: that must not grow with the pool."""

import math
from typing import Any

import jax
import jax.extend

AT_PLACES = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice")
"""What reads or writes some places of an array, and leaves the rest."""
FREE = ("reshape", "squeeze", "optimization_barrier")
"""What gives an array another shape, or an order in time, and moves nothing."""


def largest_look(f: Any, arguments: Any) -> int:
    """Finds the largest array of which an operation takes or makes every element.

    Loops are looked into. That writes at places are in place is for others to say.

    Args:
      f: a function of arrays.
      arguments: shapes of these.
    """
    largest = 0

    def look(jaxpr: Any) -> None:
        nonlocal largest
        for each in jaxpr.eqns:
            if each.primitive.name.startswith((*AT_PLACES, *FREE)):
                continue
            inner = list(jax.extend.core.jaxprs_in_params(each.params))
            for one in inner:
                look(getattr(one, "jaxpr", one))
            if not inner:
                arrays = (*each.invars, *each.outvars)
                largest = max(largest, *(math.prod(x.aval.shape) for x in arrays))

    look(jax.make_jaxpr(f)(*arguments).jaxpr)
    return largest
