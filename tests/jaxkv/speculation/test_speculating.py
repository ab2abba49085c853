"""Speculation in the engine: tokens equal plain decoding's, and all state is
released."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import Drafter, Drafts, EngineConfig, Speculation, init, steps
from jaxkv.models import PagedForward, make_model_pages, param_shapes
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs
from jaxkv.speculation import (
    Adaptive,
    DraftModel,
    Eagle,
    EagleConfig,
    Jacobi,
    Lookahead,
    Medusa,
    MedusaConfig,
    MTPConfig,
    NGram,
    Rejection,
    SharedNoiseVerifier,
    Synthetic,
    TargetAndDraftParams,
    TargetWithDraft,
    TargetWithEagle,
    TargetWithHeads,
    build_self_speculative,
    static_tree,
)
from tests.support import asks as workloads
from tests.support import engines, searches
from tests.support.engines import CACHED, MODEL, TIGHT, Ask, Run, greedy


@dataclasses.dataclass(frozen=True)
class Bushy(Drafter):
    """Packs a chain's drafts as a path of a tree with wrong siblings.

    The index of the right sibling changes from token to token.
    """

    chain: Drafter
    parents: tuple[int, ...] = (0, 0, 1, 2, 2, 1, 4, 7)
    on_path: tuple[tuple[int, ...], ...] = ((1, 3), (2, 4, 7, 8), (1, 6), (2, 5))

    @property
    def width(self) -> int:
        return 2

    def propose(
        self, params: Any, memory: Any, state: Any, granted: Any, config: Any
    ) -> Any:
        proposal = self.chain.propose(params, memory, state, granted, config)
        memory, pages, drafts = proposal
        depth = [0]
        num = len(self.parents)
        for parent in self.parents:
            depth.append(depth[parent] + 1)
        depths = jnp.asarray(depth[1:], jnp.int32)
        right = np.zeros((len(self.on_path), num), bool)
        for path, places in enumerate(self.on_path):
            right[path, np.array(places) - 1] = True
        num_tokens = state.slots.num_tokens
        is_right = jnp.asarray(right)[num_tokens % len(self.on_path)]
        token = drafts.tokens[:, depths - 1]
        step = jnp.arange(1, num + 1, dtype=jnp.int32)[None, :]
        wrong = (token + step) % MODEL.vocab_size
        parents = jnp.broadcast_to(jnp.asarray(self.parents, jnp.int32), token.shape)
        token = jnp.where(is_right, token, wrong)
        return memory, pages, Drafts(granted, token, None, parents)


SMALLER = dataclasses.replace(MODEL, num_layers=1, hidden_size=16, mlp_size=24)
OF_MODEL = PagedForward(MODEL)
OF_SMALLER = PagedForward(SMALLER)

HEADS = MedusaConfig(target=MODEL, num_heads=3)
EAGLE = EagleConfig(target=MODEL, taps=(0, 1, 2))
MTP, MTP_OF_TWO = (
    MTPConfig(target=dataclasses.replace(MODEL, num_ahead_layers=num)) for num in (1, 2)
)
BUSH = static_tree.Topology((0, 0, 1, 1, 2, 3, 0, 5), (0, 1, 0, 2, 1, 0, 3, 1))

DRAFTERS: dict[str, Drafter] = {
    "n-gram": NGram(1, 3),
    "jacobi": Jacobi(),
    "early exit": build_self_speculative(OF_MODEL, [0]),
    "all layers": build_self_speculative(OF_MODEL, [0, 1]),
    "draft model": DraftModel(OF_SMALLER, has_own_model=True),
    "lookahead": Lookahead(columns=2, ngram=3, candidates=2, entries=8),
    "adaptive": Adaptive(build_self_speculative(OF_MODEL, [0, 1]), patience=4),
    "tree": Bushy(build_self_speculative(OF_MODEL, [0, 1])),
    "medusa": Medusa(HEADS, static_tree.chain(3)),
    "medusa tree": Medusa(HEADS, BUSH),
    "eagle": Eagle(EAGLE, (1, 1)),
    "eagle tree": Eagle(EAGLE, (3, 3, 2), 3),
    "mtp": Eagle(MTP, (1, 1)),
    "mtp tree": Eagle(MTP, (3, 3, 2), 3),
    "mtp of two, tree": Eagle(MTP_OF_TWO, (3, 3, 2), 3),
}
SWAPPING = dataclasses.replace(TIGHT, max_swap_pages=24)
BOUNDS = {"tight": TIGHT, "cached": CACHED, "swapping": SWAPPING}
ASKS = {
    "singles": workloads.singles,
    "groups": workloads.groups,
    "shared prefix": workloads.alike,
}


def with_drafts(config: EngineConfig, **changes: Any) -> EngineConfig:
    changes = {"max_drafts": 3, "token_budget": 40, **changes}
    return dataclasses.replace(config, **changes)


def with_nan(pages: Any) -> Any:
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)


def weights_of(shapes: Any) -> Any:
    """Random weights, large enough to affect the output."""
    rng = np.random.default_rng(11)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), shapes
    )


def parts_of(drafter: str, config: EngineConfig) -> dict[str, Any]:
    """Forward pass and pages for a drafter with its own weights."""
    if drafter == "draft model":
        draft_params = engines.params(SMALLER)
        forward = TargetWithDraft(OF_MODEL, OF_SMALLER)
        pages = make_model_pages(MODEL, config)
        pages = pages._replace(draft_pages=make_model_pages(SMALLER, config))
    elif drafter.startswith("medusa"):
        target = PagedForward(MODEL, config.numerics, taps=HEADS.taps)
        draft_params = weights_of(HEADS.param_shapes())
        forward = TargetWithHeads(target)
        pages = make_model_pages(MODEL, config, taps=HEADS.taps)
    elif drafter.startswith("eagle"):
        target = PagedForward(MODEL, config.numerics, taps=EAGLE.taps)
        draft_params = weights_of(EAGLE.param_shapes())
        forward = TargetWithEagle(target, EAGLE)
        pages = make_model_pages(MODEL, config, taps=EAGLE.taps)
        pages = pages._replace(draft_pages=make_model_pages(EAGLE.layer, config))
    elif drafter.startswith("mtp"):
        how: Any = DRAFTERS[drafter]
        target = PagedForward(MODEL, config.numerics, taps=how.config.taps)
        draft_params = weights_of(param_shapes(how.config.target)["ahead"])
        forward = TargetWithEagle(target, how.config)
        layer = how.config.layer
        pages = make_model_pages(MODEL, config, taps=how.config.taps)
        taps = (0,) * (layer.num_layers - 1)
        draft_pages = make_model_pages(layer, config, taps=taps)
        pages = pages._replace(draft_pages=draft_pages)
    else:
        return {}
    return {
        "state": init(config, with_nan(pages), ()),
        "weights": TargetAndDraftParams(engines.params(MODEL), draft_params),
        "forward": forward,
    }


@functools.cache
def served(drafter: str, bounds: str, asks: str, **changes: Any) -> Run:
    if drafter.endswith(("tree", "lookahead")):
        changes = {"max_drafts": 8, "token_budget": 60, **changes}
    if drafter == "adaptive":
        changes = {
            "max_drafts": 5,
            "num_draft_buckets": 2,
            "token_budget": 60,
            **changes,
        }
    config = with_drafts(BOUNDS[bounds], **changes)
    speculation = Speculation(DRAFTERS[drafter], SharedNoiseVerifier())
    policy = fcfs(preemption="swap") if bounds == "swapping" else None
    how: Any = {"policy": policy, "speculation": speculation}
    return engines.serve(ASKS[asks](), config, **how, **parts_of(drafter, config))


def drafted(run: Run) -> tuple[int, int]:
    """Number of drafts fed, and number accepted."""
    num_drafts = np.asarray(run.info.num_drafts)
    accepted = np.maximum(run.info.num_emitted - 1, 0)[num_drafts > 0]
    return int(num_drafts.sum()), int(accepted.sum())


def marked(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow, id=", ".join(case))


@pytest.mark.parametrize(
    ("drafter", "bounds", "asks"),
    [
        marked("n-gram", "cached", "shared prefix"),
        marked("tree", "cached", "shared prefix"),
        marked("tree", "swapping", "groups"),
        marked("tree", "tight", "singles"),
        marked("medusa", "tight", "singles"),
        marked("medusa", "swapping", "groups"),
        marked("medusa tree", "cached", "shared prefix"),
        marked("medusa tree", "swapping", "groups"),
        marked("eagle", "cached", "shared prefix"),
        marked("eagle", "swapping", "groups"),
        marked("eagle tree", "swapping", "groups"),
        marked("eagle tree", "tight", "singles"),
        marked("mtp", "cached", "shared prefix"),
        marked("mtp", "swapping", "groups"),
        marked("mtp", "tight", "singles"),
        marked("mtp tree", "swapping", "groups"),
        marked("mtp of two, tree", "cached", "shared prefix"),
        marked("mtp of two, tree", "swapping", "groups"),
        marked("adaptive", "swapping", "groups"),
        marked("lookahead", "tight", "singles"),
        marked("all layers", "tight", "singles"),
        marked("jacobi", "swapping", "groups"),
        marked("draft model", "cached", "shared prefix"),
        marked("early exit", "swapping", "groups"),
        marked("draft model", "swapping", "groups"),
        marked("early exit", "cached", "shared prefix"),
        ("n-gram", "tight", "singles"),
        marked("jacobi", "tight", "singles"),
        marked("jacobi", "cached", "shared prefix"),
    ],
)
def test_tokens_equal_those_of_a_plain_loop(
    drafter: str, bounds: str, asks: str
) -> None:
    """Greedy and sampled requests, with penalties and truncation, to equal ends."""
    run = served(drafter, bounds, asks)
    requests = ASKS[asks]()
    engines.assert_equal_plain(run, requests, TIGHT)
    num_drafts, num_accepted = drafted(run)
    assert num_drafts > 50
    assert num_accepted > 0
    assert (np.asarray(run.info.num_swapped_out).sum() > 0) == (bounds == "swapping")
    if drafter == "all layers":  # it samples the target's token, except at an end
        assert num_accepted > 0.9 * num_drafts
    if drafter == "tree":  # its right path has two drafts of eight at least
        assert num_accepted > 0.2 * num_drafts
    scored = [ask for ask in requests if ask.sampling.logprobs is not None]
    for ask in scored:
        got = run.outcomes[ask.request_id]
        law = engines.logprobs_of(ask, got.tokens)
        scores = law[np.arange(len(law) - 1), [*ask.prompt, *got.tokens][1:]]
        answer = scores[len(ask.prompt) - 1 :]
        np.testing.assert_allclose(got.logprobs, answer, rtol=0, atol=1e-4)
        best = np.sort(law[len(ask.prompt) - 1 : -1], axis=1)[:, ::-1]
        best = best[:, : TIGHT.max_logprobs]
        np.testing.assert_allclose(got.top_logprobs, best, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_keys_that_stay_with_a_rejected_branch_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_compact_accepted_path", lambda state, verified: state)
    # A token budget of no other test, so that the program is compiled here.
    run = served("tree", "cached", "shared prefix", token_budget=61)
    with pytest.raises(AssertionError):
        engines.assert_equal_plain(run, workloads.alike(), TIGHT)


def test_drafts_must_have_max_drafts_columns() -> None:
    line = r"drafts.tokens.shape=\(8, 8\) must be \(8, 5\)"
    with pytest.raises(ValueError, match=line):
        served("tree", "cached", "shared prefix", max_drafts=5)


@pytest.mark.thorough
def test_a_tree_as_wide_as_the_window_is_refused() -> None:
    model = dataclasses.replace(MODEL, window=8)
    tree = Bushy(build_self_speculative(PagedForward(model), [0, 1]))
    with pytest.raises(ValueError, match="window=8 must be above num_drafts=8"):
        engines.serve(
            [greedy(100, [3, 1], 8)],
            with_drafts(TIGHT, max_drafts=8, token_budget=60),
            speculation=Speculation(tree, SharedNoiseVerifier()),
            forward=PagedForward(model),
        )


@pytest.mark.thorough
def test_trees_are_refused_under_reproducible_numerics() -> None:
    line = "numerics='reproducible' takes chains of drafts, no token trees"
    with pytest.raises(ValueError, match=line):
        served("tree", "cached", "shared prefix", numerics="reproducible")


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", ["n-gram", pytest.param("jacobi", marks=pytest.mark.slow)]
)
def test_no_bit_changes_under_reproducible_numerics(drafter: str) -> None:
    numerics: Any = {"numerics": "reproducible"}
    asks = workloads.alike()
    config = dataclasses.replace(CACHED, token_budget=40, **numerics)
    plain = engines.serve(asks, config)
    run = served(drafter, "cached", "shared prefix", **numerics)
    assert drafted(run)[1] > 20
    for name, wanted in plain.outcomes.items():
        got = run.outcomes[name]
        assert (got.tokens, got.reason) == (wanted.tokens, wanted.reason)
        np.testing.assert_array_equal(got.logprobs, wanted.logprobs)
        np.testing.assert_array_equal(got.top_logprobs, wanted.top_logprobs)


@pytest.mark.slow
def test_beams_are_unaffected_by_drafts() -> None:
    config = with_drafts(searches.TIGHT)
    speculation = Speculation(NGram(1, 2), SharedNoiseVerifier())
    run = searches.serve("llama", config, 24, speculation=speculation)
    searches.check("llama", run, 24)
    plain = searches.serve("llama", searches.TIGHT, 24)
    assert run.tokens == plain.tokens
    assert drafted(run)[1] > 0


@pytest.mark.slow
def test_greedy_tokens_are_kept_by_rejection() -> None:
    rng = np.random.default_rng(0)
    asks = [
        greedy(100 + i, rng.integers(0, 61, 5 + i).tolist(), 20, logprobs=1)
        for i in range(10)
    ]
    drafter = dataclasses.replace(
        build_self_speculative(OF_MODEL, [0]), shares_noise=False
    )
    run = engines.serve(
        asks, with_drafts(TIGHT), speculation=Speculation(drafter, Rejection())
    )
    engines.assert_equal_plain(run, asks, TIGHT)
    assert drafted(run)[1] > 10


@pytest.mark.slow
def test_jacobi_takes_at_most_a_step_a_token_and_holds_no_place() -> None:
    """Each step fixes at least one token; no place is reserved between two steps."""
    config = with_drafts(TIGHT, steps_per_call=1)
    ask = greedy(100, [3, 1, 4, 1, 5], 40)
    speculation = Speculation(Jacobi(), SharedNoiseVerifier())
    state = engines.start(config, speculation=speculation)
    requests = engines.requests_of([ask], config)
    state, _ = engines.submit(state, requests, config=config)
    num_tokens = 0
    num_steps = 0
    while num_tokens < 40:
        state, info = engines.run_steps(
            engines.params(),
            state,
            jnp.zeros(2, jnp.int32),
            config=config,
            forward=OF_MODEL,
            policy=engines.FCFS,
            speculation=speculation,
        )
        engines.assert_sound(jax.tree.map(np.asarray, info))
        num = int(np.asarray(info.num_emitted).sum())
        assert num >= 1
        num_tokens = num_tokens + num
        num_steps = num_steps + 1
        assert not np.asarray(state.table.ahead).any()
        used = int((np.asarray(state.pool.ref) > 0).sum())
        length = int(np.asarray(state.table.length).sum())
        assert used == -(-length // config.page_size)
    assert num_steps < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "acceptance",
    [0.8, *(pytest.param(a, marks=pytest.mark.slow) for a in (0.0, 0.5, 1.0))],
)
def test_tokens_a_step_are_as_in_theory(acceptance: float) -> None:
    """(1 - a^(g+1)) / (1 - a) with independent acceptance, Leviathan et al., eq. 1."""
    config = with_drafts(engines.ROOMY, max_logprobs=0, max_logit_rows=0)
    asks = [
        Ask(100 + i, [i % 61, 7], Sampling(max_tokens=60, temperature=1.0))
        for i in range(40)
    ]
    speculation = Speculation(Jacobi(), Synthetic(acceptance))
    info = engines.serve(asks, config, speculation=speculation).info
    uncut = np.asarray(info.num_drafts) == config.max_drafts
    powers = sum(acceptance**k for k in range(config.max_drafts + 1))
    assert uncut.sum() > 400
    assert info.num_emitted[uncut].mean() == pytest.approx(powers, rel=0.03)
