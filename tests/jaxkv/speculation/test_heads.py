"""Drafting heads: drafts over pages equal those over whole sequences; weight
folders."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, models, sampling
from jaxkv.engine import (
    Drafter,
    Drafts,
    EngineConfig,
    EngineState,
    Speculation,
    init,
    run_steps,
)
from jaxkv.models import PagedForward, make_model_pages, param_shapes, run_sequences
from jaxkv.sampling import Sampling
from jaxkv.speculation import (
    Eagle,
    EagleConfig,
    Medusa,
    MedusaConfig,
    SharedNoiseVerifier,
    TargetAndDraftParams,
    TargetWithEagle,
    TargetWithHeads,
    draws,
    eagle,
    eagle_drafting,
    head_logits,
    load_heads,
    save_heads,
    static_tree,
    unroll_drafts,
)
from pallas_kernels.online_softmax import ScoreTransform
from tests.support import engine_programs, engines
from tests.support.engines import MODEL, Ask, greedy

HEADS = MedusaConfig(target=MODEL, num_heads=3, num_blocks=2)
EAGLE = EagleConfig(target=MODEL, taps=(0, 2, 1))
NUM = 7
BUSH = static_tree.Topology((0, 0, 1, 1, 2, 3, 0), (0, 2, 0, 1, 1, 0, 4))
# Pages are mapped beyond the known tokens of a sequence, also between two steps.
BOUNDS = EngineConfig(
    num_pages=4,
    page_size=64,
    max_slots=4,
    max_length=64,
    max_sequences=4,
    queue_capacity=4,
    submit_width=4,
    token_budget=40,
    max_drafts=NUM,
    steps_per_call=3,
    debug=True,
)


def weights_of(heads: Any) -> Any:
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype),
        heads.param_shapes(),
    )


def after_some_steps(
    drafter: Drafter, asks: list[Ask]
) -> tuple[EngineState, TargetAndDraftParams]:
    """An engine between two steps, some tokens into its answers."""
    heads: Any = drafter
    target = PagedForward(MODEL, taps=heads.config.taps)
    pages = make_model_pages(MODEL, BOUNDS, taps=heads.config.taps)
    forward: Any = TargetWithHeads(target)
    if isinstance(drafter, Eagle):
        forward = TargetWithEagle(target, drafter.config)
        draft_pages = make_model_pages(drafter.config.layer, BOUNDS)
        pages = pages._replace(draft_pages=draft_pages)
    params = TargetAndDraftParams(engines.params(), weights_of(heads.config))
    full = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)
    requests = engines.requests_of(asks, BOUNDS)
    state, _ = engines.submit(init(BOUNDS, full, ()), requests, config=BOUNDS)
    for _ in range(2):
        state, info = engines.run_steps(
            params,
            state,
            clock.from_seconds(0.0),
            config=BOUNDS,
            forward=forward,
            policy=engines.FCFS,
            speculation=Speculation(drafter, SharedNoiseVerifier()),
        )
        engines.assert_sound(jax.tree.map(np.asarray, info))
    return state, params


def drafted(drafter: Drafter) -> tuple[list[list[int]], Drafts, TargetAndDraftParams]:
    """Returns the drafts of each slot, and its known tokens."""
    rng = np.random.default_rng(3)
    asks = [greedy(i, rng.integers(0, 61, 3 + 4 * i).tolist(), 40) for i in range(4)]
    state, params = after_some_steps(drafter, asks)
    granted = jnp.full((4,), NUM, jnp.int32)
    propose = jax.jit(drafter.propose, static_argnames="config")
    _, _, drafts = propose(params, (), state, granted, config=BOUNDS)
    s = state.sequences
    rows = np.asarray(state.slots.sequence)
    assert (rows >= 0).all()
    lengths = np.asarray(state.slots.num_tokens).tolist()
    tokens = np.asarray(s.tokens)
    histories = [tokens[row, :num] for row, num in zip(rows, lengths, strict=True)]
    assert all(len(x) > len(ask.prompt) for x, ask in zip(histories, asks, strict=True))
    return [x.tolist() for x in histories], drafts, params


def features_of(tokens: list[int], taps: tuple[int, ...]) -> np.ndarray:
    model = models.merge(MODEL, engines.params())
    outputs = run_sequences(model, jnp.asarray([tokens], jnp.int32), taps=taps)
    return np.asarray(jnp.concatenate(outputs.taps)).T


@pytest.mark.slow
def test_medusa_drafts_the_best_guesses_of_every_head() -> None:
    histories, drafts, params = drafted(Medusa(HEADS, BUSH))
    assert drafts.parents is not None
    for slot, tokens in enumerate(histories):
        last = features_of(tokens[:-1], HEADS.taps)[-1:]
        said = head_logits(params.draft, params.target, jnp.asarray(last), config=HEADS)
        best = np.argsort(-np.asarray(said)[:, 0], axis=1)
        at = zip(BUSH.depths, BUSH.ranks, strict=True)
        wanted = [int(best[depth - 1, rank]) for depth, rank in at]
        assert drafts.tokens[slot].tolist() == wanted
        assert drafts.parents[slot].tolist() == list(BUSH.parents)
        assert int(drafts.num[slot]) == NUM


def test_medusa_heads_equal_a_loop() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(0, 1, (5, MODEL.hidden_size)).astype("float32")
    params = weights_of(HEADS)
    target = engines.params()
    said = head_logits(params, target, jnp.asarray(states), config=HEADS)
    weight, bias = (np.asarray(params["layers"][x]) for x in ("weight", "bias"))
    for head in range(3):
        x = states
        for block in range(2):
            build_eagle_drafter = x @ weight[head, block].T + bias[head, block]
            x = x + build_eagle_drafter / (1 + np.exp(-build_eagle_drafter))
        wanted = x @ np.asarray(target["head"]["weight"]).T
        np.testing.assert_allclose(said[head], wanted, rtol=1e-3, atol=1e-3)


@functools.cache
def _unrolled(num_steps: int) -> Any:
    how: dict[str, Any] = {"config": EAGLE, "num_steps": num_steps}
    return jax.jit(functools.partial(unroll_drafts, **how))


def logprobs_after(
    context: list[int], path: list[int], params: TargetAndDraftParams
) -> np.ndarray:
    """Log-probabilities after drafts, computed as in training."""
    features = features_of(context[:-1], EAGLE.taps)
    size = 64
    num = len(context) + len(path)
    # Features of the last known token and of drafts must not be read.
    feature = np.random.default_rng(len(path)).normal(
        0, 9, (1, size, features.shape[1])
    )
    feature[0, : len(features)] = features
    tokens = np.zeros((1, size), np.int32)
    tokens[0, :num] = context + path
    said = _unrolled(len(path) + 1)(
        params.draft, params.target, tokens, feature.astype("float32")
    )
    last = np.asarray(said, np.float64)[-1, 0, num - 1]
    return last - np.log(np.exp(last - last.max()).sum()) - last.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(
            Eagle(EAGLE, (1,) * (NUM - 1)), id="chain", marks=pytest.mark.slow
        ),
        pytest.param(Eagle(EAGLE, (2, 3, 2), 3), id="tree"),
        pytest.param(Eagle(EAGLE, (), 4), id="one deep", marks=pytest.mark.slow),
    ],
)
def test_eagle_drafts_equal_a_slow_search(drafter: Eagle) -> None:
    """K and V of earlier rows come from features, those of drafts from the drafter's
    states.
    """
    histories, drafts, params = drafted(drafter)
    for slot, tokens in enumerate(histories):
        root = logprobs_after(tokens, [], params)
        every: list[tuple[float, list[int]]] = []
        level = [(root[x], [int(x)]) for x in np.argsort(-root)[: drafter.branching]]
        every += level
        for beam in drafter.beams:
            build_eagle_drafter = []
            for score, path in sorted(level, key=lambda x: -x[0])[:beam]:
                law = logprobs_after(tokens, path, params)
                best = np.argsort(-law)[: drafter.branching]
                build_eagle_drafter += [(score + law[x], [*path, int(x)]) for x in best]
            level = build_eagle_drafter
            every += build_eagle_drafter
        wanted = [path for _, path in sorted(every, key=lambda x: -x[0])][:NUM]
        num = int(drafts.num[slot])
        assert num == len(wanted)
        ways: list[list[int]] = [[]]
        for place in range(num):
            parent = place if drafts.parents is None else drafts.parents[slot, place]
            ways.append([*ways[int(parent)], int(drafts.tokens[slot, place])])
        assert ways[1:] == wanted


@pytest.mark.slow
def test_no_more_is_drafted_than_granted() -> None:
    """Fewer places hold fewer expanded guesses; the rest is still a tree."""
    drafter = Eagle(EAGLE, (2, 3, 2), 3)
    state, params = after_some_steps(drafter, [greedy(0, [1, 2, 3], 40)])
    propose = jax.jit(drafter.propose, static_argnames="config")
    for num in range(NUM + 1):
        granted = jnp.asarray([num, 0, 0, 0], jnp.int32)
        _, _, drafts = propose(params, (), state, granted, config=BOUNDS)
        assert drafts.num.tolist() == [num, 0, 0, 0]
        parents = np.asarray(drafts.parents)[0, :num]
        assert (parents <= np.arange(num)).all()


@pytest.mark.thorough
def test_the_noise_of_the_target_ranks_guesses() -> None:
    """Among equal logits, the first guess is the token that the target will sample."""
    rng = np.random.default_rng(2)
    asks = [
        Ask(i, [1], Sampling(temperature=t, seed=i))
        for i, t in enumerate((0.0, 0.5, 1.0, 1.5))
    ]
    params = jax.tree.map(jnp.asarray, engines.requests_of(asks, BOUNDS).params)
    logits = jnp.asarray(rng.normal(0, 2, (4, 61)), jnp.float32)
    places = jnp.asarray([4, 5, 6, 9], jnp.int32)
    ranked = draws.shared_noise_logits(logits, params, places)
    samples = sampling.sample(logits, params, places)
    assert jnp.argmax(ranked, axis=1).tolist() == samples.token.tolist()
    np.testing.assert_array_equal(ranked[0], logits[0])


def test_attention_of_unrolled_drafts_equals_a_loop() -> None:
    """In step s, the newest s keys of a position are those of its drafts."""
    rng = np.random.default_rng(0)
    config = EAGLE.layer
    batch, seq, steps = 2, 6, 3
    groups = config.num_q_heads // config.num_kv_heads
    shape = (config.num_kv_heads, groups + 2, config.head_dim, batch * seq)
    inputs = rng.normal(size=(steps, *shape)).astype(np.float32)
    keys: Any = ()
    scoring = ScoreTransform(config.score_scale)
    layer = models.LayerAttention(0, config.attention_kinds[0], scoring)
    for step, qkv in enumerate(inputs):
        out, keys = eagle._attend(
            layer, jnp.asarray(qkv), None, keys, shape=(batch, seq)
        )
        out = np.asarray(out).reshape(*shape[:1], groups, config.head_dim, batch, seq)
        split = inputs.reshape(steps, *shape[:3], batch, seq)
        for kv, head, b, place in np.ndindex(shape[0], groups, batch, seq):
            if place < step:
                continue
            ages = range(place + 1)
            # The key of `age` tokens ago: by a draft if it is one of the last `step`.
            source = [(max(step - age, 0), place - age) for age in ages]
            k, v = (
                np.stack([split[s, kv, groups + i, :, b, p] for s, p in source])
                for i in (0, 1)
            )
            scores = k @ split[step, kv, head, :, b, place] * config.score_scale
            weights = np.exp(scores - scores.max())
            expected = weights @ v / weights.sum()
            np.testing.assert_allclose(
                out[kv, head, :, b, place], expected, rtol=1e-4, atol=1e-5
            )


def test_a_tree_grows_as_the_best_fixed_one_does() -> None:
    sure = [[0.9, 0.05], [0.8, 0.1]]
    assert eagle_drafting.build_eagle_drafter(EAGLE, sure, 4) == Eagle(
        EAGLE, (1, 1, 1), 1
    )
    unsure = [[0.5, 0.4, 0.05]]
    wide = eagle_drafting.build_eagle_drafter(EAGLE, unsure, 6)
    assert wide == Eagle(EAGLE, (2,), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_pages_stay_in_place(kind: str) -> None:
    """Features and the drafter's K and V are not copied either."""
    model = engine_programs.MODEL
    config = dataclasses.replace(
        engine_programs.CONFIG,
        num_pages=engine_programs.LARGE,
        max_drafts=4,
        prefix_cache=True,
    )
    heads: Any = MedusaConfig(target=model)
    drafter: Drafter = Medusa(heads, static_tree.Topology((0, 0, 1, 1), (0, 1, 0, 1)))
    if kind == "eagle":
        heads = EagleConfig(target=model, taps=(1, 3))
        drafter = Eagle(heads, (2, 1), 2)
    target = PagedForward(model, taps=heads.taps)
    forward: Any = (
        TargetWithEagle(target, heads) if kind == "eagle" else TargetWithHeads(target)
    )

    def make() -> Any:
        pages = make_model_pages(model, config, taps=heads.taps)
        if kind == "medusa":
            return pages
        return pages._replace(draft_pages=make_model_pages(heads.layer, config))

    pages = jax.eval_shape(make)
    state = jax.eval_shape(functools.partial(init, config), pages, ())
    run = functools.partial(
        run_steps,
        config=config,
        forward=forward,
        policy=engines.FCFS,
        speculation=Speculation(drafter, SharedNoiseVerifier()),
    )
    params = TargetAndDraftParams(param_shapes(model), heads.param_shapes())
    clock_shape = jax.ShapeDtypeStruct((2,), jnp.int32)
    lowered = jax.jit(run, donate_argnums=1).lower(params, state, clock_shape)
    program = lowered.compile()
    size = engine_programs.bytes_of(pages)
    assert engine_programs.temporary_bytes(program) < 0.05 * size
    smallest = min(jax.tree.leaves(pages), key=lambda leaf: leaf.size)
    assert not engine_programs.copies(program, smallest)


