"""Serves trained models through the paged engine, with and without their own drafts."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments import lab
from experiments.harness import Server, make_benchmark_config, measure_in_turns
from experiments.training.deepseek.runs import DENSE, FULL_BLOCK, TrainedModel
from jaxkv.engine import EngineConfig, EngineRules
from jaxkv.memory import Pages
from jaxkv.models import ModelConfig, make_model_pages
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine
from jaxkv.speculation import ModelWeights, build_speculative, parse_speculation

WITH_DRAFTS = "DeepSeek, with drafts"
"""The model with all three ideas, with drafts of its own module."""
_PAGE_SIZE = 16


class ServedModels(lab.ResultTable):
    """Speed of every way of serving."""

    way: lab.Texts = lab.column("a kind, or `WITH_DRAFTS`", heading="served")
    batch: lab.Ints = lab.column("sequences at once")
    tokens_per_s: Float[np.ndarray, "rows rounds"] = lab.column(
        "answers' tokens over the time of all requests, prompts included", of=np.median
    )
    ratio: lab.Floats = lab.column(
        "over the DeepSeek model without drafts, median of rounds",
        heading="over no drafts",
        form="{:.2f}",
    )
    tokens_per_step: lab.Floats = lab.column(
        "tokens of a sequence in a decoding step", form="{:.2f}"
    )
    pool_bytes: lab.Floats = lab.column(
        "float32 bytes of a token in all pages, those of the drafter included",
        heading="bytes a token, float32",
        form="{:,.0f}",
    )
    num_tokens: lab.Ints = lab.column("tokens of all answers", heading="tokens")
    num_other: lab.Ints = lab.column(
        "tokens that differ from the same model's without drafts",
        heading="other tokens",
    )

    def ratios(self, kind: str, batch: int) -> Float[np.ndarray, " rounds"]:
        """Returns the speed of a way over that of `FULL_BLOCK` in each round."""
        ours, base = (
            self.where(way=x, batch=batch).tokens_per_s[0] for x in (kind, FULL_BLOCK)
        )
        return ours / base


class DraftDepths(lab.ResultTable):
    """Drafts by their position after the model's own last token."""

    depth: lab.Ints = lab.column("position of the draft, from 1")
    drafted: lab.Ints = lab.column("drafts that were verified")
    accepted: lab.Ints = lab.column("drafts that were accepted, with all before them")

    @property
    @lab.computed_column(heading="accepted")
    def accepted_share(self) -> lab.Floats:
        """Share of the drafts of a position that are accepted."""
        return self.accepted / np.maximum(self.drafted, 1)

    @property
    @lab.computed_column(heading="if those before are")
    def conditional_share(self) -> lab.Floats:
        """Share that is accepted among drafts whose predecessors are."""
        before = np.concatenate([self.drafted[:1], self.accepted[:-1]])
        return self.accepted / np.maximum(before, 1)


class _Served(NamedTuple):
    """One round of a server.

    Attributes:
      tokens_per_s: answers' tokens per second.
      answers: tokens of the answers.
      emitted: tokens of each decoding step of a sequence, except its last.
      drafted: drafts of the same steps.
    """

    tokens_per_s: float
    answers: list[list[int]]
    emitted: Int[np.ndarray, " steps"]
    drafted: Int[np.ndarray, " steps"]


def page_bytes_per_token(model: ModelConfig, dtype: str = "bfloat16") -> float:
    """Returns the bytes of a token in the pages of a model, counted from the arrays."""
    bounds = make_benchmark_config(1, _PAGE_SIZE, page_size=_PAGE_SIZE)
    pages = make_model_pages(model, bounds, dtype=dtype)
    return _bytes_per_token(pages, bounds)


def _bytes_per_token(pages: Pages, bounds: EngineConfig) -> float:
    leaves = jax.tree.leaves(pages)
    return sum(x.nbytes for x in leaves) / (bounds.num_pages * bounds.page_size)


