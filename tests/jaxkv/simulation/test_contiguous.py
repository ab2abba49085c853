"""Contiguous reservations compared with a buddy allocator of split and merged lists."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, scheduling
from jaxkv.ledger import PROGRESS
from jaxkv.scheduling import NO_LIMIT
from jaxkv.simulation import contiguous
from jaxkv.simulation import step as simulation_step
from jaxkv.simulation.state import Capacity, Simulation, init_simulation
from jaxkv.workloads import Workload
from tests.support.buddies import Buddies
from tests.support.simulations import COST

find = jax.jit(
    lambda idle, start, num, order: contiguous.find_block(
        contiguous.free_leaves(idle, start, num), order
    )
)


@pytest.mark.parametrize("num_leaves", [59, 64, 7])
def test_blocks_equal_those_of_free_lists(num_leaves: int) -> None:
    idle = contiguous.reservation(
        "max", num_leaves=num_leaves, leaves_per_region=16
    ).idle
    twin = Buddies(num_leaves, 16)
    rng = np.random.default_rng(num_leaves)
    refused = 0
    for _ in range(150):
        held = sorted(twin.orders)
        if held and rng.random() < 0.35:
            twin.release(int(rng.choice(held)))
            continue
        start = np.full(64, -1, np.int32)
        num = np.zeros(64, np.int32)
        start[: len(held)] = held
        num[: len(held)] = [1 << twin.orders[x] for x in held]
        order = int(rng.integers(0, 5))
        block = int(find(idle, start, num, jnp.int32(order)))
        expected = twin.allocate(order)
        assert block == (-1 if expected is None else expected)
        refused += expected is None
    assert 0 < refused < 80


def test_reserved_places_of_each_rule() -> None:
    """As in the paper: an answer of 25 tokens becomes 32."""
    prompt = jnp.array([100, 100, 1, 900])
    output = jnp.array([25, 32, 1, 1100])
    sizes = {
        rule: contiguous.reserved_places(
            jnp.int32(i), prompt, output, jnp.int32(2048)
        ).tolist()
        for i, rule in enumerate(contiguous.RESERVATION_RULES)
    }
    assert sizes == {
        "max": [2048] * 4,
        "pow2": [132, 132, 2, 2048],
        "oracle": [125, 132, 2, 2000],
    }
    places = jnp.array([1, 16, 17, 2000, 2048])
    orders = contiguous.block_order(places, jnp.int32(16))
    assert orders.tolist() == [0, 0, 1, 7, 7]


def load(num: int) -> Workload:
    rng = np.random.default_rng(5)
    return Workload(
        arrival=jnp.asarray(clock.from_seconds(np.cumsum(rng.exponential(0.03, num)))),
        prompt=jnp.asarray(rng.integers(1, 40, num), jnp.int32),
        output=jnp.asarray(rng.integers(1, 60, num), jnp.int32),
        samples=jnp.ones(num, jnp.int32),
        clients=jnp.int32(NO_LIMIT),
    )


@pytest.mark.thorough
def test_orca_admits_in_order_while_blocks_are_free() -> None:
    """Compares each step of all three rules with the lists, without preemptions."""
    w = load(60)
    num = 60
    leaf = 2
    bounds = Capacity(*(jnp.int32(x) for x in (203, leaf, 128, 256, 0)))
    policy = scheduling.fcfs()
    rules = [
        contiguous.reservation(rule, num_leaves=203, leaves_per_region=64)
        for rule in ("max", "pow2", "oracle")
    ]

    def run(reservation: contiguous.Reservation) -> Any:
        state = init_simulation(
            w, bounds, policy, max_slots=12, reservation=reservation
        )

        def step(state: Simulation, _: None) -> Any:
            state, info = simulation_step.simulate_step(
                state,
                w,
                capacity=bounds,
                policy=policy,
                cost=COST,
                head=4,
                reservation=reservation,
            )
            return state, (state.ledger.slots.sequence, state.pages.block, info)

        return jax.lax.scan(step, state, None, length=700)

    sizes = [
        (128, int(p) + (1 << (int(n) - 1).bit_length()), int(p) + int(n))
        for p, n in zip(w.prompt, w.output, strict=True)
    ]
    orders = [
        [(-(-min(size[i], 128) // leaf) - 1).bit_length() for size in sizes]
        for i in range(3)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rules)
    mapped = jax.jit(jax.vmap(run))
    states, trace = jax.tree.map(np.asarray, mapped(stacked))
    batches = trace[-1].num_running
    for i in range(3):
        twin = Buddies(203, 64)
        blocks: dict[int, Any] = {}
        steps = zip(trace[0][i], trace[1][i], trace[-1].drew[i], strict=True)
        for sequence, block, drew in steps:
            block_of = dict(zip(sequence.tolist(), block.tolist(), strict=True))
            # A step admits before it ends sequences: one that is admitted and ends in
            # the same step is in no state, but drew.
            for came in sorted({*block_of, *drew.tolist()} - set(blocks) - {-1}):
                blocks[came] = twin.allocate(orders[i][came])
                assert blocks[came] == block_of.get(came, blocks[came])
            for sequence_id in set(blocks) - set(block_of):
                twin.release(blocks.pop(sequence_id))
    split = trace[-1].split
    used = trace[-1].used_pages * leaf
    assert (split.tokens + split.reserved + split.internal <= used).all()
    assert (states.num_done == num).all()
    assert not PROGRESS.read(states.ledger.progress, "num_preempted").any()
    # 203 leaves of 2 have three blocks of 128 places; smaller reservations admit more.
    assert max(batches[0]) == 3
    steps = [np.count_nonzero(batch) for batch in batches]
    assert steps[0] > 1.1 * steps[1] > 1.2 * steps[2]
