"""Where the time of our step goes, by programs that lack a part of it.

A step whose forward pass computes nothing still schedules, packs and samples; one
without attention does all products, and the little around them, which no program has
alone as the model has it. What a part takes is a difference of two programs,
so overlap counts for neither: shares are those of time saved without the part.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from experiments.bench.decode.jaxkv_engine import DecodeCount, JaxkvEngine, NoOpForward
from jaxkv.models import checkpoints, paged


class StepParts(NamedTuple):
    """Seconds of a step that do not depend on the context.

    Attributes:
      products_s: the weights times the rows, with norms, activations, positions, and K
        and V into pages around them.
      sampling_s: schedule, packing, sampling, and what else a step is without a model.
    """

    products_s: float
    sampling_s: float


def skip_attention(pages: Any, layer: Any, q: jax.Array, rows: Any, **_: Any) -> Any:
    """Queries pass for what attention gives; K and V are written nevertheless."""
    return q


def measure_parts(
    engine: JaxkvEngine,
    model: checkpoints.Loaded,
    prompts: list[list[int]],
    num_tokens: int,
    turn_s: float,
) -> StepParts:
    """Times the parts, the better of two turns each.

    Args:
      ours: a plain engine, compiled.
      model: that it serves.
      prompts: one for each sequence, as for `Ours.decode`.
      num_tokens: that each decodes.
      turn_s: seconds of a turn.
    """

    def step_s(forward: Any) -> float:
        def turn() -> DecodeCount:
            return engine.decode(prompts, num_tokens, turn_s, forward=forward)

        return min(len(prompts) * x.decode_s / x.num_decoded for x in (turn(), turn()))

    assert isinstance(engine.forward, paged.PagedForward)
    sampling_s = step_s(NoOpForward(model.config.vocab_size))
    without_s = step_s(dataclasses.replace(engine.forward, attend=skip_attention))
    return StepParts(without_s - sampling_s, sampling_s)
