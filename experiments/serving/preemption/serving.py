"""Serves one workload in too little memory, in many ways, and counts what it costs.

Who was preempted, who came back and how is read off the trace of the engine: it says
who was in which slot and how many tokens it fed.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from experiments.framework import Floats, Ints, Table, Texts, column
from experiments.framework.table import shown
from experiments.harness import model_shapes
from experiments.harness.prompts import Request
from experiments.harness.serving import Server
from jaxkv.engine import EngineConfig
from jaxkv.models import checkpoints
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface, victims


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
    victim: Texts = column("who is preempted, a name of `victims.NAMES`")
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
type Ways = list[tuple[Way, EngineConfig]]
"""Ways to serve, each with bounds that hold at least its memory."""


def serve(
    model: checkpoints.Loaded,
    requests: list[Request],
    asked: Iterable[tuple[str, str, int, Ways]],
    progress: Progress,
) -> dict[str, Servings]:
    """Serves all requests in each of some ways; in the first of all nobody waits.

    Args:
      model: that answers.
      requests: always the same.
      asked: a table's name, the label of its bar, servings of each of its ways, and
        the ways; every round begins with another way.
      progress: is shown answers, and asked whether to stop.

    Returns:
      The servings by table; if stopped, those of complete ways.
    """
    tables, expected, compiled = {}, list[list[int]](), set[EngineConfig]()
    warm = requests[0]._replace(sampling=Sampling.greedy(max_tokens=2))
    for name, label, repeats, ways in asked:
        found: list[list[Served]] = [[] for _ in ways]
        num = len(ways)
        turns = [(k + turn) % num for turn in range(repeats) for k in range(num)]
        for i in progress.track(turns, label, "servings"):
            way, config = ways[i]
            if config not in compiled:
                progress.show("compiling")
                _server(model, way, config).stream([warm], progress)
                compiled.add(config)
            server = _server(model, way, config)
            started = server.engine.now()
            done = server.stream(requests, progress)
            if len(done) < len(requests):
                break
            answers = [done[k] for k in range(len(done))]
            again = sum(answer.num_recomputed for answer in answers)
            counts = read_trace(server, num_recomputed=again)
            latency_s = np.array([answer.finish_s - started for answer in answers])
            found[i].append((counts, latency_s, [answer.tokens for answer in answers]))
        rows = []
        for (way, _), runs in zip(ways, found, strict=True):
            if len(runs) < repeats:
                continue
            counts, latencies, texts = zip(*runs, strict=True)
            expected = expected or texts[0]
            pairs = [zip(tokens, expected, strict=True) for tokens in texts]
            # Counts are those of the first run: all runs have the same.
            row = way._asdict() | counts[0]
            row["num_different"] = max(sum(x != y for x, y in pair) for pair in pairs)
            row["duration_s"] = [x.max() for x in latencies]
            row["mean_latency_s"] = [x.mean() for x in latencies]
            row["p95_latency_s"] = [np.percentile(x, 95) for x in latencies]
            rows.append(row)
        tables[name] = Servings.of(rows)
    return tables


def _server(model: checkpoints.Loaded, way: Way, config: EngineConfig) -> Server:
    """An engine that serves a way; engines of the same bounds share one program."""
    # Every rule in the program: one for all ways in the same memory, which none of
    # them waits for while it is timed.
    policy = fcfs.fcfs(
        watermark=way.watermark,
        victim=way.victim,
        preemption=way.preemption,
        hold_new=way.hold_new,
        stackable=True,
    )
    hidden = (config.num_pages - way.pool_pages, config.max_swap_pages - way.swap_pages)
    if min(hidden) < 0:
        raise ValueError(f"{way.name}: needs more pages than {config=} has")
    policy = Narrowed(policy, *(jnp.asarray(x, jnp.int32) for x in hidden))
    engine = model_shapes.engine(
        model, config, policy=policy, host_pages=way.host_pages
    )
    return Server(engine)


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


def read_trace(server: Server, *, num_recomputed: int) -> dict[str, int]:
    """Reads a whole run, and compares with what the engine counted itself.

    Args:
      server: whose last run came to its end.
      num_recomputed: tokens that the engine says were computed again.

    Raises:
      RuntimeError: trace and engine disagree.
    """
    info, size = server.steps, server.engine.config.page_size
    found = read_steps(info.request_id, info.num_rows, info.reason > 0, page_size=size)
    counted = {
        "num_preempted": int(info.num_preempted.sum()),
        "num_returned": int(info.num_swapped_in.sum()),
        "num_recomputed": num_recomputed,
    }
    for name, count in counted.items():
        if found[name] != count:
            raise RuntimeError(f"{name}: {found[name]} in trace, not {count}")
    return found | {"num_swapped_out": int(info.num_swapped_out.sum())}
