"""Serves one workload in too little memory, in many ways, and counts what it costs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from experiments.harness import Request, streaming
from experiments.serving.preemption import replay
from experiments.serving.preemption.replay import Story
from jaxkv.engine import EngineConfig
from jaxkv.models import checkpoints, paged
from jaxkv.progress import Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs, interface, victims
from jaxkv.serving.engine import Engine


class Way(NamedTuple):
    """A policy, and the memory that it has.

    Attributes:
      name: for people.
      pool_pages: pages that requests may hold in all.
      preemption: what becomes of the pages of those who give way.
      hold_new: whether new requests then wait until all of those have completed.
      victim: who gives way, a name of `victims.ranks`.
      watermark: pages kept free at admission.
      swap_pages: pages that the buffer for swapped requests has room for.
      host_pages: pages that the host's memory has room for, beside them.
    """

    name: str
    pool_pages: int
    preemption: Literal["recompute", "swap"] = "recompute"
    hold_new: bool = False
    victim: victims.Victim = "latest"
    watermark: int = 0
    swap_pages: int = 0
    host_pages: int = 0


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


class Served(NamedTuple):
    """One serving.

    Attributes:
      story: what happened in its trace.
      num_swapped_out: times that a request gave way and kept its pages.
      latency_s: until the host held each request's last token: [requests].
      duration_s: until it held the last of all.
      tokens: the answers, by request.
    """

    story: Story
    num_swapped_out: int
    latency_s: np.ndarray
    duration_s: float
    tokens: dict[int, list[int]]


class Servings(NamedTuple):
    """Ways of serving the same requests, an entry for each.

    Attributes:
      name, pool_pages, preemption, hold_new, victim, watermark, swap_pages, host_pages:
        as in `Way`: [ways].
      num_preempted, num_returned, pages_moved, num_fed, num_recomputed, num_overtaken,
        steps: as in `Story`: [ways].
      num_swapped_out: as in `Served`: [ways].
      num_different: answers that differ from those where nobody gave way: [ways].
      duration_s, mean_latency_s, p95_latency_s: [ways, repeats].
    """

    name: np.ndarray
    pool_pages: np.ndarray
    preemption: np.ndarray
    hold_new: np.ndarray
    victim: np.ndarray
    watermark: np.ndarray
    swap_pages: np.ndarray
    host_pages: np.ndarray
    num_preempted: np.ndarray
    num_returned: np.ndarray
    pages_moved: np.ndarray
    num_fed: np.ndarray
    num_recomputed: np.ndarray
    num_overtaken: np.ndarray
    steps: np.ndarray
    num_swapped_out: np.ndarray
    num_different: np.ndarray
    duration_s: np.ndarray
    mean_latency_s: np.ndarray
    p95_latency_s: np.ndarray

    @property
    def recomputed_share(self) -> np.ndarray:
        """Tokens computed again / tokens computed: [ways]."""
        return self.num_recomputed / np.maximum(self.num_fed, 1)

    @property
    def num_fallbacks(self) -> np.ndarray:
        """Times that a request gave way and lost its pages at once: [ways]."""
        return self.num_preempted - self.num_swapped_out


class Server:
    """The workload, the model, and the answers when nobody gives way."""

    def __init__(
        self, model: checkpoints.Loaded, requests: Sequence[Request], progress: Progress
    ) -> None:
        """Serves nothing yet."""
        self.model, self.requests, self.progress = model, list(requests), progress
        self._expected: dict[int, list[int]] = {}
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
        complete = [
            (way, runs)
            for (way, _), runs in zip(ways, found, strict=True)
            if len(runs) == repeats
        ]
        if complete and not self._expected:
            self._expected = complete[0][1][0].tokens
        return _columns(self._row(way, runs) for way, runs in complete)

    def _serve(self, way: Way, config: EngineConfig) -> Served | None:
        if config not in self._compiled:
            self.progress.show("compiling")
            ask = Sampling.greedy(max_tokens=2)
            warm = self.requests[0]._replace(sampling=ask)
            streaming.stream(
                self._engine(way, config), [warm], self.progress, lambda done: None
            )
            self._compiled.add(config)
        engine = self._engine(way, config)
        started = engine.now()
        done = streaming.stream(engine, self.requests, self.progress, lambda done: None)
        if len(done) < len(self.requests):
            return None
        answers = [done[i] for i in range(len(done))]
        return Served(
            story=replay.read_trace(
                engine.trace,
                num_recomputed=sum(answer.num_recomputed for answer in answers),
                page_size=config.page_size,
            ),
            num_swapped_out=sum(int(x.num_swapped_out.sum()) for x in engine.trace),
            latency_s=np.array([answer.finish_s - started for answer in answers]),
            duration_s=max(answer.finish_s for answer in answers) - started,
            tokens={answer.request_id: answer.tokens for answer in answers},
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
        return Engine(
            self.model.params,
            paged.PagedForward(self.model.config, config.numerics),
            paged.make_pages(self.model.config, config),
            config,
            tokenizer=self.model.tokenizer,
            eos_ids=self.model.eos_ids,
            policy=Narrowed(policy, *(jnp.asarray(x, jnp.int32) for x in hidden)),
            keep_trace=True,
            host_pages=way.host_pages,
        )

    def _row(self, way: Way, runs: list[Served]) -> dict[str, Any]:
        """Counts are those of the first run: the others have the same."""
        first = runs[0]
        different = [
            sum(run.tokens[i] != answer for i, answer in self._expected.items())
            for run in runs
        ]
        return {
            **way._asdict(),
            **first.story._asdict(),
            "num_swapped_out": first.num_swapped_out,
            "num_different": max(different),
            "duration_s": [run.duration_s for run in runs],
            "mean_latency_s": [run.latency_s.mean() for run in runs],
            "p95_latency_s": [np.percentile(run.latency_s, 95) for run in runs],
        }


def bounds(base: EngineConfig, pool_pages: int, swap_pages: int) -> EngineConfig:
    """An engine with so much memory."""
    return dataclasses.replace(base, num_pages=pool_pages, max_swap_pages=swap_pages)


def _columns(rows: Iterable[dict[str, Any]]) -> Servings:
    rows = list(rows)
    return Servings(
        **{name: np.array([row[name] for row in rows]) for name in Servings._fields}
    )
