"""Results of simulations, as NumPy arrays with a leading axis of members."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.ledger import NO_SEQUENCE
from jaxkv.simulation import step
from jaxkv.simulation.outcomes import Outcome
from jaxkv.workloads import (
    make_dataframe,
    per_row,
    recomputed_share,
    shared_page_saving,
)


class Means(NamedTuple):
    """Means over the busy time of an engine, one number for each member."""

    batch: Float[np.ndarray, " members"]
    """Running sequences."""
    waiting: Float[np.ndarray, " members"]
    """Waiting requests, which have arrived and have no slot."""
    used_pages: Float[np.ndarray, " members"]
    """Pages in use."""
    saved_pages: Float[np.ndarray, " members"]
    """Pages saved by sharing: additional pages that would be in use without it."""
    tokens: Float[np.ndarray, " members"]
    """Share of all token places with K and V of running sequences."""
    reserved: Float[np.ndarray, " members"]
    """Share of all token places that are held and written later."""
    internal: Float[np.ndarray, " members"]
    """Share of all token places that are held and never written (internal
    fragmentation)."""
    external: Float[np.ndarray, " members"]
    """Share of all token places that are free, or beyond a contiguous reservation."""


class Totals(NamedTuple):
    """Sums over the measured steps, one number for each member."""

    steps: Int[np.ndarray, " members"]
    """Steps that took time."""
    busy_s: Float[np.ndarray, " members"]
    """Time of these steps in s."""
    decoded: Int[np.ndarray, " members"]
    """Tokens fed in decoding, drafts excluded."""
    drafted: Int[np.ndarray, " members"]
    """Drafts fed, accepted or not."""
    read: Int[np.ndarray, " members"]
    """Tokens fed in prefill, recomputation included."""
    drawn: Int[np.ndarray, " members"]
    """Tokens emitted."""
    swapped_pages: Int[np.ndarray, " members"]
    """Pages swapped out and in."""
    preempted: Int[np.ndarray, " members"]
    """Preemptions of sequences."""


class StepTrace(NamedTuple):
    """Information about every step, with axes of members and of steps."""

    start_s: Float[np.ndarray, "members steps"]
    """Start of each step in s."""
    info: step.SimulatedStep

    def member(self, index: int) -> "StepTrace":
        """Returns the trace of one member."""
        return jax.tree.map(lambda x: x[index], self)

    def __repr__(self) -> str:
        """One line."""
        return f"StepTrace({' x '.join(map(str, self.start_s.shape))} steps)"

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per step, counts summed over slots.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        axes = ("member", "step")[-np.ndim(self.start_s) :]
        values = {"start_s": self.start_s} | self.info._asdict()
        return make_dataframe(per_row(values, axes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationResult(Outcome):
    """Results of a simulation: outcomes of requests, means and totals of members."""

    end_s: Float[np.ndarray, " members"]
    """Simulated time at the end in s, at most `until_s`."""
    means: Means
    totals: Totals
    trace: StepTrace | None

    def numbers(self, member: int) -> dict[str, float]:
        """Returns the measurements of one member by name.

        Memory shares are fractions of all token places, `recomputed_share` is a
        fraction of the fed tokens, and `saved_pages_share` of the pages in use without
        sharing.
        """
        means = self.means
        totals = self.totals
        fed = totals.decoded + totals.drafted + totals.read
        numbers = {
            "batch": means.batch,
            "step_s": totals.busy_s / np.maximum(1, totals.steps),
            "busy_s": totals.busy_s,
            "tokens_share": means.tokens,
            "reserved_share": means.reserved,
            "internal_share": means.internal,
            "external_share": means.external,
            "num_preempted": totals.preempted,
            "recomputed_share": recomputed_share(self.recomputed.sum(-1), fed),
            "saved_pages_share": shared_page_saving(
                means.saved_pages, means.used_pages
            ),
        }
        return {name: x[member].item() for name, x in numbers.items()}


def select_members(
    parts: list[SimulationResult], keep: Int[np.ndarray, " members"]
) -> SimulationResult:
    """Concatenates parts of a simulation, and selects members in the order of `keep`.

    Traces are padded to the same number of steps.
    """
    parts = list(parts)
    lengths = [0 if x.trace is None else x.trace.start_s.shape[1] for x in parts]
    for i, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if (trace := part.trace) is None:
            continue

        # Padded with steps that take no time.
        def padded(
            x: Array | np.ndarray, value: int = 0, num: int = max(lengths) - length
        ) -> np.ndarray:
            widths = [(0, 0), (0, num)] + [(0, 0)] * (x.ndim - 2)
            return np.pad(x, widths, constant_values=value)

        longer = jax.tree.map(padded, trace)
        drew = padded(np.asarray(trace.info.drew), NO_SEQUENCE)
        info = longer.info._replace(drew=drew)
        parts[i] = dataclasses.replace(part, trace=longer._replace(info=info))
    return jax.tree.map(lambda *x: np.concatenate(x)[keep], *parts)
