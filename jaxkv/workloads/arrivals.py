"""The requests that will come: when they arrive, how much they ask for.

Workloads are made on the host, by NumPy, from an explicit generator of random numbers,
and are arrays from then on.
"""

import math
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Num

from jaxkv import clock, validation
from jaxkv.scheduling import interface
from jaxkv.scheduling.attributes import BOUNDS, RequestAttributes
from jaxkv.workloads import lengths


class Workload(NamedTuple):
    """Requests in order of arrival."""

    arrival: Int32[Array, "requests 2"]
    """Seconds and microseconds."""
    prompt: Int32[Array, " requests"]
    """Tokens of each prompt, at least 1."""
    output: Int32[Array, " requests"]
    """Tokens that each of its sequences draws, at least 1."""
    samples: Int32[Array, " requests"]
    """Sequences, at least 1; 0 for a request that is none."""
    clients: Int32[Array, ""]
    """Requests in the system at most: in a closed loop each of so many clients asks
    again as soon as it is answered. `interface.NO_LIMIT` for an open one."""
    limit: Int32[Array, " requests"] | None = None
    """Tokens of prompt and answer at which a sequence would be ended, as `max_tokens`
    does, which a policy may know; None means the longest sequence. What a policy must
    not know is `output`."""
    attributes: RequestAttributes | None = None
    """What policies see of the requests; None means the defaults."""


def make(
    arrival_s: Num[np.ndarray, " requests"],
    prompt: Int[np.ndarray, " requests"],
    output: Int[np.ndarray, " requests"],
    *,
    samples: int | Int[np.ndarray, " requests"] = 1,
    clients: int | None = None,
    limit: Int[np.ndarray, " requests"] | None = None,
    attributes: Any = None,
) -> Workload:
    """Makes a workload of numbers that are known.

    Args:
      arrival_s: when each request arrives, in seconds from 0, in order.
      prompt: tokens of each prompt, from 1.
      output: tokens that each of its sequences draws, from 1.
      samples: sequences of each request, from 1.
      clients: requests in the system at most, from 1; None for an open loop.
      limit: tokens of prompt and answer at which policies expect a sequence to end at
        the latest, at least those that it has; None means the longest sequence.
      attributes: `RequestAttributes` of columns, or of numbers for all requests.

    Raises:
      ValueError: something is out of its range, or no whole number where it should
        be; the line names the first such request, or the column.
    """
    columns = {
        "prompt": _numbers("prompt", prompt, "iu"),
        "output": _numbers("output", output, "iu"),
        "samples": _numbers("samples", samples, "iu"),
    }
    arrival_s = _numbers("arrival_s", arrival_s, "iuf").astype(np.float64)
    num = arrival_s.size
    if not columns["samples"].shape:
        columns["samples"] = np.full(num, samples)
    if not num or any(x.shape != (num,) for x in columns.values()):
        shapes = [x.shape for x in (arrival_s, *columns.values())]
        raise ValueError(f"a workload needs columns of one length, not {shapes}")
    in_range = (arrival_s >= 0) & (arrival_s < 2**31 - 1)
    _refuse(~in_range, arrival_s, "arrives at {} s, not in [0, 2^31 - 1)")
    late = np.diff(arrival_s, prepend=0.0) < 0
    _refuse(late, arrival_s, "arrives at {} s, before the one ahead of it")
    for name, column in columns.items():
        wrong = (column < 1) | (column > lengths.LONGEST)
        _refuse(wrong, column, f"has {name}={{}}, not in [1, {lengths.LONGEST}]")
    if clients is not None:
        hint = "at least 1, or None for an open loop"
        clients = validation.integer("clients", clients, low=1, hint=hint)
    limits = None
    if limit is not None:
        limit = np.broadcast_to(_numbers("limit", limit, "iu"), num)
        short = limit < columns["prompt"] + columns["output"]
        _refuse(short, limit, "has limit={}, below its prompt and output")
        limits = jnp.asarray(limit, jnp.int32)
    if attributes is not None:
        for name, (low, high) in BOUNDS._asdict().items():
            given = _numbers(f"attributes.{name}", getattr(attributes, name), "iu")
            given = np.broadcast_to(given, num)
            wrong = (given < low) | (given > high)
            _refuse(wrong, given, f"has attributes.{name}={{}}, not in [{low}, {high}]")
            attributes = attributes._replace(**{name: jnp.asarray(given, jnp.int32)})
    return Workload(
        arrival=jnp.asarray(clock.from_seconds(arrival_s)),
        **{name: jnp.asarray(x, jnp.int32) for name, x in columns.items()},
        clients=jnp.asarray(clients or interface.NO_LIMIT, jnp.int32),
        limit=limits,
        attributes=attributes,
    )


