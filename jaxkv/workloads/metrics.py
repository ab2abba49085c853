"""Serving metrics: latencies, TTFT, TPOT, goodput, gaps between tokens, jobs.

Plain NumPy on the host. Arrays may have leading axes, such as members of a simulation;
requests are the last axis. Missing times are NaN. A mean or percentile over a request
that was not served is NaN, with a warning that counts such requests: without them, a
policy that serves only the fast requests would look fast. The caller may leave requests
out by `is_asked`, and should report `share_served` with the metric.
"""

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import validation

type Seconds = Float[np.ndarray, "*members requests"]
type Tokens = Int[np.ndarray, "*#members requests"]


def share_served(finish_s: Seconds, is_asked: np.ndarray | None = None) -> np.ndarray:
    """Returns the share of requests that were answered.

    Args:
      finish_s: finish time of each request, NaN if it was not answered.
      is_asked: requests that count; all by default.
    """
    mask = np.ones(finish_s.shape, bool) if is_asked is None else is_asked
    num = np.maximum(mask.sum(-1), 1)
    return np.asarray((np.isfinite(finish_s) & mask).sum(-1) / num)


def normalised_latency_s(
    arrival_s: Seconds, finish_s: Seconds, output: Tokens
) -> Float[np.ndarray, "*members"]:
    """Returns the mean over requests of end-to-end latency per output token.

    Example: two requests arrive at 0 s; one gets 10 tokens by 1 s, the other 100 by 2
    s: (0.1 + 0.02) / 2 = 0.06 s per token.

    Args:
      arrival_s: arrival time; NaN excludes a request that never arrived.
      finish_s: finish time of the last sequence.
      output: tokens of each sequence.

    Returns:
      The mean; NaN, with a warning, if a request that arrived was not answered.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1; Yu et al. 2022 (Orca).
    """
    is_asked = np.isfinite(arrival_s)
    per_token_s = (finish_s - arrival_s) / output
    _warn_of_missing("normalised latency", per_token_s, is_asked)
    num = is_asked.sum(-1)
    total = np.where(is_asked, per_token_s, 0.0).sum(-1)
    return np.asarray(np.where(num > 0, total / np.maximum(num, 1), np.nan))


def time_to_first_token_s(arrival_s: Seconds, first_s: Seconds) -> Seconds:
    """Returns the time to first token (TTFT) of each request.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 2.
    """
    return first_s - arrival_s


def time_per_output_token_s(
    first_s: Seconds, finish_s: Seconds, output: Tokens
) -> Seconds:
    """Returns the time per output token (TPOT) of each request.

    It is the mean gap between tokens; 0 for a single token.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 2.
    """
    gaps = np.maximum(output - 1, 1)
    return np.where(output > 1, (finish_s - first_s) / gaps, 0.0 * finish_s)


@validation.checks_numbers(percent="[0, 100]")
def percentile(
    values: Float[np.ndarray, "*members requests"],
    percent: int | float,
    *,
    is_asked: Bool[np.ndarray, "*members requests"] | None = None,
) -> Float[np.ndarray, "*members"]:
    """Returns a percentile over requests, interpolated linearly.

    Args:
      values: one for each request; NaN if missing.
      percent: in [0, 100].
      is_asked: requests that count; all by default.

    Returns:
      The percentile; NaN, with a warning, if a request that counts has no value, and
      NaN if no request counts.

    Raises:
      ValueError: `percent` is out of range.
    """
    is_counted = np.ones(values.shape, bool) if is_asked is None else is_asked
    _warn_of_missing(f"percentile {percent}", values, is_counted)
    rows = values.reshape(-1, values.shape[-1])
    samples = [
        row[mask]
        for row, mask in zip(rows, is_counted.reshape(rows.shape), strict=True)
    ]
    percentiles = [np.percentile(x, percent) if x.size else np.nan for x in samples]
    return np.array(percentiles).reshape(values.shape[:-1])


