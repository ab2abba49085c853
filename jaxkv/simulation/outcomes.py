"""What became of the requests of a simulation, as NumPy arrays on the host.

Arrays have the leading axes of the state, of members mapped together for one; requests
are the last. `metrics` says what they come to.
"""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import clock
from jaxkv.ledger import SequenceEvents, SequenceProgress
from jaxkv.simulation.state import Simulation
from jaxkv.workloads import Workload, dataframes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of every request."""

    arrival_s: Float[np.ndarray, "*members requests"]
    """When each came; in a closed loop when its client asked, NaN if it never did."""
    first_s: Float[np.ndarray, "*members requests"]
    """When the first token of any of its sequences was drawn, NaN where none was."""
    finish_s: Float[np.ndarray, "*members requests"]
    """When its last sequence ended, NaN where one did not."""
    preempted: Int[np.ndarray, "*members requests"]
    """Times that its sequences were preempted."""
    recomputed: Int[np.ndarray, "*members requests"]
    """Tokens computed again."""
    rejected: Bool[np.ndarray, "*members requests"]
    """Requests that can never be served: they do not fit the engine even alone."""

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per request, of every member.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        names = [field.name for field in dataclasses.fields(Outcome)]
        values = {name: getattr(self, name) for name in names}
        axes = ("member", "request")[-np.ndim(self.arrival_s) :]
        return dataframes.make_dataframe(dataframes.per_row(values, axes))


def read(
    state: Simulation,
    workload: Workload,
    *,
    until_s: float = np.inf,
    warns: bool = True,
) -> Outcome:
    """Reads off a state what became of its requests.

    Args:
      state: of one engine, or of several with leading axes.
      workload: its requests; of several, with the last of these axes at least.
      until_s: what happened later is left out.
      warns: whether a warning says that requests were rejected or left waiting.

    Returns:
      A value for each request of each member.
    """
    members, num = state.num_done.shape, workload.prompt.shape[-1]
    own = {"arrival": (num, 2), "clients": ()}
    names = ("arrival", "prompt", "output", "samples", "clients")
    spread: Any = {
        name: np.broadcast_to(
            np.asarray(getattr(workload, name)), (*members, *own.get(name, (num,)))
        )
        for name in names
    }
    w: Any = Workload(**spread)
    table = np.asarray(state.ledger.events).reshape(
        *members, num, -1, len(SequenceEvents._fields)
    )
    noted: Any = SequenceEvents(*np.moveaxis(table, -1, 0))
    column = SequenceProgress._fields.index("num_preempted")
    num_preempted = np.asarray(state.ledger.progress)[..., column]
    num_preempted = num_preempted.reshape(*members, num, -1)
    is_sequence = np.arange(table.shape[-2]) < w.samples[..., None]
    first = _time(noted.first_s, noted.first_us, until_s)
    first_s = np.min(np.nan_to_num(first, nan=np.inf), axis=-1)
    finish = _time(noted.finish_s, noted.finish_us, until_s)
    finish_s = np.max(np.where(is_sequence, finish, -np.inf), axis=-1)
    finish_s = np.where(np.isfinite(finish_s), finish_s, np.nan)
    served = np.zeros(finish_s.shape, bool)
    all_order, num_served = np.asarray(state.order), np.asarray(state.num_served)
    arrival_s = np.where(w.samples > 0, clock.to_seconds(w.arrival), np.nan)
    for member in np.ndindex(finish_s.shape[:-1]):
        at = (*member, all_order[member][: num_served[member]])
        served[at] = True
        if (clients := int(w.clients[member])) < len(at[-1]):
            # The k-th can come when k - clients other requests have been answered.
            done_s = np.concatenate([np.full(clients, -np.inf), np.sort(finish_s[at])])
            done_s = done_s[: len(at[-1])]
            asked_s = np.maximum(arrival_s[at], done_s)
            arrival_s[at] = np.where(np.isnan(done_s), np.nan, asked_s)
    found = Outcome(
        arrival_s=arrival_s,
        first_s=np.where(np.isfinite(first_s), first_s, np.nan),
        finish_s=finish_s,
        preempted=num_preempted.sum(axis=-1),
        recomputed=noted.num_recomputed.sum(axis=-1),
        rejected=~served & (w.samples > 0),
    )
    if warns:
        _warn(found, w, is_over=not np.isfinite(until_s))
    return found


def _time(seconds: np.ndarray, micros: np.ndarray, until_s: float) -> np.ndarray:
    """Times as `Events` has them, in seconds; NaN for never, and for later."""
    time = seconds - 1 + micros / clock.MICROS_PER_SECOND
    return np.where((seconds > 0) & (time <= until_s), time, np.nan)


def _warn(found: Outcome, w: Any, is_over: bool) -> None:
    """Says who is not served, and names the first of them."""
    is_asked = w.samples > 0
    waits = is_asked & ~found.rejected & ~np.isfinite(found.finish_s)
    for who, why in (
        (found.rejected, "can never be served: they do not fit the engine even alone"),
        (waits & is_over, "were not served to their end"),
    ):
        if who.any():
            *member, i = (int(x) for x in np.argwhere(who)[0])
            of = f" of member {tuple(member)}" if member else ""
            columns = (w.prompt, w.output, w.samples)
            prompt, output, samples = (x[(*member, i)] for x in columns)
            warnings.warn(
                f"{who.sum()} of {is_asked.sum()} requests {why}; the first is request "
                f"{i}{of}: {prompt} + {output} tokens, {samples} sequences",
                stacklevel=3,
            )
