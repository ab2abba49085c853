"""Outcomes of the requests of a simulation, as NumPy arrays.

The last axis of each array is over requests; leading axes are those of the simulation
state, for example members. `workloads.metrics` computes latencies and rates from them.
"""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import clock, validation
from jaxkv.ledger import EVENTS, PROGRESS
from jaxkv.simulation import sessions
from jaxkv.simulation.state import Simulation
from jaxkv.workloads import Workload, make_dataframe, per_row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of every request."""

    arrival_s: Float[np.ndarray, "*members requests"]
    """Arrival time in s. In a closed loop, the time at which a client sends the
    request, or the delay after the answers that it waits for; NaN if it is never
    sent."""
    first_s: Float[np.ndarray, "*members requests"]
    """Time of the first token of any of its sequences in s; NaN if there is none."""
    finish_s: Float[np.ndarray, "*members requests"]
    """Time at which its last sequence ended, in s; NaN if it has not."""
    preempted: Int[np.ndarray, "*members requests"]
    """Number of preemptions of its sequences."""
    recomputed: Int[np.ndarray, "*members requests"]
    """Tokens recomputed after preemptions."""
    rejected: Bool[np.ndarray, "*members requests"]
    """True for requests that are never served because they do not fit into an idle
    engine, or are sent after one that does not."""

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per request of each member.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        names = [field.name for field in dataclasses.fields(Outcome)]
        values = {name: getattr(self, name) for name in names}
        axes = ("member", "request")[-np.ndim(self.arrival_s) :]
        return make_dataframe(per_row(values, axes))


@validation.checks_numbers(until_s="[0, inf]")
def read_outcomes(
    state: Simulation,
    workload: Workload,
    *,
    until_s: float = np.inf,
    warns: bool = True,
) -> Outcome:
    """Returns the outcomes of all requests of a simulation.

    Args:
      state: state of one simulation, or of several with leading axes.
      workload: the workload, broadcast over the leading axes.
      until_s: end of the measurement in s; later events are left out.
      warns: True to warn about requests that were rejected or not finished.

    Returns:
      The outcomes.
    """
    members = state.num_done.shape
    num = workload.prompt.shape[-1]
    axes = {"arrival": (num, 2), "clients": ()}
    names = ("arrival", "prompt", "output", "samples", "clients")
    spread: Any = {
        name: np.broadcast_to(
            np.asarray(getattr(workload, name)), (*members, *axes.get(name, (num,)))
        )
        for name in names
    }
    w: Any = Workload(**spread, dependencies=workload.dependencies)
    events: Any = jax.tree.map(
        lambda x: x.reshape(*members, num, -1),
        EVENTS.unpack(np.asarray(state.ledger.events)),
    )
    num_preempted = PROGRESS.read(np.asarray(state.ledger.progress), "num_preempted")
    num_preempted = num_preempted.reshape(*members, num, -1)
    is_sequence = np.arange(num_preempted.shape[-1]) < w.samples[..., None]
    first = _time(events.first_s, events.first_us, until_s)
    first_s = np.min(np.nan_to_num(first, nan=np.inf), axis=-1)
    finish = _time(events.finish_s, events.finish_us, until_s)
    finish_s = np.max(np.where(is_sequence, finish, -np.inf), axis=-1)
    finish_s = np.where(np.isfinite(finish_s), finish_s, np.nan)
    served = np.zeros(finish_s.shape, bool)
    all_order = np.asarray(state.order)
    num_served = np.asarray(state.num_served)
    arrival_s = np.where(w.samples > 0, clock.to_seconds(w.arrival), np.nan)
    for member in np.ndindex(finish_s.shape[:-1]):
        at = (*member, all_order[member][: num_served[member]])
        served[at] = True
        if (clients := int(w.clients[member])) < len(at[-1]):
            # Request k is sent when k - clients earlier requests are answered.
            done_s = np.concatenate([np.full(clients, -np.inf), np.sort(finish_s[at])])
            done_s = done_s[: len(at[-1])]
            asked_s = np.maximum(arrival_s[at], done_s)
            arrival_s[at] = np.where(np.isnan(done_s), np.nan, asked_s)
    if state.sessions is not None:
        arrival = np.asarray(state.sessions.arrival)
        is_root = np.asarray(workload.arrival)[..., 0] < sessions.NEVER_S
        sent_s = clock.to_seconds(arrival)
        is_sent = (arrival[..., 0] < sessions.NEVER_S) & (sent_s <= until_s)
        arrival_s = np.where(is_root, arrival_s, np.where(is_sent, sent_s, np.nan))
    outcome = Outcome(
        arrival_s=arrival_s,
        first_s=np.where(np.isfinite(first_s), first_s, np.nan),
        finish_s=finish_s,
        preempted=num_preempted.sum(axis=-1),
        recomputed=events.num_recomputed.sum(axis=-1),
        rejected=~served & (w.samples > 0),
    )
    if warns:
        _warn(outcome, w, is_over=not np.isfinite(until_s))
    return outcome


def _time(seconds: np.ndarray, micros: np.ndarray, until_s: float) -> np.ndarray:
    """Converts times of `Events` to s; NaN for no event, or one after `until_s`."""
    time = seconds - 1 + micros / clock.MICROS_PER_SECOND
    return np.where((seconds > 0) & (time <= until_s), time, np.nan)


def _warn(outcome: Outcome, w: Workload, is_over: bool) -> None:
    """Warns about rejected and unfinished requests, with the first of each."""
    is_asked = w.samples > 0
    or_ = "" if w.dependencies is None else ", or are sent after one that does not"
    waits = is_asked & ~outcome.rejected & ~np.isfinite(outcome.finish_s)
    for mask, why in (
        (outcome.rejected, f"were rejected: they do not fit into an idle engine{or_}"),
        (waits & is_over, "were not served to their end"),
    ):
        if mask.any():
            *member, i = (int(x) for x in np.argwhere(mask)[0])
            of = f" of member {tuple(member)}" if member else ""
            columns = (w.prompt, w.output, w.samples)
            prompt, output, samples = (x[(*member, i)] for x in columns)
            warnings.warn(
                f"{mask.sum()} of {is_asked.sum()} requests {why}; the first is "
                f"request {i}{of}: {prompt} + {output} tokens, {samples} sequences",
                stacklevel=3,
            )
