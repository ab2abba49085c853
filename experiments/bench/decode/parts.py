"""Breakdown of a decode step, by programs without one of its parts.

A step with an empty forward pass still schedules, packs and samples. A step without
attention computes all products. The time of a part is the difference of
two programs, so overlapping work is attributed to neither part: shares are times saved
without the part.
"""

import dataclasses
from typing import NamedTuple

import jax

from experiments.bench.decode.jaxkv_engine import DecodeCount, JaxkvEngine, NoOpForward
from jaxkv.memory import Pages
from jaxkv.models import Forward, LoadedModel, PagedForward


class StepParts(NamedTuple):
    """Parts of a decode step that do not depend on the context, in s.

    Attributes:
      products_s: products with weights, including norms, activations, positions, and
        the writes of K and V.
      sampling_s: scheduling, packing, sampling, and all other work outside the model.
    """

    products_s: float
    sampling_s: float


def skip_attention(
    pages: Pages, layer: object, q: jax.Array, rows: object, **_: object
) -> jax.Array:
    """Returns the queries instead of the attention output; K and V are written."""
    return q[..., : pages.layout.value_width]


def measure_parts(
    engine: JaxkvEngine,
    model: LoadedModel,
    prompts: list[list[int]],
    num_tokens: int,
    turn_s: float,
) -> StepParts:
    """Times the parts, each as the faster of two turns.

    Args:
      engine: compiled engine without speculation.
      model: its model.
      prompts: one prompt per sequence, as for `JaxkvEngine.decode`.
      num_tokens: tokens that each sequence decodes.
      turn_s: time limit of a turn, in s.
    """

    def step_s(forward: Forward) -> float:
        def turn() -> DecodeCount:
            return engine.decode(prompts, num_tokens, turn_s, forward=forward)

        return min(len(prompts) * x.decode_s / x.num_decoded for x in (turn(), turn()))

    assert isinstance(engine.forward, PagedForward)
    sampling_s = step_s(NoOpForward(model.config.vocab_size))
    without_s = step_s(dataclasses.replace(engine.forward, attend=skip_attention))
    return StepParts(without_s - sampling_s, sampling_s)
