"""Expert parallelism: outputs return to their rows, choices beyond it are dropped."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxkv import models
from jaxkv.models import Experts, Routing, load_model
from jaxkv.parallel import (
    REPLICATED,
    experts,
    make_mesh,
    map_over_mesh,
    specs_on,
    tensor,
)
from tests.support import engines, mutation
from tests.support.folders import GOLDEN
from tests.support.mutation import Bug

ROWS = 12
WIDTH = 5
EXPERTS = 8
TOP_K = 2
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(EXPERTS, WIDTH, 3)).astype(np.float32)


def routing(num_rows: int, seed: int) -> Routing:
    """Returns the routing of rows that prefer some experts."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(num_rows, EXPERTS)) + np.linspace(0, 2, EXPERTS)
    scores = jnp.asarray(scores, jnp.float32)
    return models.route(
        scores, Experts(num_experts=scores.shape[1], top_k=TOP_K, size=1)
    )


def stored_choices(routes: Routing, capacity: int) -> np.ndarray:
    """Returns the choices that get a place, one after another (slow reference)."""
    expert = np.asarray(routes.expert)
    taken = np.zeros(EXPERTS, int)
    is_kept = np.zeros(expert.shape, bool)
    for choice in range(expert.shape[1]):
        for row in range(expert.shape[0]):
            if taken[expert[row, choice]] < capacity:
                taken[expert[row, choice]] += 1
                is_kept[row, choice] = True
    return is_kept


def mixed(x: np.ndarray, routes: Routing, is_kept: np.ndarray) -> np.ndarray:
    """Returns the experts' outputs, choice by choice."""
    y = np.zeros((len(x), WEIGHT.shape[2]))
    for row, choice in zip(*np.nonzero(is_kept), strict=True):
        expert = int(routes.expert[row, choice])
        y[row] += float(routes.share[row, choice]) * (x[row] @ WEIGHT[expert])
    return y


def divided(p: int, function: Any, x: Any, routes: Routing) -> np.ndarray:
    """Runs a function of rows, routing and weights on p devices."""
    mesh = jax.make_mesh(
        (p,), (experts.EXPERT,), (AxisType.Auto,), devices=jax.devices()[:p]
    )
    parts = PartitionSpec(experts.EXPERT)
    run = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts)
    return np.asarray(jax.jit(run)(jnp.asarray(x), routes, jnp.asarray(WEIGHT)))


def check_places(capacity: int) -> None:
    routes = routing(ROWS, 3)
    places = experts.assign_places(
        routes.expert, num_experts=EXPERTS, capacity=capacity
    )
    is_kept = stored_choices(routes, capacity)
    place = np.asarray(places.place)
    assert ((place < EXPERTS * capacity) == is_kept).all()
    rows, choices = np.nonzero(is_kept)
    assert (np.asarray(places.row)[place[is_kept]] == rows).all()
    assert (
        place[is_kept] // capacity == np.asarray(routes.expert)[rows, choices]
    ).all()
    assert len({*place[is_kept].tolist()}) == len(rows)
    empty = np.setdiff1d(np.arange(EXPERTS * capacity), place[is_kept])
    assert (np.asarray(places.row)[empty] == ROWS).all()
    dropped = experts.dropped_fraction(routes, capacity=capacity)
    assert float(dropped) == pytest.approx(1 - is_kept.mean(), abs=1e-6)


@pytest.mark.parametrize("capacity", [1, 2, 5, ROWS])
def test_choices_have_distinct_places(capacity: int) -> None:
    check_places(capacity)


@pytest.mark.parametrize("p", [2, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("capacity", [1, 3, ROWS])
def test_exchange_returns_rows_with_places(p: int, capacity: int) -> None:
    x = RNG.normal(size=(p * ROWS, WIDTH)).astype(np.float32)
    routes = routing(p * ROWS, 5)

    def of_device(x: Any, routes: Routing, weight: Any) -> Any:
        answer = functools.partial(jnp.einsum, "erh,ehw->erw")
        return experts.exchange(
            x, routes, lambda rows: answer(rows, weight), capacity=capacity
        )

    y = divided(p, of_device, x, routes)
    for device in range(p):
        part = slice(device * ROWS, (device + 1) * ROWS)
        device_routes = jax.tree.map(lambda a, part=part: a[part], routes)
        wanted = mixed(x[part], device_routes, stored_choices(device_routes, capacity))
        np.testing.assert_allclose(y[part], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_gather_rows_drops_no_choice(p: int) -> None:
    x = RNG.normal(size=(p * ROWS, WIDTH)).astype(np.float32)
    routes = routing(p * ROWS, 6)

    def of_device(x: Any, routes: Routing, weight: Any) -> Any:
        def answer(rows: Any, sizes: Any) -> Any:
            number = jnp.arange(len(rows), dtype=jnp.int32)
            expert = jnp.searchsorted(jnp.cumsum(sizes), number, side="right")
            is_own = expert < len(weight)
            all_of_them = jnp.einsum("rh,ehw->erw", rows, weight)
            row_outputs = all_of_them[jnp.minimum(expert, len(weight) - 1), number]
            return jnp.where(is_own[:, None], row_outputs, 0.0)

        return experts.gather_rows(x, routes, answer, num_own=len(weight))

    y = divided(p, of_device, x, routes)
    wanted = mixed(x, routes, np.ones((p * ROWS, TOP_K), bool))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        # Second choices before first ones; a capacity larger by one; places of rows in
        # another order.
        ("expert.T.reshape(-1)", "expert.reshape(-1)"),
        ("rank < capacity", "rank <= capacity"),
        ("number % num_rows", "number // top_k"),
    ],
)
def test_seeded_bugs_of_places_are_detected(
    removed: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(experts, "assign_places", removed, added, check_places, (2,))
    mutation.assert_noticed(monkeypatch, bug)


@pytest.mark.thorough
def test_groups_and_biases_are_whole_on_a_mesh() -> None:
    """Each device routes over all experts, and has a quarter of them."""
    config, params, *_ = load_model(GOLDEN / "deepseek_v3")
    expected = np.load(GOLDEN / "deepseek_v3" / "expected.npz")
    mesh = make_mesh(expert=4)
    placed = tensor.place_params(config, params, mesh)
    mixture = placed["layers"][1]["mixture"]
    assert mixture["router"]["bias"].sharding.is_fully_replicated
    assert mixture["down"]["weight"].addressable_shards[0].data.shape[0] == 2
    run = map_over_mesh(
        functools.partial(models.logits, config=config),
        mesh,
        (specs_on(placed, mesh), REPLICATED),
        REPLICATED,
    )
    compiled = jax.jit(run, compiler_options=engines.FAST_COMPILE)
    mesh_logits = compiled(placed, jnp.asarray(expected["ids"]))
    np.testing.assert_allclose(mesh_logits, expected["logits"], rtol=0, atol=1e-4)