def serve_in_turns(
    dense: TrainedModel,
    deepseek: TrainedModel,
    *,
    prompts: list[list[int]],
    output_tokens: int,
    num_drafts: int,
    batches: tuple[int, ...],
    rounds: int,
    progress: lab.Progress,
) -> tuple[ServedModels, DraftDepths]:
    """Serves two models in alternating rounds, the second one also with drafts.

    Args:
      dense: the dense model.
      deepseek: the model with all three ideas.
      prompts: prompts of equal length; a multiple of every batch size.
      output_tokens: tokens of each answer; all are greedy.
      num_drafts: drafts per step.
      batches: numbers of concurrent sequences.
      rounds: rounds that are timed, after one that compiles.
      progress: progress display.

    Returns:
      The speeds, and the accepted drafts by position, of the first batch size.
    """
    ask = Sampling.greedy(max_tokens=output_tokens, ignore_eos=True)
    longest = len(prompts[0]) + output_tokens
    ways = {
        DENSE: (dense, 0),
        FULL_BLOCK: (deepseek, 0),
        WITH_DRAFTS: (deepseek, num_drafts),
    }

    def begin(batch: int) -> list[Server]:
        servers = []
        for name, (trained, num) in ways.items():
            bounds = make_benchmark_config(
                batch,
                longest,
                page_size=_PAGE_SIZE,
                num_pages=batch * -(-(longest + num) // _PAGE_SIZE),
                token_budget=max(64, batch * (1 + num)),
                max_drafts=num,
                steps_per_call=16,
            )
            server = Server(_make_engine(trained, bounds), name)
            server.serve(prompts[:batch], [ask] * batch)
            servers.append(server)
        return servers

    def measure(batch: int, server: Server) -> _Served:
        answers = []
        emitted = []
        drafted = []
        started = time.perf_counter()
        for start in range(0, len(prompts), batch):
            answers += server.serve(prompts[start : start + batch], [ask] * batch)
            steps = server.steps
            num_emitted = np.asarray(steps.num_emitted)
            so_far = np.cumsum(num_emitted, axis=0)
            # Neither the step that ends the prompt, nor one cut by the answer's end.
            counted = (
                (num_emitted > 0) & (so_far > num_emitted) & (so_far < output_tokens)
            )
            emitted.append(num_emitted[counted])
            fed = (
                np.zeros_like(num_emitted)
                if steps.num_drafts is None
                else steps.num_drafts
            )
            drafted.append(np.asarray(fed)[counted])
        seconds = time.perf_counter() - started
        num = sum(map(len, answers))
        return _Served(
            num / seconds, answers, np.concatenate(emitted), np.concatenate(drafted)
        )

    rows = []
    depths = DraftDepths.of([])
    for batch, servers, runs_by_server in measure_in_turns(
        batches,
        rounds,
        begin,
        measure,
        progress=progress,
        bar_label="serving",
        case_name="batch",
    ):
        base = np.array([x.tokens_per_s for x in runs_by_server[FULL_BLOCK]])
        for server in servers:
            first = runs_by_server[server.name][0]
            rates = np.array([x.tokens_per_s for x in runs_by_server[server.name]])
            reference = first if server.name == DENSE else runs_by_server[FULL_BLOCK][0]
            rows.append(
                {
                    "way": server.name,
                    "batch": batch,
                    "tokens_per_s": rates,
                    "ratio": np.median(rates / base),
                    "tokens_per_step": first.emitted.mean(),
                    "pool_bytes": _bytes_per_token(
                        server.engine.state.pages, server.engine.config
                    ),
                    "num_tokens": sum(map(len, first.answers)),
                    "num_other": sum(
                        a != b
                        for pair in zip(first.answers, reference.answers, strict=True)
                        for a, b in zip(*pair, strict=True)
                    ),
                }
            )
        if not len(depths):
            depths = _count_depths(runs_by_server[WITH_DRAFTS][0], num_drafts)
    return ServedModels.of(rows), depths


def _count_depths(run: _Served, num_drafts: int) -> DraftDepths:
    """Counts verified and accepted drafts by position."""
    depths = range(1, num_drafts + 1)
    return DraftDepths.of(
        (depth, (run.drafted >= depth).sum(), (run.emitted > depth).sum())
        for depth in depths
    )


def _make_engine(trained: TrainedModel, bounds: EngineConfig) -> Engine:
    """Makes an engine; its drafts are those of the model's own module, if any."""
    params = jax.tree.map(jnp.asarray, trained.result.params)
    how = parse_speculation("mtp") if bounds.max_drafts else None
    model = ModelWeights(trained.model, params)
    parts, speculation = build_speculative(model, bounds, how, dtype="float32")
    return Engine(parts, EngineRules(speculation=speculation), keep_trace=True)
