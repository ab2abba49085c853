"""Simulated speculative decoding: equal to the engine, step for step."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling, simulation
from jaxkv.engine import AcceptResult, Drafter, Drafts, Speculation
from jaxkv.ledger import Slots
from jaxkv.sampling import request_key, request_keys
from jaxkv.scheduling import interface
from jaxkv.simulation import (
    Acceptance,
    KVTransferred,
    SerializedPhases,
    SimulationMember,
    acceptance,
    apply_plan,
    costs,
    read_outcomes,
    step,
)
from jaxkv.simulation.counted_pages import CountedPages
from jaxkv.simulation.state import Capacity, Simulation, init_simulation
from jaxkv.simulation.step import SimulatedStep
from jaxkv.workloads import Workload, gaps_between_tokens, make_workload
from scaling import shapes
from scaling.costs import find_device, step_models, steps
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.simulations import (
    CASES,
    COST,
    assert_equal_steps,
    compare_with_engine,
    workload,
)

MAX_DRAFTS = 3
"""Largest draft length, the same in all tests, so that programs are shared."""


def law(chance: Any, num_drafts: Any = MAX_DRAFTS, seed: int = 0) -> Acceptance:
    return Acceptance.of(
        chance, num_drafts=num_drafts, max_drafts=MAX_DRAFTS, seed=seed
    )


# Compared with the engine


@dataclasses.dataclass(frozen=True)
class Guess(Drafter):
    """A drafter with constant tokens and a fixed draft length."""

    num: int

    def init(self, config: Any) -> tuple[()]:
        return ()

    def requested_draft_lengths(
        self, memory: Any, state: Any, config: Any
    ) -> jax.Array:
        return jnp.full(state.slots.sequence.shape, self.num, jnp.int32)

    def propose(
        self, params: Any, memory: Any, state: Any, granted: jax.Array, config: Any
    ) -> Any:
        shape = (granted.shape[0], config.max_drafts)
        sample = state.sequences.params.sample[jnp.maximum(state.slots.sequence, 0)]
        tokens = jnp.broadcast_to(sample[:, None], shape)
        return memory, state.pages, Drafts(granted, tokens)

    def learn(self, memory: Any, state: Any, verified: Any) -> Any:
        return memory


@dataclasses.dataclass(frozen=True)
class Chance:
    """A verifier that accepts each draft with one probability.

    Samples of a request emit different tokens, so that they share only the prompt.
    """

    chance: float
    is_lossless = False

    def __call__(
        self,
        logits: Any,
        children: Any,
        draft_probs: Any,
        params: Any,
        positions: Any,
        raw: Any,
    ) -> AcceptResult:
        return AcceptResult(
            accept=jnp.where(children >= 0, jnp.float32(self.chance), 0.0),
            token=params.sample,
            invalid=jnp.zeros(positions.shape, bool),
        )


def comparison_cases() -> list[Any]:
    quick = {("plain", 0.6), ("groups, swap", 1.0)}
    return [
        pytest.param(
            name,
            chance,
            marks=[] if (name, chance) in quick else [pytest.mark.slow],
        )
        for name in CASES
        for chance in (0.0, 0.6, 1.0)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "chance"), comparison_cases())
def test_it_schedules_as_the_engine(name: str, chance: float) -> None:
    """Step for step, with the same random bits for each draft."""
    case = CASES[name]
    w = workload(10, 30, max_samples=case.max_samples)
    run = compare_with_engine(
        w,
        case,
        10,
        acceptance=law(chance),
        speculation=Speculation(Guess(MAX_DRAFTS), Chance(chance)),
    )
    assert_equal_steps(run)
    assert run.infos.work.num_drafts.sum() > 100
    assert (run.infos.num_preempted.sum() > 0) == ("static" not in name)


# Without the engine

ROOMY = Capacity.of(num_pages=400, page_size=4, max_length=200, token_budget=100)
TIGHT = Capacity.of(num_pages=24, page_size=4, max_length=200, token_budget=24)
RULE = scheduling.fcfs(chunk_size=7, stackable=True)


class Ran(NamedTuple):
    state: Simulation
    infos: SimulatedStep
    slots: Slots
    """After every step."""
    pages: CountedPages
    """After every step."""


def simulate(
    w: Workload,
    bounds: Capacity,
    acceptance: Acceptance | None,
    max_samples: int = 1,
    num_steps: int = 200,
) -> Ran:
    state = init_simulation(w, bounds, RULE, max_slots=6, max_samples=max_samples)

    def body(state: Simulation, _: None) -> Any:
        state, info = step.simulate_step(
            state,
            w,
            capacity=bounds,
            policy=RULE,
            cost=COST,
            max_samples=max_samples,
            acceptance=acceptance,
        )
        return state, (info, state.ledger.slots, state.pages)

    state, infos = jax.lax.scan(body, state, None, length=num_steps)
    return Ran(state, *infos)


run = jax.jit(
    simulate,
    static_argnames=("max_samples", "num_steps"),
)


def served(*arguments: Any, **bounds: int) -> Any:
    """Simulates to the end; returns NumPy arrays."""
    ran = jax.tree.map(np.asarray, run(*arguments, **bounds))
    assert ran.state.num_done == ran.state.num_served == 12
    assert ran.infos.enough.all()
    return ran


def gains(infos: Any) -> list[list[int]]:
    """Returns the tokens emitted per step, for steps with at least one."""
    drew = infos.drew
    num = infos.num_drawn
    every = range(drew.max() + 1)
    return [num[drew == sequence].tolist() for sequence in every]


@pytest.mark.thorough
def test_acceptance_rate_0_decodes_plainly_and_feeds_more() -> None:
    for bounds in (ROOMY, TIGHT):
        w = workload(3, 12, longest=25)
        plain = served(w, bounds, None)
        zero_rate = served(w, bounds, law(0.0))
        for name in ("start", "drew", "num_admitted", "num_preempted", "num_finished"):
            one, other = (getattr(x.infos, name) for x in (plain, zero_rate))
            np.testing.assert_array_equal(one, other, name)
        np.testing.assert_array_equal(
            plain.state.ledger.events, zero_rate.state.ledger.events
        )
        assert set(itertools.chain(*gains(zero_rate.infos))) == {1}
        work = zero_rate.infos.work
        before = plain.infos.work
        for name in before._fields[: -len(before._field_defaults)]:
            one = getattr(work, name)
            other = getattr(before, name)
            np.testing.assert_array_equal(one, other, name)
        assert work.num_drafts.sum() > 100
        assert work.num_accepted.sum() == 0
        assert (zero_rate.infos.used_pages >= plain.infos.used_pages).all()
    assert zero_rate.infos.num_preempted.sum() > 0


def test_acceptance_rate_1_emits_one_token_more_than_drafts() -> None:
    w = workload(3, 12)._replace(
        prompt=jnp.full(12, 5, jnp.int32), output=jnp.arange(1, 13, dtype=jnp.int32)
    )
    for num in (0, 2, 3):
        ran = served(w, ROOMY, law(1.0, num))
        for output, gain in enumerate(gains(ran.infos), 1):
            full_steps, remainder = divmod(output - 1, num + 1)
            assert gain == [1] + [num + 1] * full_steps + [remainder] * (remainder > 0)
        work = ran.infos.work
        assert work.num_drawn.sum() == np.arange(1, 13).sum()
        assert work.draft_steps.max() == num
        # The last token of an answer is never drafted, so every draft can be used.
        np.testing.assert_array_equal(work.num_accepted, work.num_drafts)


@pytest.mark.slow
def test_mean_tokens_per_step_follow_the_acceptance_rate() -> None:
    """(1 - a^(g + 1)) / (1 - a), of steps that the end of the answer does not cut."""
    num_tokens = 900
    w = make_workload(np.zeros(12), np.full(12, 5), np.full(12, num_tokens))
    bounds = ROOMY._replace(num_pages=jnp.int32(9000), max_length=jnp.int32(1000))
    cases = [(0.3, 1), (0.5, 3), (0.8, 2), (0.8, 3), (0.95, 3)]
    laws = jax.tree.map(lambda *x: jnp.stack(x), *(law(*case) for case in cases))

    @jax.jit
    def all_of(laws: Acceptance) -> Any:
        def one(law: Acceptance) -> Any:
            return simulate(w, bounds, law, 1, 2 * num_tokens).infos

        return jax.vmap(one)(laws)

    infos = jax.tree.map(np.asarray, all_of(laws))
    for i, (chance, num) in enumerate(cases):
        full_gains = []
        for request_gains in gains(jax.tree.map(lambda x, i=i: x[i], infos)):
            left = num_tokens - np.cumsum(request_gains) + request_gains
            full_gains += np.array(request_gains)[1:][left[1:] > num].tolist()
            assert sum(request_gains) == num_tokens
        expected = (1 - chance ** (num + 1)) / (1 - chance)
        np.testing.assert_allclose(np.mean(full_gains), expected, rtol=0.03)


def test_each_place_may_have_its_own_acceptance_rate() -> None:
    w = workload(3, 12)._replace(
        prompt=jnp.full(12, 5, jnp.int32), output=jnp.full(12, 31, jnp.int32)
    )
    # Drafts after a rejected draft are rejected.
    for chances, gain in (((1, 0, 1), 2), ((0, 1, 1), 1), ((1, 1, 0), 3)):
        request_gains = gains(served(w, ROOMY, law(chances)).infos)
        assert request_gains == [[1] + [gain] * (30 // gain)] * 12


def test_acceptance_does_not_depend_on_other_sequences() -> None:
    w = workload(3, 12)
    crowd = w._replace(arrival=jnp.zeros_like(w.arrival))
    alone = w._replace(clients=jnp.int32(1))
    first = gains(served(crowd, ROOMY, law(0.6)).infos)
    assert gains(served(alone, ROOMY, law(0.6)).infos) == first
    assert gains(served(crowd, ROOMY, law(0.6, seed=1)).infos) != first


@pytest.mark.thorough
def test_acceptance_is_independent_between_samples() -> None:
    w = workload(3, 12, max_samples=3)._replace(output=jnp.full(12, 30, jnp.int32))
    request_gains = gains(served(w, ROOMY, law(0.6), max_samples=3).infos)
    both = [x for x, num in enumerate(np.asarray(w.samples)) if num > 1]
    assert all(request_gains[3 * x] != request_gains[3 * x + 1] for x in both)


def test_the_key_of_a_request_is_the_engines() -> None:
    key = jnp.asarray(request_key(7 << 33, 0, 0))
    ids = jnp.asarray([[0, 5], [2**31 - 1, 9]], jnp.int32)
    keys = np.asarray(request_keys(key, ids))
    for at in np.ndindex(2, 2):
        expected = request_key(None, 7 << 33, int(ids[at]))
        np.testing.assert_array_equal(keys[at], expected)


@pytest.mark.parametrize(
    "chance", [0.7, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1.0))]
)
def test_pages_of_rejected_drafts_are_released(chance: float) -> None:
    """Between steps, sequences hold the pages of decoding without speculation."""
    num_rejected = 0
    for samples, num_pages in ((1, 24), (3, 28)):
        w = workload(5, 12, max_samples=samples, longest=25)
        bounds = TIGHT._replace(num_pages=jnp.int32(num_pages))
        ran = served(w, bounds, law(chance), max_samples=samples)
        slots = ran.slots
        held = ran.pages
        work = ran.infos.work
        stays = slots.sequence >= 0
        decodes = stays & (ran.infos.drew >= 0)
        assert (held.places >= held.length)[stays].all()
        pages, plain = (-(-x // 4) for x in (held.places, held.length))
        np.testing.assert_array_equal(pages[decodes], plain[decodes])
        assert (held.places <= slots.num_tokens)[stays].all()
        assert (ran.infos.used_pages <= bounds.num_pages).all()
        assert ran.infos.num_preempted.sum() > 0
        # All pages in use are accounted for.
        total = sum(ran.infos.split)
        np.testing.assert_array_equal(total, 4 * ran.infos.used_pages)
        num_rejected += (work.num_drafts - work.num_accepted).sum()
    assert (num_rejected > 0) == (chance < 1)


@pytest.mark.thorough
def test_a_mapped_run_equals_a_single_run() -> None:
    w = workload(5, 12, longest=25)
    laws = [law(0.5, 0), law(0.9, 1, 4), law((0.9, 0.1, 0.5)), law(0.3, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *laws)
    together = jax.jit(jax.vmap(lambda x: simulate(w, TIGHT, x)))(stacked)
    for i, one in enumerate(laws):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_array_equal(x[i], y),
            together,
            run(w, TIGHT, one),
        )


@pytest.mark.thorough
def test_contiguous_places_have_room_for_drafts() -> None:
    """A reservation has room for the whole answer, and drafts never exceed it."""
    w = workload(5, 12, longest=25)
    taken = simulation.reservation("oracle", num_leaves=64, leaves_per_region=16)
    bounds = ROOMY._replace(num_pages=jnp.int32(64))
    cost = costs.with_drafter(COST, step_s=0.001)
    member = SimulationMember(w, bounds, RULE, cost, taken, law(0.7))
    outcome = simulation.simulate(
        simulation.stack([member]), max_slots=6, keep_trace=True
    )
    assert np.isfinite(outcome.finish_s).all()
    assert outcome.totals.drawn == np.asarray(w.output).sum()
    assert outcome.trace is not None
    assert outcome.trace.info.enough.all()


# On the host


@pytest.mark.slow
def test_all_steps_are_summed() -> None:
    loads = [workload(seed, 12, longest=25) for seed in range(3)]
    laws = [law(0.7), law(0.7, 0), law((0.9, 0.5, 0.1), seed=3)]
    members = simulation.stack(
        [
            SimulationMember(load, TIGHT, RULE, COST, None, acceptance_law)
            for load, acceptance_law in zip(loads, laws, strict=True)
        ]
    )
    outcome = simulation.simulate(
        members, max_slots=6, keep_trace=True, steps_per_call=50
    )
    assert outcome.trace is not None
    assert outcome.totals.drafted[1] == 0
    for i, load in enumerate(loads):
        trace = outcome.trace.member(i)
        info: Any = trace.info
        output = np.asarray(load.output)
        assert outcome.totals.drawn[i] == output.sum()
        assert outcome.totals.drafted[i] == info.work.num_drafts.sum()
        # Fed and kept: all tokens except the last of a sequence, and recomputed ones.
        num_processed = outcome.totals.decoded[i] + outcome.totals.read[i]
        num_processed += info.work.num_accepted.sum()
        tokens = np.asarray(load.prompt) + output - 1
        assert num_processed == tokens.sum() + outcome.recomputed[i].sum()
        end_s = trace.start_s + info.micros / 1e6
        gaps = gaps_between_tokens(info.drew, end_s, info.num_drawn)
        num = np.bincount(gaps.sequence, minlength=12)
        np.testing.assert_array_equal(num, output - 1)
        spent = np.bincount(gaps.sequence, gaps.seconds, minlength=12)
        took = (outcome.finish_s - outcome.first_s)[i]
        np.testing.assert_allclose(spent, took, atol=1e-6)
    # The same without a trace, and in a run to the end without the driver.
    short = simulation.simulate(members, max_slots=6)
    np.testing.assert_array_equal(short.finish_s, outcome.finish_s)
    last = loads[2]
    state = jax.jit(
        lambda w, x: step.simulate_workload(
            w, TIGHT, RULE, COST, max_slots=6, acceptance=x
        )
    )(last, laws[2])
    alone = read_outcomes(state, last)
    np.testing.assert_array_equal(alone.finish_s, outcome.finish_s[2])


def test_laws_of_several_sizes_are_not_mapped_together() -> None:
    member = SimulationMember(workload(0, 12), ROOMY, RULE, COST, None, law(0.5))
    other = member._replace(acceptance=Acceptance.of(0.5, num_drafts=2))
    with pytest.raises(ValueError, match="max_drafts must be equal in all members"):
        simulation.stack([member, other])
    with pytest.raises(ValueError, match="acceptance must have the same type in all"):
        simulation.stack([member, member._replace(acceptance=None)])


# Cost models

SPECULATES = costs.make_work(
    num_decodes=2,
    num_prompt_rows=70,
    decode_context=401 + 10,
    prompt_context=120,
    prompt_squares=120**2 - 50**2,
    num_drawn=3 + 2,
    num_drafts=3 + 1,
    draft_steps=3,
    draft_context=402 + 403 + 404 + 11,
    num_accepted=2,
)
"""A chunk after 50 tokens, and two decodes after 400 and 9 with 3 drafts and 1."""


def test_the_roofline_of_verification_is_that_of_its_rows() -> None:
    roofline = step_models.make_roofline_cost(
        shapes.describe("opt-13b"),
        find_device("a100-80gb"),
        compute_share=0.01,
    )
    new = jnp.array([70, 4, 2])
    past = jnp.array([50, 400, 9])
    assert isinstance(roofline.cost, step_models.RooflineCost)
    apart = steps.step_work(roofline.cost.step, new, past, jnp.int32(3 + 4))
    np.testing.assert_allclose(roofline.cost(SPECULATES), apart.time_s, rtol=1e-6)


def test_a_draft_costs_what_a_sequence_more_does() -> None:
    cost = step_models.linear_cost(
        (10.0, 0.5, 0.0), (10.0, 0.01, 0.2), (20.0, 0.01, 0.1)
    )
    feeds = 0.010 + 1e-5 * (411 + 120) + 2e-4 * (2 + 4) + 5e-4 * 70
    assert float(cost(SPECULATES)) == pytest.approx(feeds)
    wide_work = SPECULATES._replace(num_drafts=jnp.int32(93), num_decodes=jnp.int32(2))
    feeds = 0.020 + 1e-5 * (411 + 120) + 1e-4 * 95 + 5e-4 * 70
    assert float(cost(wide_work)) == pytest.approx(feeds)


def test_a_drafter_takes_a_step_for_each_draft_of_the_longest() -> None:
    plain = step_models.linear_cost((10.0, 0.5, 0.0), (10.0, 0.01, 0.2))
    both = costs.with_drafter(plain, step_s=0.002, row_s=1e-5)
    added = float(both(SPECULATES)) - float(plain(SPECULATES))
    assert added == pytest.approx(3 * 0.002 + 4 * 1e-5)
    alone = costs.make_work(num_decodes=3)
    assert alone.num_drafts is None
    assert float(both(alone)) == float(plain(alone))
    for value in (-1.0, float("nan"), True, float("inf")):
        with pytest.raises(ValueError, match=r"step_s=\S+ must be .*at least 0"):
            costs.with_drafter(plain, step_s=value)


def test_parts_of_a_step_keep_their_drafts() -> None:
    """Drafts belong to the decode phase; a decode worker verifies them as well."""

    def count(work: Any) -> jax.Array:
        w = step_models.counts_as_floats(work)
        tokens = 1e6 * w.num_drawn + 1e3 * w.num_logits + w.num_decode_rows
        return tokens + 1e-3 * w.decode_pairs

    reads = 1e6 + 1e3
    decodes = 4e6 + 6e3 + 6 + 1e-3 * (411 + 1220)
    seconds = SerializedPhases(count, jnp.asarray(True))(SPECULATES)
    assert float(seconds) == pytest.approx(reads + decodes)
    assert float(
        SerializedPhases(count, jnp.asarray(False))(SPECULATES)
    ) == pytest.approx(reads + decodes)
    received = KVTransferred(count, jnp.asarray(True))(SPECULATES)
    expected = 5e6 + 7e3 + 7 + 1e-3 * (411 + 120 + 1220)
    assert float(received) == pytest.approx(expected)


def test_the_work_of_rows_is_summed() -> None:
    w = make_workload(np.zeros(12), np.full(12, 5), np.full(12, 30))
    ran = served(w._replace(clients=jnp.int32(1)), ROOMY, law(1.0))
    work = jax.tree.map(lambda x: x[1], ran.infos.work)
    # After five prompt tokens: the sampled token, and three drafts.
    assert work.num_decodes == work.num_drawn - work.num_accepted == 1
    assert work.num_drafts == work.draft_steps == work.num_accepted == 3
    assert (work.decode_context, work.draft_context) == (6, 7 + 8 + 9)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (dict(chance=1.5, num_drafts=2), r"chance=1.5 must be in \[0, 1\]"),
        (dict(chance=(0.5, -1), num_drafts=2), r"chance=-1 must be in \[0, 1\]"),
        (dict(chance=float("nan"), num_drafts=2), r"chance=nan must be in \[0, 1\]"),
        (dict(chance=0.5, num_drafts=-1), "num_drafts=-1 must be at least 0"),
        (
            dict(chance=0.5, num_drafts=0, max_drafts=0),
            "max_drafts=0 must be at least 1",
        ),
        (
            dict(chance=0.5, num_drafts=3, max_drafts=2),
            r"num_drafts=3 must be in \[0, max_drafts=2\]",
        ),
        (
            dict(chance=(0.5, 0.5), num_drafts=2, max_drafts=3),
            r"chance has shape \(2,\), must be one number or max_drafts=3",
        ),
        (
            dict(chance=0.5, num_drafts=jnp.int32(2)),
            "max_drafts=None must be a number if num_drafts is mapped",
        ),
        (dict(chance=0.5, num_drafts=2, seed=-1), r"seed=-1 must be in \[0, 2"),
    ],
)
def test_a_law_out_of_range_is_refused(arguments: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Acceptance.of(**arguments)


BUGS = {
    "pages of drafts are kept": Bug(
        apply_plan,
        "release_drafts",
        "if granted.num_drafts is None",
        "if True",
        test_pages_of_rejected_drafts_are_released,
        (0.0,),
    ),
    "accepted tokens lose their pages": Bug(
        apply_plan,
        "release_drafts",
        "jnp.maximum(granted.num_places, pages.length)",
        "granted.num_places",
        test_pages_of_rejected_drafts_are_released,
        (1.0,),
    ),
    "the last token is drafted": Bug(
        interface,
        "limit_draft_lengths",
        "limit - num_tokens - 1",
        "limit - num_tokens",
        test_acceptance_rate_1_emits_one_token_more_than_drafts,
    ),
    "drafts after a rejected one are accepted": Bug(
        acceptance,
        "draw_num_accepted",
        "jnp.cumprod(accepts.astype(jnp.int32), axis=1)",
        "accepts.astype(jnp.int32)",
        test_each_place_may_have_its_own_acceptance_rate,
    ),
    "random bits depend on the slot": Bug(
        acceptance,
        "draw_num_accepted",
        "position = slots.num_tokens[:, None] + place",
        "position = jnp.arange(sequence.size)[:, None] + place",
        test_acceptance_does_not_depend_on_other_sequences,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_seeded_bug_is_noticed(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # A new program, since that of the correct functions is cached.
        fresh_simulate = functools.partial(simulate)
        fresh = jax.jit(
            fresh_simulate,
            static_argnames=("max_samples", "num_steps"),
        )
        patch.setitem(globals(), "run", fresh)
        mutation.seed(patch, bug)
        with pytest.raises(AssertionError):
            bug.noticed_by(*bug.arguments)
