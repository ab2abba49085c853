"""Compares a model over pages with the same model over whole sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.engine import EngineConfig
from jaxkv.memory import Rows
from jaxkv.models import ModelConfig, PagedForward, make_model_pages
from tests.support import engines

ROWS = 24


def feed(params: Any, pages: Any, rows: Rows, *, forward: PagedForward) -> Any:
    return forward(params, pages, rows)


_compiled = functools.partial(
    jax.jit, feed, static_argnames="forward", donate_argnames="pages"
)
feed_fast_to_compile: Any = _compiled(compiler_options=engines.FAST_COMPILE)


feed_as_served = _compiled()


def check_paged_equals_contiguous(
    config: ModelConfig,
    params: Any,
    *,
    feed: Any,
    page_size: int,
    numerics: Any = "fast",
    seed: int,
    decode_share: float,
) -> None:
    """Feeds sequences in chunks and random batches, and compares all logits.

    Some steps feed one row per slot, by the decode program.
    """
    rng = np.random.default_rng(seed)
    length = min(config.max_positions, 70)
    tokens = rng.integers(0, config.vocab_size, (2, length)).astype(np.int32)
    expected = np.asarray(engines.full_logits(params, tokens, config=config))

    width = -(-length // page_size)
    pages = make_model_pages(
        config,
        EngineConfig(num_pages=2 * width + 1, page_size=page_size, max_length=length),
    )
    pages = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)
    page_ids: Any = np.full((3, width), -1, np.int32)
    slots = (2, 0)  # of the two sequences; slot 1 stays empty
    page_ids[slots, :] = rng.permutation(2 * width + 1)[:-1].reshape(2, width)
    forward = PagedForward(config, numerics)
    done = [0, 0]
    num_steps = 0
    while min(done) < length:
        one_each = rng.random() < decode_share
        fed: list[tuple[int, int]] = []
        for which in rng.permutation(2).tolist():
            max_rows = 1 if one_each else ROWS - len(fed) - 2
            num = int(rng.integers(0, min(max_rows, length - done[which]) + 1))
            fed += [(which, done[which] + place) for place in range(num)]
            done[which] += num
        num_rows = 3 if one_each else ROWS
        fields: Any = np.full((4, num_rows), -1, np.int32)
        for row, (which, place) in enumerate(fed):
            row = slots[which] if one_each else row
            fields[:, row] = tokens[which, place], place, slots[which], row
        token, position, slot, logit_rows = fields
        rows = Rows(
            token=np.maximum(token, 0),
            position=position,
            slot=None if one_each else slot,
            page_ids=page_ids,
            logit_rows=logit_rows,
        )
        result = feed(params, pages, rows, forward=forward)
        pages = result.pages
        logits = np.asarray(result.logits)
        for row, (which, place) in enumerate(fed):
            row = slots[which] if one_each else row
            want = expected[which, place]
            np.testing.assert_allclose(logits[row], want, rtol=0, atol=1e-4)
        num_steps += 1
    assert num_steps > 5
