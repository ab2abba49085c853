"""Attributes of requests that a policy can order and preempt by."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxkv import validation

NO_DEADLINE = 2**30
"""A deadline, in ms, of a request that has none."""
NO_SESSION = -1

_FARTHEST_S = 1_000_000
"""Bound on times relative to the clock, in s, so that ms fit into an int32."""


type Values = Any
"""A whole number of one request, or an int32 column `[*n]` of several."""


class RequestAttributes(NamedTuple):
    """Attributes of a request, or columns of them.

    Times are relative: of a request to its arrival, of `Counts` to the clock. A new
    attribute is a field with a default, and a bound in `BOUNDS`.
    """

    arrival_ms: Values = 0
    """Arrival; below 0 once the request waits."""
    priority: Values = 0
    """Smaller values are more urgent, as in vLLM; in [-1000, 1000]."""
    deadline_ms: Values = NO_DEADLINE
    """Time by which the last token is wanted, at least 0; `NO_DEADLINE` for none."""
    session: Values = NO_SESSION
    """User or conversation that shares are counted for, from 0; `NO_SESSION`: none."""
    predicted_length: Values = 0
    """Tokens of prompt and answer at which a sequence is expected to end. 0 of a
    request is unknown; `Counts` have the limit of the sequence then."""


BOUNDS: Any = RequestAttributes(
    arrival_ms=(0, 0),
    priority=(-1000, 1000),
    deadline_ms=(0, NO_DEADLINE),
    session=(NO_SESSION, 2**31 - 1),
    predicted_length=(0, 2**31 - 1),
)
"""Smallest and largest value of each attribute of a request."""

REQUEST_FIELDS = tuple(
    name for name in RequestAttributes._fields if len(set(getattr(BOUNDS, name))) > 1
)
"""Attributes that a request can set; the engine sets those with a single value."""


def checked(attributes: object) -> RequestAttributes:
    """Returns attributes of one request, or the defaults for None.

    Raises:
      ValueError: a value is not a whole number in its range.
    """
    if attributes is None:
        return RequestAttributes()
    if not isinstance(attributes, RequestAttributes):
        kinds = (RequestAttributes, type(None))
        return validation.instance("attributes", attributes, *kinds)
    return from_fields(attributes._asdict(), "attributes.")


def from_fields(fields: Mapping[str, Any], prefix: str = "") -> RequestAttributes:
    """Returns attributes of one request; those that are absent have their default.

    Args:
      fields: values by the name of the attribute.
      prefix: precedes the name in an error message.

    Raises:
      ValueError: a value is not a whole number in its range.
    """
    found = {}
    for name, value in fields.items():
        low, high = getattr(BOUNDS, name)
        found[name] = validation.integer(
            f"{prefix}{name}",
            value,
            low=low,
            below=high + 1,
            hint=f"a whole number in [{low}, {high}]",
        )
    return RequestAttributes(**found)


def attribute_columns(rows: Sequence[RequestAttributes]) -> RequestAttributes:
    """Returns one NumPy column for each attribute."""
    table = np.array(rows, np.int32).reshape(-1, len(RequestAttributes._fields))
    return RequestAttributes(*table.T)


def blank(num: int) -> RequestAttributes:
    """Returns NumPy columns of `num` requests with default attributes."""
    return attribute_columns([RequestAttributes()] * num)


def relative(
    attributes: RequestAttributes,
    arrival: Int32[Array, "*n 2"],
    limit: Int32[Array, "*n"],
    clock: Int32[Array, " 2"],
) -> RequestAttributes:
    """Returns attributes as `Counts` has them: times relative to the clock, in ms.

    Args:
      attributes: columns, or the numbers that all requests have.
      arrival: seconds and microseconds.
      limit: tokens at which a sequence ends at the latest.
      clock: seconds and microseconds.
    """
    a = RequestAttributes(
        *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), limit.shape) for x in attributes)
    )
    seconds = jnp.clip(arrival[..., 0] - clock[0], -_FARTHEST_S, _FARTHEST_S)
    arrival_ms = seconds * 1000 + (arrival[..., 1] - clock[1]) // 1000
    has_deadline = a.deadline_ms < NO_DEADLINE
    predicted = jnp.minimum(a.predicted_length, limit)
    return a._replace(
        arrival_ms=arrival_ms,
        deadline_ms=jnp.where(has_deadline, arrival_ms + a.deadline_ms, NO_DEADLINE),
        predicted_length=jnp.where(predicted > 0, predicted, limit),
    )
