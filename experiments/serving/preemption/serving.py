"""Serves one workload in too little memory under many settings.

Preemptions and restores are counted from the engine's trace, which holds the request of
each slot and its number of fed tokens.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from experiments import lab
from experiments.harness import PromptRequest, Server, make_engine
from jaxkv import scheduling
from jaxkv.engine import EngineConfig
from jaxkv.models import LoadedModel
from jaxkv.scheduling import FCFS, Counts, Plan, Victim


class PreemptionSetting(NamedTuple):
    """A policy and its memory; fields as in `Servings`."""

    name: str
    pool_pages: int
    preemption: Literal["recompute", "swap"] = "recompute"
    hold_new: bool = False
    victim: Victim = "latest"
    watermark: int = 0
    swap_pages: int = 0
    host_pages: int = 0


Times = Float[np.ndarray, "rows repeats"]


class Servings(lab.ResultTable):
    """Counts and times of each setting."""

    name: lab.Texts = lab.column("name in reports", heading="setting")
    pool_pages: lab.Ints = lab.column("pages of the pool")
    preemption: lab.Texts = lab.column('"recompute" or "swap"')
    hold_new: Bool[np.ndarray, " rows"] = lab.column(
        "True if new requests wait until all preempted ones have completed"
    )
    victim: lab.Texts = lab.column("rule for victims, a name of `victims.VICTIM_NAMES`")
    watermark: lab.Ints = lab.column(
        "pages kept free at admission", heading="pages kept free"
    )
    swap_pages: lab.Ints = lab.column(
        "pages of the device buffer", heading="buffer, pages"
    )
    host_pages: lab.Ints = lab.column("pages of the host memory", heading="host, pages")
    num_preempted: lab.Ints = lab.column("preemptions", heading="preempted")
    num_returned: lab.Ints = lab.column("restores with pages")
    pages_moved: lab.Ints = lab.column("pages swapped by restored requests, out and in")
    num_fed: lab.Ints = lab.column("tokens fed")
    num_recomputed: lab.Ints = lab.column(
        "tokens lost by requests restored without pages"
    )
    num_overtaken: lab.Ints = lab.column(
        "first admissions while a preempted request had not completed"
    )
    steps: lab.Ints = lab.column("steps with a running request")
    num_swapped_out: lab.Ints = lab.column("preemptions that kept their pages")
    num_different: lab.Ints = lab.column(
        "answers that differ from those without preemption",
        heading="other answers",
    )
    duration_s: Times = lab.column(
        "until the host has the last token of all requests", of=np.median
    )
    mean_latency_s: Times = lab.column(
        "until the host has each request's last token", of=np.median
    )
    p95_latency_s: Times = lab.column("P95 of that latency", of=np.median)

    @property
    @lab.computed_column(heading="found no room")
    def num_fallbacks(self) -> lab.Ints:
        """Preemptions that lost their pages at once."""
        return self.num_preempted - self.num_swapped_out

    @property
    @lab.computed_column(heading="computed again")
    def recomputed_share(self) -> lab.Floats:
        """Recomputed tokens / computed tokens."""
        return self.num_recomputed / np.maximum(self.num_fed, 1)

    @property
    def seconds(self) -> lab.Texts:
        """Durations as text: median (lowest-highest)."""
        quantiles = (np.quantile(x, (0, 0.5, 1)) for x in self.duration_s)
        return np.array([f"{b:.2f} ({a:.2f}-{c:.2f})" for a, b, c in quantiles])

    @property
    def watermark_share(self) -> lab.Floats:
        """Pages kept free, as a share of the pool."""
        return self.watermark / self.pool_pages

    @property
    def swap_share(self) -> lab.Floats:
        """Pages of the buffer, as a share of the pool."""
        return self.swap_pages / self.pool_pages


class LimitedMemoryPolicy(NamedTuple):
    """A policy that hides a part of the memory.

    Hidden pages are never used, so that one compiled program serves every size.
    """

    policy: FCFS
    hidden_pages: Int32[Array, ""]
    hidden_swap_pages: Int32[Array, ""]

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans with the visible pages."""
        return self.policy.plan(
            counts._replace(
                free_pages=counts.free_pages - self.hidden_pages,
                free_swap_pages=counts.free_swap_pages - self.hidden_swap_pages,
            )
        )


type ServedRun = tuple[dict[str, int], np.ndarray, list[list[int]]]
"""One serving: counts by columns of `Servings`, seconds from the start until the host
has each request's last token, and the answers."""
type PreemptionSettings = list[tuple[PreemptionSetting, EngineConfig]]
"""Settings with engine configs that hold at least their memory."""


