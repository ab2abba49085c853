"""Numbers of a function's arguments, checked by their annotations."""

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable
from typing import get_args

from jaxkv.validation.values import (
    INT32,
    integer,
    integer_range,
    number,
)


def checks_numbers[**P, R](
    **bounds: int | tuple[int, int] | str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function to check its numbers by their annotations.

    As in `check_fields`, integers must be at least 1 and below 2**31, other numbers
    positive and finite, and None is accepted where the annotation includes it. Arrays
    are checked entry by entry where the annotation includes them. Tracers are accepted,
    so that `jit` and `vmap` apply as before.

    Args:
      **bounds: by parameter, the smallest allowed number where it is not the default,
        (smallest, exclusive upper bound) of an integer, or an interval of numbers such
        as "(0, 1]"; its ends are numbers, "inf" or "-inf".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        checks = [
            (index, name, check)
            for index, (name, parameter) in enumerate(parameters.items())
            if (check := _number_check(name, parameter.annotation, bounds.get(name)))
        ]
        if unknown := bounds.keys() - {name for _, name, _ in checks}:
            raise TypeError(f"{function} has no numbers {sorted(unknown)}")

        @functools.wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            for index, name, check in checks:
                if index < len(args):
                    check(args[index])
                elif name in keywords:
                    check(keywords[name])
            return function(*args, **keywords)

        return checked

    return decorate


def _number_check(
    name: str, annotation: object, bounds: int | tuple[int, int] | str | None
) -> Callable[[object], object] | None:
    """Returns the check of a parameter; None if its annotation has no number."""
    kind = getattr(annotation, "__value__", annotation)  # of a type alias
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if not {int, float} & {*kinds}:
        return None
    ending = " or None" if types.NoneType in kinds else ""
    has_arrays = any(hasattr(member_type, "array_type") for member_type in kinds)
    if float in kinds:
        low, high, hint = interval_ends(bounds)
        check = functools.partial(number, name, low=low, high=high, hint=hint + ending)
    else:
        low, below = bounds if isinstance(bounds, tuple) else (bounds, INT32)
        low = low if isinstance(low, int) else 1
        hint = f"{integer_range(low, below)},{ending}" if ending else ""
        check = functools.partial(integer, name, low=low, below=below, hint=hint)

    def check_value(value: object) -> None:
        if value is None and ending:
            return
        if type(value) not in (int, float):
            import jax.core
            import numpy as np

            if isinstance(value, jax.core.Tracer):
                return
            if has_arrays and isinstance(value, np.ndarray | jax.Array) and value.size:
                array = np.asarray(value)  # `np.min` of JAX's array is traced in `jit`
                if array.dtype.kind in "iuf":
                    check(np.min(array).item())
                    value = np.max(array).item()  # NaN if an entry is NaN
        check(value)

    return check_value


def interval_ends(
    bounds: int | tuple[int, int] | str | None,
) -> tuple[float, float, str]:
    """Returns the smallest and largest number of an interval, and its text."""
    if isinstance(bounds, str):
        low, high = map(float, bounds[1:-1].split(","))
        low = math.nextafter(low, math.inf) if bounds[0] == "(" else low
        high = math.nextafter(high, -math.inf) if bounds[-1] == ")" else high
        is_open = bounds[0] == "[" and bounds.endswith("inf]")
        return low, high, f"at least {low:g}" if is_open else f"in {bounds}"
    if isinstance(bounds, int):
        return float(bounds), sys.float_info.max, f"at least {bounds} and finite"
    return math.ulp(0.0), sys.float_info.max, "above 0 and finite"
