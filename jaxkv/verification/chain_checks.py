"""An engine and a simulation that serve sessions with a prefix cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import validation
from jaxkv.engine import EngineConfig
from jaxkv.memory import Eviction, make_pages
from jaxkv.models import ForwardResult
from jaxkv.scheduling import Policy, RequestAttributes
from jaxkv.simulation import (
    Capacity,
    SimulatedStep,
    Simulation,
    Work,
    init_simulation,
    simulate_steps,
)
from jaxkv.verification.engine_replay import (
    EngineReplay,
    engine_requests,
    find_difference,
    replay_in_engine,
)
from jaxkv.workloads import Workload, make_workload

_NUM_CHAINS = 8
_TURNS = 3
_VOCAB = 4099
"""Large enough that two sequences rarely sample the same token."""
_CHAIN_HEAD = 6
_CHAIN_CONFIG = EngineConfig(
    num_pages=17,
    page_size=4,
    max_slots=9,
    max_length=60,
    max_sequences=_NUM_CHAINS * _TURNS,
    queue_capacity=_NUM_CHAINS * _TURNS,
    token_budget=24,
    submit_width=_NUM_CHAINS * _TURNS,
    queue_head=_CHAIN_HEAD,
    prefix_cache=True,
    max_stop_tokens=1,
    debug=True,
)


class ChainReplay(NamedTuple):
    """Both runs of a load."""

    workload: Workload
    simulation: Simulation
    """Its end."""
    steps: SimulatedStep
    replay: EngineReplay


class _StepCost(NamedTuple):
    """A step takes 10 ms, and 1 % more for each row of a prompt."""

    base_s: Float[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time in s."""
        return self.base_s * (1.0 + 0.01 * work.num_prompt_rows.astype(jnp.float32))


@validation.checks_numbers(seed=validation.SEEDS)
def draw_chains(seed: int) -> Workload:
    """Draws sessions that return after a random time, with more tokens than pages."""
    rng = np.random.default_rng(seed)
    starts_s = np.cumsum(rng.exponential(0.01, _NUM_CHAINS))
    rows = []
    for chain in range(_NUM_CHAINS):
        length = 0
        for turn in range(_TURNS):
            prompt = length + int(rng.integers(1, 7))
            output = int(rng.integers(1, 15))
            length = prompt + output
            rows.append((prompt, output, chain, turn))
    prompt, output, chain, turn = np.array(rows).T
    num = chain.size
    columns = RequestAttributes(session=chain, priority=turn)
    return make_workload(
        starts_s[chain],
        prompt,
        output,
        attributes=RequestAttributes(
            *(np.broadcast_to(np.asarray(x, np.int32), num) for x in columns)
        ),
        after=np.where(turn > 0, np.arange(num) - 1, -1)[:, None],
        delay_s=np.where(turn > 0, rng.uniform(0.0, 0.4, num).round(3), 0.0),
        chain=chain,
    )


def _forward(params: Any, pages: Any, rows: Any) -> ForwardResult:
    """A model with equal logits."""
    return ForwardResult(jnp.zeros((rows.logit_rows.shape[0], _VOCAB)), pages)


_simulate = jax.jit(simulate_steps, static_argnames=("num_steps", "head"))


@validation.checks_numbers(seed=validation.SEEDS)
def replay_chains(
    policy: Policy, eviction: Eviction | None, *, seed: int
) -> ChainReplay:
    """Simulates random sessions, and serves them in an engine with the same clock.

    The prompt of each turn is the real one: the tokens of the turns before it, answers
    included, and random new ones.
    """
    w = draw_chains(seed)
    w = w._replace(limit=w.prompt + w.output)
    capacity = Capacity.of(
        num_pages=_CHAIN_CONFIG.num_pages,
        page_size=_CHAIN_CONFIG.page_size,
        max_length=_CHAIN_CONFIG.max_length,
        token_budget=_CHAIN_CONFIG.token_budget,
    )
    state = init_simulation(w, capacity, policy, max_slots=9, head=_CHAIN_HEAD)
    parts = []
    while int(state.num_done) < int(state.num_served):
        state, infos = _simulate(
            state,
            w,
            capacity=capacity,
            policy=policy,
            cost=_StepCost(jnp.float32(0.01)),
            num_steps=64,
            head=_CHAIN_HEAD,
            eviction=eviction,
        )
        parts.append(jax.tree.map(np.asarray, infos))
    pages = make_pages(
        num_layers=1,
        num_pages=_CHAIN_CONFIG.num_pages,
        num_kv_heads=1,
        page_size=_CHAIN_CONFIG.page_size,
        head_dim=1,
        dtype="float32",
    )
    replay = replay_in_engine(
        w,
        parts,
        policy,
        _CHAIN_CONFIG,
        requests=engine_requests(w, _CHAIN_CONFIG, seed=seed, vocab_size=_VOCAB),
        model=(None, _forward, pages),
        eviction=eviction,
    )
    steps = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return ChainReplay(w, state, steps, replay)


@validation.checks_numbers(seed=validation.SEEDS)
def check_chains(policy: Policy, eviction: Eviction | None, *, seed: int) -> str | None:
    """Returns the first difference between engine and simulation, or None."""
    run = replay_chains(policy, eviction, seed=seed)
    return find_difference(run.steps, run.replay)
