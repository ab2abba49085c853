"""Builds engines with and without speculation, and counts tokens and step times."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from experiments.harness import CallTimes, Server, make_benchmark_config
from jaxkv.engine import (
    EngineConfig,
    EngineRules,
    EngineState,
    Speculation,
    StepInfo,
)
from jaxkv.models import LoadedModel
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine
from jaxkv.speculation import (
    Jacobi,
    LoadedHeads,
    Method,
    ModelWeights,
    SpeculationConfig,
    build_speculative,
)

PLAIN_DECODING = "plain"


class DecodingMethod(NamedTuple):
    """A decoding method.

    Attributes:
      method: drafter of the engine; None for plain decoding.
      layers: layers of an early-exit drafter, or the number of first layers.
      is_chain: True if heads draft a chain instead of a tree.
      adaptive: True if the draft length adapts to acceptance and cost.
    """

    method: Method | None = None
    layers: int | tuple[int, ...] | None = None
    is_chain: bool = False
    adaptive: bool = False


DECODING_METHODS = {
    PLAIN_DECODING: DecodingMethod(),
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
    """Counts of decoding steps; the step that ends prefill is excluded.

    Attributes:
      steps: steps, summed over sequences.
      emitted: tokens of these steps.
      drafted: verified draft tokens.
      first: steps that accepted the first draft token.
      call_s: seconds of calls in which every sequence decoded in every step.
      call_steps: steps of these calls, counted once per batch.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    first: int = 0
    call_s: float = 0.0
    call_steps: int = 0

    def plus(self, other: "DecodeCounts") -> "DecodeCounts":
        """Returns the sums of both."""
        return DecodeCounts(*(a + b for a, b in zip(self, other, strict=True)))


def count_decoding(
    info: StepInfo, times: list[CallTimes], num_slots: int
) -> DecodeCounts:
    """Counts the decoding steps of one batch with a slot per sequence.

    A step is timed by its call, from the end of the previous call. So neither prefill
    nor idle steps after the last token count.

    Args:
      info: all steps in order.
      times: their calls.
      num_slots: sequences of the batch.
    """
    emitted = np.asarray(info.num_emitted)
    drafts = np.zeros_like(emitted)
    if info.num_drafts is not None:
        drafts = np.asarray(info.num_drafts)
    decodes = (emitted > 0) & (np.cumsum(emitted, axis=0) > emitted)
    by_call = decodes.reshape(len(times), -1, num_slots)
    ready_s = np.array([call.ready_s for call in times])
    is_full = by_call.all(axis=(1, 2))[1:]
    return DecodeCounts(
        steps=int(decodes.sum()),
        emitted=int(emitted[decodes].sum()),
        drafted=int(drafts[decodes].sum()),
        first=int((emitted[decodes] > 1).sum()),
        call_s=float(np.diff(ready_s)[is_full].sum()),
        call_steps=int(is_full.sum()) * by_call.shape[1],
    )


def drafting_engine_config(
    batch: int,
    num_drafts: int,
    max_length: int,
    steps_per_call: int,
    num_draft_buckets: int = 1,
) -> EngineConfig:
    """Returns an engine config with enough pages and rows for all drafts."""
    return make_benchmark_config(
        batch,
        max_length,
        num_pages=batch * -(-(max_length + num_drafts) // 16),
        token_budget=max(128, batch * (1 + num_drafts)),
        max_drafts=num_drafts,
        num_draft_buckets=num_draft_buckets,
        steps_per_call=steps_per_call,
    )


def make_server(
    model: LoadedModel,
    method_name: str,
    config: EngineConfig,
    speculation: Speculation | None = None,
    heads: LoadedHeads | None = None,
    draft: LoadedModel | None = None,
) -> Server:
    """Builds a server of a decoding method.

    Args:
      model: target model.
      method_name: key of `DECODING_METHODS`.
      config: engine config.
      speculation: replaces the method's own drafter and verifier.
      heads: trained heads, for methods that use them.
      draft: draft model, for the method "draft model".
    """
    method = DECODING_METHODS[method_name]
    if method.is_chain and heads is not None:
        first = tuple(depth[:1] for depth in heads.acceptance)
        heads = heads._replace(acceptance=first)
    small = None
    if draft is not None and method.method == "draft-model":
        small = ModelWeights(draft.config, draft.params)
    how = None
    if method.method is not None:
        how = SpeculationConfig(
            method.method, draft_layers=method.layers, adaptive=method.adaptive
        )
    parts, built_speculation = build_speculative(
        ModelWeights(model.config, model.params),
        config,
        how,
        dtype="float32",
        heads=heads,
        draft=small,
    )
    rules = EngineRules(speculation=speculation or built_speculation)
    engine = Engine(parts, rules, keep_trace=True)
    if method.adaptive:
        engine.tune()
    return Server(engine, f"{method_name} {config.max_drafts}")


def decode_batches(
    server: Server, prompts: list[list[int]], asks: list[Sampling]
) -> tuple[list[list[int]], DecodeCounts]:
    """Answers prompts in batches of `max_slots`; the first batch compiles.

    Returns:
      The answers' tokens, and the counts of all batches.
    """
    answers = []
    counts = DecodeCounts()
    batch = server.engine.config.max_slots
    for start in range(0, len(prompts), batch):
        end = start + batch
        answers += server.serve(prompts[start:end], asks[start:end])
        counts = counts.plus(count_decoding(server.steps, server.times, batch))
    return answers, counts


def steps_with_drafts(server: Server, num_drafts: int) -> tuple[int, int]:
    """Returns the steps of the last batch with that draft length, and their tokens."""
    emitted = server.steps.num_emitted
    fed = server.steps.num_drafts
    selected = (fed == num_drafts) & (emitted > 0)
    return int(selected.sum()), int(emitted[selected].sum())


def relative_costs(
    step_s: Float[np.ndarray, "rows rounds"], plain_s: Float[np.ndarray, "rows rounds"]
) -> Float[np.ndarray, " rows"]:
    """Returns the cost of steps / plain steps of the same round, median over rounds."""
    pairs = zip(step_s, plain_s, strict=True)
    return np.array([np.median(ours / plain) for ours, plain in pairs])


@dataclasses.dataclass(frozen=True)
class MixedDraftLengths(Jacobi):
    """A Jacobi drafter whose slots have different draft lengths."""

    wanted: tuple[int, ...] = (1,)
    """Draft lengths of the first slots, repeated for the following ones."""

    def requested_draft_lengths(
        self, memory: object, state: EngineState, config: EngineConfig
    ) -> Int32[Array, " slots"]:
        """Returns the draft length of each slot."""
        wanted = jnp.asarray(self.wanted, jnp.int32)
        return jnp.resize(wanted, state.slots.sequence.shape)
