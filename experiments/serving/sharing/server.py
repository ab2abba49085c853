"""Serves requests and looks at the page tables in the middle of every step.

The middle is where a step needs most: pages are reserved for what it writes, and those
that others read, too, are copied. So no page counts as shared that is about to be
parted.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from experiments.harness import Request, prompts
from experiments.harness.stepping import Stepper
from jaxkv.engine import EngineConfig, EngineState, StepInfo, step
from jaxkv.memory import Table
from jaxkv.models import checkpoints, paged
from jaxkv.progress import QUIET, Progress
from jaxkv.sampling import Sampling
from jaxkv.scheduling import interface


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

    def totals(self) -> dict[str, Any]:
        """Numbers of the whole, as tables have them."""
        return self._asdict() | {
            "logical_pages": self.logical_pages.sum(),
            "distinct_pages": self.distinct_pages.sum(),
            "prompt_rows": self.prompt_rows.sum(),
            "num_cached": self.num_cached.min(),
            "steps": len(self.num_rows),
        }


class Server(Stepper):
    """An engine whose page tables are seen, and what it is asked.

    Attributes:
      ask: how answers are drawn; what of it matters to a study is replaced.
      progress: is asked whether to stop.
    """

    def __init__(
        self,
        model: checkpoints.Loaded,
        config: EngineConfig,
        ask: Sampling,
        progress: Progress = QUIET,
    ) -> None:
        """Makes an idle engine; one program serves whatever it is given."""
        super().__init__(
            config,
            paged.PagedForward(model.config, config.numerics),
            functools.partial(paged.make_pages, model.config, config),
            params=model.params,
            eos_ids=model.eos_ids,
            step=_step,
        )
        self.tokenizer: Any = model.tokenizer
        self.ask, self.progress = ask, progress

    def requests(self, sizes: list[int], samplings: list[Sampling]) -> list[Request]:
        """Requests of held-out text, the same whenever asked for."""
        rng = np.random.default_rng(self.config.seed)
        return prompts.held_out(self.tokenizer, sizes, samplings, rng)

    def samplings(self, answers: np.ndarray, **fields: Any) -> list[Sampling]:
        """How answers of so many tokens are drawn, whatever ends a text."""
        ask = dataclasses.replace(self.ask, ignore_eos=True, **fields)
        return [
            dataclasses.replace(ask, seed=self.config.seed + i, max_tokens=limit)
            for i, limit in enumerate(answers.tolist())
        ]

    def serve(
        self, requests: Sequence[Request], policy: interface.Policy | None = None
    ) -> Served | None:
        """Answers requests.

        Args:
          requests: what to serve, all there at once, those first in the queue first.
          policy: of the scheduler; None means first come, first served.

        Returns:
          What happened; None if it was stopped, the engine then empty.

        Raises:
          RuntimeError: the engine counts other pages than its tables hold.
        """
        texts, asks = [x.tokens for x in requests], [x.sampling for x in requests]
        sizes = np.array([*map(len, texts)])
        prompt_rows, num_cached = np.zeros_like(sizes), np.zeros_like(sizes)
        tokens: dict[tuple[int, int], list[int]] = {}
        seen: list[tuple[StepInfo, Table]] = []
        started = time.perf_counter()
        for call in self.calls(texts, asks, policy=policy):
            ended = call.ended
            np.add.at(num_cached, ended.request_id, ended.num_cached)
            for row, name in enumerate(ended.request_id.tolist()):
                answer = slice(ended.prompt_length[row], ended.num_tokens[row])
                sample = int(ended.params.sample[row])
                tokens[name, sample] = ended.tokens[row, answer].tolist()
            seen.append(call.seen)
            if self.progress.stopped:
                self.clear()
                return None
        duration_s = time.perf_counter() - started
        info, table = jax.tree.map(lambda *parts: np.concatenate(parts), *seen)
        fed = info.num_rows.any(axis=1)
        info, table = jax.tree.map(lambda x: x[fed], (info, table))
        num_pages = -(-(table.length + table.ahead) // self.config.page_size)
        columns = np.arange(table.page_ids.shape[2])
        held = np.where(columns < num_pages[:, :, None], table.page_ids, -1)
        distinct = np.array([np.unique(ids[ids >= 0]).size for ids in held], int)
        if (distinct != info.used_pages).any():
            raise RuntimeError(f"{distinct=} pages, {info.used_pages=}")
        rows, name = info.num_rows, info.request_id
        of_prompt = np.clip(sizes[name] - table.length, 0, rows) * (name >= 0)
        np.add.at(prompt_rows, name, of_prompt)
        return Served(
            logical_pages=num_pages.sum(axis=1),
            distinct_pages=distinct,
            num_rows=rows.sum(axis=1),
            num_copied=int(info.num_copied.sum()),
            num_preempted=int(info.num_preempted.sum()),
            prompt_rows=prompt_rows,
            num_cached=num_cached,
            tokens=tokens,
            duration_s=duration_s,
        )


def _step(
    params: Any, state: EngineState, *, forward: Any, **rules: Any
) -> tuple[EngineState, tuple[StepInfo, Table]]:
    """A step, and the tables in its middle."""
    # What the step itself does first; the compiler finds that it is the same.
    middle, *_ = step.plan_step(state, **rules)
    state, info = step.step(params, state, forward=forward, **rules)
    return state, (info, middle.table)
