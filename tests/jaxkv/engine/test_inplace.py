"""The pages are never copied: checks of temporary memory and of the compiled program.

All programs are lowered from shapes, so a large pool takes no memory.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv import decoding, scheduling
from jaxkv.memory import Pages, make_pool
from jaxkv.models import ModelConfig, PagedForward, param_shapes
from tests.support import pool_sized
from tests.support.engine_programs import (
    CONFIG,
    LARGE,
    MODEL,
    SMALL,
    UNOPTIMISED,
    bytes_of,
    compile_steps,
    copies,
    pages_of,
    steps,
    temporary_bytes,
)

pytestmark = pytest.mark.usefixtures("full_optimization")


def assert_in_place(program: Any, pages: Any) -> None:
    # Less than 5 % of the pool, and so of its growth from any smaller pool.
    assert temporary_bytes(program) < 0.05 * bytes_of(pages)
    assert not copies(program, pages)


# A buffer as large as the pool: a copy of either would show.
EVERYTHING = {"prefix_cache": True, "max_beams": 4, "max_swap_pages": LARGE}


@pytest.mark.parametrize(
    ("bounds", "numerics"),
    [
        pytest.param({}, "reproducible", id="reproducible", marks=pytest.mark.slow),
        pytest.param({}, "fast", id="fast", marks=pytest.mark.slow),
        pytest.param(
            {"page_size": 1}, "fast", id="token pages", marks=pytest.mark.slow
        ),
        pytest.param({"max_slots": 1}, "fast", id="one slot", marks=pytest.mark.slow),
        pytest.param(
            {"max_slots": 1, "page_size": 4},
            "fast",
            id="one slot, small pages",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"evict": "quest", "evict_budget": 32},
            "fast",
            id="quest",
            marks=pytest.mark.slow,
        ),
        pytest.param(EVERYTHING, "fast", id="everything", marks=pytest.mark.slow),
        pytest.param(
            EVERYTHING,
            "reproducible",
            id="everything, reproducible",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_pages_stay_where_they_are(bounds: dict[str, Any], numerics: str) -> None:
    config = dataclasses.replace(CONFIG, **bounds)
    assert_in_place(*compile_steps(LARGE, numerics, config=config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "numerics", ["fast", pytest.param("reproducible", marks=pytest.mark.slow)]
)
def test_pages_of_one_kv_head_stay_where_they_are(numerics: str) -> None:
    """XLA may reorder an axis of size 1; a device of a mesh often has one head."""
    model = dataclasses.replace(MODEL, num_kv_heads=1)
    assert_in_place(*compile_steps(LARGE, numerics, model=model))


@pytest.mark.slow
def test_a_scan_over_layers_leaves_the_pages_where_they_are() -> None:
    assert_in_place(*compile_steps(LARGE, stacked=True))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_static_batching_leaves_the_pages_where_they_are(numerics: str) -> None:
    assert_in_place(*compile_steps(LARGE, numerics, scheduling.static()))


@pytest.mark.slow
@pytest.mark.parametrize("max_slots", [1, 32])
def test_the_pages_of_a_real_shape_stay_where_they_are(max_slots: int) -> None:
    # SmolLM2-135M: 30 layers, which a compiler could slice or hoist.
    model = ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_size=1536,
        max_positions=2048,
    )
    config = dataclasses.replace(CONFIG, max_slots=max_slots, token_budget=128)
    program, pages = compile_steps(20_000, model=model, config=config)
    assert bytes_of(pages) > 14e9
    assert_in_place(program, pages)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "extras", [{}, {"max_beams": 4, "max_swap_pages": 16}], ids=["plain", "all"]
)
def test_no_step_reads_every_page(extras: dict[str, int]) -> None:
    """Nor at every entry of the prefix cache: only at pages that sequences use."""
    config = dataclasses.replace(CONFIG, prefix_cache=True, **extras)
    looks = []
    for num_pages in (SMALL, 64 * LARGE):
        run, arguments, _ = steps(num_pages, config=config)
        looks.append(pool_sized.largest_look(run, arguments))
    assert looks[0] == looks[1] < LARGE * 2


def test_reading_every_page_would_be_detected() -> None:
    pool = jax.eval_shape(lambda: make_pool(LARGE))
    assert pool_sized.largest_look(lambda pool: pool.ref.sum(), (pool,)) == LARGE


@pytest.mark.slow
@pytest.mark.parametrize(
    "extras",
    [{}, pytest.param({"max_beams": 4, "max_swap_pages": 16}, marks=pytest.mark.slow)],
    ids=["plain", "all"],
)
def test_the_prefix_cache_stays_where_it_is(extras: dict[str, int]) -> None:
    num_pages = 16381  # a prime, so that no other axis has this size
    config = dataclasses.replace(CONFIG, prefix_cache=True, **extras)
    program, _ = compile_steps(num_pages, config=config)
    assert not re.findall(rf"\[{num_pages}[\d,]*\]\S* copy\(", program.as_text())


def test_decoding_without_a_scheduler_stays_in_place() -> None:
    config = dataclasses.replace(CONFIG, num_pages=LARGE)
    forward = PagedForward(MODEL)
    pages = pages_of(MODEL, config)
    cache = jax.eval_shape(
        functools.partial(decoding.init_cache, max_slots=4, max_length=256), pages
    )

    def answer(params: Any, cache: decoding.Cache, tokens: jax.Array) -> Any:
        lengths = jnp.full((4,), tokens.shape[1], jnp.int32)
        logits, cache, _ = decoding.prefill(
            params, cache, tokens, lengths, forward=forward
        )

        def body(carry, _):
            logits, cache = carry
            token = jnp.argmax(logits, axis=1).astype(jnp.int32)
            logits, cache, _ = decoding.decode_step(
                params, cache, token, forward=forward
            )
            return (logits, cache), token

        return jax.lax.scan(body, (logits, cache), length=8)

    prompts = jax.ShapeDtypeStruct((4, 9), jnp.int32)
    program = (
        jax.jit(answer, donate_argnums=1)
        .lower(param_shapes(MODEL), cache, prompts)
        .compile(UNOPTIMISED)
    )
    assert_in_place(program, pages)


def test_a_copy_would_be_detected() -> None:
    config = dataclasses.replace(CONFIG, num_pages=LARGE)
    pages = pages_of(MODEL, config)

    def layer_by_layer(pages: Pages, new: jax.Array) -> Pages:
        """A bad layout: a scan that unstacks the pages and stacks them again."""

        def body(carry, layer):
            return carry + 1, jax.tree.map(lambda x: x.at[carry, 0, 0].set(new), layer)

        return jax.lax.scan(body, jnp.zeros((), jnp.int32), pages)[1]

    def steps(pages: Pages, new: jax.Array) -> Pages:
        return jax.lax.fori_loop(0, 3, lambda _, p: layer_by_layer(p, new), pages)

    new = jax.ShapeDtypeStruct((MODEL.head_dim,), jnp.float32)
    lowered = jax.jit(steps, donate_argnums=0).lower(pages, new)
    program = lowered.compile(UNOPTIMISED)
    assert temporary_bytes(program) > 0.3 * bytes_of(pages)
    assert copies(program, pages)
