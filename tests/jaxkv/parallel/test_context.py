"""Context parallelism: answers equal those of one device, and bytes the formulas."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv import files, models, parallel
from jaxkv.memory import Rows, make_pages, page_parts
from jaxkv.models import Experts, ModelConfig, load_model, partition
from jaxkv.parallel import layout, make_mesh
from jaxkv.sampling import Sampling
from jaxkv.speculation import SpeculationConfig
from pallas_kernels.paged_attention import api
from scaling.costs import Layout, prefill_traffic
from scaling.shapes import describe_config
from tests.support import engines, latent_models, meshes
from tests.support.folders import GOLDEN
from tests.support.latent_models import LATENT
from tests.support.marks import one_quick
from tests.support.mutation import replace

BOUNDS: dict[str, Any] = {"num_pages": 20, "page_size": 8}
"""Pages whose parts have one token on eight devices."""
PARTS = jax.sharding.PartitionSpec("context")
"""Concatenates the results of devices that divide pages."""
BUNDLED = files.BUNDLED / "stdlib-bytes"


def fed(
    config: ModelConfig, params: Any, mesh: Mesh, page_size: int = meshes.PAGE_SIZE
) -> tuple[list[Any], list[Any], Any]:
    """Runs the prompts chunk by chunk with divided pages.

    Returns:
      Logits of each chunk's rows, the compiled programs, and the final pages.
    """
    jitted, params, pages = meshes.divided(config, params, mesh, page_size)
    logits = []
    programs = []
    for first, end in meshes.CHUNKS:
        rows = meshes.chunk(first, end)
        step = jitted.lower(params, pages, rows).compile()
        call_logits, pages = step(params, pages, rows)
        logits.append(np.asarray(call_logits))
        programs.append(step)
    return logits, programs, pages


def check_family(
    family: str, mesh: Mesh, how: Layout, page_size: int = meshes.PAGE_SIZE
) -> None:
    """Checks a model of a golden folder as `check_model`."""
    loaded = load_model(GOLDEN / family)
    check_model(loaded.config, loaded.params, mesh, how, page_size)


def check_model(
    config: ModelConfig,
    params: Any,
    mesh: Mesh,
    how: Layout,
    page_size: int = meshes.PAGE_SIZE,
) -> None:
    """Checks logits against one device, bytes against the formula, and the pages."""
    logits, programs, pages = fed(config, params, mesh, page_size)
    for slot, length in enumerate(meshes.LENGTHS):
        tokens = jnp.arange(length, dtype=jnp.int32)[None] + 3 + 20 * slot
        full_logits = models.logits(params, tokens, config=config)[0]
        chunk_logits = np.concatenate(
            [
                x[np.asarray(meshes.chunk(*c).slot) == slot]
                for x, c in zip(logits, meshes.CHUNKS, strict=True)
            ]
        )
        np.testing.assert_allclose(chunk_logits, full_logits, rtol=0, atol=1e-4)
    for program, rows in zip(programs, (16, 4), strict=True):
        sent = parallel.find_collectives(program.as_text())
        divides = how.pages > 1 and rows % how.pages == 0
        assert any(collective.kind == "all-to-all" for collective in sent) == divides
        words = config.vocab_size
        padded = dataclasses.replace(
            describe_config(config),
            vocab_size=words + -words % how.tensor,
        )
        sizes = {"rows": rows, "logit_rows": rows, "number_bytes": 4}
        formula = prefill_traffic(padded, how, **sizes)
        assert all(collective.is_sure for collective in sent)
        total = sum(collective.sent(rank=2) for collective in sent)
        assert total == pytest.approx(sum(x.forward for x in formula), rel=1e-12)
        assert total > 0
    for leaf in jax.tree.leaves(pages):
        part = leaf.addressable_shards[0].data
        by_heads = how.tensor if config.latent is None else 1
        assert leaf.nbytes == part.nbytes * how.pages * by_heads


@pytest.mark.parametrize(
    ("degree", "page_size"),
    [
        pytest.param(2, 8, marks=pytest.mark.thorough),
        (8, 8),
        pytest.param(4, 32, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_device(degree: int, page_size: int) -> None:
    """Includes devices without a token of any sequence."""
    how = Layout(pages=degree)
    check_family("llama", make_mesh(context=degree), how, page_size)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "tp", "cp"),
    [
        pytest.param("qwen2_moe", 2, 2, marks=pytest.mark.slow),
        ("llama", 2, 4),
        pytest.param("gpt2", 1, 4, marks=pytest.mark.slow),
        pytest.param("opt", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_device_with_tensor(
    family: str, tp: int, cp: int
) -> None:
    mesh = make_mesh(tensor=tp, context=cp)
    check_family(family, mesh, Layout(tensor=tp, pages=cp))


@pytest.mark.parametrize(
    ("tp", "cp"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_latent_attention_on_several_devices(tp: int, cp: int) -> None:
    """Every tensor-parallel device has the latents, of its token places."""
    mesh = make_mesh(tensor=tp, context=cp)
    params = latent_models.params()
    check_model(LATENT, params, mesh, Layout(tensor=tp, pages=cp))


def answers(mesh: Any, family: str = "llama", **fields: Any) -> list[Any]:
    return meshes.answers(GOLDEN / family, mesh, **BOUNDS, **fields)


@pytest.mark.parametrize(
    ("family", "ep", "degrees"),
    [
        pytest.param("mixtral", 2, {}, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", 4, {}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 2, {"pages": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {"tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_experts_on_several_devices(family: str, ep: int, degrees: Any) -> None:
    how = Layout(expert=ep, data=ep, gather=True, **degrees)
    mesh = make_mesh(tensor=how.tensor, context=how.pages, expert=ep)
    check_family(family, mesh, how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "budget"),
    [
        (2, 24),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((4, 24), (8, 24), (2, 25))
        ),
    ],
)
def test_answers_are_those_of_one_device(degree: int, budget: int) -> None:
    """With and without division of the rows of mixed passes."""
    sharded_answers = answers(make_mesh(context=degree), token_budget=budget)
    assert sharded_answers == answers(None)


LARGER = dataclasses.replace(
    engines.MODEL,
    vocab_size=64,
    experts=Experts(num_experts=4, top_k=2, size=24),
)
WAYS = [
    Layout(pages=2),
    Layout(pages=2, tensor=2),
    Layout(expert=2, data=2, gather=True),
    Layout(pages=2, expert=2, data=2, gather=True),
]


def program_of(how: Layout, num_layers: int, rows: Rows) -> Any:
    """Returns the compiled step of a layout."""
    config = dataclasses.replace(LARGER, num_layers=num_layers)
    mesh = make_mesh(tensor=how.tensor, context=how.pages, expert=how.expert)
    run, *operands = meshes.divided(config, engines.params(config), mesh)
    return run.lower(*operands, rows).compile()


def sent_by(how: Layout, num_layers: int) -> tuple[float, float]:
    """Returns the bytes that a device sends in the first chunk: program, formulas."""
    rows = meshes.chunk(*meshes.CHUNKS[0])
    program = program_of(how, num_layers, rows)
    collectives = parallel.find_collectives(program.as_text())
    assert all(collective.is_sure for collective in collectives)
    formula = prefill_traffic(
        describe_config(dataclasses.replace(LARGER, num_layers=num_layers)),
        how,
        rows=(num := len(rows.token)),
        logit_rows=num,
        number_bytes=4,
    )
    wanted = sum(term.forward for term in formula)
    return sum(collective.sent(rank=2) for collective in collectives), wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        WAYS[0],
        WAYS[2],
        *(pytest.param(x, marks=pytest.mark.slow) for x in (WAYS[1], WAYS[3])),
    ],
    ids=["cp", "ep", "cp tp", "cp ep"],
)
def test_bytes_grow_with_the_layers(how: Layout) -> None:
    """Four layers send twice the bytes of two, apart from those outside of layers."""
    (two, wanted_two), (four, wanted_four) = (sent_by(how, num) for num in (2, 4))
    assert (two, four) == (wanted_two, wanted_four)
    rows = len(meshes.chunk(*meshes.CHUNKS[0]).token)
    outside = 0.0
    if how.pages > 1:  # last states
        outside += rows * LARGER.hidden_size * 4
    if how.tensor > 1:  # embeddings of own rows added up, logits gathered
        outside += rows / 2 * LARGER.hidden_size * 4 + rows * 64 * 4 / 2
    assert four - outside == 2 * (two - outside) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("how", [WAYS[0], WAYS[2]], ids=["cp", "ep"])
def test_surplus_collectives_are_detected(
    how: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathers queries that all devices have, or sums outputs twice."""
    rows = len(meshes.chunk(*meshes.CHUNKS[0]).token)
    if how.pages > 1:
        paged_attention = api.paged_attention
        num = LARGER.num_q_heads * LARGER.head_dim

        def wasteful(q: Any, *args: Any, **options: Any) -> Any:
            return paged_attention(jax.lax.pmean(q, "context"), *args, **options)

        replace(monkeypatch, api, "paged_attention", wasteful)
    else:
        own_experts = partition.own_experts
        num = LARGER.hidden_size

        def twice(routing: Any, *, part: int) -> Any:
            local_routing = own_experts(routing, part=part)
            more = jnp.ones((rows, num), jnp.float32)
            more = jax.lax.psum(more * local_routing.share.sum(), "expert").sum()
            return local_routing._replace(share=local_routing.share + 1e-9 * more)

        replace(monkeypatch, partition, "own_experts", twice)
    sent, wanted = sent_by(how, 2)
    # In an all-reduce of two devices each sends its operand.
    assert sent - wanted == 2 * rows * num * 4