class JobTimes(NamedTuple):
    """Start and end of jobs: the requests of one session are a job."""

    arrival_s: Float[np.ndarray, "*members jobs"]
    """Arrival time of the first request of each job in s; NaN if none arrived."""
    finish_s: Float[np.ndarray, "*members jobs"]
    """Time of the last answer in s; NaN if a request of the job was not answered."""

    @property
    def latency_s(self) -> Float[np.ndarray, "*members jobs"]:
        """Time from first arrival to last answer in s, think time included, or NaN."""
        return self.finish_s - self.arrival_s

    def jobs_per_hour(
        self, *, since_s: float = 0.0, until_s: float | None = None
    ) -> Float[np.ndarray, "*members"]:
        """Returns the jobs per hour whose last answer is in an interval.

        Args:
          since_s: start of the interval in s.
          until_s: end of the interval in s; None means the last answer of any job.

        Returns:
          Jobs per hour; NaN if the interval is empty.
        """
        done = np.isfinite(self.finish_s) & (self.finish_s >= since_s)
        end_s = np.max(np.where(done, self.finish_s, -np.inf), axis=-1)
        if until_s is not None:
            done &= self.finish_s <= until_s
            end_s = np.full_like(end_s, until_s)
        hours = np.where(end_s > since_s, end_s - since_s, np.nan) / 3600
        return np.asarray(done.sum(-1) / hours)


def find_jobs(arrival_s: Seconds, finish_s: Seconds, session: Tokens) -> JobTimes:
    """Returns when jobs start and end; the requests of one session are a job.

    Example: two turns arrive at 0 s and 5 s and are answered at 2 s and 9 s: the job
    takes 9 s, the 3 s between the turns included.

    Args:
      arrival_s: arrival time of each request; NaN if it was never sent.
      finish_s: finish time of the last sequence; NaN if it was not answered.
      session: session of each request; negative numbers are in no job. Sessions of
        members may differ if they are equally many.

    Returns:
      Times of jobs, in ascending order of their sessions.

    Raises:
      ValueError: members have different numbers of sessions.
    """
    shape = np.broadcast_shapes(arrival_s.shape, finish_s.shape, session.shape)
    rows = (np.broadcast_to(x, shape) for x in (arrival_s, finish_s, session))
    rows = zip(*(x.reshape(-1, shape[-1]) for x in rows), strict=True)
    job_times = []
    for arrival, finish, job in rows:
        names, index = np.unique(job[job >= 0], return_inverse=True)
        first = np.full(names.size, np.inf)
        last = np.full(names.size, -np.inf)
        np.fmin.at(first, index, arrival[job >= 0])
        unanswered = np.isnan(finish)
        np.maximum.at(last, index, np.where(unanswered, np.inf, finish)[job >= 0])
        job_times.append([np.where(np.isfinite(x), x, np.nan) for x in (first, last)])
    sizes = {first.size for first, _ in job_times}
    if len(sizes) > 1:
        raise ValueError(f"members must have equally many sessions, not {sizes}")
    times = np.array(job_times).reshape(*shape[:-1], 2, -1)
    return JobTimes(arrival_s=times[..., 0, :], finish_s=times[..., 1, :])


class Objectives(NamedTuple):
    """Service level objectives (SLO) of a request."""

    first_s: float
    """Largest time to first token, in s."""
    per_token_s: float
    """Largest time per output token, in s."""


def attainment(
    arrival_s: Seconds,
    first_s: Seconds,
    finish_s: Seconds,
    output: Tokens,
    objectives: Objectives,
) -> Float[np.ndarray, "*members"]:
    """Returns the share of requests that met both objectives (SLO attainment).

    Requests that were not answered did not meet them.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 2.
    """
    first = time_to_first_token_s(arrival_s, first_s)
    gap = time_per_output_token_s(first_s, finish_s, output)
    met = (first <= objectives.first_s) & (gap <= objectives.per_token_s)
    num = np.maximum(np.isfinite(arrival_s).sum(-1), 1)
    return np.asarray(met.sum(-1) / num)


@validation.checks_numbers(share="[0, 1]")
def goodput(
    rates: Float[np.ndarray, " rates"],
    attained: Float[np.ndarray, " rates"],
    *,
    share: float = 0.9,
) -> float:
    """Returns the highest rate at which a share of requests meets the objectives.

    Attainment is interpolated linearly between two rates. Example: rates 1, 2, 3 with
    attainment 1.0, 0.95, 0.85 give 2.5 at a share of 0.9.

    Args:
      rates: requests per second, ascending.
      attained: attainment at each rate, see `attainment`.
      share: required attainment, in (0, 1].

    Returns:
      The rate of the first crossing from above; 0 if the share is met at no rate, and
      the highest of `rates` if it is met at all.

    Source: Zhong et al. 2024 (DistServe), arXiv:2401.09670, section 1.
    """
    return _crossing(rates, attained, share)


@validation.checks_numbers(at_most_s=0)
def capacity(
    rates: Float[np.ndarray, " rates"],
    latency_s: Float[np.ndarray, " rates"],
    *,
    at_most_s: float,
) -> float:
    """Returns the rate at which latency crosses a bound, as `goodput` does."""
    return _crossing(rates, -latency_s, -at_most_s)


