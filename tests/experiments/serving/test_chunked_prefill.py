"""Whole and chunked prefill: policies, costs and claims."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.serving.chunked_prefill import runs, settings
from experiments.serving.chunked_prefill.experiment import Result
from jaxkv.scheduling import chunked_prefill
from jaxkv.simulation import SerializedPhases, make_work
from scaling.costs import PAGE_SIZE, linear_cost
from tests.support import smoke
from tests.support.plans import counts, plan_of

DECODES = [(6, 5, 2), (9, 8, 3)]


def rows(line: list, waiting: list[int], **rules: Any) -> tuple[list, list]:
    """Returns rows of running and of admitted requests; 12 rows, enough pages."""
    plan = plan_of(counts(line, waiting, free_pages=9), chunked_prefill(**rules))
    assert plan.admit.tolist() == (plan.head_rows > 0).tolist()
    assert ((plan.head_places > 0) == plan.admit).all()
    return plan.num_rows.tolist(), plan.head_rows.tolist()


def test_the_default_is_the_inner_policy() -> None:
    assert rows([*DECODES], [8, 8]) == ([1, 1, 0, 0], [8, 2, 0, 0])


def test_whole_prompts_wait_until_the_budget_suffices() -> None:
    # The third prompt would fit, but does not overtake.
    assert rows([*DECODES], [8, 8, 1], whole_prompts=True) == (
        [1, 1, 0, 0],
        [8, 0, 0, 0],
    )


def test_prefill_first_stalls_decoding() -> None:
    rules = dict(whole_prompts=True, first=True)
    assert rows([*DECODES], [8], **rules) == ([0, 0, 0, 0], [8, 0, 0, 0])
    assert rows([*DECODES], [], **rules) == ([1, 1, 0, 0], [0, 0, 0, 0])
    # A partial prefill continues.
    assert rows([(9, 2, 3), *DECODES], [], first=True)[0] == [7, 0, 0, 0]


def test_max_running_limits_admission() -> None:
    assert rows([*DECODES], [2, 2], max_running=3)[1] == [2, 0, 0, 0]
    with pytest.raises(ValueError, match=r"max_running=0 must be in \[1, 2\*\*31\)"):
        chunked_prefill(max_running=0)


def test_a_serialized_step_costs_the_sum_of_both() -> None:
    cost = linear_cost((10.0, 1.0, 0.0), (5.0, 0.1, 1.0), scale=1.0)
    both = make_work(
        num_decodes=2,
        num_prompt_rows=8,
        decode_context=30,
        prompt_context=8,
        prompt_squares=64,
        num_drawn=3,
    )
    # Mixed, the step's constant is paid once: 5 + 38 / 10 + 2, and 8 for the prompt.
    assert float(SerializedPhases(cost, jnp.asarray(False))(both)) == pytest.approx(
        18.8
    )
    # Serialized: 10 + 8 for prefill, 5 + 3 + 2 for decode.
    assert float(SerializedPhases(cost, jnp.asarray(True))(both)) == pytest.approx(28.0)
    alone = both._replace(num_decodes=jnp.int32(0), decode_context=jnp.int32(0))
    assert float(SerializedPhases(cost, jnp.asarray(True))(alone)) == pytest.approx(
        18.0
    )


def decode_s(model: settings.ServedModel, batch: int, context: int) -> float:
    """Returns the time of a decode step."""
    every = batch * context
    work = make_work(num_decodes=batch, decode_context=every, num_drawn=batch)
    return float(model.cost(work))


def test_settings_are_the_papers() -> None:
    yi = settings.MODELS["Yi-34B"]
    assert yi.num_pages * PAGE_SIZE == pytest.approx(306_000, rel=0.01)
    for model in settings.MODELS.values():
        step_s = decode_s(model, 32, 4096)
        assert 4 < model.limits_s["strict"] / step_s < 7
        assert 20 < model.limits_s["relaxed"] / step_s < 35
    # Each chunk pays the fixed time of a step.
    unchunked_s, parts = (settings.prompt_s(yi, 8192, size) for size in (None, 512))
    assert parts - unchunked_s == pytest.approx(15 * settings.OVERHEAD_S, rel=0.01)


@pytest.fixture(scope="module")
def result() -> Result:
    return smoke.run("chunked_prefill").result


@pytest.mark.slow
def test_stalls_follow_from_the_schedule(result: Result) -> None:
    line = result.timeline
    longest = {}
    for schedule in settings.SCHEDULES:
        line_mask = (line.way == schedule.name) & (line.sequence < runs.NUM_DECODING)
        times = [line.time_s[line_mask & (line.sequence == i)] for i in range(3)]
        longest[schedule.name] = max(np.diff(x).max() for x in times)
        assert all(len(x) == 90 for x in times)
    first, mixed, chunks, both = longest.values()
    # Two prompts stall all decoding sequences at once, one after the other, or hardly.
    assert first > 1.8 * mixed > 1.8 * 3 * chunks
    assert both < chunks < both + 0.05


@pytest.mark.slow
def test_the_tail_is_a_step_with_a_full_budget(result: Result) -> None:
    # The expected times omit the few sequences that decode in the same step.
    yi = settings.MODELS["Yi-34B"]
    budgets = (256, 2048)
    full_s = [settings.prompt_s(yi, budget) for budget in budgets]
    assert result.budgets.budget.tolist() == [*budgets]
    np.testing.assert_allclose(result.budgets.tbt_p99_s, full_s, rtol=0.1)
    np.testing.assert_allclose(result.budgets.longest_s, full_s, rtol=0.15)
    assert (result.loads.preempted == 0).all()
    assert {*result.loads.system} == {system.name for system in settings.SYSTEMS}


@pytest.mark.slow
def test_claims_follow_from_the_result(result: Result) -> None:
    measured = smoke.measured_values(smoke.run("chunked_prefill").claims)
    whole_s = settings.prompt_s(settings.MODELS["Yi-34B"], 8192)

    def extra(chunk: int) -> float:
        """Returns the overhead of further steps of a prompt of 8,192 tokens in %."""
        return 100 * (-(-8192 // chunk) - 1) * settings.OVERHEAD_S / whole_s

    small = measured["chunks of 512 cost at most 25 % more than the whole prompt"]
    large = measured["chunks of 2,048 cost hardly more than the whole prompt"]
    assert (small, large) == pytest.approx((extra(512), extra(2048)), rel=1e-4)
    odd = measured["chunks of 257 cost more than chunks of 256"]
    assert odd == pytest.approx(0, abs=1e-3)  # equal steps: a roofline has no tiles
    for name in ("mixed only", "chunks only", "both"):
        row_mask = result.ways.system == name
        for what, column in (
            ("median time to the first token", result.ways.ttft_s),
            ("P99 time between tokens", result.ways.tbt_p99_s),
        ):
            assert [measured[f"openchat, {name}: {what}"]] == column[row_mask].tolist()