def serve_settings(
    model: LoadedModel,
    requests: list[PromptRequest],
    cases: Iterable[tuple[str, str, int, PreemptionSettings]],
    progress: lab.Progress,
) -> dict[str, Servings]:
    """Serves all requests under each setting; the first has no preemption.

    Args:
      model: served model.
      requests: requests, the same for all settings.
      cases: name of a table, label of its progress bar, servings of each setting, and
        the settings. Rounds start at different settings.
      progress: receives progress; may stop.

    Returns:
      The servings by table; if stopped, those of finished settings.
    """
    tables = {}
    expected = list[list[int]]()
    compiled = set[EngineConfig]()
    # Sampled as the others are: greedy requests alone have another program.
    short = dataclasses.replace(requests[0].sampling, max_tokens=2)
    warm = requests[0]._replace(sampling=short)
    for name, label, repeats, ways in cases:
        runs_by_setting: list[list[ServedRun]] = [[] for _ in ways]
        num = len(ways)
        turns = [(k + turn) % num for turn in range(repeats) for k in range(num)]
        for i in progress.track(turns, label, "servings"):
            setting, config = ways[i]
            if config not in compiled:
                progress.show("compiling")
                _server(model, setting, config).stream([warm], progress)
                compiled.add(config)
            server = _server(model, setting, config)
            started = server.engine.now()
            done = server.stream(requests, progress)
            if len(done) < len(requests):
                break
            answers = [done[k] for k in range(len(done))]
            again = sum(answer.num_recomputed for answer in answers)
            counts = check_counts(server, num_recomputed=again)
            latency_s = np.array([answer.finish_s - started for answer in answers])
            runs_by_setting[i].append(
                (counts, latency_s, [answer.tokens for answer in answers])
            )
        rows = []
        for (setting, _), runs in zip(ways, runs_by_setting, strict=True):
            if len(runs) < repeats:
                continue
            counts, latencies, texts = zip(*runs, strict=True)
            expected = expected or texts[0]
            pairs = [zip(tokens, expected, strict=True) for tokens in texts]
            # Counts of the first run; all runs have the same.
            row = setting._asdict() | counts[0]
            row["num_different"] = max(sum(x != y for x, y in pair) for pair in pairs)
            row["duration_s"] = [x.max() for x in latencies]
            row["mean_latency_s"] = [x.mean() for x in latencies]
            row["p95_latency_s"] = [np.percentile(x, 95) for x in latencies]
            rows.append(row)
        tables[name] = Servings.of(rows)
    return tables


def _server(
    model: LoadedModel, setting: PreemptionSetting, config: EngineConfig
) -> Server:
    """Builds an engine for a setting; equal configs share a compiled program."""
    # The program contains every rule, so that settings with the same memory share it
    # and none compiles while it is timed.
    policy = scheduling.fcfs(
        watermark=setting.watermark,
        victim=setting.victim,
        preemption=setting.preemption,
        hold_new=setting.hold_new,
        stackable=True,
    )
    hidden = (
        config.num_pages - setting.pool_pages,
        config.max_swap_pages - setting.swap_pages,
    )
    if min(hidden) < 0:
        raise ValueError(f"{setting.name}: needs more pages than {config=} has")
    policy = LimitedMemoryPolicy(policy, *(jnp.asarray(x, jnp.int32) for x in hidden))
    engine = make_engine(model, config, policy=policy, host_pages=setting.host_pages)
    return Server(engine)


def count_preemptions(
    request_id: Int[np.ndarray, "steps slots"],
    num_rows: Int[np.ndarray, "steps slots"],
    ended: Bool[np.ndarray, "steps slots"],
    *,
    page_size: int,
) -> dict[str, int]:
    """Counts preemptions and restores in a trace of single-sequence requests.

    A request that leaves its slot before it has ended was preempted. When it returns,
    it feeds no token in its first step if its pages were restored, and starts from the
    first token otherwise.

    Args:
      request_id: request in each slot, -1 if none.
      num_rows: tokens fed.
      ended: True if the request ended in this step.
      page_size: token places in a page.

    Returns:
      Counts by columns of `Servings`.
    """
    preempted = returned = moved = lost = overtaken = 0
    written: dict[int, int] = {}  # tokens with K and V, by request
    running: set[int] = set()
    absent: set[int] = set()
    incomplete: set[int] = set()  # preempted, not completed
    for ids, rows_fed, ends in zip(request_id, num_rows, ended, strict=True):
        slots = np.flatnonzero(ids >= 0)
        slots_by_request = dict(zip(ids[slots].tolist(), slots, strict=True))
        newly_preempted = running - slots_by_request.keys()
        preempted += len(newly_preempted)
        absent |= newly_preempted
        incomplete |= newly_preempted
        for name, slot in slots_by_request.items():
            rows = int(rows_fed[slot])
            if name not in written:
                overtaken += bool(incomplete)
            elif name in absent:
                absent.remove(name)
                if rows == 0:
                    returned += 1
                    moved += 2 * -(-written[name] // page_size)
                else:
                    lost += written[name]
                    written[name] = 0
            written[name] = written.get(name, 0) + rows
        done = {name for name, slot in slots_by_request.items() if ends[slot]}
        running = slots_by_request.keys() - done
        incomplete -= done
    return {
        "num_preempted": preempted,
        "num_returned": returned,
        "pages_moved": moved,
        "num_fed": int(num_rows.sum()),
        "num_recomputed": lost,
        "num_overtaken": overtaken,
        "steps": int((request_id >= 0).any(1).sum()),
    }


def check_counts(server: Server, *, num_recomputed: int) -> dict[str, int]:
    """Counts preemptions of a run, and checks them against the engine's own counts.

    Args:
      server: server whose last run finished.
      num_recomputed: recomputed tokens by the engine's count.

    Raises:
      RuntimeError: trace and engine disagree.
    """
    info = server.steps
    size = server.engine.config.page_size
    counts = count_preemptions(
        info.request_id, info.num_rows, info.reason > 0, page_size=size
    )
    counted = {
        "num_preempted": int(info.num_preempted.sum()),
        "num_returned": int(info.num_swapped_in.sum()),
        "num_recomputed": num_recomputed,
    }
    for name, count in counted.items():
        if counts[name] != count:
            raise RuntimeError(f"{name}: {counts[name]} in trace, not {count}")
    return counts | {"num_swapped_out": int(info.num_swapped_out.sum())}