@pytest.mark.slow
def test_answers_of_divided_experts_are_those_of_one_device() -> None:
    mesh = make_mesh(expert=2, context=2)
    assert answers(mesh, "qwen3_moe") == answers(None, "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["draft-model", pytest.param("ngram", marks=pytest.mark.slow)]
)
def test_speculation_keeps_the_answers(method: Any) -> None:
    draft = GOLDEN / "llama" if method == "draft-model" else None
    how = SpeculationConfig(method, draft_folder=draft)
    fields: Any = {"max_drafts": 3, "token_budget": 32, "speculate": how}
    assert answers(make_mesh(context=2, tensor=2), **fields) == answers(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["eagle", pytest.param("medusa", marks=pytest.mark.slow)]
)
def test_trees_of_trained_heads_keep_the_answers(method: Any) -> None:
    """Covers rows of trees, their features, and the moves of accepted tokens."""
    bounds: Any = {
        "max_slots": 2,
        "max_length": 96,
        "num_pages": 20,
        "token_budget": 80,
    }
    folder = files.BUNDLED / f"stdlib-bytes-{method}"
    heads: Any = {"speculate": SpeculationConfig(method, heads_folder=folder)}
    token_lists = []
    for mesh in (None, make_mesh(context=4)):
        how: Any = {} if mesh is None else heads
        engine = jaxkv.Engine.load(BUNDLED, mesh=mesh, **bounds, **how)
        asks = [Sampling.greedy(max_tokens=40), Sampling(max_tokens=40, seed=3)]
        completions = engine.generate(["import os\n", "class A:\n"], asks)
        token_lists.append([one.answers[0].tokens for one in completions])
    assert token_lists[0] == token_lists[1]


