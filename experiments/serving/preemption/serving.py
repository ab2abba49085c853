"""Serves one workload in too little memory, in many ways, and counts what it costs.

Who was preempted, who came back and how is read off the trace of the engine: it says
who was in which slot and how many tokens it fed.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from experiments.framework import Floats, Ints, Table, Texts, column
from experiments.framework.table import shown
from experiments.harness import Request, model_shapes, streaming
from jaxkv.engine import EngineConfig, StepInfo
from jaxkv.models import checkpoints
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface, victims
from jaxkv.serving.engine import Engine


class Way(NamedTuple):
    """A policy, and the memory that it has; fields as those of `Servings`."""

    name: str
    pool_pages: int
    preemption: Literal["recompute", "swap"] = "recompute"
    hold_new: bool = False
    victim: victims.Victim = "latest"
    watermark: int = 0
    swap_pages: int = 0
    host_pages: int = 0


Times = Float[np.ndarray, "rows repeats"]


class Servings(Table):
    """Ways of serving the same requests, a row for each."""

    name: Texts = column("for people", heading="way")
    pool_pages: Ints = column("that requests may hold in all")
    preemption: Texts = column("what becomes of the pages of preempted requests")
    hold_new: Bool[np.ndarray, " rows"] = column(
        "whether new requests then wait until all preempted ones have completed"
    )
    victim: Texts = column("who is preempted, a name of `victims.ranks`")
    watermark: Ints = column("pages kept free at admission", heading="pages kept free")
    swap_pages: Ints = column(
        "that the buffer for swapped requests has room for", heading="buffer, pages"
    )
    host_pages: Ints = column(
        "that the host's memory has room for, beside them", heading="host, pages"
    )
    num_preempted: Ints = column("preemptions of a request", heading="preempted")
    num_returned: Ints = column("times that one came back with its pages")
    pages_moved: Ints = column("that these left and came back with, both ways counted")
    num_fed: Ints = column("tokens fed")
    num_recomputed: Ints = column("tokens lost, by requests that came back without")
    num_overtaken: Ints = column(
        "requests let in for the first time while a preempted one had not completed"
    )
    steps: Ints = column("in which anybody had a slot")
    num_swapped_out: Ints = column("preempted requests that kept their pages")
    num_different: Ints = column(
        "answers that differ from those where nobody is preempted",
        heading="other answers",
    )
    duration_s: Times = column(
        "until the host held the last token of all", of=np.median
    )
    mean_latency_s: Times = column(
        "until it held each request's last token", of=np.median
    )
    p95_latency_s: Times = column("of that", of=np.median)

    @property
    @shown(heading="found no room")
    def num_fallbacks(self) -> Ints:
        """Preempted requests that lost their pages at once."""
        return self.num_preempted - self.num_swapped_out

    @property
    @shown(heading="computed again")
    def recomputed_share(self) -> Floats:
        """Tokens computed again / tokens computed."""
        return self.num_recomputed / np.maximum(self.num_fed, 1)

    @property
    def seconds(self) -> Texts:
        """How long all took, as text: median (lowest-highest)."""
        found = (np.quantile(x, (0, 0.5, 1)) for x in self.duration_s)
        return np.array([f"{b:.2f} ({a:.2f}-{c:.2f})" for a, b, c in found])

    @property
    def watermark_share(self) -> Floats:
        """Pages kept free, as a share of the pool."""
        return self.watermark / self.pool_pages

    @property
    def swap_share(self) -> Floats:
        """Pages of the buffer, as a share of the pool."""
        return self.swap_pages / self.pool_pages


class Narrowed(NamedTuple):
    """A policy that knows of less memory than there is.

    What it hides is never used, so that one compiled program serves every size.
    """

    policy: fcfs.FCFS
    hidden_pages: Int32[Array, ""]
    hidden_swap_pages: Int32[Array, ""]

    holds_finished = False

    def plan(self, counts: interface.Counts) -> interface.Plan:
        """Plans with what is not hidden."""
        return self.policy.plan(
            counts._replace(
                free_pages=counts.free_pages - self.hidden_pages,
                free_swap_pages=counts.free_swap_pages - self.hidden_swap_pages,
            )
        )


type Served = tuple[dict[str, int], np.ndarray, list[list[int]]]
"""One serving: counts by columns of `Servings`, seconds from the start until the host
held each request's last token, and the answers."""


