"""Engines of models with latent attention: pages, sharing, preemption, batches."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.disaggregation import identity
from jaxkv.engine.drafting import Speculation
from jaxkv.engine.parts import EngineParts
from jaxkv.engine.state import EngineConfig, init
from jaxkv.memory import KVLayout
from jaxkv.models import (
    Experts,
    ModelConfig,
    PagedForward,
    load_model,
    make_model_pages,
    save_model,
)
from jaxkv.scheduling import fcfs
from jaxkv.serving import LOCAL, HostSpace
from jaxkv.speculation import (
    Eagle,
    EagleConfig,
    ModelWeights,
    SharedNoiseVerifier,
    TargetAndDraftParams,
    TargetWithEagle,
    build_self_speculative,
    build_speculative,
    parse_speculation,
    unroll_drafts,
)
from tests.support import batches, engines, latent_models
from tests.support.asks import alike, groups
from tests.support.engines import Ask, Run
from tests.support.latent_models import LATENT, YARN
from tests.support.trees import assert_same

DEEPSEEK = dataclasses.replace(
    LATENT,
    norm_eps=1e-6,
    tie_embeddings=False,
    experts=Experts(
        num_experts=4,
        top_k=2,
        size=8,
        shared_size=8,
        scoring="sigmoid",
        gate_bias=True,
        num_groups=2,
        top_groups=1,
        scale=2.5,
        num_dense_layers=1,
    ),
    num_ahead_layers=1,
    family="deepseek_v3",
)
"""All parts of DeepSeek-V3: latents, experts with biases, and a module that drafts."""


def serve(asks: Sequence[Ask], config: EngineConfig, **how: Any) -> Run:
    weights = latent_models.params(how.setdefault("model", LATENT))
    return engines.serve(asks, config, weights=weights, **how)


def tokens_of(run: Run) -> dict[Any, Any]:
    return {
        name: (outcome.tokens, outcome.reason) for name, outcome in run.outcomes.items()
    }


def sized(page_size: int, **fields: Any) -> EngineConfig:
    """Returns an engine with room for one sequence of `max_length`."""
    num_pages = engines.TIGHT.max_length // page_size
    sizes = {"page_size": page_size, "num_pages": num_pages}
    return dataclasses.replace(engines.TIGHT, **(sizes | fields))


def shapes_of(model: ModelConfig, config: EngineConfig) -> Any:
    return jax.eval_shape(lambda: make_model_pages(model, config))


def greedy(num: int) -> list[Ask]:
    """Returns greedy requests, most with a common prefix."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 61, 18).tolist()
    prompts = [
        [*(prefix if index % 4 else []), *rng.integers(0, 61, 5).tolist()]
        for index in range(num)
    ]
    return [engines.greedy(index, x, 14) for index, x in enumerate(prompts)]


def check_greedy(config: EngineConfig, preemption: Any) -> None:
    """Checks that greedy tokens equal those of whole sequences."""
    asks = greedy(10)
    weights = latent_models.params()
    run = serve(asks, config, policy=fcfs(preemption=preemption))
    assert tokens_of(run) == engines.plain(asks, config, model=LATENT, weights=weights)
    assert run.info.num_preempted.sum() > 3
    assert sum(outcome.num_cached for outcome in run.outcomes.values()) > 0
    assert (run.info.num_swapped_out.sum() > 0) == (preemption == "swap")