def _crossing(rates: np.ndarray, values: np.ndarray, threshold: float) -> float:
    """Returns the rate at which values first fall below `threshold`."""
    if (np.diff(rates) <= 0).any():
        raise ValueError("rates must ascend")
    below = np.flatnonzero(~(values >= threshold))
    if not below.size:
        return float(rates[-1])
    k = int(below[0])
    if k == 0:
        return 0.0
    high = values[k - 1]
    low = values[k]
    share = (high - threshold) / (high - low) if np.isfinite(low) else 0.0
    return float(rates[k - 1] + share * (rates[k] - rates[k - 1]))


class Gaps(NamedTuple):
    """Times between consecutive tokens of a sequence."""

    sequence: Int[np.ndarray, " gaps"]
    seconds: Float[np.ndarray, " gaps"]


def gaps_between_tokens(
    drew: Int[np.ndarray, "steps slots"],
    end_s: Float[np.ndarray, " steps"],
    num_drawn: Int[np.ndarray, "steps slots"] | None = None,
) -> Gaps:
    """Returns the times between tokens (TBT) of each sequence, stalls included.

    Args:
      drew: sequences that drew tokens in each step; -1 for an idle slot.
      end_s: end time of each step.
      num_drawn: tokens that each sequence drew; None means one. Tokens of one step
        arrive together, with gaps of 0.

    Source: Agrawal et al. 2024 (Sarathi-Serve), arXiv:2403.02310, section 2.
    """
    step, slot = np.nonzero(drew >= 0)
    if num_drawn is not None:
        times = num_drawn[step, slot]
        step = np.repeat(step, times)
        slot = np.repeat(slot, times)
    sequence = drew[step, slot]
    order = np.argsort(sequence, kind="stable")
    sequence = sequence[order]
    time = end_s[step[order]]
    same = sequence[1:] == sequence[:-1]
    return Gaps(sequence[1:][same], np.diff(time)[same])


def shared_page_saving(
    saved_pages: Float[np.ndarray, "*members"],
    used_pages: Float[np.ndarray, "*members"],
) -> Float[np.ndarray, "*members"]:
    """Returns the share of pages saved by sharing, relative to no sharing.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 6.3 (figure 15).
    """
    total = np.maximum(saved_pages + used_pages, np.finfo(float).tiny)
    return np.asarray(saved_pages / total)


def recomputed_share(
    recomputed: Int[np.ndarray, "*members"], fed: Int[np.ndarray, "*members"]
) -> Float[np.ndarray, "*members"]:
    """Returns the share of fed tokens that were recomputed after preemption."""
    return np.asarray(recomputed / np.maximum(fed, 1))


def fifo_finish_s(
    arrival_s: Float[np.ndarray, " n"], service_s: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Returns finish times of a first-come-first-served queue (Lindley's recursion)."""
    # done[i] = max(arrival[i], done[i - 1]) + service[i], unrolled.
    total = np.cumsum(service_s)
    return total + np.maximum.accumulate(arrival_s - (total - service_s))


@validation.checks_numbers(rate="[0, 1e100]", service_s="[0, 1e100]")
def md1_waiting_s(rate: int | float, service_s: int | float) -> float:
    """Returns the mean wait before service in an M/D/1 queue, in s.

    Poisson arrivals and constant service time: R D^2 / (2 (1 - R D)). Example: 2
    requests per second of 0.3 s each give 2 * 0.09 / (2 * 0.4) = 0.225 s.

    Args:
      rate: requests per second.
      service_s: service time in s, with `rate * service_s` below 1.

    Raises:
      ValueError: the load is at least 1, so the queue grows without bound.

    Source: Pollaczek and Khinchine's formula; Zhong et al. 2024 (DistServe),
    arXiv:2401.09670, section 3.1, equation 1.
    """
    if not 0 <= rate * service_s < 1:
        raise ValueError(f"{rate=} times {service_s=} must be in [0, 1)")
    return rate * service_s**2 / (2 * (1 - rate * service_s))


def _warn_of_missing(name: str, values: np.ndarray, is_asked: np.ndarray) -> None:
    """Warns that a metric is NaN because of requests that were not served."""
    missing = is_asked & np.isnan(values)
    if missing.any():
        warnings.warn(
            f"{name} is NaN: {missing.sum()} of {is_asked.sum()} requests have no "
            "value, as they were not served",
            stacklevel=3,
        )
