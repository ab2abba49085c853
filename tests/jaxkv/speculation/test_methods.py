"""Methods by name through `Engine`: equal answers, one program, pages updated in
place."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import EngineParts, EngineRules, Speculation
from jaxkv.models import (
    PagedForward,
    load_model,
    make_model_pages,
    param_forms,
    read_config,
)
from jaxkv.models import logits as model_logits
from jaxkv.sampling import Sampling
from jaxkv.serving import LOCAL
from jaxkv.speculation import (
    HEAD_KINDS,
    Adaptive,
    DraftModel,
    EagleConfig,
    Jacobi,
    LoadedHeads,
    Medusa,
    MedusaConfig,
    ModelWeights,
    NGram,
    Rejection,
    SharedNoiseVerifier,
    SpeculationConfig,
    build_self_speculative,
    build_speculative,
    parse_speculation,
    save_heads,
    static_tree,
)
from jaxkv.speculation.ngram import look_up_drafts
from tests.support import engine_programs, engines
from tests.support.engines import MODEL
from tests.support.folders import GOLDEN
from tests.support.sampled_laws import chi_square, law_slowly

BOUNDS: dict[str, Any] = {
    "num_pages": 80,
    "page_size": 4,
    "max_slots": 8,
    "max_length": 40,
    "max_sequences": 32,
    "token_budget": 64,
    "steps_per_call": 8,
    "numerics": "reproducible",
    "prefix_cache": True,
}
FAMILIES = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/config.json")
    if path.parent.name not in ("bfloat16", "tokenized")
)


def answers(folder: str, prompts: Sequence[list[int]], **how: Any) -> list[Any]:
    engine = jaxkv.Engine.load(GOLDEN / folder, **(BOUNDS | how))
    greedy = Sampling.greedy(max_tokens=14, logprobs=0)
    random_ask = Sampling(max_tokens=14, logprobs=0, temperature=0.8, top_p=0.9, seed=3)
    asks = [greedy, greedy, random_ask]
    done = engine.generate(prompts, [asks[i % 3] for i in range(len(prompts))])
    return [(x.answers[0].tokens, x.answers[0].reason) for x in done]


def prompts_of(num: int) -> list[list[int]]:
    """Prompts of 1 to 20 tokens, some with equal beginnings."""
    rng = np.random.default_rng(num)
    begin = rng.integers(0, 60, 9).tolist()
    return [
        begin[: 9 * (i % 2)] + rng.integers(0, 60, 1 + i % 11).tolist()
        for i in range(num)
    ]


def heads_for(family: str, kind: Any, folder: Path) -> Path:
    """Random heads for a model."""
    target = read_config(GOLDEN / family)
    heads: Any = MedusaConfig(target=target, num_heads=2)
    if kind == "eagle":
        heads = EagleConfig(target=target, taps=(0, target.num_layers))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: rng.normal(0, 0.1, x.shape).astype("float32"), heads.param_shapes()
    )
    return save_heads(folder / kind, heads, params, acceptance=SHARES, model_card="")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_without_drafts(family: str, tmp_path: Path) -> None:
    """200 prompts, greedy and sampled, one by one and in batches, bit by bit."""
    prompts = prompts_of(200)
    wanted = answers(family, prompts)
    ways: list[dict[str, Any]] = [
        {"speculate": "ngram"},
        {"speculate": "jacobi", "max_drafts": 3},
        *(
            {
                "speculate": SpeculationConfig(
                    kind, heads_folder=heads_for(family, kind, tmp_path)
                )
            }
            for kind in HEAD_KINDS
        ),
    ]
    if read_config(GOLDEN / family).recurrence is None:
        draft = SpeculationConfig("draft-model", draft_folder=GOLDEN / family)
        ways += [{"speculate": SpeculationConfig("early-exit", draft_layers=1)}]
        ways += [{"speculate": draft}]
    for options in ways:
        jax.clear_caches()  # or Linux's limit on mappings is exceeded
        assert answers(family, prompts, **options) == wanted, options
    alone = {"max_slots": 1, "speculate": "ngram"}
    assert answers(family, prompts[:40], **alone) == wanted[:40]


@pytest.mark.slow
def test_workloads_of_all_kinds_share_one_program() -> None:
    config = dataclasses.replace(engines.SERVED, max_drafts=2, debug=False)
    speculation = Speculation(NGram(1, 2), SharedNoiseVerifier())
    pages = make_model_pages(MODEL, config)
    parts = EngineParts(engines.params(), PagedForward(MODEL), pages, config)
    engine = jaxkv.Engine(parts, EngineRules(speculation=speculation))
    run: Any = LOCAL.run_steps
    engine.generate([[1, 2, 3]])
    before = run._cache_size()
    rng = np.random.default_rng(1)
    for _ in range(4):
        asks = engines.random_asks(rng, 8, max_answer=9, scores=True)
        engine.generate([x.prompt for x in asks], [x.sampling for x in asks])
    assert run._cache_size() == before


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [NGram(), Jacobi()], ids=["n-gram", "jacobi"])
def test_pages_stay_in_place(drafter: Any) -> None:
    config = dataclasses.replace(
        engine_programs.CONFIG, max_drafts=3, prefix_cache=True
    )
    speculation = Speculation(drafter, SharedNoiseVerifier())
    program, pages = engine_programs.compile_steps(
        engine_programs.LARGE, config=config, speculation=speculation
    )
    size = engine_programs.bytes_of(pages)
    assert engine_programs.temporary_bytes(program) < 0.05 * size
    assert not engine_programs.copies(program, pages)


def found_before(
    tokens: list[int], shortest: int, longest: int, num: int
) -> list[int] | None:
    """The latest of the longest matches of the last tokens, in plain Python."""
    best = (0, -1)
    for end in range(len(tokens) - 1):
        length = 0
        while (
            length < min(longest, end + 1)
            and tokens[end - length] == tokens[-1 - length]
        ):
            length += 1
        best = max(best, (length, end))
    length, end = best
    if length < shortest:
        return None
    period = len(tokens) - 1 - end
    return [tokens[end + 1 + i % period] for i in range(num)]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4)])
def test_lookup_equals_its_twin(shortest: int, longest: int) -> None:
    rng = np.random.default_rng(shortest)
    look = jax.jit(look_up_drafts, static_argnames=("shortest", "longest", "num"))
    hits = 0
    for _ in range(40):
        tokens = rng.integers(0, 4, (6, 30)).astype(np.int32)
        num_known = rng.integers(0, 31, 6).astype(np.int32)
        drafts = look(tokens, num_known, shortest=shortest, longest=longest, num=5)
        for slot in range(6):
            token_history = tokens[slot, : num_known[slot]].tolist()
            wanted = (
                found_before(token_history, shortest, longest, 5)
                if token_history
                else None
            )
            assert int(drafts.num[slot]) == (0 if wanted is None else 5)
            if wanted is not None:
                assert drafts.tokens[slot].tolist() == wanted
                hits += 1
    assert hits > 60


def loaded(**how: Any) -> jaxkv.Engine:
    return jaxkv.Engine.load(GOLDEN / "llama", max_length=64, **how)


OTHER = dataclasses.replace(MODEL, vocab_size=60)
SHARES = ((0.5, 0.4), (0.5, 0.1))
HEADS = LoadedHeads(MedusaConfig(target=MODEL, num_heads=2), {}, SHARES)
OF_OTHER = HEADS._replace(config=MedusaConfig(target=OTHER))


def build(
    method: Any, layers: Any = None, **models: Any
) -> tuple[EngineParts, Speculation | None]:
    config = dataclasses.replace(engines.SERVED, max_drafts=2)
    model = ModelWeights(MODEL, engines.params())
    if layers is not None:
        method = SpeculationConfig(method, draft_layers=layers)
    how = parse_speculation(method)
    return build_speculative(model, config, how, dtype="float32", **models)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: build("hydra"), "speculate='hydra' must be 'ngram', 'jacobi', "),
        (lambda: build("eagle"), "needs trained heads: SpeculationConfig('eagle',"),
        (
            lambda: build("eagle", heads=HEADS),
            "medusa heads do not go with speculate='eagle'",
        ),
        (
            lambda: build(None, heads=HEADS),
            "medusa heads do not go with speculate=None",
        ),
        (
            lambda: build("medusa", heads=OF_OTHER),
            "the heads must be those of the model served",
        ),
        (
            lambda: build("mtp"),
            "speculate='mtp' needs a model with modules for multi-token prediction",
        ),
        (lambda: build("draft-model"), "draft must be given if, and only if"),
        (
            lambda: build("draft-model", draft=ModelWeights(OTHER, {})),
            "draft.config.vocab_size=60 must be the served model's 61",
        ),
        (
            lambda: build("early-exit", layers=3),
            "layers=3 must be in [1, 2]",
        ),
        (lambda: build("ngram", layers=1), "draft_layers=1 needs the method"),
        (
            lambda: SpeculationConfig("eagle", draft_folder="a"),
            "draft_folder='a' needs the method 'draft-model', not 'eagle'",
        ),
        (lambda: SpeculationConfig("hydra"), "method='hydra' must be 'ngram', "),  # ty: ignore[invalid-argument-type]
        (lambda: build(5), "speculate=5 must be a str or SpeculationConfig or Draf"),
        (lambda: build(NGram), "must be a str or SpeculationConfig or Drafter, not a"),
        (lambda: SpeculationConfig(NGram), "must be a Drafter, not a class"),  # ty: ignore[invalid-argument-type]
        (lambda: NGram(0), "shortest=0 must be at least 1"),
        (lambda: NGram(3, 2), "longest=2 must be at least 3"),
        (lambda: PagedForward(MODEL, layers=(2,)), "must be in [0, "),
        (lambda: loaded(max_drafts=2), "config.max_drafts=2 must be 0 without specu"),
        (
            lambda: loaded(max_drafts=0, speculate="jacobi"),
            "max_drafts=0 must be at least 1 with speculate='jacobi'",
        ),
        (
            lambda: dataclasses.replace(engines.TIGHT, max_drafts=64),
            "max_drafts=64 must be in [0, max_length=64)",
        ),
    ],
)
def test_bad_input_is_one_line(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_model_that_drafts_is_named_by_what_it_is() -> None:
    assert build("jacobi")[1] == Speculation(Jacobi(), SharedNoiseVerifier())
    assert build(NGram(2))[1] == Speculation(NGram(2), SharedNoiseVerifier())
    adaptive = SpeculationConfig(NGram(2), adaptive=True)
    assert build(adaptive)[1] == Speculation(Adaptive(NGram(2)), SharedNoiseVerifier())
    medusa = build("medusa", heads=HEADS)[1]
    assert medusa is not None
    bush = static_tree.Topology((0, 0), (0, 1))
    assert medusa.drafter == Medusa(MedusaConfig(target=MODEL, num_heads=2), bush)
    exits = build("early-exit")[1]
    assert exits is not None
    assert isinstance(exits.drafter, DraftModel)
    assert exits.drafter.forward == PagedForward(MODEL, layers=(0,))


def test_small_weights_are_copied_where_few_rows_are_multiplied() -> None:
    """Not under reproducible numerics, nor if no step has so few rows."""

    def has_both(**fields: Any) -> bool:
        bounds = dataclasses.replace(engines.SERVED, token_budget=16, **fields)
        model = ModelWeights(MODEL, engines.params())
        parts, _ = build_speculative(model, bounds, dtype="float32")
        return param_forms.has_transposed_weights(parts.params)

    assert has_both(max_slots=2)
    assert not has_both(max_slots=1)
    assert has_both(max_slots=1, max_drafts=7, num_draft_buckets=2)
    assert not has_both(max_slots=1, max_drafts=7)
    assert not has_both(max_slots=5)
    assert not has_both(max_slots=2, numerics="reproducible")


@pytest.mark.slow
def test_rejection_keeps_the_distribution_on_text() -> None:
    """20,032 answers of the bundled model: pairs of tokens, the second one drafted."""
    loaded = load_model("stdlib-bytes")
    config = jaxkv.EngineConfig(
        token_budget=192,
        num_pages=400,
        max_slots=64,
        max_length=48,
        max_sequences=128,
        max_drafts=2,
    )
    forward = PagedForward(loaded.config)
    drafter = dataclasses.replace(
        build_self_speculative(forward, [0, 1]), shares_noise=False
    )
    pages = make_model_pages(loaded.config, config)
    parts = EngineParts(loaded.params, forward, pages, config)
    rules = EngineRules(speculation=Speculation(drafter, Rejection()))
    engine = jaxkv.Engine(parts, rules, keep_trace=True)
    prompt = list(b"def read(self, size):\n    # ")
    asks = [
        Sampling(n=64, seed=i, max_tokens=3, temperature=1.6, top_p=0.98)
        for i in range(313)
    ]
    done = engine.generate([prompt] * len(asks), asks)
    pairs = np.zeros((257, 257))
    for completion in done:
        for answer in completion.answers:
            pairs[tuple(answer.tokens[:2])] += 1
    info = jax.tree.map(lambda *x: np.concatenate(x), *engine.trace)
    num_drafts = np.asarray(info.num_drafts)
    accepted = (info.num_emitted - 1)[num_drafts > 0].sum()
    num = num_drafts.sum()
    assert 0.2 < accepted / num < 0.95
    ends = [*prompt, 0]
    tokens = jnp.array([[*ends[:-1], token] for token in range(257)], jnp.int32)
    logits = np.asarray(model_logits(loaded.params, tokens, config=loaded.config))
    first = law_slowly(logits[0, -2], asks[0])
    law = np.stack([first[t] * law_slowly(logits[t, -1], asks[0]) for t in range(257)])
    assert not pairs[law == 0].any()
    often = law * pairs.sum() >= 5
    rare_mass = [x[~often].sum() for x in (pairs, law)]
    observed, wanted = (
        np.append(x[often], r) for x, r in zip((pairs, law), rare_mass, strict=True)
    )
    assert often.sum() > 50
    assert chi_square(observed, wanted) > 1e-3
