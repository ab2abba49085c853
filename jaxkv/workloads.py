"""The requests that will come: when they arrive, how much they ask for."""

from typing import NamedTuple

from jaxtyping import Array, Int32


class Workload(NamedTuple):
    """Requests in order of arrival."""

    arrival: Int32[Array, "requests 2"]
    """Seconds and microseconds."""
    prompt: Int32[Array, " requests"]
    """Tokens of each prompt, at least 1."""
    output: Int32[Array, " requests"]
    """Tokens that each of its sequences draws, at least 1."""
    samples: Int32[Array, " requests"]
    """Sequences, at least 1."""
    clients: Int32[Array, ""]
    """Requests in the system at most: in a closed loop each of so many clients asks
    again as soon as it is answered. `scheduling.NO_LIMIT` for an open one."""
