"""What simulations come to, as NumPy arrays with a leading axis of members."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxkv.ledger import NO_SEQUENCE
from jaxkv.simulation import step
from jaxkv.simulation.outcomes import Outcome
from jaxkv.workloads import dataframes, metrics


class Means(NamedTuple):
    """Means over the time in which an engine was busy, one number for each member."""

    batch: Float[np.ndarray, " members"]
    """Running sequences."""
    waiting: Float[np.ndarray, " members"]
    """Waiting requests: those that have come and have no slot."""
    used_pages: Float[np.ndarray, " members"]
    saved_pages: Float[np.ndarray, " members"]
    """Pages that would be in use more, did nobody share."""
    tokens: Float[np.ndarray, " members"]
    """Share of all token places that hold K and V of running sequences."""
    reserved: Float[np.ndarray, " members"]
    """Share that will before their sequence ends."""
    internal: Float[np.ndarray, " members"]
    """Share that is held and never will."""
    external: Float[np.ndarray, " members"]
    """Share that nobody holds, or nobody asked for."""


class Totals(NamedTuple):
    """Sums over the steps that count, one number for each member."""

    steps: Int[np.ndarray, " members"]
    """Steps that did something."""
    busy_s: Float[np.ndarray, " members"]
    """Seconds that they took."""
    decoded: Int[np.ndarray, " members"]
    """Tokens fed in decoding, drafts apart."""
    drafted: Int[np.ndarray, " members"]
    """Drafts fed, accepted or not."""
    read: Int[np.ndarray, " members"]
    """Other tokens fed: prompts, and what was lost."""
    drawn: Int[np.ndarray, " members"]
    swapped_pages: Int[np.ndarray, " members"]
    """Pages moved out and in."""
    preempted: Int[np.ndarray, " members"]
    """Times that a sequence was preempted."""


class SimulationTrace(NamedTuple):
    """What every step did, with an axis of steps behind that of members."""

    start_s: Float[np.ndarray, "members steps"]
    info: step.SimulationInfo

    def member(self, index: int) -> "SimulationTrace":
        """That of one member alone."""
        return jax.tree.map(lambda x: x[index], self)

    def __repr__(self) -> str:
        """One line."""
        return f"SimulationTrace({' x '.join(map(str, self.start_s.shape))} steps)"

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per step, counts summed over slots.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        axes = ("member", "step")[-np.ndim(self.start_s) :]
        values = {"start_s": self.start_s} | self.info._asdict()
        return dataframes.make_dataframe(dataframes.per_row(values, axes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Served(Outcome):
    """What became of the requests of every member, and of its engine."""

    end_s: Float[np.ndarray, " members"]
    """The clock in the end, `until_s` at most."""
    means: Means
    totals: Totals
    trace: SimulationTrace | None

    def numbers(self, member: int) -> dict[str, float]:
        """What the engine of one member did, by name.

        Shares are of token places, of tokens fed, and of pages that nobody would share.
        """
        means, totals = self.means, self.totals
        fed = totals.decoded + totals.drafted + totals.read
        found = {
            "batch": means.batch,
            "step_s": totals.busy_s / np.maximum(1, totals.steps),
            "busy_s": totals.busy_s,
            "tokens_share": means.tokens,
            "reserved_share": means.reserved,
            "internal_share": means.internal,
            "external_share": means.external,
            "num_preempted": totals.preempted,
            "recomputed_share": metrics.recomputed_share(self.recomputed.sum(-1), fed),
            "saved_pages_share": metrics.shared_page_saving(
                means.saved_pages, means.used_pages
            ),
        }
        return {name: x[member].item() for name, x in found.items()}


def join(parts: list[Served], keep: Int[np.ndarray, " members"]) -> Served:
    """Takes members out of several parts, by their place behind each other.

    The parts are of the same kind; their traces may be of different lengths.
    """
    parts = list(parts)
    lengths = [0 if x.trace is None else x.trace.start_s.shape[1] for x in parts]
    for i, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if (trace := part.trace) is None:
            continue

        # Steps are added that do nothing.
        def padded(x: Any, value: int = 0, num: int = max(lengths) - length) -> Any:
            widths = [(0, 0), (0, num)] + [(0, 0)] * (x.ndim - 2)
            return np.pad(x, widths, constant_values=value)

        longer = jax.tree.map(padded, trace)
        drew = padded(np.asarray(trace.info.drew), NO_SEQUENCE)
        info = longer.info._replace(drew=drew)
        parts[i] = dataclasses.replace(part, trace=longer._replace(info=info))
    return jax.tree.map(lambda *x: np.concatenate(x)[keep], *parts)