def poisson(
    rng: np.random.Generator, *, rate: float, num: int
) -> Float[np.ndarray, " num"]:
    """Draws times at which independent users ask: gaps are exponential.

    Arguments, result and errors are those of `bursty`.
    """
    return bursty(rng, rate=rate, num=num, cv=1.0)


def bursty(
    rng: np.random.Generator, *, rate: float, num: int, cv: float
) -> Float[np.ndarray, " num"]:
    """Draws times of which the gaps follow a Gamma law.

    Args:
      rng: where the draws come from.
      rate: requests per second on average, above 0.
      num: requests, at least 1.
      cv: coefficient of variation of the gaps, at least 0: 0 is a steady beat, 1 is
        Poisson's, more comes in bursts.

    Returns:
      Seconds from 0 of each arrival, in order.

    Raises:
      ValueError: a parameter is out of its range.

    Source: Li et al. 2023 (AlpaServe), arXiv:2302.11665, who vary rate and cv so.
    """
    largest, above_0 = sys.float_info.max, math.ulp(0.0)
    rate = validation.number(
        "rate",
        rate,
        low=above_0,
        high=largest,
        hint="above 0 requests per second",
    )
    num = validation.integer("num", num, low=1)
    cv = validation.number("cv", cv, low=0.0, high=largest, hint="at least 0")
    if cv == 0:
        return np.arange(1, num + 1) / rate
    return np.cumsum(rng.gamma(cv**-2, cv**2 / rate, num))


def open_loop(
    rng: np.random.Generator,
    law: lengths.Pair,
    *,
    rate: float,
    num: int,
    cv: float = 1.0,
    samples: int = 1,
) -> Workload:
    """Draws requests of users who do not wait for each other.

    Lengths are drawn before arrivals and do not depend on `rate` and `cv`: members of a
    sweep that start from equal generators serve the same requests, faster.

    Args:
      rng: where the draws come from.
      law: how long prompts and outputs are.
      rate: requests per second on average, above 0.
      num: requests, at least 1.
      cv: as for `bursty`; 1 is Poisson's.
      samples: sequences of each request.

    Raises:
      ValueError: a parameter is out of its range.
    """
    tokens = law.draw(rng, num)
    arrival_s = bursty(rng, rate=rate, num=num, cv=cv)
    return make(arrival_s, tokens.prompt, tokens.output, samples=samples)


def closed_loop(
    rng: np.random.Generator,
    law: lengths.Pair,
    *,
    clients: int,
    num: int,
    samples: int = 1,
) -> Workload:
    """Draws requests of so many clients, of whom each asks again once it is answered.

    Args:
      rng: where the draws come from.
      law: how long prompts and outputs are.
      clients: how many, at least 1.
      num: requests of all of them, at least 1.
      samples: sequences of each request.

    Raises:
      ValueError: a parameter is out of its range.
    """
    tokens = law.draw(rng, num)
    return make(
        np.zeros(num),
        tokens.prompt,
        tokens.output,
        samples=samples,
        clients=clients,
    )


def _numbers(name: str, column: Any, kinds: str) -> np.ndarray:
    """Refuses a column of another kind of numbers, or of none."""
    column = np.asarray(column)
    if column.dtype.kind not in kinds:
        whole = "" if "f" in kinds else "whole "
        raise ValueError(f"{name} must be {whole}numbers, not {column.dtype}")
    return column


def _refuse(wrong: np.ndarray, column: np.ndarray, what: str) -> None:
    """Names the first request that is wrong, if one is."""
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(f"request {first}: {what.format(column[first])}")
