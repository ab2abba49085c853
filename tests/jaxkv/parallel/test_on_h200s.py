"""An engine compiled for four H200s without such devices: bytes and copies."""

import collections

import pytest

from jaxkv.engine import EngineConfig
from jaxkv.models import ModelConfig
from jaxkv.parallel.collectives import find_collectives
from pallas_kernels import devices
from pallas_kernels.bench import deviceless
from scaling.costs import Layout, decode_traffic, prefill_traffic
from scaling.shapes import describe_config
from tests.support import engine_programs

WHY_NOT = deviceless.unavailable_reason()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.slow,
]
LLAMA = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=2,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=14_336,
    max_positions=8192,
    tie_embeddings=False,
)
"""Llama-3-8B with two layers."""
CONFIG = EngineConfig(
    page_size=64, num_pages=16_384, max_slots=32, max_length=2048, token_budget=256
)
KERNELS = {"copy_part", "decode_attention", "merge_one", "one_row", "prefill_attention"}


DRAWN = CONFIG.max_slots
ROWS = CONFIG.token_budget


@pytest.mark.parametrize(
    "how", [Layout(tensor=4), Layout(tensor=2, pages=2)], ids=["tensor", "pages too"]
)
def test_engine_on_four_h200s(how: Layout) -> None:
    degrees = {"context": how.pages, "tensor": how.tensor}
    mesh = deviceless.make_h200_mesh({x: num for x, num in degrees.items() if num > 1})
    run, arguments, pages = engine_programs.steps_on(
        mesh, model=LLAMA, config=CONFIG, dtype="bfloat16"
    )
    options = devices.COMPILER_OPTIONS
    report = deviceless.compile_function(
        run, *arguments, donate_argnums=1, options=options, mesh=mesh
    )
    collectives = find_collectives(report.text)
    # A step decodes with one row per slot, or is mixed with the rows of the budget.
    model = describe_config(LLAMA)
    layers = LLAMA.num_layers
    rows_per_part = ROWS // how.pages
    first = next(
        i for i, x in enumerate(collectives) if rows_per_part in x.shapes[0][1]
    )
    decode = decode_traffic(model, how, batch=DRAWN)
    mixed = prefill_traffic(model, how, rows=ROWS, logit_rows=DRAWN)
    divides = how.pages > 1
    wanted = {"all-reduce": 1 + (2 + 2 * divides) * layers, "all-gather": 1}
    packed = {"all-reduce": 1 + 2 * layers, "all-gather": 1}
    if divides:  # queries, keys and values; states of attention; the last states
        packed = {
            "all-reduce": packed["all-reduce"] + 1,
            "all-gather": 1 + layers,
            "all-to-all": 2 * layers,
        }
    for formula, kinds, phase_collectives in (
        (decode, wanted, collectives[:first]),
        (mixed, packed, collectives[first:]),
    ):
        assert (
            collections.Counter(collective.kind for collective in phase_collectives)
            == kinds
        )
        assert sum(x.sent() / x.trips for x in phase_collectives) == sum(
            x.forward for x in formula
        )
    # K and V are in none of the collectives, and stay in place.
    assert all(
        CONFIG.num_pages not in sides for x in collectives for _, sides in x.shapes
    )
    pool = engine_programs.bytes_of(pages)
    assert pool * 4 == engine_programs.bytes_of(arguments[1].pages)
    assert report.alias_bytes >= pool
    assert report.temp_bytes < 0.1 * pool
    assert not engine_programs.large_copies(report.text, pages)
    assert {kernel.name.rpartition("_")[0] for kernel in report.kernels} == KERNELS
    for kernel in report.kernels:
        assert kernel.spill_stores == kernel.spill_loads == 0
