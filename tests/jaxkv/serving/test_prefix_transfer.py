"""Cached pages that are sent from one engine to another: equal answers, sound pools."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.memory.prefixes import prefix_transfer
from jaxkv.serving.compiling import programs
from tests.support import engines, mutation
from tests.support.folders import TOKENIZED
from tests.support.mutation import Bug

BOUNDS = engines.SERVED
PAGE = BOUNDS.page_size
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(5, 60, 27).tolist()
GREEDY = Sampling.greedy(max_tokens=12, ignore_eos=True)


def make_engine(**fields: Any) -> jaxkv.Engine:
    fields = vars(BOUNDS) | {"prefix_cache": True} | fields
    return jaxkv.Engine.load(TOKENIZED, keep_trace=True, **fields)


def answer(engine: jaxkv.Engine, prompt: list[int], ask: Sampling = GREEDY) -> Any:
    [done] = engine.generate([prompt], ask)
    for info in engine.trace:
        engines.assert_sound(info)
    return done


def taken(prompt: list[int], **fields: Any) -> tuple[Any, int]:
    """Pages of an engine that has read a prompt."""
    engine = make_engine(**fields)
    answer(engine, prompt, Sampling.greedy(max_tokens=1))
    return engine.take_prefix(prompt)


def check_sent(kv_dtype: str = "model") -> None:
    sent, num = taken(PROMPT, kv_dtype=kv_dtype)
    assert num == (len(PROMPT) - 1) // PAGE == 6
    receiver = make_engine(kv_dtype=kv_dtype)
    assert receiver.bring_prefix(PROMPT, sent) == num
    assert receiver.bring_prefix(PROMPT, sent) == num  # a repetition has no effect
    again, same = receiver.take_prefix(PROMPT)
    assert same == num
    for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    completion = answer(receiver, PROMPT)
    assert completion.num_cached == num * PAGE
    assert completion.tokens == answer(make_engine(kv_dtype=kv_dtype), PROMPT).tokens


@pytest.mark.thorough
def test_a_prompt_read_elsewhere_is_answered_the_same() -> None:
    check_sent()


@pytest.mark.slow
def test_pages_of_8_bits_take_their_scales_with_them() -> None:
    check_sent("int8")


@pytest.mark.thorough
def test_only_missing_pages_are_written() -> None:
    """Half of the prompt is cached; pages of other continuations are not changed."""
    sent, num = taken(PROMPT)
    receiver = make_engine()
    half = PROMPT[: 3 * PAGE + 1]
    answer(receiver, [*half, 7, 7, 7, 7, 7])
    nonsense = jax.tree.map(lambda x: x.copy(), sent)
    for leaf in jax.tree.leaves(nonsense):
        leaf[:, :3] = 1e9 if leaf.dtype.kind == "f" else 0
    assert receiver.bring_prefix(PROMPT, nonsense) == num
    assert answer(receiver, PROMPT).tokens == answer(make_engine(), PROMPT).tokens


@pytest.mark.thorough
def test_a_full_pool_takes_what_it_has_room_for() -> None:
    sent, num = taken(PROMPT)
    receiver = make_engine()
    others = [RNG.integers(5, 60, 30).tolist() for _ in range(4)]
    for other in others:  # idle pages fill the pool and are evicted
        answer(receiver, other, Sampling.greedy(max_tokens=1))
    assert receiver.bring_prefix(PROMPT, sent) == num
    completion = answer(receiver, PROMPT)
    assert completion.num_cached == num * PAGE
    engines.assert_empty(receiver.state)
    # While a sequence of 15 pages runs, of 24 there are 9 for two prompts' 12.
    receiver = make_engine()
    receiver.submit(others[0], Sampling.greedy(max_tokens=30, ignore_eos=True))
    stream = receiver.stream()
    next(stream)
    for prompt in (PROMPT, others[1], others[2]):
        pages = sent if prompt is PROMPT else taken(prompt)[0]
        assert receiver.bring_prefix(prompt, pages) <= 7
    assert [event for event in stream][-1].completion is not None
    for info in receiver.trace:
        engines.assert_sound(info)
    assert answer(receiver, others[2]).tokens == answer(make_engine(), others[2]).tokens


@pytest.mark.thorough
def test_salts_separate_tenants() -> None:
    sent, num = taken(PROMPT)
    receiver = make_engine()
    assert receiver.bring_prefix(PROMPT, sent, salt=3) == num
    assert receiver.take_prefix(PROMPT)[1] == 0
    assert receiver.take_prefix(PROMPT, salt=3)[1] == num


@pytest.mark.thorough
def test_arrays_that_do_not_fit_are_refused() -> None:
    sent, num = taken(PROMPT)
    receiver = make_engine()
    with pytest.raises(ValueError, match=f"at most {num - 1} pages"):
        receiver.bring_prefix(PROMPT[: num * PAGE], sent)
    half = jax.tree.map(lambda x: x[:, :, :1], sent)
    with pytest.raises(ValueError, match=r"pages of float32 .* must be float32"):
        receiver.bring_prefix(PROMPT, half)
    with pytest.raises(ValueError, match="must be float32"):
        receiver.bring_prefix(PROMPT, jax.tree.map(lambda x: x.astype("f2"), sent))
    with pytest.raises(ValueError, match=r"must be at most config\.max_length=64"):
        receiver.take_prefix([5] * 65)
    with pytest.raises(ValueError, match=r"config\.prefix_cache=False must be True"):
        make_engine(prefix_cache=False).take_prefix(PROMPT)
    assert receiver.bring_prefix([5], jax.tree.map(lambda x: x[:, :0], sent)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("removed", "added"),
    [
        # Pages are written at the next place, or over existing ones.
        ("jnp.where(is_new, ids, NO_PAGE)", "jnp.where(is_new, ids - 1, -9)"),
        ("pool = page_pool.share(pool, ids)", "pool = pool"),
        ("page_pool.release_counted(pool, ids[None])", "(pool, ids[None] * 0)"),
    ],
)
def test_a_seeded_bug_is_noticed(
    removed: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        programs,
        "LOCAL",
        programs.LOCAL._replace(
            bring_in=jax.jit(lambda *x: programs._bring_in(*x), donate_argnums=0)
        ),
    )
    bug = Bug(prefix_transfer, "import_prefix", removed, added, check_sent)
    mutation.seed(monkeypatch, bug)
    with pytest.raises((AssertionError, jaxkv.memory.InvariantError)):
        check_sent()
