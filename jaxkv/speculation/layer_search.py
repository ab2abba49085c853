"""Which layers of a model draft best for it: Draft&Verify's search.

A draft by few layers is cheap and seldom right. How often it is right is counted on
given texts, one forward pass for each set of layers; what it costs is their share of
all layers. The best set has the best speed-up by Leviathan et al., theorem 3.8, at the
best number of drafts.

Source: Zhang et al. 2024, arXiv:2309.08168, section 4.2, where a Bayesian optimiser
proposes the sets; here all are tried where there are few, else layers are left out one
after the other, the one that is missed least first.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv import validation
from jaxkv.models import ModelConfig, Params, param_forms, transformer

MOST_SETS = 64
"""Sets of layers that are tried one by one."""


class Found(NamedTuple):
    """A set of layers as a drafter."""

    layers: tuple[int, ...]
    """Those that are run, in order."""
    acceptance: float
    """Share of the places at which it finds the model's own likeliest token."""
    num_drafts: int
    """Drafts of a step at which it gains most."""
    speed: float
    """Times as fast as plain decoding, if a pass of the model costs one whatever is
    verified, and a layer its share."""


def agreement(
    params: Params,
    tokens: Int[Array, "texts length"],
    *,
    config: ModelConfig,
    layers: tuple[int, ...],
) -> float:
    """Share of the places at which some layers find what all layers find likeliest.

    Args:
      params: of the model, layers not stacked.
      tokens: texts, such as the model writes.
      config: the model's shape.
      layers: those that are run, in order; no place is left out at which others fail.
    """
    return float(_agreement(params, tokens, config, layers))


@functools.partial(jax.jit, static_argnames=("config", "layers"))
def _agreement(
    params: Params, tokens: Array, config: ModelConfig, layers: tuple[int, ...]
) -> Array:
    model = transformer.merge(config, params)
    states = [
        transformer.run_sequences(model, tokens, only=x).last for x in (None, layers)
    ]
    found = [jnp.argmax(model.logits(state), axis=1) for state in states]
    return jnp.mean((found[0] == found[1]).astype(jnp.float32))


def speed_of(acceptance: float, cost: float, most: int) -> tuple[float, int]:
    """The best speed-up of up to `most` drafts, and at how many.

    Each is accepted with one probability, by itself, and costs `cost` plain steps.
    """
    gains = []
    for num in range(1, most + 1):
        tokens = sum(acceptance**power for power in range(num + 1))
        gains.append((tokens / (num * cost + 1), num))
    return max(gains, key=lambda gain: (gain[0], -gain[1]))


def search(
    params: Params,
    tokens: Int[Array, "texts length"],
    *,
    config: ModelConfig,
    max_drafts: int = 8,
) -> Found:
    """Finds the layers that draft best for the model whose layers they are.

    Args:
      params: of the model, layers not stacked.
      tokens: texts, such as the model writes.
      config: the model's shape, of at least two layers.
      max_drafts: drafts of a step at most, at least 1.

    Returns:
      The best set that was tried.

    Raises:
      ValueError: there is one layer only, layers are stacked, or there are no drafts.
    """
    validation.integer("max_drafts", max_drafts, low=1)
    if config.num_layers < 2:
        raise ValueError(f"{config.num_layers=} must be at least 2, to leave one out")
    if param_forms.is_stacked(params):
        raise ValueError("a search for layers needs layers that are not stacked")

    def judge(layers: tuple[int, ...]) -> Found:
        share = agreement(params, tokens, config=config, layers=layers)
        speed, num = speed_of(share, len(layers) / config.num_layers, max_drafts)
        return Found(layers, share, num, speed)

    sets = _all if 2**config.num_layers - 2 <= MOST_SETS else _one_by_one
    # Of equal ones the smallest.
    return max(sets(config.num_layers, judge), key=lambda x: (x.speed, -len(x.layers)))


def _all(num_layers: int, judge: Callable[[tuple[int, ...]], Found]) -> list[Found]:
    """Every set but the empty one and the whole model."""
    sizes = range(1, num_layers)
    sets = (itertools.combinations(range(num_layers), size) for size in sizes)
    return [judge(layers) for layers in itertools.chain.from_iterable(sets)]


def _one_by_one(
    num_layers: int, judge: Callable[[tuple[int, ...]], Found]
) -> Iterable[Found]:
    """Ever smaller sets, each the best that lacks one layer of the one before."""
    layers: tuple[int, ...] = tuple(range(num_layers))
    while len(layers) > 1:
        tried: list[Any] = [
            judge(layers[:place] + layers[place + 1 :]) for place in range(len(layers))
        ]
        best = max(tried, key=lambda found: found.acceptance)
        yield best
        layers = best.layers
