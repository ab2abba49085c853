"""Simulated page sharing: reservations by system, and claims."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.serving.sharing import simulation
from experiments.serving.sharing.simulation import (
    Result,
    SharedPrefixCost,
    SimulatedSavings,
    TranslationRates,
)
from jaxkv.simulation import SimulationMember, Work
from scaling.costs import linear_cost
from tests.support.commands import Command, document


def test_decoding_sequences_attend_to_the_shared_prefix() -> None:
    plain = linear_cost((10.0, 0.5, 0.0), (10.0, 0.01, 0.2))
    work = Work(*(jnp.int32(0) for _ in Work._fields))._replace(
        num_decodes=jnp.int32(7), decode_context=jnp.int32(100)
    )
    cost = SharedPrefixCost(plain, jnp.int32(80))
    assert float(cost(work)) == pytest.approx(0.010 + 1e-5 * (100 + 7 * 80) + 7 * 2e-4)


def test_a_prefix_is_stored_once_or_in_every_reservation() -> None:
    def member(system: str) -> SimulationMember:
        return simulation._translations(system, 341, 10.0, 3.0, seed=1)

    ours = member("paged")
    oracle_member = member("Orca (Oracle)")
    prompt_lengths = np.asarray(oracle_member.workload.prompt) - 341
    # 21 pages of 16 hold 336 of the tokens; each request stores the other 5 itself.
    np.testing.assert_array_equal(np.asarray(ours.workload.prompt), prompt_lengths + 5)
    assert prompt_lengths.min() >= 1
    assert (int(ours.capacity.num_pages), int(oracle_member.capacity.num_pages)) == (
        962,
        983,
    )
    assert ours.reservation is None
    assert oracle_member.reservation is not None


def counted(saved: list[float]) -> SimulatedSavings:
    num = len(saved)
    ones = np.ones(num, int)
    return SimulatedSavings(
        lengths=np.array(["short"] * num),
        num_sequences=np.array([2, 4, 6][:num]),
        rate=np.ones(num),
        num_requests=ones,
        batch=np.ones(num),
        saved_share=np.array(saved),
        expected_share=np.array([0.065, 0.097, 0.108][:num]),
        drawn_share=np.array([0.066, 0.099, 0.11][:num]),
        num_preempted=0 * ones,
    )


def test_savings_are_judged_in_points() -> None:
    saved = counted([0.0650, 0.0970, 0.1170])
    claims = simulation.claims(
        Result(counted=saved, translated=TranslationRates.of([]))
    )
    assert [claim.verdict for claim in claims] == ["holds", "holds", "holds", "fails"]
    assert claims[0].ours == pytest.approx(0.9)
    assert claims[3].ours - claims[3].published == pytest.approx(11.7 - 9.79)


def test_rates_at_equal_latency_are_compared() -> None:
    two = np.ones((1, 2, 3))
    translation_rates = TranslationRates(
        np.array([80]), np.ones((1, 3)), two, two, np.array([[20.0, 33.4]])
    )
    (claim,) = simulation.claims(
        Result(counted=counted([]), translated=translation_rates)
    )
    assert (claim.ours, claim.published) == pytest.approx((1.67, 1.67))
    assert claim.verdict == "differs"
    nothing = Result(counted=counted([]), translated=TranslationRates.of([]))
    assert simulation.claims(nothing) == []


@pytest.mark.slow
def test_simulated_savings_follow_from_lengths(jaxkv: Command) -> None:
    args = ("run", "sharing", "paper", "--num-simulated", "48", "--out", "run")
    claims = document(jaxkv, *args)["claims"]
    forms = [x for x in claims if "full prompt pages" in x["claim"]]
    assert [x["ours"] < 1.0 for x in forms] == [True, True]
    one, five = (x["ours"] for x in claims if "translations" in x["claim"])
    assert five > one > 1
