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


class DecodingMethod(NamedTuple):
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


METHODS = {
    PLAIN: DecodingMethod(),
    "n-gram": DecodingMethod("ngram"),
    "Jacobi": DecodingMethod("jacobi"),
    "draft model": DecodingMethod("draft-model"),
    "early exit, 1 layer": DecodingMethod("early-exit", 1),
    "early exit, 2 layers": DecodingMethod("early-exit", 2),
    "lookahead": DecodingMethod("lookahead"),
    "Medusa, chain": DecodingMethod("medusa", is_chain=True),
    "Medusa, tree": DecodingMethod("medusa"),
    "EAGLE, chain": DecodingMethod("eagle", is_chain=True),
    "EAGLE, tree": DecodingMethod("eagle"),
    "n-gram, adaptive": DecodingMethod("ngram", adaptive=True),
    "EAGLE, adaptive": DecodingMethod("eagle", is_chain=True, adaptive=True),
}


class DecodeCounts(NamedTuple):
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

    def plus(self, other: "DecodeCounts") -> "DecodeCounts":
        """The sums of both."""
        return DecodeCounts(*(a + b for a, b in zip(self, other, strict=True)))


def count_decoding(
    info: StepInfo, times: list[CallTimes], num_slots: int
) -> DecodeCounts:
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
    return DecodeCounts(
        steps=int(decodes.sum()),
        emitted=int(emitted[decodes].sum()),
        drafted=int(drafts[decodes].sum()),
        first=int((emitted[decodes] > 1).sum()),
        call_s=float(np.diff(ready_s)[whole].sum()),
        call_steps=int(whole.sum()) * by_call.shape[1],
    )


def drafting_engine_config(
    batch: int,
    num_drafts: int,
    max_length: int,
    steps_per_call: int,
    num_lengths: int = 1,
) -> EngineConfig:
    """An engine's, in which nobody lacks a page, nor rows for his drafts."""
    return model_shapes.bounds(
        batch,
        max_length,
        num_pages=batch * -(-(max_length + num_drafts) // 16),
        token_budget=max(128, batch * (1 + num_drafts)),
        max_drafts=num_drafts,
        num_lengths=num_lengths,
        steps_per_call=steps_per_call,
    )


def make_server(
    model: checkpoints.Loaded,
    way: str,
    config: EngineConfig,
    speculation: Speculation | None = None,
    heads: head_folders.Loaded | None = None,
    draft: checkpoints.Loaded | None = None,
) -> Server:
    """Makes a server that decodes one way.

    Args:
      model: what to serve.
      way: one of `METHODS`.
      config: the engine's bounds.
      speculation: instead of the way's own.
      heads: that draft for the model, for ways that have some.
      draft: the model that drafts, for the way that has one.
    """
    its = METHODS[way]
    if its.is_chain and heads is not None:
        first = tuple(depth[:1] for depth in heads.acceptance)
        heads = heads._replace(acceptance=first)
    small = None
    if draft is not None and its.method == "draft-model":
        small = methods.Model(draft.config, draft.params)
    how = None
    if its.method is not None:
        how = SpeculationConfig(
            its.method, draft_layers=its.layers, adaptive=its.adaptive
        )
    served = methods.build_speculative(
        methods.Model(model.config, model.params),
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


def decode_batches(
    server: Server, prompts: list[list[int]], asks: list[Sampling]
) -> tuple[list[list[int]], DecodeCounts]:
    """Answers prompts in batches of as many as there are slots; the first compiles.

    Returns:
      The answers' tokens, and the counts of all batches.
    """
    answers, counts, batch = [], DecodeCounts(), server.engine.config.max_slots
    for start in range(0, len(prompts), batch):
        end = start + batch
        answers += server.serve(prompts[start:end], asks[start:end])
        counts = counts.plus(count_decoding(server.steps, server.times, batch))
    return answers, counts


def steps_with_drafts(server: Server, num_drafts: int) -> tuple[int, int]:
    """Steps of the last batch that fed so many drafts, and the tokens they gave."""
    emitted, fed = server.steps.num_emitted, server.steps.num_drafts
    here = (fed == num_drafts) & (emitted > 0)
    return int(here.sum()), int(emitted[here].sum())


def relative_costs(
    step_s: Float[np.ndarray, "rows rounds"], plain_s: Float[np.ndarray, "rows rounds"]
) -> Float[np.ndarray, " rows"]:
    """What steps cost in plain ones of the same round; the median of rounds."""
    pairs = zip(step_s, plain_s, strict=True)
    return np.array([np.median(ours / plain) for ours, plain in pairs])


@dataclasses.dataclass(frozen=True)
class MixedDraftLengths(Jacobi):
    """Guesses of which not all slots want as many."""

    wanted: tuple[int, ...] = (1,)
    """Drafts of the first slots; for those behind them it begins again."""

    def wishes(
        self, memory: Any, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """As many as are wanted."""
        wanted = jnp.asarray(self.wanted, jnp.int32)
        return jnp.resize(wanted, state.slots.sequence.shape)
