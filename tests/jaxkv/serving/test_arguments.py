"""Every public argument of the library refuses wrong values in one line."""

import dataclasses
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv import speculation, validation
from jaxkv.engine import EngineParts, EngineRules, Speculation
from jaxkv.engine.emitting import logit_rows
from jaxkv.models import (
    LoadedModel,
    PagedForward,
    load_model,
    make_model_pages,
    save_model,
)
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from jaxkv.speculation import SpeculationConfig, methods, static_tree
from tests.support import engines
from tests.support.folders import TOKENIZED

# Arguments here have types that no annotation allows.
api: Any = types.SimpleNamespace(
    **{name: getattr(speculation, name) for name in speculation.__all__}
)
api.Engine = jaxkv.Engine
api.EngineConfig = jaxkv.EngineConfig
api.EngineParts = EngineParts
api.EngineRules = EngineRules
api.Sampling = Sampling
api.make_mesh = make_mesh
api.load_model = load_model
pytestmark = pytest.mark.usefixtures("no_type_checks")

NO_COUNTS: list[Any] = [
    0,
    -1,
    1.5,
    True,
    "3",
    math.nan,
    math.inf,
    2**31,
    2**32,
    np.float32(1.5),
]
NO_COUNTS += [np.array([0, 1]), [[1]], {}, object]
NO_TYPES: list[Any] = [
    0,
    -1,
    1.5,
    True,
    "3",
    math.nan,
    2**32,
    np.int64(1),
    jnp.array(1),
    [1],
    {},
]
NO_TYPES += [object]
NO_PATHS = [x for x in [*NO_TYPES, None, b"x", (1,)] if not isinstance(x, str)]
NO_SALTS = [-1, 1.5, True, None, "3", math.nan, math.inf, 2**32, 2**64, [1], {}]
NO_TOKENS: list[Any] = [
    [-1] * 9,
    [320] * 9,
    [2**32 + 5] * 9,
    [2**31],
    [2**40],
    [10**30],
    "abc",
]
NO_TOKENS += [5, None, 1.5, True, [True], [1.0], ["5"], np.array([2**32 + 5] * 9)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(TOKENIZED)


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Any:
    return jaxkv.Engine.load(TOKENIZED, loaded=loaded, **vars(engines.CACHED))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert "self." not in message
    assert len(message) < 300
    # Raised by this project, not by a library that received the value.
    assert Path(caught.tb.tb_frame.f_code.co_filename).exists()
    last = caught.traceback[-1].path
    assert {"jaxkv", "tests"} & {*Path(last).parts}, message
    assert "site-packages" not in str(last), message
    return message


SPECULATION: dict[str, list[Any]] = {
    "draft_layers": [*NO_COUNTS, 3, [0, 0], (5,), ("a",), ()],
    "draft_folder": [x for x in NO_PATHS if x is not None],
    "heads_folder": [x for x in NO_PATHS if x is not None],
    "adaptive": [0, 1.5, "no", None],
}
LOAD: dict[str, list[Any]] = {
    "folder": NO_PATHS,
    "mesh": NO_TYPES,
    "loaded": NO_TYPES,
    "speculate": NO_TYPES,
    "layout": NO_TYPES,
    "dtype": [0, 1.5, True, "3", "int8", np.float32(1.5), 2**32, {}],
    "policy": NO_TYPES,
    "num_pages": NO_COUNTS,
}
METHODS = {
    "draft_layers": "early-exit",
    "draft_folder": "draft-model",
    "heads_folder": "medusa",
}


@pytest.mark.parametrize("name", LOAD | SPECULATION)
def test_engine_load_refuses(name: str, loaded: LoadedModel) -> None:
    fields: dict[str, Any] = vars(engines.TIGHT) | {"loaded": loaded, "max_drafts": 3}
    fields |= {"speculate": "ngram", "folder": TOKENIZED}
    if name == "dtype":
        fields["loaded"] = None
    method: Any = METHODS.get(name, "ngram")

    def load(value: Any) -> Any:
        options = {name: value}
        if name in SPECULATION:
            options = {"speculate": SpeculationConfig(method, **options)}
        return api.Engine.load(**(fields | options))

    for value in (LOAD | SPECULATION)[name]:
        message = refusal(lambda value=value: load(value))
        assert message.startswith(
            f"{name}={validation.format_value(value)} must be "
        ), message


def test_whole_numbers_of_numpy_and_jax_name_layers(
    loaded: LoadedModel,
) -> None:
    wide = dataclasses.replace(loaded.config, num_layers=3)
    for value in (2, np.int64(2), np.array(2), jnp.array(2), [0, 1], np.arange(2)):
        assert methods._check_layers(value, 3) == (0, 1)
    drafter = api.build_self_speculative(PagedForward(wide), [np.int64(0), 2])
    assert drafter.forward.layers == (0, 2)


def test_a_mesh_of_other_axes_is_refused(loaded: LoadedModel) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    message = refusal(lambda: api.Engine.load(TOKENIZED, loaded=loaded, mesh=mesh))
    assert message.startswith("mesh.axis_names=('data',) must be of ('tensor', ")


def test_parts_of_an_engine_are_refused(engine: Any) -> None:
    forward = engine.static["forward"]
    pages = engine.state.pages
    parts = EngineParts(engine.params, forward, pages, engine.config, vocab_size=320)
    spec: Any = Speculation
    tries: dict[str, list[Any]] = {
        "tokenizer": NO_TYPES,
        "mesh": NO_TYPES,
        "vocab_size": NO_COUNTS,
        "eos_ids": [x for x in NO_TOKENS if x is not None],
    }
    for name, values in tries.items():
        for value in values:
            other_parts = dataclasses.replace(parts, **{name: value})
            message = refusal(lambda parts=other_parts: api.Engine(parts))
            assert message.startswith(name), message
    for value in NO_TYPES:
        rules = api.EngineRules(speculation=value)
        assert refusal(lambda r=rules: api.Engine(parts, r)).startswith("speculation")
        assert refusal(lambda x=value: api.Engine(x)).startswith("parts")
        assert refusal(lambda x=value: api.Engine(parts, x)).startswith("rules")
    fields = dataclasses.asdict(engine.config) | {"max_drafts": 2}
    config = type(engine.config)(**fields)
    for pair in (
        spec(api.NGram(), 6),
        spec(5, api.SharedNoiseVerifier()),
        spec(api.NGram, 6),
    ):
        other_parts = dataclasses.replace(parts, config=config)
        rules = EngineRules(speculation=pair)
        assert "speculation." in refusal(
            lambda parts=other_parts, rules=rules: api.Engine(parts, rules)
        )


def test_parts_and_rules_one_by_one_are_read_with_a_warning(
    loaded: LoadedModel,
) -> None:
    """The signature of version 0.1, which the next version will not have."""
    config = engines.SERVED
    model = PagedForward(loaded.config)
    pages = make_model_pages(loaded.config, config)
    policy = jaxkv.fcfs(preemption="swap")
    rules: dict[str, Any] = {"policy": policy, "eviction": None}
    with pytest.warns(DeprecationWarning, match=r"is now called Engine\(EngineParts\("):
        engine = api.Engine(loaded.params, model, pages, config, eos_ids=(7,), **rules)
    assert engine.eos_ids == (7,)
    assert engine.policy is policy
    fields = {"params": loaded.params, "forward": model, "pages": pages}
    with pytest.warns(DeprecationWarning, match="is now called"):
        engine = api.Engine(**fields, config=config, policy=None, keep_trace=True)
    assert engine.eos_ids == ()
    assert type(engine.policy) is type(jaxkv.fcfs())


def test_another_policy_is_checked(engine: Any) -> None:
    for value in [*NO_TYPES, jaxkv.fcfs]:

        def assign(value: Any = value) -> None:
            engine.policy = value

        before = engine.policy
        assert refusal(assign).startswith(
            f"policy={validation.format_value(value)} must be"
        )
        assert engine.policy is before
    engine.policy = None
    assert type(engine.policy) is type(jaxkv.fcfs())


def test_prefixes_take_tokens_of_the_vocabulary_and_salts_of_32_bits(
    engine: Any,
) -> None:
    pages = jax.tree.map(lambda x: np.asarray(x)[:, :2], engine.state.pages)
    calls: list[Callable[..., Any]] = [
        engine.take_prefix,
        lambda tokens, salt=0: engine.bring_prefix(tokens, pages, salt=salt),
    ]
    for call in calls:
        for value in NO_TOKENS:
            message = refusal(lambda call=call, value=value: call(value))
            assert message.startswith("tokens"), message
        for value in NO_SALTS:
            message = refusal(lambda call=call, x=value: call([1] * 9, salt=x))
            assert message.startswith(f"salt={validation.format_value(value)} must be ")
    for value in [*NO_TYPES, None, (pages, pages), np.zeros((2, 2))]:
        message = refusal(lambda x=value: engine.bring_prefix([1] * 9, x))
        assert message.startswith(
            f"pages={validation.format_value(value)} must be arrays"
        )
    # Token ids did not wrap: no other prefix is cached.
    assert int(engine.state.prefixes.num_pinned) == 0


DRAFTERS: dict[str, tuple[Any, dict[str, Any], dict[str, list[Any]]]] = {
    "NGram": (api.NGram, {}, {"shortest": NO_COUNTS, "longest": NO_COUNTS}),
    "Lookahead": (
        api.Lookahead,
        {},
        dict.fromkeys(("columns", "ngram", "candidates", "entries"), NO_COUNTS),
    ),
    "Adaptive": (
        api.Adaptive,
        {"drafter": api.NGram()},
        {
            "drafter": NO_TYPES,
            "half_life": [0, -1, True, None, "3", math.nan, math.inf, [1]],
            "patience": NO_COUNTS,
        },
    ),
    "DraftModel": (
        api.DraftModel,
        {"forward": PagedForward(engines.MODEL)},
        {
            "forward": NO_TYPES,
            "has_own_model": [0, 1, None, "no"],
            "shares_noise": [0, None],
        },
    ),
    "MedusaConfig": (
        api.MedusaConfig,
        {"target": engines.MODEL},
        {"target": NO_TYPES, "num_heads": NO_COUNTS, "num_blocks": NO_COUNTS},
    ),
    "EagleConfig": (
        api.EagleConfig,
        {"target": engines.MODEL, "taps": (0,)},
        {"target": NO_TYPES, "taps": [0, 1.5, None, "3", (1.5,), (True,), (9,), (-1,)]},
    ),
    "Eagle": (
        api.Eagle,
        {"config": api.EagleConfig(target=engines.MODEL, taps=(0,))},
        {"config": NO_TYPES, "beams": [1, 1.5, None, "3", (1.5,), (0,), (2,)]},
    ),
    "MTPConfig": (
        api.MTPConfig,
        {"target": dataclasses.replace(engines.MODEL, num_ahead_layers=1)},
        {"target": [*NO_TYPES, engines.MODEL]},
    ),
    "Topology": (
        static_tree.Topology,
        {"parents": (0,), "ranks": (0,)},
        {"parents": [1, None, "3", (1.5,), (-1,)], "ranks": [1, None, "3", (-1,)]},
    ),
    "make_mesh": (
        make_mesh,
        {},
        dict.fromkeys(("tensor", "context", "expert"), NO_COUNTS),
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_and_meshes_refuse_wrong_types(name: str) -> None:
    make, base, tries = DRAFTERS[name]
    for field, values in tries.items():
        for value in values:
            arguments = base | {field: value}
            message = refusal(lambda make=make, arguments=arguments: make(**arguments))
            assert field in message, message


def test_numbers_of_arrays_become_plain_ones() -> None:
    drafter = api.NGram(shortest=jnp.array(2), longest=np.array(3))
    assert hash(drafter) == hash(speculation.NGram(2, 3))
    assert speculation.NGram(2, 3) == drafter
    assert hash(api.Adaptive(drafter, half_life=np.float32(2), patience=np.int8(3)))
    assert hash(dataclasses.replace(engines.MODEL, num_layers=np.array(2)))


# Results of a `logits_fn`

RAW = jnp.zeros((3, 7), jnp.float32)
NO_LOGITS = [
    None,
    0.0,
    (RAW,),
    RAW[0],
    RAW[:, :1],
    RAW[:1],
    RAW.T,
    RAW[None],
    RAW > 0,
    RAW.astype(jnp.int32),
]


@pytest.mark.parametrize(
    "logits", NO_LOGITS, ids=lambda x: validation.format_value(x)[:9]
)
def test_logits_of_another_shape_or_type_are_refused(logits: Any) -> None:
    rows: Any = None
    message = refusal(
        lambda: logit_rows.apply_logits_fn(lambda rows, raw: logits, rows, RAW)
    )
    assert message.startswith("logits_fn returned ")
    assert "must return float32[3, 7]" in message


def test_logits_that_fit_pass() -> None:
    rows: Any = None
    for logits in (RAW - 1, RAW.astype(jnp.bfloat16)):
        assert (
            logit_rows.apply_logits_fn(lambda rows, raw, x=logits: x, rows, RAW)
            is logits
        )
    assert logit_rows.apply_logits_fn(None, rows, RAW) is RAW


def test_an_engine_refuses_such_logits_and_continues(
    loaded: LoadedModel,
) -> None:
    bad: Any = lambda answer, logits: logits[:, :1]  # noqa: E731
    bounds = vars(engines.SERVED)
    engine = jaxkv.Engine.load(TOKENIZED, loaded=loaded, logits_fn=bad, **bounds)
    message = refusal(lambda: engine.generate([[5, 6]], Sampling(max_tokens=2)))
    assert (
        "logits_fn returned float32[3, 1], and must return float32[3, 320]" in message
    )
    assert list(engine.stream()) == []
    assert engine.tracker.is_empty()


# Keywords


MISSPELT: dict[str, tuple[Callable[[], Any], str]] = {
    "Engine.load": (lambda: api.Engine.load(TOKENIZED, num_page=9), "num_pages"),
    "Engine.load policy": (lambda: api.Engine.load(TOKENIZED, polcy=9), "policy"),
    "Engine.load own": (lambda: api.Engine.load(TOKENIZED, dtyp="x"), "dtype"),
    "Engine": (lambda: api.Engine(0, rulez=1), "rules"),
    "EngineParts": (lambda: api.EngineParts(0, 0, 0, 0, tokeniser=1), "tokenizer"),
    "EngineRules": (lambda: api.EngineRules(polcy=1), "policy"),
    "EngineConfig": (lambda: api.EngineConfig(max_slot=3), "max_slots"),
    "Sampling": (lambda: api.Sampling(tempature=0.0), "temperature"),
    "greedy": (lambda: api.Sampling.greedy(max_token=3), "max_tokens"),
    "replace": (
        lambda: dataclasses.replace(engines.TIGHT, page_sise=3),
        "page_size",
    ),
    "NGram": (lambda: api.NGram(shortes=2), "shortest"),
    "Adaptive": (lambda: api.Adaptive(api.NGram(), patiense=2), "patience"),
    "make_mesh": (lambda: api.make_mesh(tensr=2), "tensor"),
    "submit": (lambda: api.Engine.submit(None, "x", sampling_=2), "sampling"),
    "generate": (lambda: api.Engine.generate(None, "x", sampler=2), "sampling"),
    "take_prefix": (lambda: api.Engine.take_prefix(None, [1], slat=1), "salt"),
    "load_model": (lambda: api.load_model(TOKENIZED, dtipe=1), "dtype"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_keywords_get_a_suggestion(name: str) -> None:
    call, wanted = MISSPELT[name]
    message = refusal(call)
    assert "got an unexpected keyword argument" in message
    assert message.endswith(f"; did you mean '{wanted}'?"), message
    with pytest.raises(TypeError):  # as Python's own
        call()


def test_a_keyword_without_a_near_name_is_refused_as_well() -> None:
    untyped: Any = Sampling
    message = refusal(lambda: untyped(zzzzzz=1))
    assert message == (
        "Sampling() got an unexpected keyword argument 'zzzzzz'; see its help"
    )


def test_saved_end_tokens_are_of_the_vocabulary(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    save: Any = save_model
    for value in ([320], [-1], [2**40], ["</s>"], [True]):
        arguments = (tmp_path / "a", loaded.config, loaded.params)
        message = refusal(
            lambda arguments=arguments, x=value: save(*arguments, eos_ids=x)
        )
        assert message.startswith("eos_ids")
    assert not (tmp_path / "a").exists()
