"""Request attributes by which a policy can order and preempt requests."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxkv import validation

NO_DEADLINE = 2**30
"""Deadline, in ms, of a request without one."""
NO_SESSION = -1
"""Session of a request without one."""

_FARTHEST_S = 1_000_000
"""Largest time relative to the clock, in s, so that ms fit into an int32."""


type Values = Any
"""An integer of one request, or an int32 column `[*n]` of several."""


class RequestAttributes(NamedTuple):
    """Attributes of a request, or columns of the attributes of several requests.

    Times of a request are relative to its arrival; in `Counts` they are relative to the
    clock. A new attribute is a field with a default, and a range in `ATTRIBUTE_RANGES`.
    """

    arrival_ms: Values = 0
    """Arrival time in ms; negative once the request has arrived."""
    priority: Values = 0
    """Priority, in [-1000, 1000]; smaller values are more urgent, as in vLLM."""
    deadline_ms: Values = NO_DEADLINE
    """Deadline of the last token in ms, at least 0; `NO_DEADLINE` for none."""
    session: Values = NO_SESSION
    """User or conversation for fair sharing, at least 0; `NO_SESSION` for none."""
    predicted_length: Values = 0
    """Predicted length of a sequence, prompt plus answer, in tokens. 0 means unknown;
    `Counts` then have the limit of the sequence."""


ATTRIBUTE_RANGES: Any = RequestAttributes(
    arrival_ms=(0, 0),
    priority=(-1000, 1000),
    deadline_ms=(0, NO_DEADLINE),
    session=(NO_SESSION, 2**31 - 1),
    predicted_length=(0, 2**31 - 1),
)
"""Smallest and largest value of each attribute of a request."""

REQUEST_FIELDS = tuple(
    name
    for name in RequestAttributes._fields
    if len(set(getattr(ATTRIBUTE_RANGES, name))) > 1
)
"""Attributes that a request can set; the engine sets those with a single value."""


def check_attributes(attributes: object) -> RequestAttributes:
    """Validates the attributes of one request; None means the defaults.

    Raises:
      ValueError: a value is not a whole number in its range.
    """
    kinds = (RequestAttributes, type(None))
    checked = validation.instance("attributes", attributes, *kinds)
    if checked is None:
        return RequestAttributes()
    return from_fields(checked._asdict(), "attributes.")


def from_fields(fields: Mapping[str, object], prefix: str = "") -> RequestAttributes:
    """Returns attributes of one request; those that are absent have their default.

    Args:
      fields: values by the name of the attribute.
      prefix: precedes the name in an error message.

    Raises:
      ValueError: a value is not a whole number in its range.
    """
    attributes = {}
    for name, value in fields.items():
        low, high = getattr(ATTRIBUTE_RANGES, name)
        attributes[name] = validation.integer(
            f"{prefix}{name}",
            value,
            low=low,
            below=high + 1,
            hint=f"a whole number in [{low}, {high}]",
        )
    return RequestAttributes(**attributes)


def attribute_columns(rows: Sequence[RequestAttributes]) -> RequestAttributes:
    """Returns a NumPy column of each attribute."""
    table = np.array(rows, np.int32).reshape(-1, len(RequestAttributes._fields))
    return RequestAttributes(*table.T)


def relative_to_clock(
    attributes: RequestAttributes,
    arrival: Int32[Array, "*n 2"],
    limit: Int32[Array, "*n"],
    clock: Int32[Array, " 2"],
) -> RequestAttributes:
    """Returns attributes for `Counts`, with times in ms relative to the clock.

    Args:
      attributes: columns, or scalars that apply to all requests.
      arrival: arrival times: seconds and microseconds.
      limit: largest lengths, in tokens.
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