@pytest.mark.slow
def test_pages_are_never_sent_nor_copied() -> None:
    sizes = []
    mesh = make_mesh(context=2)
    names = "page_size", "max_slots", "max_length", "token_budget"
    bounds: Any = {name: (meshes.ALL_AT_ONCE | BOUNDS)[name] for name in names}
    for num_pages in (61, 610):
        fields = bounds | {"num_pages": num_pages}
        engine = jaxkv.Engine.load(GOLDEN / "llama", mesh=mesh, **fields)
        program = engine.lower().compile()
        sent = parallel.find_collectives(program.as_text())
        # In decode, states are summed; in mixed passes devices divide the rows.
        kinds = collections.Counter(collective.kind for collective in sent)
        assert kinds == {"all-reduce": 2 * 2 + 1, "all-gather": 2, "all-to-all": 2 * 2}
        for collective in sent:
            assert all(num_pages not in sides for _, sides in collective.shapes)
        leaves = jax.tree.leaves(engine.state.pages)
        pool = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert pool * 2 == sum(leaf.nbytes for leaf in leaves)
        sizes.append((program.memory_analysis().temp_size_in_bytes, pool))
    (small, small_pool), (big, big_pool) = sizes
    assert big - small < 0.05 * (big_pool - small_pool)


@pytest.mark.parametrize(
    ("num", "window"),
    [
        pytest.param(2, None, marks=pytest.mark.slow),
        pytest.param(4, None, marks=pytest.mark.thorough),
        pytest.param(2, 16, marks=pytest.mark.slow),
        (4, 8),
    ],
)
@pytest.mark.parametrize("with_tree", one_quick([True, False]))
def test_attention_over_parts_equals_the_whole(
    num: int, window: int | None, with_tree: bool
) -> None:
    """Covers chunks and trees at random places, also with windows."""
    draw = np.random.default_rng(num)
    pages = make_pages(
        num_layers=1,
        num_pages=14,
        num_kv_heads=2,
        page_size=meshes.PAGE_SIZE,
        head_dim=4,
        dtype="float32",
    )
    pages = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape).astype(np.float32)), pages
    )
    start = draw.integers(0, 40, 3)
    slot = np.repeat(np.arange(3, dtype=np.int32), 5)
    position = np.concatenate([x + np.arange(5) for x in start]).astype(np.int32)
    position[-1] = slot[-1] = -1
    ancestors = draw.random((15, 5)) < 0.5
    ancestors |= np.tile(np.eye(5, dtype=bool), (3, 1))
    ancestors[slot != 1] = False
    position, slot = (np.append(x, np.int32(-1)) for x in (position, slot))
    ancestors = np.pad(ancestors, ((0, 1), (0, 0)))
    rows = Rows(
        token=jnp.zeros(16, jnp.int32),
        position=jnp.asarray(position),
        slot=jnp.asarray(slot),
        page_ids=jnp.asarray(draw.permutation(14)[:12].reshape(3, 4), jnp.int32),
        logit_rows=jnp.arange(16, dtype=jnp.int32),
    )
    if with_tree:
        rows = rows._replace(
            context=jnp.asarray([-1, start[1], -1], jnp.int32),
            ancestors=jnp.asarray(ancestors),
        )
    rows = rows._replace(page_ids=jnp.tile(rows.page_ids, (1, 2))[:, :6])
    q = jnp.asarray(draw.normal(size=(16, 4, 4)), jnp.float32)

    def attend(pages: Any, q: Any, rows: Any) -> Any:
        run = functools.partial(pages.layout.attend, pages, 0, q, rows)
        return [run(window=window, own_rows=own_rows) for own_rows in (False, True)]

    specs = layout.pages_specs(pages)
    mesh = make_mesh(context=num)
    in_specs = specs, layout.REPLICATED, layout.REPLICATED
    run = layout.map_over_mesh(attend, mesh, in_specs, [layout.REPLICATED, PARTS])
    outputs = jax.jit(run)(layout.place_tree(pages, specs, mesh), q, rows)
    # Results of all rows on every device, and of each device's own rows.
    for one in outputs:
        wanted = attend(pages, q, rows)[0]
        np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num", [2, 4])