@pytest.mark.thorough
def test_greedy_tokens_equal_whole_sequences() -> None:
    check_greedy(sized(2, prefix_cache=True, max_swap_pages=16), "swap")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "preemption"),
    [
        (16, "recompute"),
        pytest.param(2, "recompute", marks=pytest.mark.slow),
        pytest.param(16, "swap", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_with_pages_of_all_sizes(page_size: int, preemption: Any) -> None:
    fields = {"max_swap_pages": 32 // page_size} if preemption == "swap" else {}
    check_greedy(sized(page_size, prefix_cache=True, **fields), preemption)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bits_are_kept_by_every_operation(kind: Any) -> None:
    """Answers with copies, swapping and cache hits equal those of single requests."""
    config = sized(4, kv_dtype=kind, max_swap_pages=8, prefix_cache=True)
    how: Any = {"policy": fcfs(preemption="swap")}
    indexed_asks = enumerate((*groups(1, 16), *alike(1, 12)))
    asks = [ask._replace(request_id=index) for index, ask in indexed_asks]
    alone: dict[Any, Any] = {}
    for ask in asks:
        alone |= tokens_of(serve([ask], config, **how))
    space = HostSpace(16, LOCAL.move)
    run = serve(asks, config, host=space, **how)
    assert tokens_of(run) == alone
    assert run.info.num_swapped_out.sum() > 0
    assert run.info.num_copied.sum() > 0
    assert run.info.asks_host.any()
    assert sum(outcome.num_cached for outcome in run.outcomes.values()) > 0


@pytest.mark.slow
def test_no_bit_depends_on_the_batch() -> None:
    weights = latent_models.params()
    first = {}
    asks = batches.groups(0)
    for name in ("8 slots", "large budget"):
        run = batches.serve(
            asks, batches.SETTINGS[name], 0, model=LATENT, weights=weights
        )
        first = first or run.outcomes
        for request_id, outcome in run.outcomes.items():
            batches.assert_same_bits(outcome, first[request_id])
    assert len(first) > len(asks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers", "eagle"])
def test_drafts_change_no_token(name: str) -> None:
    """The drafts of EAGLE are a token tree, whose layer has latents of its own."""
    asks = greedy(6)
    weights = latent_models.params()
    fields = {"max_drafts": 8, "token_budget": 60, "max_swap_pages": 8}
    config = sized(4, **fields)
    how: dict[str, Any] = {}
    if name == "layers":
        drafter: Any = build_self_speculative(PagedForward(LATENT), [0])
        params: Any = weights
    else:
        heads = EagleConfig(target=LATENT, taps=(0, 1, 2))
        drafter = Eagle(heads, (3, 3, 2), 3)
        target = PagedForward(LATENT, taps=heads.taps)
        head_params = heads.init_params(jax.random.key(0))
        params = TargetAndDraftParams(weights, head_params)
        pages = make_model_pages(LATENT, config, taps=heads.taps)
        draft_pages = make_model_pages(heads.layer, config)
        how = {"forward": TargetWithEagle(target, heads)}
        pages = pages._replace(draft_pages=draft_pages)
        how |= {"state": init(config, pages, ())}
        tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
        features = jnp.ones((2, 6, 3 * LATENT.hidden_size))
        steps: Any = {"config": heads, "num_steps": 3}
        logits = unroll_drafts(head_params, weights, tokens, features, **steps)
        assert logits.shape == (3, 2, 6, 61)
        assert np.isfinite(logits).all()
    run = engines.serve(
        asks,
        config,
        fcfs(preemption="swap"),
        model=LATENT,
        weights=params,
        speculation=Speculation(drafter, SharedNoiseVerifier()),
        **how,
    )
    assert tokens_of(run) == engines.plain(asks, config, model=LATENT, weights=weights)
    assert run.info.num_drafts is not None
    assert run.info.num_drafts.sum() > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["model", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_own_module_drafts_for_a_saved_mixture(kind: Any, tmp_path: Path) -> None:
    """Greedy tokens of a model in DeepSeek-V3's form equal those of its logits."""
    folder = save_model(tmp_path / "m", DEEPSEEK, latent_models.params(DEEPSEEK))
    model, params, *_ = load_model(folder)
    asks = greedy(8)
    fields = {"max_drafts": 2, "token_budget": 40, "max_swap_pages": 8}
    config = sized(4, kv_dtype=kind, prefix_cache=True, **fields)
    parts, speculation = build_speculative(
        ModelWeights(model, params), config, parse_speculation("mtp"), dtype="float32"
    )
    run = engines.serve(
        asks,
        config,
        fcfs(preemption="swap"),
        weights=parts.params,
        forward=parts.forward,
        state=init(config, parts.pages, ()),
        speculation=speculation,
    )
    if kind == "model":
        wanted = engines.plain(asks, config, model=DEEPSEEK, weights=params)
    else:
        wanted = tokens_of(
            serve(asks, dataclasses.replace(config, max_drafts=0), model=DEEPSEEK)
        )
    assert tokens_of(run) == wanted
    assert run.info.num_drafts is not None
    assert run.info.num_drafts.sum() > 50
    assert run.info.num_swapped_out.sum() > 0


def test_pages_have_a_row_for_each_token() -> None:
    for kind, size in (("model", 4), ("int8", 1), ("fp8", 1)):
        config = sized(4, kv_dtype=kind)
        pages = shapes_of(LATENT, config)
        assert pages.layout == KVLayout(kind, 16)
        places = LATENT.num_layers * config.num_pages * config.page_size
        scale = 0 if kind == "model" else 4
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
        assert num_bytes == places * (16 * size + scale + 6 * 4)


def test_identity_has_the_width_of_values() -> None:
    """Models of equal widths of rows may divide them in different ways."""
    identities = []
    for rank in (16, 14):
        assert LATENT.latent is not None
        sizes = dataclasses.replace(LATENT.latent, kv_rank=rank, rope_dim=22 - rank)
        model = dataclasses.replace(
            LATENT, latent=sizes, head_dim=sizes.nope_dim + sizes.rope_dim
        )
        pages = shapes_of(model, sized(4))
        identities.append(identity.page_identity(sized(4), pages))
    assert identity.describe_difference(*identities) == "value_width='16' must be '14'"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "int8"])
def test_prefixes_and_snapshots_are_moved(kind: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(engines.SERVED, prefix_cache=True, kv_dtype=kind)

    def engine() -> jaxkv.Engine:
        pages = make_model_pages(YARN, config)
        forward = PagedForward(YARN)
        parts = EngineParts(latent_models.params(YARN), forward, pages, config)
        return jaxkv.Engine(parts)

    prompt = list(range(3, 30))
    ask = Sampling.greedy(max_tokens=8)
    sender = engine()
    receiver = engine()
    [wanted] = sender.generate([prompt], ask)
    sent, num = sender.take_prefix(prompt)
    assert receiver.bring_prefix(prompt, sent) == num == 6
    [completion] = receiver.generate([prompt], ask)
    assert completion.num_cached == num * config.page_size
    assert completion.tokens == wanted.tokens
    state = sender.state
    folder = jaxkv.save_state(tmp_path / "state", state, config)
    empty = init(config, make_model_pages(YARN, config)).pages
    assert_same(jaxkv.load_state(folder, config, empty), state)
