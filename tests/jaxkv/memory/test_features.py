"""Features on the pages: written with K and V, and copied, shared and swapped too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, models, scheduling
from jaxkv.engine import init
from jaxkv.memory import make_pages, parent_places, read_features, write_features
from jaxkv.memory.kv_pages import Rows
from jaxkv.memory.page_pool import NO_PAGE
from jaxkv.models import PagedForward, make_model_pages, run_sequences, stack_layers
from tests.support import asks as workloads
from tests.support import engines
from tests.support.engines import CACHED, MODEL, TIGHT

TAPS = (0, 2, 1)
SWAPPING = dataclasses.replace(TIGHT, max_swap_pages=24, steps_per_call=1)


def states_of(tokens: Any, stacked: bool = False) -> np.ndarray:
    """Returns the tapped states of every token of whole sequences."""
    params = engines.params()
    if stacked:
        params = stack_layers(MODEL, params)
    model = models.merge(MODEL, params)
    outputs = run_sequences(model, jnp.asarray(tokens), taps=TAPS)
    return np.asarray(jnp.concatenate(outputs.taps)).T.reshape(*np.shape(tokens), -1)


def test_taps_are_the_inputs_of_layers_and_the_last_state() -> None:
    tokens = np.random.default_rng(0).integers(0, 61, (2, 7))
    states = states_of(tokens).reshape(2, 7, 3, -1)
    embedded = engines.params()["embed"]["weight"][tokens]
    np.testing.assert_array_equal(states[:, :, 0], embedded)
    logits = engines.full_logits(engines.params(), tokens, config=MODEL)
    head = np.asarray(engines.params()["head"]["weight"])
    np.testing.assert_allclose(states[:, :, 1] @ head.T, logits, rtol=1e-4, atol=1e-4)
    assert not np.allclose(states[:, :, 2], states[:, :, 0])
    np.testing.assert_allclose(
        states_of(tokens, stacked=True), states_of(tokens), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "asks"),
    [
        (TIGHT, workloads.singles),
        pytest.param(CACHED, workloads.alike, marks=pytest.mark.slow),
        pytest.param(SWAPPING, workloads.groups, marks=pytest.mark.slow),
    ],
    ids=["tight", "cached", "swapping"],
)
def test_features_of_every_token(config: Any, asks: Any) -> None:
    """Covers preemption, copy-on-write, shared prefixes and the swap buffer."""
    forward = PagedForward(MODEL, taps=TAPS)
    preemption: Any = "swap" if config.max_swap_pages else "recompute"
    policy = scheduling.fcfs(hold_new=not config.max_swap_pages, preemption=preemption)
    pages = make_model_pages(MODEL, config, taps=TAPS)
    state = init(config, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages))
    waiting = asks()
    checked = 0
    num_swapped = 0
    for call in range(400):
        if waiting:
            batch = engines.batch_of(waiting, config)
            requests = engines.requests_of(batch, config)
            state, taken = engines.submit(state, requests, config=config)
            begun = np.asarray(taken) & (requests.params.sample == 0)
            waiting = waiting[int(begun.sum()) :]
        state, info = engines.run_steps(
            engines.params(),
            state,
            clock.from_seconds(float(call)),
            config=config,
            forward=forward,
            policy=policy,
        )
        engines.assert_sound(jax.tree.map(np.asarray, info))
        num_swapped += int(np.asarray(info.num_swapped_in).sum())
        state, _ = engines.drain(state)
        wanted = states_of(state.sequences.tokens)
        size = config.page_size
        for slot, row in enumerate(np.asarray(state.slots.sequence)):
            places = np.arange(int(state.table.length[slot]))
            page = np.asarray(state.table.page_ids)[slot, places // size]
            assert state.pages.features is not None
            got = np.asarray(state.pages.features)[0, page, :, places % size]
            true = wanted[row, places].reshape(got.shape)
            np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4)
            checked += len(places)
        if not waiting and (np.asarray(state.slots.sequence) < 0).all():
            break
    assert checked > 400
    assert (num_swapped > 0) == (preemption == "swap")


def test_parent_places() -> None:
    """The parent is the last ancestor in a tree, and the place before elsewhere."""
    place = [[6, 7, 8, 9], [2, 3, 4, -1], [0, 1, 2, 3]]
    kin = np.zeros((3, 4, 3), bool)
    # Slot 0: a draft token after the root at place 6, and two children of it.
    kin[0, 1, 0] = kin[0, 2, [0, 1]] = kin[0, 3, [0, 2]] = True
    rows = Rows(
        token=jnp.zeros(12, jnp.int32),
        position=jnp.asarray(place, jnp.int32).reshape(-1),
        slot=None,
        page_ids=jnp.zeros((3, 2), jnp.int32),
        logit_rows=jnp.zeros(0, jnp.int32),
    )
    tree = rows._replace(
        place=rows.position,
        context=jnp.asarray([7, -1, -1], jnp.int32),
        ancestors=jnp.asarray(kin.reshape(12, 3)),
    )
    places = parent_places(tree).reshape(3, 4).tolist()
    assert places == [[5, 6, 7, 7], [1, 2, 3, -2], [-1, 0, 1, 2]]
    by_slot = tree._replace(slot=jnp.arange(12, dtype=jnp.int32) // 4)
    assert parent_places(by_slot).reshape(3, 4).tolist() == places
    np.testing.assert_array_equal(parent_places(rows), rows.position - 1)


def test_missing_places_are_skipped() -> None:
    pages = make_pages(
        num_layers=1,
        num_pages=3,
        num_kv_heads=1,
        page_size=2,
        head_dim=2,
        dtype="float32",
        num_features=6,
    )
    rows = Rows(
        token=jnp.zeros(4, jnp.int32),
        position=jnp.asarray([3, -1, 2, 4], jnp.int32),
        slot=jnp.asarray([0, 0, 1, 1], jnp.int32),
        page_ids=jnp.asarray([[2, 0, NO_PAGE], [1, NO_PAGE, NO_PAGE]], jnp.int32),
        logit_rows=jnp.zeros(0, jnp.int32),
    )
    values = jnp.arange(1.0, 25.0).reshape(4, 6)
    written = write_features(pages, values, rows)
    assert written.features is not None
    features = np.asarray(written.features)
    np.testing.assert_array_equal(features[0, 0, :, 1].reshape(-1), values[0])
    assert (features != 0).sum() == 6
    places = jnp.asarray([3, -1, 2, -2], jnp.int32)
    got = np.asarray(read_features(written, rows, places))
    np.testing.assert_array_equal(got[0], values[0])
    assert not got[1:].any()
    with pytest.raises(ValueError, match="must be the pages' 6"):
        write_features(pages, values[:, :4], rows)
    with pytest.raises(ValueError, match="the pages have no features"):
        read_features(pages._replace(features=None), rows, places)


def test_number_of_features_is_even() -> None:
    sizes: Any = {"num_pages": 1, "num_kv_heads": 1, "page_size": 2, "head_dim": 2}
    with pytest.raises(ValueError, match="num_features=5 must be even"):
        make_pages(num_layers=1, dtype="float32", num_features=5, **sizes)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"taps": (3,)}, r"taps=\(3,\) must be in \[0, "),
        ({"taps": (-1,)}, r"taps=\(-1,\) must be in \[0, "),
        ({"taps": (1,), "layers": (0,)}, "needs all layers"),
    ],
)
def test_invalid_taps_are_refused(how: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        PagedForward(MODEL, **how)
