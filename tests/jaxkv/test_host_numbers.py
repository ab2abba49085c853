"""Public host functions of `jaxkv` check their numbers, as those of `scaling` do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import memory, workloads
from tests.support.engines import MODEL
from tests.support.number_arguments import (
    find_faults,
    first_arguments,
    numeric_functions,
)

pytestmark = pytest.mark.usefixtures("no_type_checks")

FUNCTIONS = {
    function.name.removeprefix("jaxkv."): function
    for function in numeric_functions(jaxkv)
    if not function.name.startswith("jaxkv.validation.")  # the checks themselves
}

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
LOGITS = np.zeros((1, 8), np.float32)
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
    "workloads.make_workload": {
        "arrival_s": np.zeros(2),
        "prompt": np.full(2, 4),
        "output": np.full(2, 4),
        "samples": 1,
        "after": np.array([[-1], [0]]),
        "delay_s": 0.0,
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


# Functions that read another argument before their numbers.
OTHER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "models.save_model": {"folder": "unused"},
    "parallel.join_processes": {
        "coordinator": "127.0.0.1:4000",
        "num_processes": 2,
        "process_id": 1,
    },
    "sampling.top_logprobs": {"logits": LOGITS},
    "simulation.reservation": {"rule": "max"},
    "speculation.draw_drafts": {"logits": LOGITS},
}
EXEMPT = {
    "parts of the command line, whose options are checked": (
        "cli.last_lines",
        "cli.refuse_outside",
        "cli.run_study",
    ),
    "rules of the router, which passes the length of a checked prompt": (
        "disaggregation.least_work",
        "disaggregation.prefix_affinity",
    ),
    "layers, whose axes are literals and whose eps is that of a checked config": (
        "models.expand_latent",
        "models.norm",
        "models.rotate",
        "models.rotate_pair",
        "models.rotate_queries",
        "models.split_heads",
    ),
    "coordinates of a figure, where NaN is a gap": (
        "plotting.draw_curve",
        "plotting.draw_reference_count",
        "plotting.draw_reference_line",
        "plotting.draw_ridge",
        "plotting.draw_text",
        "plotting.shade_band",
    ),
    "formats of any number, NaN and infinity included": (
        "report.format_bytes",
        "report.format_count",
        "report.format_flops",
        "report.format_percent",
        "report.format_rate",
        "report.format_seconds",
    ),
    "the message of an error, with any number": ("scheduling.stall_error",),
    "counts by name, True included, which JAX converts": ("simulation.make_work",),
}
COSTLY = {
    # Draws as many requests as are asked for.
    "simulation.sample_requests",
    # NaN is a documented result.
    "workloads.load_ratio",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_host_functions_check_their_numbers(name: str) -> None:
    is_costly = name in COSTLY
    faults = find_faults(FUNCTIONS[name], ARGUMENTS[name], is_costly=is_costly)
    assert faults == []


def test_other_functions_check_their_numbers_first() -> None:
    """New functions are included: they check their numbers, or have an exemption.

    Numbers are refused before any other argument is read, so the calls cost little.
    """
    exempt = {name for names in EXEMPT.values() for name in names}
    assert exempt <= {*FUNCTIONS}
    faults = []
    for name in sorted({*FUNCTIONS} - {*ARGUMENTS} - exempt):
        arguments = first_arguments(FUNCTIONS[name]) | OTHER_ARGUMENTS.get(name, {})
        faults += find_faults(FUNCTIONS[name], arguments, is_costly=True)
    assert faults == []


def test_sizes_may_be_arrays_that_a_program_closes_over() -> None:
    size = jnp.asarray(4, jnp.int32)
    places = jnp.arange(9, dtype=jnp.int32)
    num_pages = jax.jit(lambda x: memory.pages_for(x, page_size=size))(places)
    assert num_pages.tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(ValueError, match="page_size=0 must be at least 1"):
        memory.pages_for(places, page_size=size * 0)
