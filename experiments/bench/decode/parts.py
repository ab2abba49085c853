"""Where the time of our step goes, by programs that lack a part of it.

A step whose forward pass computes nothing still schedules, packs and samples; one
without attention does all products. What a part takes is a difference of two programs,
so overlap counts for neither: shares are those of time saved without the part.
"""

import dataclasses
import time
import types
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.bench.decode.ours import Decoded, Ours, Unread
from jaxkv.models import ForwardResult, checkpoints, paged
from pallas_kernels.paged_attention import api


class Parts(NamedTuple):
    """Seconds of a step that do not depend on the context.

    Attributes:
      products_s: the weights times the rows, in a program of their own.
      sampling_s: schedule, packing, sampling, and what else a step is without a model.
      rest_s: norms, activations, positions, K and V into pages.
    """

    products_s: float
    sampling_s: float
    rest_s: float


@dataclasses.dataclass(frozen=True)
class WithoutAttention(paged.PagedForward):
    """The model, whose queries pass for what attention gives."""

    def __call__(self, params: Any, pages: Any, rows: Any) -> ForwardResult:
        """As the model, but for attention; K and V are written."""

        def skip(q: jax.Array, *_: Any, **__: Any) -> Any:
            return types.SimpleNamespace(out=q)

        with mock.patch.object(api, "paged_attention", skip):  # while it is traced
            return super().__call__(params, pages, rows)


def measure(
    ours: Ours,
    model: checkpoints.Loaded,
    prompts: list[list[int]],
    num_tokens: int,
    turn_s: float,
) -> Parts:
    """Times the parts, the better of two turns each.

    Args:
      ours: a plain engine, compiled.
      model: that it serves.
      prompts: one for each sequence, as for `Ours.decode`.
      num_tokens: that each decodes.
      turn_s: seconds of a turn.
    """

    def step_s(forward: Any) -> float:
        def turn() -> Decoded:
            return ours.decode(prompts, num_tokens, turn_s, forward=forward)

        return min(len(prompts) * x.decode_s / x.num_decoded for x in (turn(), turn()))

    own = vars(ours.forward)
    sampling_s = step_s(Unread(model.config.vocab_size))
    without_s = step_s(WithoutAttention(**own))
    products_s = products(model, len(prompts), turn_s)
    return Parts(products_s, sampling_s, without_s - sampling_s - products_s)


def products(model: checkpoints.Loaded, num_rows: int, turn_s: float) -> float:
    """Seconds of one product of rows with every matrix of a model, one by one."""
    leaves = jax.tree.leaves(model.params)
    tied = model.config.tie_embeddings
    vocab = model.config.vocab_size
    # The table of an untied model is looked up, not multiplied.
    weights = [x for x in leaves if x.ndim == 2 and (tied or x.shape[0] != vocab)]

    widest = max(min(x.shape) if vocab in x.shape else x.shape[0] for x in weights)
    base = jax.random.normal(jax.random.key(0), (num_rows, widest), weights[0].dtype)

    @jax.jit
    def run(base: jax.Array, weights: list[jax.Array]) -> jax.Array:
        total = jnp.float32(0)
        for weight in weights:
            turned = weight.T if weight.shape[0] == vocab else weight
            # Each waits for the one before, as layers do.
            rows = base[:, : turned.shape[0]] + total.astype(base.dtype)
            total = jnp.max(rows @ turned).astype(jnp.float32) * 1e-9
        return total

    run(base, weights).block_until_ready()
    best, end_s = float("inf"), time.perf_counter() + turn_s
    while True:
        start_s = time.perf_counter()
        run(base, weights).block_until_ready()
        best = min(best, time.perf_counter() - start_s)
        if time.perf_counter() > end_s:
            return best