def test_local_places_equal_enumeration(num: int) -> None:
    """Compares with a list of each device's places."""
    part = 3
    length = 31

    def count(place: Any) -> Any:
        local_places = jnp.arange(12, dtype=jnp.int32)
        place_pairs = (
            page_parts.last_local_place(place, part=part),
            page_parts.global_place(local_places, part=part),
        )
        return jax.tree.map(lambda x: x[None], place_pairs)

    places = jnp.arange(-1, length, dtype=jnp.int32)
    run = layout.map_over_mesh(
        count, make_mesh(context=num), (layout.REPLICATED,), PARTS
    )
    last, global_places = map(np.asarray, jax.jit(run)(places))
    for device in range(num):
        device_places = [x for x in range(500) if x % (part * num) // part == device]
        assert global_places[device].tolist() == device_places[:12]
        last_places = [
            sum(x <= place for x in device_places) - 1 for place in range(-1, length)
        ]
        assert last[device].tolist() == last_places


def test_device_states_merge_pairwise() -> None:
    keys = jax.random.split(jax.random.key(0))
    out = jax.random.normal(keys[0], (4, 8, 3, 8))
    lse = jax.random.normal(keys[1], (4, 8, 3)) * 9
    lse = lse.at[0].set(-jnp.inf).at[:, 2].set(-jnp.inf)  # a device, a row without keys
    out = jnp.where(jnp.isneginf(lse)[..., None], jnp.nan, out)

    def merge(out: Any, lse: Any) -> Any:
        state = api.AttentionState(out[0], lse[0])
        ways = api.merge_devices, api.merge_own_rows
        return [merge_fn(state, "context") for merge_fn in ways]

    out_specs = [layout.REPLICATED, PARTS]
    run = layout.map_over_mesh(merge, make_mesh(context=4), (PARTS, PARTS), out_specs)
    states = [api.AttentionState(*x) for x in zip(out, lse, strict=True)]
    wanted = functools.reduce(api.merge_states, states)
    for merged_state in jax.jit(run)(out, lse):
        np.testing.assert_allclose(merged_state.out, wanted.out, rtol=0, atol=1e-6)
        np.testing.assert_allclose(merged_state.lse, wanted.lse, rtol=1e-6)
        assert np.all(np.asarray(merged_state.out)[2] == 0)
        assert np.all(np.isneginf(np.asarray(merged_state.lse)[2]))


def test_indivisible_sizes_are_refused() -> None:
    mesh = make_mesh(context=4)
    with pytest.raises(ValueError, match=r"page_size=6 must be a multiple of the 4"):
        jaxkv.Engine.load(GOLDEN / "llama", mesh=mesh, page_size=6, num_pages=20)
    with pytest.raises(
        ValueError, match=r"window=12 must be a multiple of page_size=8"
    ):
        layout.check_pages(mesh, page_size=8, window=12)
    with pytest.raises(ValueError, match=r"context=4 times tensor=4 must be in \[1, 8"):
        make_mesh(tensor=4, context=4)
    with pytest.raises(
        ValueError, match=r"expert=2 divides experts, and the model has"
    ):
        jaxkv.Engine.load(GOLDEN / "llama", mesh=make_mesh(expert=2))
    with pytest.raises(
        ValueError, match=r"num_experts=\d must be a multiple of expert=5"
    ):
        jaxkv.Engine.load(GOLDEN / "mixtral", mesh=make_mesh(expert=5))
