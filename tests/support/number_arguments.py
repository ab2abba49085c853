"""Bad values of the numeric parameters of public functions, found by annotations."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

import numpy as np

HUGE = 10**400
NO_NUMBERS = ("5", b"5", True, np.bool_(True), 1j, [5], math.nan, np.float32("nan"))
NO_RANGE = (math.inf, -math.inf, HUGE, -HUGE)
ODD_NUMBERS = (-1, -0.5, 0, 0.5, 2**63, 1e308, 1e-308)


class NumericFunction(NamedTuple):
    """A public function with numeric parameters.

    Attributes:
      name: its name, with that of its package.
      call: the function.
      parameters: names of its numeric parameters; True if None is allowed.
    """

    name: str
    call: Callable[..., Any]
    parameters: dict[str, bool]


def public_functions(root: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the functions that the packages in `root` export, and their names."""
    for module in pkgutil.iter_modules(root.__path__, f"{root.__name__}."):
        package = importlib.import_module(module.name) if module.ispkg else None
        for name in () if package is None else package.__all__:
            call = getattr(package, name)
            if inspect.isroutine(call) or hasattr(call, "__wrapped__"):
                yield f"{module.name}.{name}", call


def parameter_types(call: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Returns the members of the type of each parameter."""
    types_by_name = {}
    for parameter in inspect.signature(call).parameters.values():
        kind = getattr(parameter.annotation, "__value__", parameter.annotation)
        is_union = isinstance(kind, types.UnionType)
        types_by_name[parameter.name] = get_args(kind) if is_union else (kind,)
    return types_by_name


def numeric_functions(root: Any) -> Iterator[NumericFunction]:
    """Yields the functions with numbers that the packages in `root` export."""
    for name, call in public_functions(root):
        parameters = {
            parameter: types.NoneType in kinds
            for parameter, kinds in parameter_types(call).items()
            if {int, float} & {*kinds}
        }
        if parameters:
            yield NumericFunction(name, call, parameters)


def first_arguments(function: NumericFunction) -> dict[str, Any]:
    """Returns 1 for numbers, and None for other parameters, unless they have defaults.

    They suffice for a call that is refused because of a number.
    """
    return {
        name: 1 if name in function.parameters else None
        for name, parameter in inspect.signature(function.call).parameters.items()
        if parameter.default is parameter.empty
    }


def find_faults(
    function: NumericFunction, arguments: Mapping[str, Any], *, is_costly: bool = False
) -> list[str]:
    """Calls a function with every bad value of every number.

    Args:
      function: the function.
      arguments: arguments of a right call.
      is_costly: True if numbers that may be in the range are not tried.

    Returns:
      A line for each call that neither raises one line with name and value nor returns
      finite numbers of the types of the right call. Infinity is allowed where it is the
      default.
    """
    wanted = None if is_costly else function.call(**arguments)
    faults = []
    for name, is_optional in function.parameters.items():
        default = inspect.signature(function.call).parameters[name].default
        refused = [*NO_NUMBERS, *NO_RANGE, *(() if is_optional else (None,))]
        if default == math.inf:
            refused.remove(math.inf)
        for value in (*refused, *(() if is_costly else ODD_NUMBERS)):
            try:
                result = function.call(**{**arguments, name: value})
            except ValueError as error:  # of numbers in the range it may name the cause
                line = str(error)
                is_named = name in line or not any(value is x for x in refused)
                is_named &= "\n" not in line and len(line) < 300
                fault = "" if is_named else f"message {line!r}"
            except Exception as error:
                fault = repr(error)
            else:
                fault = _result_fault(result, wanted)
                if not fault and any(
                    value is refused_value for refused_value in refused
                ):
                    fault = "accepted"
            if fault:
                faults.append(f"{function.name}: {name}={value!r:.30}: {fault:.200}")
    return faults


def _result_fault(result: Any, wanted: Any) -> str:
    """Returns the reason why a result is no result; "" if it is one."""
    if wanted is not None and result is not None:
        if not isinstance(result, type(wanted)) and not isinstance(wanted, int | float):
            return f"a {type(result).__name__}"
    leaves = [*_leaves(result)]
    if any(np.iscomplexobj(leaf) for leaf in leaves):
        return "complex"
    if all(_is_finite(x) for x in _leaves(wanted)) and not all(map(_is_finite, leaves)):
        return "not finite"
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | float | complex | np.generic | np.ndarray):
        yield value


def _is_finite(value: Any) -> bool:
    if isinstance(value, int):
        return True
    return np.asarray(value).dtype.kind not in "fc" or bool(np.isfinite(value).all())