ACCEPTANCE = [[0.5, 0.25], [0.5, 0.125]]


@pytest.mark.parametrize("heads", [HEADS, EAGLE], ids=["medusa", "eagle"])
def test_folders_hold_heads(heads: Any, tmp_path: Path) -> None:
    params = jax.tree.map(lambda x: x.astype("bfloat16"), weights_of(heads))
    metadata: dict[str, Any] = {"acceptance": ACCEPTANCE, "model_card": "# Heads\n"}
    folder = save_heads(tmp_path / "heads", heads, params, **metadata)
    assert (folder / "README.md").read_text() == "# Heads\n"
    stored_heads = load_heads(folder, MODEL)
    assert stored_heads.config == heads
    assert [list(x) for x in stored_heads.acceptance] == ACCEPTANCE
    assert jax.tree.structure(stored_heads.params) == jax.tree.structure(params)
    for got, wanted in zip(
        *map(jax.tree.leaves, (stored_heads.params, params)), strict=True
    ):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, wanted.astype(jnp.float32))
    with pytest.raises(ValueError, match="already exists"):
        save_heads(folder, heads, params, **metadata)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "llama"}, "model_type='llama' must be 'medusa' or 'eagle'"),
        (
            {"hidden_size": 32},
            "of a model with hidden_size=32, the model served has 24",
        ),
        ({"vocab_size": None}, "with vocab_size=None, the model served has 61"),
        ({"num_hidden_layers": 4}, "with num_hidden_layers=4, the model served has 2"),
        ({"taps": [0, 3]}, r"taps=\(0, 3\) must be some in \[0, 2\]"),
        ({"taps": []}, "must be some in"),
        ({"taps": [0]}, "fuse.weight has shape"),
        ({"taps": "all"}, "taps='all' must be a whole number"),
        ({"acceptance": [[2.0]]}, r"acceptance=2.0 must be in \[0, 1\]"),
        ({"acceptance": [[0.1], []]}, "as many ranks at each depth"),
        ({"acceptance": 3}, "config.json"),
    ],
)
def test_heads_of_another_model_are_refused(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    params = weights_of(EAGLE)
    folder = save_heads(
        tmp_path / "heads", EAGLE, params, acceptance=ACCEPTANCE, model_card=""
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=r"config\.json: is damaged or was changed"):
        load_heads(folder, MODEL)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=line) as refused:
        load_heads(folder, MODEL)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_folders_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        load_heads(tmp_path / "none", MODEL)
    folder = save_heads(
        tmp_path, HEADS, weights_of(HEADS), acceptance=ACCEPTANCE, model_card=""
    )
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: is damaged"):
        load_heads(folder, MODEL)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: is missing"):
        load_heads(folder, MODEL)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        load_heads(folder, MODEL)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: MedusaConfig(target=MODEL, num_heads=0), "num_heads=0 must be at"),
        (lambda: Medusa(HEADS, static_tree.chain(4)), "4 deep, there are 3 heads"),
        (
            lambda: Medusa(HEADS, static_tree.Topology((0,), (61,))),
            "rank=61 must be below vocab_size=61",
        ),
        (lambda: EagleConfig(target=MODEL, taps=(3,)), r"must be some in \[0, 2\]"),
        (lambda: Eagle(EAGLE, (1,), 0), "branching=0 must be at least 1"),
        (lambda: Eagle(EAGLE, (2,), 1), r"beams=\(2,\) must be in \[1, 1\]"),
        (lambda: Eagle(EAGLE, (0,), 2), r"beams=\(0,\) must be in \[1, 2\]"),
    ],
)
def test_missing_taps_and_heads_are_refused(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_more_continued_guesses_than_drafts_are_refused() -> None:
    drafter = Eagle(EAGLE, (4, 4), 4)
    nothing = jnp.zeros(4, jnp.int32)
    state: Any = init(BOUNDS, make_model_pages(MODEL, BOUNDS), ())
    both = TargetAndDraftParams(engines.params(), weights_of(EAGLE))
    with pytest.raises(ValueError, match=r"must be at most config.max_drafts=7"):
        drafter.propose(both, (), state, nothing, BOUNDS)


def test_other_models_have_layers_of_their_own() -> None:
    """The drafter's layer is dense, for any target."""
    tied = dataclasses.replace(MODEL, tie_embeddings=True, qkv_bias=True)
    config = EagleConfig(target=tied, taps=(2,))
    shapes = config.param_shapes()
    head_params = config.init_params(jax.random.key(0))
    assert jax.tree.map(jnp.shape, head_params) == jax.tree.map(
        lambda x: x.shape, shapes
    )
    assert not {"embed", "head"} & head_params.keys()
    ahead = dataclasses.replace(tied, num_ahead_layers=2)
    assert EagleConfig(target=ahead, taps=(2,)).param_shapes() == shapes
