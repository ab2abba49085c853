"""Serves requests and looks at the page tables in the middle of every step.

The middle is where a step needs most: pages are reserved for what it writes, and those
that others read, too, are copied. So no page counts as shared that is about to be
parted.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from experiments.harness import Request
from jaxkv.clock import from_seconds
from jaxkv.engine import EngineConfig, EngineState
from jaxkv.engine import step as engine_step
from jaxkv.engine.requests import drain, submit
from jaxkv.engine.state import FINISHED, Sequences, init
from jaxkv.engine.step import StepInfo, plan_step
from jaxkv.memory import page_table
from jaxkv.models import checkpoints, paged
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs, interface
from jaxkv.serving import outputs


class Served(NamedTuple):
    """What became of some requests, and what they held on the way.

    Attributes:
      logical_pages: pages in the tables of all slots, each slot's own count: [steps].
      distinct_pages: pages in use by any of them: [steps].
      num_rows: tokens fed: [steps].
      num_copied: pages copied before they were written.
      num_preempted: sequences preempted.
      prompt_rows: tokens of each request's prompt that were fed, again included.
      num_cached: tokens of each prompt that were found in the cache.
      tokens: every answer, by request and sample.
      duration_s: from the first request handed over until the last answer was there.
    """

    logical_pages: Int[np.ndarray, " steps"]
    distinct_pages: Int[np.ndarray, " steps"]
    num_rows: Int[np.ndarray, " steps"]
    num_copied: int
    num_preempted: int
    prompt_rows: Int[np.ndarray, " requests"]
    num_cached: Int[np.ndarray, " requests"]
    tokens: dict[tuple[int, int], list[int]]
    duration_s: float


class Seen(NamedTuple):
    """A call of some steps.

    Attributes:
      info: what each step did, as NumPy arrays.
      table: the page tables in the middle of each, likewise.
      state: the engine after the last one; the next call takes its arrays.
      drained: all sequences; those with status FINISHED have just left.
    """

    info: StepInfo
    table: page_table.Table
    state: EngineState
    drained: Sequences


class Server:
    """An engine without its facade, so that a look at its state costs nothing."""

    def __init__(self, model: checkpoints.Loaded, config: EngineConfig) -> None:
        """Makes an idle engine; one program serves whatever it is given.

        Raises:
          ValueError: the model has no tokenizer, or not as many positions.
        """
        if model.tokenizer is None:
            raise ValueError("the model has no tokenizer, so no text")
        if config.max_length > model.config.max_positions:
            raise ValueError(
                f"{config.max_length=} must be at most {model.config.max_positions=}"
            )
        self.model, self.config = model, config
        self.tokenizer: Any = model.tokenizer
        self._forward = paged.PagedForward(model.config, config.numerics)
        self.clear()

    def clear(self) -> None:
        """Empties it, the prefix cache included."""
        pages = paged.make_pages(self.model.config, self.config)
        self._state = init(self.config, pages)

    def calls(
        self, requests: Sequence[Request], policy: interface.Policy | None = None
    ) -> Iterator[Seen]:
        """Hands requests over as there is room, and runs until all are answered.

        A run that is left half-way must be followed by `clear`.
        """
        config, waiting = self.config, list(enumerate(requests))
        policy = fcfs.fcfs() if policy is None else policy
        clock = from_seconds(0.0)
        unfinished = 0
        while waiting or unfinished:
            batch = waiting[: _num_that_fit([r for _, r in waiting], config)]
            if batch:
                rows = outputs.make_requests(
                    [request.tokens for _, request in batch],
                    [request.sampling for _, request in batch],
                    config=config,
                    request_ids=[i for i, _ in batch],
                    eos_ids=self.model.eos_ids,
                    width=config.submit_width,
                )
                self._state, taken = _submit(self._state, rows, config=config)
                begun = np.asarray(taken) & (rows.params.sample == 0)
                waiting = waiting[int(begun.sum()) :]
                unfinished += int(np.asarray(taken).sum())
            self._state, (info, table) = _run(
                *(self.model.params, self._state, clock, policy),
                config=config,
                forward=self._forward,
            )
            info, table = jax.tree.map(np.asarray, (info, table))
            unfinished -= int((info.reason > 0).sum())
            self._state, drained = _drain(self._state)
            yield Seen(info, table, self._state, drained)

    def serve(
        self,
        requests: Sequence[Request],
        *,
        policy: interface.Policy | None = None,
        progress: Progress = QUIET,
    ) -> Served | None:
        """Answers requests.

        Args:
          requests: what to serve, all there at once, those first in the queue first.
          policy: of the scheduler; None means first come, first served.
          progress: is asked whether to stop.

        Returns:
          What happened; None if it was stopped, the engine then empty.

        Raises:
          RuntimeError: the engine counts other pages than its tables hold.
        """
        prompts = np.array([len(request.tokens) for request in requests])
        prompt_rows, num_cached = np.zeros_like(prompts), np.zeros_like(prompts)
        tokens: dict[tuple[int, int], list[int]] = {}
        seen: list[tuple[StepInfo, Any]] = []
        started = time.perf_counter()
        for call in self.calls(requests, policy):
            tokens |= _finished(call.drained, num_cached)
            seen.append((call.info, call.table))
            if progress.stopped:
                self.clear()
                return None
        duration_s = time.perf_counter() - started
        columns: list[tuple[int, int, int]] = []
        for info, table in seen:
            for step in np.flatnonzero(info.num_rows.any(1)):
                places = table.length[step] + table.ahead[step]
                pages = pages_of(table.page_ids[step], places, self.config.page_size)
                distinct = np.unique(np.concatenate(pages)).size
                if distinct != info.used_pages[step]:
                    raise RuntimeError(f"{distinct=} pages, {info.used_pages[step]=}")
                rows, name = info.num_rows[step], info.request_id[step]
                columns.append((sum(map(len, pages)), distinct, int(rows.sum())))
                fed = np.clip(prompts[name] - table.length[step], 0, rows) * (name >= 0)
                np.add.at(prompt_rows, name, fed)
        logical, distinct_pages, num_rows = np.array(columns, int).reshape(-1, 3).T
        return Served(
            logical_pages=logical,
            distinct_pages=distinct_pages,
            num_rows=num_rows,
            num_copied=sum(int(info.num_copied.sum()) for info, _ in seen),
            num_preempted=sum(int(info.num_preempted.sum()) for info, _ in seen),
            prompt_rows=prompt_rows,
            num_cached=num_cached,
            tokens=tokens,
            duration_s=duration_s,
        )


def pages_of(
    page_ids: Int[np.ndarray, "slots pages_per_slot"],
    places: Int[np.ndarray, " slots"],
    page_size: int,
) -> list[Int[np.ndarray, " pages"]]:
    """Cuts each row of a page table to the pages of so many token places."""
    num = -(-places // page_size)
    return [ids[:n] for ids, n in zip(page_ids, num, strict=True)]


def _run_and_look(
    params: Any,
    state: EngineState,
    clock: Int[Array, " 2"],
    policy: interface.Policy,
    *,
    config: EngineConfig,
    forward: Any,
) -> tuple[EngineState, tuple[StepInfo, page_table.Table]]:
    """As `engine.run_steps`, with the tables in the middle of every step."""

    def body(
        state: EngineState, _: None
    ) -> tuple[EngineState, tuple[StepInfo, page_table.Table]]:
        # What the step itself does first; the compiler finds that it is the same.
        middle = plan_step(state, config=config, policy=policy)[0]
        state, info = engine_step.step(
            params, state, config=config, forward=forward, policy=policy
        )
        return state, (info, middle.table)

    state = state._replace(clock=clock)
    return lax.scan(body, state, None, length=config.steps_per_call)


_run = jax.jit(
    _run_and_look, static_argnames=("config", "forward"), donate_argnames="state"
)
_submit = jax.jit(submit, static_argnames="config", donate_argnames="state")
_drain = jax.jit(drain, donate_argnames="state")


def _num_that_fit(requests: Sequence[Request], config: EngineConfig) -> int:
    """How many requests of a list one call of `submit` takes."""
    sizes = [r.sampling.num_sequences for r in requests[: config.submit_width]]
    return int(np.searchsorted(np.cumsum(sizes), config.submit_width, "right"))


def _finished(
    drained: Sequences, num_cached: np.ndarray
) -> dict[tuple[int, int], list[int]]:
    """Answers that are complete; notes what each request found in the cache."""
    s: Any = jax.tree.map(np.asarray, drained)
    found = {}
    for row in np.flatnonzero(s.status == FINISHED):
        name, sample = int(s.request_id[row]), int(s.params.sample[row])
        answer = s.tokens[row, s.prompt_length[row] : s.num_tokens[row]]
        found[name, sample] = answer.tolist()
        num_cached[name] += s.num_cached[row]
    return found
