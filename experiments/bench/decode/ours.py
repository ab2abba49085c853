"""Our engine, timed as its peers are, and seen from outside."""

import concurrent.futures
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench import peer_main
from jaxkv.engine import state
from jaxkv.models import checkpoints
from jaxkv.sampling import Sampling
from jaxkv.serving import engine
from jaxkv.speculation import methods


class Timing(NamedTuple):
    """One batch served once.

    Attributes:
      prefill_s: seconds until every request had its first token.
      decode_s: seconds that later tokens took.
      num_decoded: how many those were.
      tokens: the answers.
      peak_bytes: peak memory of the process that served it, weights included.
    """

    prefill_s: float
    decode_s: float
    num_decoded: int
    tokens: list[list[int]]
    peak_bytes: int


class CallTimes(NamedTuple):
    """When one call of K steps, and what followed it, was where; in seconds.

    Attributes:
      dispatched_s: when the host had handed it over.
      ready_s: when the device had its results.
      drained_s: when the device had handed out the finished sequences behind it; equal
        to `ready_s` if there were none.
      fed: whether it fed any tokens; one that was handed over before the host knew that
        all is done does not.
    """

    dispatched_s: float
    ready_s: float
    drained_s: float
    fed: bool


class WatchedEngine(engine.Engine):
    """An `Engine` that can note when each call is dispatched, and when it is ready."""

    _note: Callable[[Any], Any] | None = None

    @contextlib.contextmanager
    def watch(self) -> Generator[list[CallTimes]]:
        """Notes the times of the calls made inside; the list is whole at the end.

        A second thread waits for the results and does nothing else, so the engine's own
        order of work stays as it is.
        """
        times: list[CallTimes] = []
        with concurrent.futures.ThreadPoolExecutor(1) as waiting:
            self._note = lambda call: waiting.submit(
                _wait, call, time.perf_counter(), times
            )
            try:
                yield times
            finally:
                self._note = None

    def _dispatch(self) -> None:
        num_unread = len(self._unread)
        super()._dispatch()
        if self._note is not None and len(self._unread) > num_unread:
            self._note(self._unread[-1])


def _wait(call: Any, dispatched_s: float, times: list[CallTimes]) -> None:
    jax.block_until_ready(call.info)
    ready_s = drained_s = time.perf_counter()
    if call.drained is not None:
        jax.block_until_ready(call.drained)
        drained_s = time.perf_counter()
    fed = bool(np.asarray(call.info.num_rows).any())
    times.append(CallTimes(dispatched_s, ready_s, drained_s, fed))


def host_share(calls: list[CallTimes]) -> float | None:
    """The share of time in which the device had no steps to run.

    Between the end of one call and the start of the next the device hands out finished
    sequences, or waits for the host. That gap counts in full, over the time from one
    call's end to the next one's.

    Args:
      calls: in order. What goes before the first, and before those that feed nothing,
        is left out.

    Returns:
      A share in [0, 1]; `None` with less than two calls.
    """
    gaps = spans = 0.0
    for before, call in itertools.pairwise(calls):
        if not call.fed:
            continue
        start_s = max(before.drained_s, call.dispatched_s)
        gaps += max(0.0, min(start_s, call.ready_s) - before.ready_s)
        spans += call.ready_s - before.ready_s
    return gaps / spans if spans else None


class Ours:
    """Our engine, serving batches of one size. The first `measure` compiles.

    Args:
      model: what to serve.
      bounds: of the engine, with a slot for each sequence of the batch.
      dtype: of the pages.
      speculate: a method of `speculation.methods`, or None.
    """

    name = "jaxkv"
    version = f"jax {jax.__version__}"

    def __init__(
        self,
        model: checkpoints.Loaded,
        bounds: state.EngineConfig,
        dtype: str,
        speculate: str | None = None,
    ):
        self.dtype = dtype
        target = methods.Model(model.config, model.params)
        served = methods.serve(target, bounds, dtype=dtype, method=speculate)
        self._engine = WatchedEngine(
            served.params,
            served.forward,
            served.pages,
            bounds,
            speculation=served.speculation,
            eos_ids=(),
            vocab_size=model.config.vocab_size,
            keep_trace=True,
        )
        self._host_shares: list[float | None] = []
        self.first_s = 0.0

    @property
    def host_share(self) -> float | None:
        """The median over the servings behind the first; None where none tells."""
        known = [x for x in self._host_shares[1:] if x is not None]
        return statistics.median(known) if known else None

    def measure(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        """Serves prompts of one length as one batch, greedily."""
        peer_main.reset_peak()
        first = self._serve(prompts, 1)
        with self._engine.watch() as calls:
            whole = self._serve(prompts, output_tokens)
        self._host_shares.append(host_share(calls))
        # The first device's if it keeps count, else this process's.
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = stats.get("peak_bytes_in_use") or peer_main.peak_bytes()
        return whole._replace(prefill_s=first.prefill_s, peak_bytes=peak)

    def _serve(self, prompts: list[list[int]], num_tokens: int) -> Timing:
        """Serves once; nobody looks at the memory."""
        engine = self._engine
        ask = Sampling.greedy(max_tokens=num_tokens, ignore_eos=True)
        tokens: list[list[int]] = [[] for _ in prompts]
        num_held: dict[int, int] = {}  # tokens held after each call, all requests
        engine.trace.clear()
        start_s = first_s = last_s = engine.now()
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, ask, request_id=i)
        first_call = 0
        for event in engine.stream():
            if not event.tokens:
                continue  # tidying up
            call, last_s = len(engine.trace), engine.now()
            if not tokens[event.request_id]:
                first_call, first_s = call, last_s
            tokens[event.request_id] += event.tokens
            num_held[call] = sum(map(len, tokens))
        num_decoded = max(num_held.values()) - num_held[first_call]
        return Timing(first_s - start_s, last_s - first_s, num_decoded, tokens, 0)
