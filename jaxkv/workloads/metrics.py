"""What a served workload comes to: latencies, goodput, gaps between tokens.

Plain NumPy on the host. Arrays may have any leading axes, of members of a simulation
for one; requests are the last. Times that never came are NaN. A mean or a percentile
over a request that was not served is NaN, with a warning that counts such requests:
without them a policy that serves the fast ones alone would look fast. To leave requests
out is the caller's decision, by `is_asked`, and `share_served` is the number beside it.
"""

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

type Seconds = Float[np.ndarray, "*members requests"]
type Tokens = Int[np.ndarray, "*#members requests"]


def share_served(finish_s: Seconds, is_asked: np.ndarray | None = None) -> np.ndarray:
    """The share of requests that were answered.

    Args:
      finish_s: when each was, NaN if it was not.
      is_asked: the requests that count; all by default.
    """
    asked = np.ones(finish_s.shape, bool) if is_asked is None else is_asked
    num = np.maximum(asked.sum(-1), 1)
    return np.asarray((np.isfinite(finish_s) & asked).sum(-1) / num)


def normalised_latency_s(
    arrival_s: Seconds, finish_s: Seconds, output: Tokens
) -> Float[np.ndarray, "*members"]:
    """Mean over requests of the time from arrival to answer, by its tokens.

    Two requests that come at 0 s: one gets 10 tokens by 1 s, the other 100 by 2 s:
    (0.1 + 0.02) / 2 = 0.06 s a token.

    Args:
      arrival_s: when each came; NaN leaves out a request that never did.
      finish_s: when its last sequence ended.
      output: tokens of each of its sequences.

    Returns:
      The mean; NaN, with a warning, if a request that came was not answered.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1; Yu et al. 2022 (Orca).
    """
    is_asked = np.isfinite(arrival_s)
    each = (finish_s - arrival_s) / output
    _warn_of_missing("normalised latency", each, is_asked)
    num, total = is_asked.sum(-1), np.where(is_asked, each, 0.0).sum(-1)
    return np.asarray(np.where(num > 0, total / np.maximum(num, 1), np.nan))


def time_to_first_token_s(arrival_s: Seconds, first_s: Seconds) -> Seconds:
    """TTFT of each request: from its arrival to its first token.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 2.
    """
    return first_s - arrival_s


def time_per_output_token_s(
    first_s: Seconds, finish_s: Seconds, output: Tokens
) -> Seconds:
    """TPOT of each request: the mean gap between its tokens; 0 for a single token.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 2.
    """
    gaps = np.maximum(output - 1, 1)
    return np.where(output > 1, (finish_s - first_s) / gaps, 0.0 * finish_s)


