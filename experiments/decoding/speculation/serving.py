"""The engine with and without drafts: what it drew, and what its steps cost."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from experiments.harness import model_shapes
from experiments.harness.serving import Server
from experiments.harness.timing import CallTimes
from jaxkv.engine import EngineConfig, EngineState, StepInfo
from jaxkv.models import checkpoints
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine
from jaxkv.speculation import (
    Jacobi,
    Speculation,
    SpeculationConfig,
    head_folders,
    methods,
)

PLAIN = "plain"


class Way(NamedTuple):
    """A way to decode.

    Attributes:
      method: the engine's, None to decode plainly.
      layers: that draft by early exit, or how many of the first.
      is_chain: whether heads draft a chain, where they could draft a tree.
      adaptive: whether no more is drafted than pays.
    """

    method: methods.Method | None = None
    layers: int | tuple[int, ...] | None = None
    is_chain: bool = False
    adaptive: bool = False


WAYS = {
    PLAIN: Way(),
    "n-gram": Way("ngram"),
    "Jacobi": Way("jacobi"),
    "draft model": Way("draft-model"),
    "early exit, 1 layer": Way("early-exit", 1),
    "early exit, 2 layers": Way("early-exit", 2),
    "lookahead": Way("lookahead"),
    "Medusa, chain": Way("medusa", is_chain=True),
    "Medusa, tree": Way("medusa"),
    "EAGLE, chain": Way("eagle", is_chain=True),
    "EAGLE, tree": Way("eagle"),
    "n-gram, adaptive": Way("ngram", adaptive=True),
    "EAGLE, adaptive": Way("eagle", is_chain=True, adaptive=True),
}


class Counts(NamedTuple):
    """Of steps in which a sequence decodes; the one that reads its prompt is none.

    Attributes:
      steps: of all sequences, each counted by itself.
      emitted: tokens that they gave.
      drafted: drafts that were fed.
      first: steps whose first draft was accepted.
      call_s: seconds of calls in which every sequence decoded in every step.
      call_steps: steps of these calls, counted once for the whole batch.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    first: int = 0
    call_s: float = 0.0
    call_steps: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """The sums of both."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def count(info: StepInfo, times: list[CallTimes], num_slots: int) -> Counts:
    """Counts a batch that was served from its prompts to its ends, a slot for each.

    Steps are timed by the calls that they are in, each from the end of the one before:
    so neither reading prompts counts, nor what an engine idles behind the last token.

    Args:
      info: of all steps, in order.
      times: of the calls that they were made in.
      num_slots: sequences of the batch.
    """
    emitted = np.asarray(info.num_emitted)
    drafts = np.zeros_like(emitted)
    if info.num_drafts is not None:
        drafts = np.asarray(info.num_drafts)
    decodes = (emitted > 0) & (np.cumsum(emitted, axis=0) > emitted)
    by_call = decodes.reshape(len(times), -1, num_slots)
    ready_s = np.array([call.ready_s for call in times])
    whole = by_call.all(axis=(1, 2))[1:]
    return Counts(
        steps=int(decodes.sum()),
        emitted=int(emitted[decodes].sum()),
        drafted=int(drafts[decodes].sum()),
        first=int((emitted[decodes] > 1).sum()),
        call_s=float(np.diff(ready_s)[whole].sum()),
        call_steps=int(whole.sum()) * by_call.shape[1],
    )


def bounds(
    batch: int,
    num_drafts: int,
    max_length: int,
    steps_per_call: int,
    num_lengths: int = 1,
) -> EngineConfig:
    """An engine's, in which nobody lacks a page, nor rows for his drafts."""
    return model_shapes.make_engine_config(
        batch,
        max_length,
        num_pages=batch * -(-(max_length + num_drafts) // 16),
        token_budget=max(128, batch * (1 + num_drafts)),
        max_drafts=num_drafts,
        num_lengths=num_lengths,
        steps_per_call=steps_per_call,
    )


def make(
    model: checkpoints.LoadedModel,
    way: str,
    config: EngineConfig,
    speculation: Speculation | None = None,
    heads: head_folders.LoadedHeads | None = None,
    draft: checkpoints.LoadedModel | None = None,
) -> Server:
    """Makes a server that decodes one way.

    Args:
      model: what to serve.
      way: one of `WAYS`.
      config: the engine's bounds.
      speculation: instead of the way's own.
      heads: that draft for the model, for ways that have some.
      draft: the model that drafts, for the way that has one.
    """
    its = WAYS[way]
    if its.is_chain and heads is not None:
        first = tuple(depth[:1] for depth in heads.acceptance)
        heads = heads._replace(acceptance=first)
    small = None
    if draft is not None and its.method == "draft-model":
        small = methods.ModelWeights(draft.config, draft.params)
    how = None
    if its.method is not None:
        how = SpeculationConfig(
            its.method, draft_layers=its.layers, adaptive=its.adaptive
        )
    served = methods.build_speculative(
        methods.ModelWeights(model.config, model.params),
        config,
        how,
        dtype="float32",
        heads=heads,
        draft=small,
    )
    engine = Engine(
        served.params,
        served.forward,
        served.pages,
        config,
        eos_ids=(),
        speculation=speculation or served.speculation,
        keep_trace=True,
    )
    if its.adaptive:
        engine.tune()
    return Server(engine, f"{way} {config.max_drafts}")


def decode(
    server: Server, prompts: list[list[int]], asks: list[Sampling]
) -> tuple[list[list[int]], Counts]:
    """Answers prompts in batches of as many as there are slots; the first compiles.

    Returns:
      The answers' tokens, and the counts of all batches.
    """
    answers, counts, batch = [], Counts(), server.engine.config.max_slots
    for start in range(0, len(prompts), batch):
        end = start + batch
        answers += server.serve(prompts[start:end], asks[start:end])
        counts = counts.plus(count(server.steps, server.times, batch))
    return answers, counts


def given(server: Server, num_drafts: int) -> tuple[int, int]:
    """Steps of the last batch that fed so many drafts, and the tokens they gave."""
    emitted, fed = server.steps.num_emitted, server.steps.num_drafts
    here = (fed == num_drafts) & (emitted > 0)
    return int(here.sum()), int(emitted[here].sum())


def costs(
    step_s: Float[np.ndarray, "rows rounds"], plain_s: Float[np.ndarray, "rows rounds"]
) -> Float[np.ndarray, " rows"]:
    """What steps cost in plain ones of the same round; the median of rounds."""
    pairs = zip(step_s, plain_s, strict=True)
    return np.array([np.median(ours / plain) for ours, plain in pairs])


@dataclasses.dataclass(frozen=True)
class Uneven(Jacobi):
    """Guesses of which not all slots want as many."""

    wanted: tuple[int, ...] = (1,)
    """Drafts of the first slots; for those behind them it begins again."""

    def wishes(
        self, memory: Any, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """As many as are wanted."""
        wanted = jnp.asarray(self.wanted, jnp.int32)
        return jnp.resize(wanted, state.slots.sequence.shape)
