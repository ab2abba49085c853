"""Serves requests that share pages: parallel samples, beams, and common prefixes.

The page tables are read in the middle of every step, where a step needs most pages:
pages of its writes are allocated, and shared pages are copied before a write. A page
that is about to be copied does not count as shared.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from experiments import lab
from experiments.harness import (
    PromptRequest,
    Stepper,
    cut_held_out_prompts,
    measured_page_saving,
)
from jaxkv import engine, scheduling
from jaxkv.engine import EngineState, StepInfo, plan_step
from jaxkv.memory import Table as PageTable
from jaxkv.models import Forward, LoadedModel, Params
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy
from jaxkv.workloads import Lengths

PUBLISHED_SAVINGS = {
    "answers": {
        ("short", 2): 0.0609,
        ("short", 4): 0.0853,
        ("short", 6): 0.0979,
        ("long", 2): 0.162,
        ("long", 6): 0.305,
    },
    "beams": {
        ("short", 2): 0.3756,
        ("short", 4): 0.5313,
        ("short", 6): 0.5516,
        ("long", 2): 0.443,
        ("long", 6): 0.663,
    },
}
"""Share of saved pages by number of sequences: figures 15a and 15b for Alpaca (short),
and the ends of the printed ranges for ShareGPT (long)."""


class Savings(lab.ResultTable):
    """Page sharing of requests with several samples or beams."""

    lengths: lab.Texts = lab.column('"short" or "long"')
    num_sequences: lab.Ints = lab.column(
        "sequences per request", key="sequences", heading="n"
    )
    num_requests: lab.Ints = lab.column("requests", key="requests", heading="requests")
    mean_prompt: lab.Floats = lab.column("tokens", form="{:.0f}")
    mean_answer: lab.Floats = lab.column("tokens", form="{:.0f}")
    logical_pages: lab.Ints = lab.column(
        "without sharing, over steps", is_reported=False
    )
    distinct_pages: lab.Ints = lab.column("in use, over steps", is_reported=False)
    expected_share: lab.Floats = lab.column("saved share by lengths; NaN for beams")
    steps: lab.Ints = lab.column("non-empty steps")
    num_copied: lab.Ints = lab.column(
        "copy-on-write", key="copied_pages", heading="copied"
    )
    num_preempted: lab.Ints = lab.column(
        "sequences", key="preempted", heading="preempted"
    )
    duration_s: lab.Floats = lab.column("time to serve all requests", is_reported=False)

    @property
    @lab.computed_column()
    def saved_share(self) -> np.ndarray:
        """Saved pages / pages without sharing, both summed over steps."""
        return saved_share(self)

    @property
    @lab.computed_column()
    def published_share(self) -> np.ndarray:
        """Published share; NaN if there is none."""
        is_drawn = np.isfinite(self.expected_share).all()
        return published_share("answers" if is_drawn else "beams", self)

    def saved(self, lengths: str, num_sequences: int) -> float:
        """Returns the saved share in a setting; NaN if it was not served."""
        savings = self.where(lengths=lengths, num_sequences=num_sequences)
        return float(savings.saved_share[0]) if len(savings) else float("nan")


def saved_share(rows: "Savings | PrefixSavings") -> np.ndarray:
    """Returns saved pages / pages without sharing, both summed over steps."""
    return 1 - rows.distinct_pages / np.maximum(rows.logical_pages, 1)


def published_share(kind: str, rows: Any) -> np.ndarray:
    """Returns the published share for each row; NaN if there is none."""
    keys = zip(rows.lengths.tolist(), rows.num_sequences.tolist(), strict=True)
    return np.array([PUBLISHED_SAVINGS[kind].get(key, np.nan) for key in keys])


class PrefillCounts(lab.ResultTable):
    """Prompt tokens fed by requests with several samples under chunked prefill."""

    chunk_size: lab.Ints = lab.column("tokens of a prompt per step")
    num_sequences: lab.Ints = lab.column("samples per request")
    prompt_tokens: lab.Ints = lab.column("prompt tokens, once per request")
    prompt_rows: lab.Ints = lab.column("prompt tokens that the engine fed")


Pairs = Int[np.ndarray, "rows 2"]


def _pair(values: list[int]) -> str:
    return "{:,} / {:,}".format(*values)


class PrefixSavings(lab.ResultTable):
    """Requests with a common prefix, without and with the prefix cache."""

    prefix_tokens: lab.Ints = lab.column("tokens of the prefix", heading="in common")
    num_requests: lab.Ints = lab.column("requests", key="requests", heading="requests")
    prompt_tokens: lab.Ints = lab.column("tokens of all prompts")
    num_cached: lab.Ints = lab.column("fewest cached tokens of a request")
    logical_pages: lab.Ints = lab.column(
        "as in `Savings`, with the cache", is_reported=False
    )
    distinct_pages: lab.Ints = lab.column(
        "as in `Savings`, with the cache", is_reported=False
    )
    prompt_rows: Pairs = lab.column("prompt tokens fed", heading="computed", form=_pair)
    steps: Pairs = lab.column("steps", form=_pair)
    rate: Float[np.ndarray, "rows repeats 2"] = lab.column(
        "tokens/s", is_reported=False
    )
    num_different: lab.Ints = lab.column(
        "answers that differ without and with the cache",
        key="different_answers",
        heading="other answers",
    )

    @property
    @lab.computed_column(heading="pages saved", form=lab.format_percent)
    def saved_share(self) -> np.ndarray:
        """Saved pages / pages without sharing, as in `Savings`."""
        return saved_share(self)

    @property
    @lab.computed_column(
        heading="times the tokens/s",
        form=lambda x: "{1:.2f} ({0:.2f}-{2:.2f})".format(*x),
    )
    def speed_ups(self) -> np.ndarray:
        """Ratios of answer tokens/s: lowest, median, highest: [rows, 3]."""
        ratios = [np.sort(rate[:, 1] / rate[:, 0]) for rate in self.rate]
        return np.array([[x[0], np.median(x), x[-1]] for x in ratios])

    def metrics(self) -> list[lab.Row]:
        """Returns rows for JSON with separate keys without and with the cache."""
        rows = self.rows()
        for row, rate in zip(rows, self.rate, strict=True):
            names = ("speed_up_lowest", "speed_up", "speed_up_highest")
            row |= dict(zip(names, row.pop("speed_ups"), strict=True))
            pairs = {
                "prompt_rows_{}": row.pop("prompt_rows"),
                "steps_{}": row.pop("steps"),
                "tokens_{}_per_s": np.median(rate, axis=0),
            }
            for name, pair in pairs.items():
                ways = zip(("without", "with"), pair, strict=True)
                row |= {name.format(variant): value for variant, value in ways}
        return rows


class ServedPages(NamedTuple):
    """Answers of requests, and the pages that were in use.

    Attributes:
      logical_pages: entries in the tables of all slots: [steps].
      distinct_pages: distinct pages in use: [steps].
      num_rows: tokens fed: [steps].
      num_copied: pages copied on write.
      num_preempted: preempted sequences.
      prompt_rows: prompt tokens fed of each request, recomputation included.
      num_cached: prompt tokens of each request found in the cache.
      tokens: answers by request and sample.
      duration_s: time from submission until the last answer.
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

    def totals(self) -> dict[str, object]:
        """Returns totals under the names of table columns."""
        return self._asdict() | {
            "logical_pages": self.logical_pages.sum(),
            "distinct_pages": self.distinct_pages.sum(),
            "prompt_rows": self.prompt_rows.sum(),
            "num_cached": self.num_cached.min(),
            "steps": len(self.num_rows),
        }