def percentile(
    values: Float[np.ndarray, "*members requests"],
    percent: int | float,
    *,
    is_asked: Bool[np.ndarray, "*members requests"] | None = None,
) -> Float[np.ndarray, "*members"]:
    """The percentile over requests, interpolated linearly between two values.

    Args:
      values: one for each request; NaN where there is none.
      percent: in [0, 100].
      is_asked: the requests that count; all by default.

    Returns:
      The percentile; NaN, with a warning, if a request that counts has no value, and
      where none counts.

    Raises:
      ValueError: `percent` is out of range.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent=} must be in [0, 100]")
    asked = np.ones(values.shape, bool) if is_asked is None else is_asked
    _warn_of_missing(f"percentile {percent}", values, asked)
    rows = values.reshape(-1, values.shape[-1])
    found = [
        row[mask] for row, mask in zip(rows, asked.reshape(rows.shape), strict=True)
    ]
    each = [np.percentile(x, percent) if x.size else np.nan for x in found]
    return np.array(each).reshape(values.shape[:-1])


class Objectives(NamedTuple):
    """What users are promised."""

    first_s: float
    """Time to the first token, at most."""
    per_token_s: float
    """Mean gap between tokens, at most."""


def attainment(
    arrival_s: Seconds,
    first_s: Seconds,
    finish_s: Seconds,
    output: Tokens,
    objectives: Objectives,
) -> Float[np.ndarray, "*members"]:
    """The share of requests that met both objectives; who was not answered did not.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 2.
    """
    first = time_to_first_token_s(arrival_s, first_s)
    gap = time_per_output_token_s(first_s, finish_s, output)
    met = (first <= objectives.first_s) & (gap <= objectives.per_token_s)
    num = np.maximum(np.isfinite(arrival_s).sum(-1), 1)
    return np.asarray(met.sum(-1) / num)


def goodput(
    rates: Float[np.ndarray, " rates"],
    attained: Float[np.ndarray, " rates"],
    *,
    share: float = 0.9,
) -> float:
    """The highest rate at which a share of all requests meets the objectives.

    Between two rates attainment is taken to be linear. Rates of 1, 2, 3 with 1.0, 0.95,
    0.85 attained: 2.5 at a share of 0.9.

    Args:
      rates: requests per second, ascending.
      attained: see `attainment`.
      share: to be met, in (0, 1].

    Returns:
      The rate: of the first crossing from above; 0 if it is met at none, the highest
      of `rates` if it is met at all.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 1.
    """
    return _crossing(rates, attained, share)


def capacity(
    rates: Float[np.ndarray, " rates"],
    latency_s: Float[np.ndarray, " rates"],
    *,
    at_most_s: float,
) -> float:
    """The rate at which latency crosses a bound, interpolated; as `goodput` does."""
    return _crossing(rates, -latency_s, -at_most_s)


def _crossing(rates: np.ndarray, values: np.ndarray, least: float) -> float:
    """The rate at which values fall below `least` for the first time."""
    if (np.diff(rates) <= 0).any():
        raise ValueError("rates must ascend")
    below = np.flatnonzero(~(values >= least))
    if not below.size:
        return float(rates[-1])
    k = int(below[0])
    if k == 0:
        return 0.0
    high, low = values[k - 1], values[k]
    share = (high - least) / (high - low) if np.isfinite(low) else 0.0
    return float(rates[k - 1] + share * (rates[k] - rates[k - 1]))


class Gaps(NamedTuple):
    """Times between tokens of a sequence that follow each other."""

    sequence: Int[np.ndarray, " gaps"]
    seconds: Float[np.ndarray, " gaps"]


def gaps_between_tokens(
    drew: Int[np.ndarray, "steps slots"],
    end_s: Float[np.ndarray, " steps"],
    num_drawn: Int[np.ndarray, "steps slots"] | None = None,
) -> Gaps:
    """TBT: the time from each token of a sequence to its next one, stalls included.

    Args:
      drew: sequences that drew tokens in each step, -1 where nobody did.
      end_s: when each step ended.
      num_drawn: how many each drew; None means one. Those of one step come together,
        with no time between them.

    Source: Agrawal et al. 2024 (Sarathi-Serve), arXiv:2403.02310, section 2.
    """
    step, slot = np.nonzero(drew >= 0)
    if num_drawn is not None:
        times = num_drawn[step, slot]
        step, slot = np.repeat(step, times), np.repeat(slot, times)
    sequence = drew[step, slot]
    order = np.argsort(sequence, kind="stable")
    sequence, time = sequence[order], end_s[step[order]]
    same = sequence[1:] == sequence[:-1]
    return Gaps(sequence[1:][same], np.diff(time)[same])


def saving(
    saved_pages: Float[np.ndarray, "*members"],
    used_pages: Float[np.ndarray, "*members"],
) -> Float[np.ndarray, "*members"]:
    """The share of pages that sharing saves: of those in use if nobody shared.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 6.3 (figure 15).
    """
    total = np.maximum(saved_pages + used_pages, np.finfo(float).tiny)
    return np.asarray(saved_pages / total)


def waste(
    recomputed: Int[np.ndarray, "*members"], fed: Int[np.ndarray, "*members"]
) -> Float[np.ndarray, "*members"]:
    """The share of tokens that were fed because they had been lost."""
    return np.asarray(recomputed / np.maximum(fed, 1))


def in_turn(
    arrival_s: Float[np.ndarray, " n"], service_s: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """When each is done, if one after the other is served: Lindley's recursion."""
    # done[i] = max(arrival[i], done[i - 1]) + service[i], unrolled.
    total = np.cumsum(service_s)
    return total + np.maximum.accumulate(arrival_s - (total - service_s))


def waiting_s(rate: int | float, service_s: int | float) -> float:
    """Mean wait before service of an M/D/1 queue, in seconds.

    Poisson arrivals and a constant service: R D^2 / (2 (1 - R D)). At 2 requests per
    second of 0.3 s each: 2 * 0.09 / (2 * 0.4) = 0.225 s.

    Args:
      rate: requests per second.
      service_s: of each, with `rate * service_s` below 1.

    Raises:
      ValueError: the queue grows without end.

    Source: Pollaczek and Khinchine's formula; Zhong et al. 2024 (DistServe),
    arXiv:2401.09670, section 3.1, equation 1.
    """
    if not 0 <= rate * service_s < 1:
        raise ValueError(f"{rate=} times {service_s=} must be in [0, 1)")
    return rate * service_s**2 / (2 * (1 - rate * service_s))


def _warn_of_missing(name: str, values: np.ndarray, is_asked: np.ndarray) -> None:
    """Warns that a metric is NaN, and why."""
    missing = is_asked & np.isnan(values)
    if missing.any():
        warnings.warn(
            f"{name} is NaN: {missing.sum()} of {is_asked.sum()} requests have no "
            "value, as they were not served",
            stacklevel=3,
        )
