"""Prompts read whole, in chunks, beside those who decode: rules, prices, claims."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import cost_models
from experiments.serving.chunked_prefill import runs, settings
from experiments.serving.chunked_prefill.experiment import Result
from jaxkv.scheduling.chunked_prefill import chunked_prefill
from jaxkv.simulation import SerializedPhases, costs
from tests.support import smoke
from tests.support.plans import counts, plan_of

DECODES = [(6, 5, 2), (9, 8, 3)]


def rows(line: list, waiting: list[int], **rules: Any) -> tuple[list, list]:
    """Rows that those in line feed, and those who come in; 12 in all, pages enough."""
    plan = plan_of(counts(line, waiting, free_pages=9), chunked_prefill(**rules))
    assert plan.admit.tolist() == (plan.head_rows > 0).tolist()
    assert ((plan.head_places > 0) == plan.admit).all()
    return plan.num_rows.tolist(), plan.head_rows.tolist()


def test_by_default_it_is_the_policy_inside() -> None:
    assert rows([*DECODES], [8, 8]) == ([1, 1, 0, 0], [8, 2, 0, 0])


def test_whole_prompts_wait_until_the_budget_has_room_for_them() -> None:
    # The third would fit; it does not overtake.
    assert rows([*DECODES], [8, 8, 1], whole=True) == ([1, 1, 0, 0], [8, 0, 0, 0])


def test_nobody_decodes_while_prompts_are_read_first() -> None:
    rules = dict(whole=True, first=True)
    assert rows([*DECODES], [8], **rules) == ([0, 0, 0, 0], [8, 0, 0, 0])
    assert rows([*DECODES], [], **rules) == ([1, 1, 0, 0], [0, 0, 0, 0])
    # One who is in the middle of its prompt goes on.
    assert rows([(9, 2, 3), *DECODES], [], first=True)[0] == [7, 0, 0, 0]


def test_no_more_run_than_may() -> None:
    assert rows([*DECODES], [2, 2], max_running=3)[1] == [2, 0, 0, 0]
    with pytest.raises(ValueError, match="max_running=0 must be at least 1"):
        chunked_prefill(max_running=0)


def test_a_step_of_both_costs_a_step_of_either() -> None:
    cost = cost_models.linear((10.0, 1.0, 0.0), (5.0, 0.1, 1.0), scale=1.0)
    both = costs.make_work(
        num_decodes=2,
        num_prompt_rows=8,
        decode_context=30,
        prompt_context=8,
        prompt_squares=64,
        num_drawn=3,
    )
    # Together the step's constant is paid once: 5 + 38 / 10 + 2, and 8 for the prompt.
    assert float(SerializedPhases(cost, jnp.asarray(False))(both)) == pytest.approx(
        18.8
    )
    # Apart: 10 + 8 for the one, 5 + 3 + 2 for the other.
    assert float(SerializedPhases(cost, jnp.asarray(True))(both)) == pytest.approx(28.0)
    alone = both._replace(num_decodes=jnp.int32(0), decode_context=jnp.int32(0))
    assert float(SerializedPhases(cost, jnp.asarray(True))(alone)) == pytest.approx(
        18.0
    )


def decode_s(model: settings.Model, batch: int, context: int) -> float:
    """How long a step takes in which some sequences decode."""
    every = batch * context
    work = costs.make_work(num_decodes=batch, decode_context=every, num_drawn=batch)
    return float(model.cost(work))


def test_settings_are_the_papers() -> None:
    yi = settings.MODELS["Yi-34B"]
    assert yi.num_pages * cost_models.PAGE_SIZE == pytest.approx(306_000, rel=0.01)
    for model in settings.MODELS.values():
        step_s = decode_s(model, 32, 4096)
        assert 4 < model.limits_s["strict"] / step_s < 7
        assert 20 < model.limits_s["relaxed"] / step_s < 35
    # In chunks a prompt reads its own keys again, and pays for every step.
    whole, parts = (settings.prompt_s(yi, 8192, size) for size in (None, 512))
    assert parts - whole == pytest.approx(15 * settings.OVERHEAD_S, rel=0.01)


@pytest.fixture(scope="module")
def result() -> Result:
    return smoke.run("chunked_prefill").result


@pytest.mark.slow
def test_stalls_are_seen_where_they_should_be(result: Result) -> None:
    line = result.timeline
    longest = {}
    for way in settings.WAYS:
        mine = (line.way == way.name) & (line.sequence < runs.PATIENTS)
        times = [line.time_s[mine & (line.sequence == i)] for i in range(3)]
        longest[way.name] = max(np.diff(x).max() for x in times)
        assert all(len(x) == 90 for x in times)
    first, mixed, chunks, both = longest.values()
    # Two prompts stall everybody at once, one by one, or hardly.
    assert first > 1.8 * mixed > 1.8 * 3 * chunks
    assert both < chunks < both + 0.05


@pytest.mark.slow
def test_the_tail_is_a_step_that_fills_the_budget(result: Result) -> None:
    # Alone, without those few who decode beside it.
    yi, budgets = settings.MODELS["Yi-34B"], (256, 2048)
    full_s = [settings.prompt_s(yi, budget) for budget in budgets]
    assert result.budgets.budget.tolist() == [*budgets]
    np.testing.assert_allclose(result.budgets.tbt_p99_s, full_s, rtol=0.1)
    np.testing.assert_allclose(result.budgets.longest_s, full_s, rtol=0.15)
    assert (result.loads.preempted == 0).all()
    assert {*result.loads.system} == {system.name for system in settings.SYSTEMS}


@pytest.mark.slow
def test_claims_are_what_the_result_holds(result: Result) -> None:
    said = smoke.ours(smoke.run("chunked_prefill").claims)
    whole_s = settings.prompt_s(settings.MODELS["Yi-34B"], 8192)

    def extra(chunk: int) -> float:
        """Each further step of a prompt of 8,192 tokens pays for itself, in %."""
        return 100 * (-(-8192 // chunk) - 1) * settings.OVERHEAD_S / whole_s

    small = said["chunks of 512 cost at most so much more than the whole prompt"]
    large = said["chunks of 2,048 cost next to nothing"]
    assert (small, large) == pytest.approx((extra(512), extra(2048)), rel=1e-4)
    odd = said["chunks of 257 cost more than chunks of 256"]
    assert odd == pytest.approx(0, abs=1e-3)  # as many steps: there are no tiles
    for name in ("mixed only", "chunks only", "both"):
        here = result.ways.system == name
        for what, column in (
            ("median time to the first token", result.ways.ttft_s),
            ("P99 time between tokens", result.ways.tbt_p99_s),
        ):
            assert [said[f"openchat, {name}: {what}"]] == column[here].tolist()