class Client(NamedTuple):
    """An engine whose page tables are read, with the sampling of its requests.

    Attributes:
      engine: engine with `step_with_tables`.
      model: served model.
      ask: default sampling.
      progress: receives progress; may stop.
    """

    engine: Stepper
    model: LoadedModel
    ask: Sampling
    progress: lab.Progress

    def requests(
        self, sizes: list[int], samplings: list[Sampling]
    ) -> list[PromptRequest]:
        """Returns requests of held-out text, the same at every call."""
        rng = np.random.default_rng(self.engine.config.seed)
        return cut_held_out_prompts(self.model.tokenizer, sizes, samplings, rng)

    def samplings(self, answers: np.ndarray, **fields: Any) -> list[Sampling]:
        """Returns sampling for answers of fixed lengths; end tokens are ignored."""
        ask = self.ask
        seed = self.engine.config.seed
        ask = dataclasses.replace(ask, ignore_eos=True, **fields)
        return [
            dataclasses.replace(ask, seed=seed + i, max_tokens=limit)
            for i, limit in enumerate(answers.tolist())
        ]

    def serve(
        self, requests: Sequence[PromptRequest], policy: Policy | None = None
    ) -> ServedPages | None:
        """Serves requests that all arrive at once.

        Args:
          requests: requests in order of the queue.
          policy: scheduling policy; None means first come, first served.

        Returns:
          Answers and pages; None if stopped, after which the engine is empty.

        Raises:
          RuntimeError: the engine's page count differs from that of its tables.
        """
        texts = [x.tokens for x in requests]
        asks = [x.sampling for x in requests]
        done = self.engine.serve(texts, asks, policy=policy, progress=self.progress)
        if done is None:
            return None
        sizes = np.array([*map(len, texts)])
        fed = done.step_infos[0].num_rows.any(axis=1)
        info, pages = jax.tree.map(lambda x: x[fed], done.step_infos)
        num_pages = -(-(pages.length + pages.ahead) // self.engine.config.page_size)
        columns = np.arange(pages.page_ids.shape[2])
        held = np.where(columns < num_pages[:, :, None], pages.page_ids, -1)
        distinct = np.array([np.unique(ids[ids >= 0]).size for ids in held], int)
        if (distinct != info.used_pages).any():
            raise RuntimeError(f"{distinct=} pages, {info.used_pages=}")
        prompt_rows = np.zeros_like(sizes)
        rows = info.num_rows
        name = info.request_id
        of_prompt = np.clip(sizes[name] - pages.length, 0, rows) * (name >= 0)
        np.add.at(prompt_rows, name, of_prompt)
        return ServedPages(
            logical_pages=num_pages.sum(axis=1),
            distinct_pages=distinct,
            num_rows=rows.sum(axis=1),
            num_copied=int(info.num_copied.sum()),
            num_preempted=int(info.num_preempted.sum()),
            prompt_rows=prompt_rows,
            num_cached=done.num_cached,
            tokens=done.tokens,
            duration_s=done.duration_s,
        )


def step_with_tables(
    params: Params, state: EngineState, *, forward: Forward, **rules: Any
) -> tuple[EngineState, tuple[StepInfo, PageTable]]:
    """Runs a step; also returns the page table in its middle."""
    # The step plans again; the compiler removes the duplicate.
    middle, *_ = plan_step(state, **rules)
    state, info = engine.step(params, state, forward=forward, **rules)
    return state, (info, middle.table)


def serve_groups(
    client: Client, kinds: dict[str, Lengths], sizes: Iterable[int], *, beams: bool
) -> Savings:
    """Serves each kind of requests with each number of sequences.

    The requests are the same for every number of sequences. They bypass the prefix
    cache and ignore the model's end token, so that lengths are as drawn.

    Args:
      client: sends the requests.
      kinds: lengths of the requests by name.
      sizes: sequences per request.
      beams: True for beam search, False for sampling.
    """
    settings = [(name, size) for name in kinds for size in sizes]
    page_size = client.engine.config.page_size
    rows = []
    label = "beam search" if beams else "parallel sampling"
    for name, size in client.progress.track(settings, label, "settings"):
        fields = {"beam_width": size, "temperature": 1.0, "top_p": 1.0} if beams else {}
        fields |= {"n": size, "prefix_cache": False}
        lengths = kinds[name]
        samplings = client.samplings(lengths.output, **fields)
        requests = client.requests(lengths.prompt.tolist(), samplings)
        served = client.serve(requests)
        if served is None:
            break
        # Actual lengths: a file may be shorter than the drawn prompt.
        prompt = np.array([len(request.tokens) for request in requests])
        answer = np.array([len(served.tokens[i, 0]) for i in range(len(requests))])
        expected = measured_page_saving(Lengths(prompt, answer), size, page_size)
        rows.append(
            served.totals()
            | {
                "lengths": name,
                "num_sequences": size,
                "num_requests": len(requests),
                "mean_prompt": prompt.mean(),
                "mean_answer": answer.mean(),
                "expected_share": np.nan if beams else expected,
            }
        )
    return Savings.of(rows)


def count_prompt_rows(
    client: Client, lengths: Lengths, num_answers: int, chunk_sizes: Iterable[int]
) -> PrefillCounts:
    """Counts the prompt tokens that an engine feeds for requests with several samples.

    Args:
      client: sends the requests.
      lengths: lengths of the requests; answers have 2 tokens.
      num_answers: samples per request.
      chunk_sizes: tokens of a prompt per step.
    """
    ask = client.samplings(np.array([2]), n=num_answers, prefix_cache=False)
    sizes = lengths.prompt.tolist()
    requests = client.requests(sizes, ask * len(sizes))
    num_tokens = sum(len(request.tokens) for request in requests)
    rows = []
    for size in client.progress.track(chunk_sizes, "prompts in chunks", "chunk sizes"):
        policy = scheduling.fcfs(chunk_size=size)
        served = client.serve(requests, policy=policy)
        if served is None:
            break
        rows.append((size, num_answers, num_tokens, served.prompt_rows.sum()))
    return PrefillCounts.of(rows)


def serve_prefixes(
    client: Client, prefixes: Iterable[int], suffixes: Lengths, *, repeats: int
) -> PrefixSavings:
    """Serves requests with a common prefix repeatedly, without and with the cache.

    The prefix is cached before the clock starts, like a provider's system prompt.
    Without the cache, requests bypass it, so that one program runs both. The order
    alternates.

    Args:
      client: sends the requests.
      prefixes: tokens of the common prefix.
      suffixes: lengths of the rest of each prompt and of its answer.
      repeats: servings of each kind, at least 1.
    """
    rows = []
    for num in client.progress.track(prefixes, "common beginnings", "lengths"):
        # The first request leaves the prefix in the cache.
        samplings = [
            Sampling.greedy(max_tokens=1),
            *client.samplings(suffixes.output, n=1),
        ]
        first, *others = client.requests([num, *suffixes.prompt.tolist()], samplings)
        runs: dict[bool, list[ServedPages]] = {False: [], True: []}
        for turn in range(2 * repeats):
            uses = turn % 4 in (1, 2)
            prefixed = [
                x._replace(
                    tokens=first.tokens + x.tokens,
                    sampling=dataclasses.replace(x.sampling, prefix_cache=uses),
                )
                for x in others
            ]
            client.engine.clear()
            client.serve([first])
            served = client.serve(prefixed)
            if served is None:
                return PrefixSavings.of(rows)
            runs[uses].append(served)
        off = runs[False][0]
        on = runs[True][0]
        both = (off.totals(), on.totals())
        answers = sum(map(len, on.tokens.values()))
        pairs = zip(runs[False], runs[True], strict=True)
        rows.append(
            on.totals()
            | {
                "prefix_tokens": num,
                "num_requests": len(others),
                "prompt_tokens": sum(len(first.tokens + x.tokens) for x in others),
                "prompt_rows": [x["prompt_rows"] for x in both],
                "steps": [x["steps"] for x in both],
                "rate": [[answers / x.duration_s for x in pair] for pair in pairs],
                "num_different": sum(off.tokens[x] != on.tokens[x] for x in on.tokens),
            }
        )
    return PrefixSavings.of(rows)