class Server:
    """The workload, the model, and the answers when nobody is preempted."""

    def __init__(
        self, model: checkpoints.Loaded, requests: Sequence[Request], progress: Progress
    ) -> None:
        """Serves nothing yet."""
        self.model, self.requests, self.progress = model, list(requests), progress
        self._expected: list[list[int]] = []
        self._compiled: set[EngineConfig] = set()

    def serve(
        self,
        label: str,
        ways: Sequence[tuple[Way, EngineConfig]],
        *,
        repeats: int = 1,
    ) -> Servings:
        """Serves all requests in each of some ways; in the first of all nobody waits.

        Args:
          label: of the bar that a person sees.
          ways: with bounds that hold at least their memory.
          repeats: servings of each; every round begins with another way.

        Returns:
          The servings; if stopped, those of complete ways.
        """
        found: list[list[Served]] = [[] for _ in ways]
        num = len(ways)
        turns = [(k + turn) % num for turn in range(repeats) for k in range(num)]
        for i in self.progress.track(turns, label, "servings"):
            served = self._serve(*ways[i])
            if served is None:
                break
            found[i].append(served)
        rows = []
        for (way, _), runs in zip(ways, found, strict=True):
            if len(runs) == repeats:
                self._expected = self._expected or runs[0][2]
                rows.append(way._asdict() | self._row(runs))
        return Servings.of(rows)

    def _serve(self, way: Way, config: EngineConfig) -> Served | None:
        if config not in self._compiled:
            self.progress.show("compiling")
            warm = self.requests[0]._replace(sampling=Sampling.greedy(max_tokens=2))
            streaming.stream(self._engine(way, config), [warm], self.progress)
            self._compiled.add(config)
        engine = self._engine(way, config)
        started = engine.now()
        done = streaming.stream(engine, self.requests, self.progress)
        if len(done) < len(self.requests):
            return None
        answers = [done[i] for i in range(len(done))]
        again = sum(answer.num_recomputed for answer in answers)
        counts = read_trace(
            engine.trace, num_recomputed=again, page_size=config.page_size
        )
        out = sum(int(info.num_swapped_out.sum()) for info in engine.trace)
        return (
            counts | {"num_swapped_out": out},
            np.array([answer.finish_s - started for answer in answers]),
            [answer.tokens for answer in answers],
        )

    def _engine(self, way: Way, config: EngineConfig) -> Engine:
        # Every rule in the program: one for all ways in the same memory, which none of
        # them waits for while it is timed.
        policy = fcfs.fcfs(
            watermark=way.watermark,
            victim=way.victim,
            preemption=way.preemption,
            hold_new=way.hold_new,
            stackable=True,
        )
        hidden = (
            config.num_pages - way.pool_pages,
            config.max_swap_pages - way.swap_pages,
        )
        if min(hidden) < 0:
            raise ValueError(f"{way.name}: needs more pages than {config=} has")
        return model_shapes.engine(
            self.model,
            config,
            policy=Narrowed(policy, *(jnp.asarray(x, jnp.int32) for x in hidden)),
            host_pages=way.host_pages,
        )

    def _row(self, runs: list[Served]) -> dict[str, Any]:
        """Counts are those of the first run: the others have the same."""
        counts, latencies, answers = zip(*runs, strict=True)
        different = [
            sum(x != y for x, y in zip(tokens, self._expected, strict=True))
            for tokens in answers
        ]
        return counts[0] | {
            "num_different": max(different),
            "duration_s": [x.max() for x in latencies],
            "mean_latency_s": [x.mean() for x in latencies],
            "p95_latency_s": [np.percentile(x, 95) for x in latencies],
        }


def read_steps(
    request_id: Int[np.ndarray, "steps slots"],
    num_rows: Int[np.ndarray, "steps slots"],
    ended: Bool[np.ndarray, "steps slots"],
    *,
    page_size: int,
) -> dict[str, int]:
    """Follows every request, each of one sequence, through a trace.

    One that is in a slot and then is not, though it has not ended, was preempted. When
    it is back it either has its pages, and then feeds nothing in its first step, or it
    feeds from the beginning.

    Args:
      request_id: of the request in each slot, -1 for none.
      num_rows: tokens fed.
      ended: where the request ended in this step.
      page_size: token places in a page.

    Returns:
      What became of them, named as columns of `Servings`.
    """
    preempted = returned = moved = lost = overtaken = 0
    written: dict[int, int] = {}  # tokens with K and V, by request
    running: set[int] = set()
    away: set[int] = set()
    owed: set[int] = set()  # preempted, and have not completed
    for ids, rows_fed, ends in zip(request_id, num_rows, ended, strict=True):
        slots = np.flatnonzero(ids >= 0)
        here = dict(zip(ids[slots].tolist(), slots, strict=True))
        gone = running - here.keys()
        preempted += len(gone)
        away |= gone
        owed |= gone
        for name, slot in here.items():
            rows = int(rows_fed[slot])
            if name not in written:
                overtaken += bool(owed)
            elif name in away:
                away.remove(name)
                if rows == 0:
                    returned += 1
                    moved += 2 * -(-written[name] // page_size)
                else:
                    lost += written[name]
                    written[name] = 0
            written[name] = written.get(name, 0) + rows
        done = {name for name, slot in here.items() if ends[slot]}
        running = here.keys() - done
        owed -= done
    return {
        "num_preempted": preempted,
        "num_returned": returned,
        "pages_moved": moved,
        "num_fed": int(num_rows.sum()),
        "num_recomputed": lost,
        "num_overtaken": overtaken,
        "steps": int((request_id >= 0).any(1).sum()),
    }


def read_trace(
    trace: Sequence[StepInfo], *, num_recomputed: int, page_size: int
) -> dict[str, int]:
    """Reads a whole run, and compares with what the engine counted itself.

    Args:
      trace: step infos of all calls of a run that came to its end.
      num_recomputed: tokens that the engine says were computed again.
      page_size: token places in a page.

    Raises:
      RuntimeError: trace and engine disagree.
    """
    columns = [
        np.concatenate([getattr(info, name) for info in trace])
        for name in ("request_id", "num_rows", "reason")
    ]
    found = read_steps(columns[0], columns[1], columns[2] > 0, page_size=page_size)
    counted = {
        "num_preempted": sum(int(info.num_preempted.sum()) for info in trace),
        "num_returned": sum(int(info.num_swapped_in.sum()) for info in trace),
        "num_recomputed": num_recomputed,
    }
    for name, count in counted.items():
        if found[name] != count:
            raise RuntimeError(f"{name}: {found[name]} in trace, not {count}")
    return found
