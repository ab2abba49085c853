"""Search for the layers of a model that draft best for it (Draft&Verify).

A draft by few layers is cheap but seldom right. The acceptance rate is counted on given
texts, with one forward pass for each set of layers; the cost is the set's share of all
layers. The best set has the highest speed-up by Leviathan et al., theorem 3.8, at its
best number of drafts.

Source: Zhang et al. 2024, arXiv:2309.08168, section 4.2, where a Bayesian optimiser
proposes the sets; here all sets are tried if they are few, otherwise layers are removed
greedily, the least important first.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv import models, validation
from jaxkv.models import ModelConfig, Params, is_stacked, run_sequences

MOST_SETS = 64
"""Number of layer sets up to which all are tried."""


class LayerSearchResult(NamedTuple):
    """A set of layers and its predicted speed-up."""

    layers: tuple[int, ...]
    """Layers to run, ascending."""
    acceptance: float
    """Share of positions at which the set's most likely token is the model's."""
    num_drafts: int
    """Drafts per step with the highest speed-up."""
    speed: float
    """Speed-up over plain decoding, if a pass of the model costs 1 regardless of the
    tokens verified, and a layer its share."""


def agreement(
    params: Params,
    tokens: Int[Array, "texts length"],
    *,
    config: ModelConfig,
    layers: tuple[int, ...],
) -> float:
    """Returns the share of positions with the same most likely token as the full model.

    Args:
      params: parameters of the model, layers not stacked.
      tokens: texts like those that the model generates.
      config: shape of the model.
      layers: layers to run, ascending.
    """
    return float(_agreement(params, tokens, config, layers))


@functools.partial(jax.jit, static_argnames=("config", "layers"))
def _agreement(
    params: Params, tokens: Array, config: ModelConfig, layers: tuple[int, ...]
) -> Array:
    model = models.merge(config, params)
    states = [run_sequences(model, tokens, only=x).last for x in (None, layers)]
    guesses = [jnp.argmax(model.logits(state), axis=1) for state in states]
    return jnp.mean((guesses[0] == guesses[1]).astype(jnp.float32))


def speed_of(acceptance: float, cost: float, max_drafts: int) -> tuple[float, int]:
    """Returns the highest speed-up of up to `max_drafts` drafts, and their number.

    Each draft is accepted independently with one probability and costs `cost` plain
    steps.
    """
    gains = []
    for num in range(1, max_drafts + 1):
        tokens = sum(acceptance**power for power in range(num + 1))
        gains.append((tokens / (num * cost + 1), num))
    return max(gains, key=lambda gain: (gain[0], -gain[1]))


def search_layers(
    params: Params,
    tokens: Int[Array, "texts length"],
    *,
    config: ModelConfig,
    max_drafts: int = 8,
) -> LayerSearchResult:
    """Finds the layers of a model that draft best for it.

    Args:
      params: parameters of the model, layers not stacked.
      tokens: texts like those that the model generates.
      config: shape of the model, with at least two layers.
      max_drafts: drafts per step at most, at least 1.

    Returns:
      The best set.

    Raises:
      ValueError: the model has one layer, its layers are stacked, or `max_drafts` is
        below 1.
    """
    validation.integer("max_drafts", max_drafts, low=1)
    if config.num_layers < 2:
        raise ValueError(f"{config.num_layers=} must be at least 2, to leave one out")
    if is_stacked(params):
        raise ValueError("a search for layers needs layers that are not stacked")

    def judge(layers: tuple[int, ...]) -> LayerSearchResult:
        share = agreement(params, tokens, config=config, layers=layers)
        speed, num = speed_of(share, len(layers) / config.num_layers, max_drafts)
        return LayerSearchResult(layers, share, num, speed)

    sets = _evaluate_all if 2**config.num_layers - 2 <= MOST_SETS else _remove_greedily
    # Ties go to the smallest set.
    return max(sets(config.num_layers, judge), key=lambda x: (x.speed, -len(x.layers)))


def _evaluate_all(
    num_layers: int, judge: Callable[[tuple[int, ...]], LayerSearchResult]
) -> list[LayerSearchResult]:
    """Evaluates every proper subset of the layers that is not empty."""
    sizes = range(1, num_layers)
    sets = (itertools.combinations(range(num_layers), size) for size in sizes)
    return [judge(layers) for layers in itertools.chain.from_iterable(sets)]


def _remove_greedily(
    num_layers: int, judge: Callable[[tuple[int, ...]], LayerSearchResult]
) -> Iterable[LayerSearchResult]:
    """Yields smaller and smaller sets, each without the least important layer."""
    layers: tuple[int, ...] = tuple(range(num_layers))
    while len(layers) > 1:
        tried: list[LayerSearchResult] = [
            judge(layers[:place] + layers[place + 1 :]) for place in range(len(layers))
        ]
        best = max(tried, key=lambda trial: trial.acceptance)
        yield best
        layers = best.layers
