"""Public host functions of `jaxkv` check their numbers, as those of `scaling` do."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import memory, workloads
from tests.support.engines import MODEL
from tests.support.number_arguments import find_faults, numeric_functions

pytestmark = pytest.mark.usefixtures("no_type_checks")

FUNCTIONS = {x.name.removeprefix("jaxkv."): x for x in numeric_functions(jaxkv)}

PAIR = workloads.Pair(
    prompt=workloads.Fixed(tokens=4), output=workloads.Fixed(tokens=4)
)
CURVE = workloads.LatencyCurve(np.array([1.0, 2.0]), np.array([0.1, 0.5]))
BOUNDS = (0.2, 0.4)
PAGES = memory.make_pages(
    num_layers=1,
    num_pages=4,
    num_kv_heads=1,
    page_size=8,
    head_dim=8,
    dtype=jnp.float32,
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "memory.check_window": {"size": 8, "page_size": 4},
    "memory.make_prefix_cache": {"num_pages": 4, "page_size": 4},
    "memory.make_staging": {
        "pages": PAGES,
        "num_places": 2,
        "num_sequences": 2,
        "pages_per_slot": 2,
    },
    "parallel.fit_config": {"config": MODEL, "degree": 1, "num_expert": 1},
    "parallel.token_positions": {"length": 8, "ring": 1, "ulysses": 1},
    "parallel.zigzag_order": {"length": 8, "ring": 2},
    "sampling.greedy_params": {"rows": 2},
    "sampling.request_key": {"seed": 1, "engine_seed": 2, "request_id": 3},
    "simulation.sample_requests": {"law": PAIR, "rate": 1.0, "seconds": 5.0, "seed": 0},
    "scheduling.ageing_priority": {"level_ms": 100},
    "scheduling.chunked_prefill": {"max_running": 4},
    "scheduling.fcfs": {"chunk_size": 4, "watermark": 0},
    "scheduling.vllm_scheduler": {
        "max_num_seqs": 4,
        "long_prefill_token_threshold": 0,
    },
    "simulation.part_size": {"num": 4, "max_slots": 4},
    "workloads.capacity": {
        "rates": CURVE.rates,
        "latency_s": np.array([0.1, 0.5]),
        "at_most_s": 0.2,
    },
    "workloads.choose_rates": {"curve": CURVE, "bounds": BOUNDS, "num": 3},
    "workloads.closed_loop": {
        "rng": np.random.default_rng(0),
        "pair": PAIR,
        "clients": 2,
        "num": 4,
        "samples": 1,
    },
    "workloads.goodput": {
        "rates": CURVE.rates,
        "attained": np.array([1.0, 0.5]),
        "share": 0.9,
    },
    "workloads.load_ratio": {"first": CURVE, "second": CURVE, "bound": 0.3},
    "workloads.load_ratios": {
        "first": CURVE,
        "second": CURVE,
        "bounds": BOUNDS,
        "num": 3,
    },
    "workloads.md1_waiting_s": {"rate": 1.0, "service_s": 0.5},
    "workloads.num_requests_for": {"rate": 1.0, "seconds": 5.0, "deviations": 6.0},
    "workloads.open_loop": {
        "rng": np.random.default_rng(0),
        "pair": PAIR,
        "rate": 1.0,
        "num": 4,
        "cv": 1.0,
        "samples": 1,
    },
    "workloads.percentile": {"values": np.ones(4), "percent": 50},
    "workloads.poisson": {"rng": np.random.default_rng(0), "rate": 1.0, "num": 4},
    "workloads.sustained_rate": {"curve": CURVE, "bound": 0.3},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_host_functions_check_their_numbers(name: str) -> None:
    # NaN is a documented result of the one; the other draws as many as are asked for.
    is_costly = name in ("workloads.load_ratio", "simulation.sample_requests")
    faults = find_faults(FUNCTIONS[name], ARGUMENTS[name], is_costly=is_costly)
    assert faults == []
