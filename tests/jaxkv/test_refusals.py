"""Any argument gives an answer or an error of one line, and leaves no trace.

One engine serves all tests: after every error it is empty, and it serves a known batch
with the same results.
"""

import dataclasses
import math
import random
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import decoding, memory, simulation, validation, workloads
from jaxkv.engine import EngineConfig, EngineParts, EngineRules, init
from jaxkv.memory import (
    Pages,
    Rows,
    make_pages,
    make_pool,
    make_prefix_cache,
    make_table,
)
from jaxkv.models import Experts, ModelConfig, PagedForward, make_model_pages
from jaxkv.models.config import RopeScaling
from jaxkv.sampling import Sampling, make_beams
from jaxkv.serving import loading, make_requests
from jaxkv.workloads import Fixed, Gamma
from tests.support import engines
from tests.support.folders import TOKENIZED

# These calls pass values of wrong types.
api: Any = types.SimpleNamespace(
    Engine=jaxkv.Engine,
    EngineConfig=EngineConfig,
    Experts=Experts,
    Fixed=Fixed,
    Gamma=Gamma,
    Sampling=Sampling,
    fcfs=jaxkv.fcfs,
    init_cache=decoding.init_cache,
    make_pages=make_pages,
    make_pool=make_pool,
    poisson=workloads.poisson,
)
pytestmark = pytest.mark.usefixtures("no_type_checks")
FOLDER = TOKENIZED
BOUNDS = engines.SERVED
PROMPTS: list[Any] = ["def bisect_left(a", "import os\n", [5, 6, 7]]
GREEDY = Sampling.greedy(max_tokens=9)


@pytest.fixture(scope="module")
def engine() -> jaxkv.Engine:
    return jaxkv.Engine.load(FOLDER, **vars(BOUNDS))


@pytest.fixture(scope="module")
def greedy_tokens(engine: jaxkv.Engine) -> list[list[int]]:
    """Returns the answers to the batch before any invalid call."""
    return [completion.tokens for completion in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: jaxkv.Engine, greedy_tokens: list[list[int]]) -> Any:
    yield
    assert_sound(engine, greedy_tokens)


def assert_sound(engine: jaxkv.Engine, greedy_tokens: list[list[int]]) -> None:
    """Checks that the engine is idle and empty, and serves the same answers."""
    assert list(engine.stream()) == []
    assert engine.tracker.is_empty()
    assert [
        completion.tokens for completion in engine.generate(PROMPTS, GREEDY)
    ] == greedy_tokens
    engines.assert_empty(engine.state)


def refusal(call: Callable[[], Any]) -> str:
    """Returns the error's message."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        call()
    return check_line(str(caught.value))


def check_line(message: str) -> str:
    """Checks that the message is one line and not too long."""
    assert "\n" not in message
    assert 0 < len(message) < 300, message
    return message


class Broken:
    """An object whose `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no\nway")


# Requests

NO_PROMPTS = [
    None,
    5,
    1.5,
    True,
    b"ab",
    {"a": 1},
    {1, 2},
    iter([1]),
    object(),
    Broken(),
    [[1], [2]],
    [1.7],
    ["5"],
    [None],
    [True],
    [1, True],
    [1, "2"],
    [[1], 2],
    [math.nan],
    [1, Broken()],
    np.array([1.5]),
    np.array([[1]]),
    np.array(3),
    np.array([True]),
    np.zeros(0),
    jnp.array([1.5]),
    jnp.zeros((2, 2), jnp.int32),
    np.array(["a"]),
]


def _named(value: Any) -> str:
    """Returns a test id that is equal in every process."""
    return re.sub(r" at 0x\w+", "", validation.format_value(value))


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=_named)
def test_invalid_prompts_are_refused(engine: jaxkv.Engine, prompt: Any) -> None:
    if isinstance(prompt, np.ndarray) and not prompt.size:
        wanted = "the prompt is empty"
    else:
        wanted = (
            f"prompt={validation.format_value(prompt)} must be a sequence of token ids"
        )
    prompts: Any = ["x", prompt]
    assert wanted in refusal(lambda: engine.submit(prompt))
    assert f"prompts[1]: {wanted}" in refusal(lambda: engine.generate(prompts))


@pytest.mark.parametrize("token", [-1, 320, 2**31, 2**40, 2**63, 10**30, -(2**70)])
def test_tokens_outside_the_vocabulary_are_refused(
    engine: jaxkv.Engine, token: int
) -> None:
    message = refusal(lambda: engine.submit([1, token, 2]))
    assert str(token)[:20] in message
    assert "must be" in message


@pytest.mark.parametrize(
    "prompt",
    [
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint8),
        np.array([5, 6, 7], np.int8),
        jnp.array([5, 6, 7]),
        [np.int64(5), 6, np.uint64(7)],
    ],
    ids=_named,
)
def test_every_sequence_of_token_ids_is_a_prompt(
    engine: jaxkv.Engine, greedy_tokens: list[list[int]], prompt: Any
) -> None:
    [done] = engine.generate([prompt], GREEDY)
    assert done.tokens == greedy_tokens[2]
    rows: Any = np.array([[int(token) for token in prompt]])
    [done] = engine.generate(rows, [GREEDY])
    assert done.tokens == greedy_tokens[2]


@pytest.mark.parametrize("sampling", [{}, "x", [Sampling()], 3, Sampling, Broken()])
def test_invalid_sampling_is_refused(engine: jaxkv.Engine, sampling: Any) -> None:
    wanted = f"sampling={validation.format_value(sampling)} must be a Sampling"
    assert wanted in refusal(lambda: engine.submit("x", sampling))
    message = refusal(lambda: engine.generate(["x", "y"], [GREEDY, sampling]))
    assert f"prompts[1]: {wanted}" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("arrival_s", x)
            for x in (math.nan, math.inf, -math.inf, 1e12, -1.0, "3", True, [1.0])
        ],
        *[
            ("request_id", x)
            for x in (1.5, 1.0, True, "a", -1, 2**31, math.nan, [1], np.bool_(True))
        ],
    ],
)
def test_invalid_times_and_ids_are_refused(
    engine: jaxkv.Engine, name: str, value: Any
) -> None:
    before = engine.submit([5], GREEDY)
    message = refusal(lambda: engine.submit([5], GREEDY, **{name: value}))
    assert message.startswith(f"{name}={validation.format_value(value)} must be ")
    # An unused id is not skipped: draws without a seed depend on it.
    assert engine.submit([5], GREEDY) == before + 1
    for event in engine.stream():
        assert event.request_id in (before, before + 1)


@pytest.mark.parametrize("name", [np.int64(7), np.uint8(7), np.array(7), jnp.array(7)])
def test_numpy_ids_and_times_are_accepted(engine: jaxkv.Engine, name: Any) -> None:
    time_s: Any = np.float32(0.5)
    request_id = engine.submit([5], GREEDY, request_id=name, arrival_s=time_s)
    assert type(request_id) is int
    assert request_id == 7
    [done] = [event.completion for event in engine.stream() if event.completion]
    assert (done.request_id, done.arrival_s) == (7, 0.5)


def test_one_prompt_is_not_a_list_of_prompts(engine: jaxkv.Engine) -> None:
    untyped: Any = engine
    message = "prompts='abc' must be a list of prompts: wrap a single one, [prompt]"
    assert refusal(lambda: untyped.generate("abc")) == message
    tries: list[Any] = [b"abc", None, 5, {"a": 1}, iter(["a"]), np.array(3), Broken()]
    for prompts in tries:
        message = refusal(lambda prompts=prompts: engine.generate(prompts))
        assert message.startswith(
            f"prompts={validation.format_value(prompts)} must be a list"
        )
    ids: Any = [1, 2]
    assert "prompts[0]: prompt=1 must be" in refusal(lambda: engine.generate(ids))
    for sampling in ("x", {}, 3, Sampling):
        message = refusal(lambda ask=sampling: untyped.generate(["x"], ask))
        assert message.startswith(
            f"sampling={validation.format_value(sampling)} must be a "
        )
    refusal(lambda: untyped.cancel([1]))
    refusal(lambda: untyped.cancel(True))


# Every field of a configuration, by its type

NO_NUMBERS = [None, True, "1", math.nan, math.inf, [1.0], np.ones(2), 10**400, Broken()]
NO_COUNTS = [True, 1.0, "1", [], -1, 2**70]
NO_FLAGS = [None, 1, 0, "no"]
SAMPLING_TYPES: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBERS, -0.1, 1e39],
    "top_k": [None, *NO_COUNTS],
    "top_p": [*NO_NUMBERS, 0.0, 1.01],
    "min_p": [*NO_NUMBERS, -0.1, 1.5],
    "repetition_penalty": [*NO_NUMBERS, 0.0],
    "presence_penalty": NO_NUMBERS,
    "frequency_penalty": [*NO_NUMBERS, -math.inf],
    "seed": [*NO_COUNTS, 2**64],
    "n": [None, 0, *NO_COUNTS],
    "best_of": [0, *NO_COUNTS],
    "beam_width": [0, *NO_COUNTS],
    "length_penalty": NO_NUMBERS,
    "early_stopping": [None, 0, 1, "always", np.array([1, 2])],
    "max_tokens": [None, 0, *NO_COUNTS],
    "stop": ["abc", ["a"], (b"a",), ("a", ""), None, (1,)],
    "stop_tokens": [3, [1], (1.0,), (True,), ("1",), (2**31,), (-1,)],
    "ignore_eos": NO_FLAGS,
    "logprobs": NO_COUNTS,
    "prompt_logprobs": NO_FLAGS,
    "grammar": ["a", 1, {}],
    "prefix_cache": NO_FLAGS,
    "salt": [None, *NO_COUNTS],
    "adapter": ["", 3, True, b"a", ("a",)],
}


@pytest.mark.parametrize("name", SAMPLING_TYPES)
def test_sampling_error_names_the_field(name: str) -> None:
    for value in SAMPLING_TYPES[name]:
        message = refusal(lambda value=value: api.Sampling(**{name: value}))
        assert f"{name}={validation.format_value(value)} must be " in message
    assert SAMPLING_TYPES.keys() == {x.name for x in dataclasses.fields(Sampling)}


@pytest.mark.parametrize(
    "field", dataclasses.fields(EngineConfig), ids=lambda x: x.name
)
def test_config_error_names_the_field(field: Any) -> None:
    tries: list[Any] = ["4", 1.5, [4], 2**64, -(2**70), np.ones(2), Broken()]
    tries += [] if field.default is None else [None]
    tries += [1, 0] if isinstance(field.default, bool) else [True, np.bool_(True)]
    for value in tries:
        message = refusal(lambda value=value: api.EngineConfig(**{field.name: value}))
        shown = f"{field.name}={validation.format_value(value)}"
        assert message.startswith(f"{shown} must be ")


def test_numpy_numbers_become_python_numbers() -> None:
    bounds = api.EngineConfig(
        num_pages=np.int64(9), debug=np.bool_(True), seed=np.uint64(3)
    )
    assert bounds == EngineConfig(num_pages=9, debug=True, seed=3)
    assert [type(x) for x in (bounds.num_pages, bounds.debug)] == [int, bool]
    fields = dict(temperature=np.float32(0.5), top_k=np.int8(3))
    ask = api.Sampling(**fields | {"stop_tokens": (np.int64(4),)})
    assert ask == Sampling(temperature=0.5, top_k=3, stop_tokens=(4,))
    assert [type(x) for x in (ask.temperature, ask.top_k)] == [float, int]
    assert type(ask.stop_tokens[0]) is int


# Further functions that take numbers


def pages_of(**fields: Any) -> Pages:
    sizes: dict[str, Any] = dict.fromkeys(
        ["num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim"], 2
    )
    return api.make_pages(**sizes | {"dtype": "float32"} | fields)


def build_requests(**fields: Any) -> Any:
    arguments: dict[str, Any] = {"prompts": [[1], [2]], "asks": [GREEDY] * 2}
    arguments |= fields
    prompts = arguments.pop("prompts")
    asks = arguments.pop("asks")
    return make_requests(prompts, asks, config=BOUNDS, **arguments)


def bounds(**fields: Any) -> Any:
    return dataclasses.replace(engines.TIGHT, **fields)


def started(**fields: Any) -> Any:
    """Makes a state whose bounds differ from those of its pages."""
    return init(bounds(**fields), make_model_pages(engines.MODEL, engines.TIGHT))


def model(**fields: Any) -> Any:
    return dataclasses.replace(engines.MODEL, **fields)


def mixture(**fields: Any) -> Any:
    sizes: dict[str, Any] = dict(num_experts=5, top_k=2, size=12, shared_gate=True)
    return model(experts=api.Experts(**sizes | {"shared_size": 8} | fields))


def grown(max_new_pages: int) -> Any:
    pool = make_pool(4)
    table = make_table(1, 2)
    places = jnp.zeros(1, jnp.int32)
    return memory.reserve(pool, table, places, page_size=4, max_new_pages=max_new_pages)


def located() -> Any:
    """Returns rows without slots, fewer than there are slots."""
    row = jnp.zeros(2, jnp.int32)
    rows = Rows(row, row, None, jnp.zeros((3, 1), jnp.int32), row)
    return memory.locate(rows, page_size=4)


def cached(**sizes: int) -> Any:
    return api.init_cache(pages_of(), **{"max_slots": 1, "max_length": 1} | sizes)


def reserved(num_leaves: int, region: int) -> Any:
    return simulation.reservation(
        "max", num_leaves=num_leaves, leaves_per_region=region
    )


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"no {name}": (
            lambda name=name: pages_of(**{name: 0}),
            f"{name}=0 must be at least",
        )
        for name in ("num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim")
    },
    "rows": (located, "num_rows=2 must be a multiple of num_slots=3"),
    "no pool": (lambda: make_pool(0), "num_pages=0 must be at least 1"),
    "order": (lambda: make_pool(3, jnp.arange(2)), "must be (3,)"),
    "no row": (lambda: make_table(1, 0), "max_pages_per_slot=0 must be"),
    "no growth": (lambda: grown(0), "max_new_pages=0 must"),
    "prefixes": (
        lambda: make_prefix_cache(0, 1),
        "num_pages=0 must be at l",
    ),
    "prefix": (
        lambda: make_prefix_cache(1, 0),
        "page_size=0 must be at lea",
    ),
    "no length": (lambda: cached(max_length=0), "max_length=0 must be at least 1"),
    "no slot": (lambda: cached(max_slots=0), "max_slots=0 must be at least 1"),
    "beams": (lambda: make_beams(0), "max_beams=0 must be at least 1"),
    "leaves": (lambda: reserved(0, 2), "num_leaves=0 must be at least 1"),
    "region": (lambda: reserved(4, 3), "must be a power of two"),
    "no chunk": (lambda: api.fcfs(chunk_size=0), "chunk_size=0 must"),
    "watermark": (lambda: api.fcfs(watermark=-1), "watermark=-1"),
    "oldest": (lambda: api.fcfs(victim="oldest"), "victim='oldest' must be 'latest', "),
    "drop": (lambda: api.fcfs(preemption="drop"), "preemption='drop' must be 'recompu"),
    "no page": (lambda: bounds(num_pages=0), "num_pages=0 must be at least 1"),
    "slots": (lambda: bounds(max_slots=0), "max_slots=0 must be at least 1"),
    "short": (lambda: bounds(max_length=1), "max_length=1 must be at least 2"),
    "budget": (
        lambda: bounds(token_budget=3),
        "token_budget=3 must be at least max_slots=8",
    ),
    "logits": (lambda: bounds(max_logit_rows=3), "max_logit_rows=3 must be 0 or"),
    "logprobs": (lambda: bounds(max_logprobs=-1), "max_logprobs=-1 must be at least 0"),
    "processed": (
        lambda: bounds(logprobs_mode="processed_logprobs"),
        "max_logprobs=2 must be 0 with logprobs_mode='processed_logprobs'",
    ),
    "drafts": (lambda: bounds(max_drafts=-1), "max_drafts=-1 must be at least 0"),
    "seed": (lambda: bounds(seed=-1), "seed=-1 must be in"),
    "other pages": (lambda: started(num_pages=5), "must be config.num_pages=5"),
    "other size": (lambda: started(page_size=5), "must be config.page_size=5"),
    "no layer": (lambda: model(num_layers=0), "num_layers=0 must be at least 1"),
    "heads": (lambda: model(num_kv_heads=3), "num_q_heads=4 must be a multiple of"),
    "odd": (lambda: model(head_dim=3), "head_dim=3 must be even"),
    "window": (lambda: model(window=0), "window=0 must be at least 1"),
    "no experts": (lambda: mixture(num_experts=0), "num_experts=0 must be at least 1"),
    "top": (lambda: mixture(top_k=6), "top_k=6 must be at most"),
    "gate": (lambda: mixture(shared_size=0), "needs shared experts"),
    "dense": (lambda: mixture(num_dense_layers=-1), "num_dense_layers=-1 must be at l"),
    "all dense": (
        lambda: mixture(num_dense_layers=2),
        "num_dense_layers=2 must be",
    ),
    "balance": (
        lambda: mixture(balance_weight=math.nan),
        "balance_weight=nan must be at least 0",
    ),
    "biases": (
        lambda: dataclasses.replace(mixture(), mlp_bias=True),
        "experts have no biases",
    ),
    "pages": (lambda: pages_of(num_pages=1.5), "num_pages=1.5 must be a whole number"),
    "layers": (lambda: pages_of(num_layers=True), "num_layers=True must be a whole"),
    "dtype": (lambda: pages_of(dtype="foo"), "dtype='foo' must be a floating type"),
    "ints": (lambda: pages_of(dtype="int8"), "dtype='int8' must be a floating type"),
    "kv": (lambda: pages_of(kv_dtype=["int8"]), "kv_dtype=['int8'] must be 'model', "),
    "flat": (
        lambda: pages_of(num_layers=2**20, num_pages=2**20),
        "num_layers=1048576 times num_pages=1048576 must be below 2**31",
    ),
    "pool": (lambda: api.make_pool(2.0), "num_pages=2.0 must be a whole"),
    "table": (lambda: make_table(0, 1), "max_slots=0 must be at least 1"),
    "cache": (
        lambda: api.init_cache(pages_of(), max_slots=1, max_length=1.5),
        "max_length=1.5 must be a whole number",
    ),
    "chunk": (lambda: api.fcfs(chunk_size=1.5), "chunk_size=1.5 must be"),
    "hold": (lambda: api.fcfs(hold_new=1), "hold_new=1 must be True or F"),
    "victim": (lambda: api.fcfs(victim=["latest"]), "victim=['latest']"),
    "prompts": (
        lambda: build_requests(prompts=[[1], 2]),
        "prompts[1]=2 must be a sequence",
    ),
    "int32": (
        lambda: build_requests(prompts=[[1], [2**31]]),
        "prompts[1]: token id 2147483648",
    ),
    "asks": (lambda: build_requests(asks=[GREEDY, 3]), "asks[1]=3 must be a Sampling"),
    "few": (
        lambda: build_requests(asks=[GREEDY]),
        "len(asks)=1 must be len(prompts)=2",
    ),
    "ids": (
        lambda: build_requests(request_ids=[1, 2.5]),
        "request_ids=2.5 must be a whole",
    ),
    "times": (
        lambda: build_requests(arrivals_s=[0, math.nan]),
        "arrivals_s=nan must be in",
    ),
    "lengths": (
        lambda: build_requests(arrivals_s=[0.0]),
        "len(arrivals_s)=1 must be len(pr",
    ),
    "width": (lambda: build_requests(width=1), "width=1 must be at least 2, one row"),
    "stops": (
        lambda: build_requests(asks=[GREEDY, Sampling(stop_tokens=(1, 2, 3, 4))]),
        "4 tokens that end a request must be at most config.max_stop_tokens=3",
    ),
    "rate": (
        lambda: api.poisson(np.random.default_rng(0), rate="1", num=1),
        "rate='1' must be a number, above 0 requests per second",
    ),
    "num": (
        lambda: api.poisson(np.random.default_rng(0), rate=1.0, num=1.5),
        "num=1.5 must be a whole number",
    ),
    "law": (lambda: api.Fixed(tokens=1.5), "tokens=1.5 must be in"),
    "mean": (lambda: api.Gamma(mean="9", shape=1.0), "mean='9' must be"),
    "model": (
        lambda: dataclasses.replace(engines.MODEL, num_layers=1.5),
        "num_layers=1.5 must be a whole number",
    ),
    "theta": (
        lambda: dataclasses.replace(engines.MODEL, rope_theta=math.inf),
        "rope_theta=inf must be above 0 and finite",
    ),
    "experts": (
        lambda: api.Experts(num_experts=2, top_k=1, size="8"),
        "size='8' must be a whole number",
    ),
    "scaling": (lambda: RopeScaling(factor=0.0), "factor=0.0 must be above 0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_errors_of_other_functions(name: str) -> None:
    call, wanted = OTHERS[name]
    assert wanted in refusal(call)


class NotAPytree:
    """A policy that no program can take."""

    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        return jaxkv.fcfs().plan(counts)


class Planless(NamedTuple):
    """A policy without a plan."""

    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> None:
        """Returns no plan."""


def test_invalid_engine_components_are_refused() -> None:
    pages = make_model_pages(engines.MODEL, BOUNDS)
    parts = EngineParts({}, PagedForward(engines.MODEL), pages, BOUNDS)
    part_names = [field.name for field in dataclasses.fields(EngineParts)]
    rule_names = [field.name for field in dataclasses.fields(EngineRules)]
    tries: tuple[tuple[str, Any, str], ...] = (
        ("config", vars(BOUNDS), "must be a EngineConfig"),
        ("pages", (1, 2), "must be a Pages"),
        ("forward", 3, "must be a Forward"),
        ("policy", jaxkv.fcfs, "must be a Policy, but has no holds_finished and plan"),
        ("policy", type(jaxkv.fcfs()), "must be a Policy, not a class"),
        ("policy", NotAPytree(), "must be a NamedTuple of arrays, or another pytree"),
        ("eviction", jaxkv.fcfs(), "must be a Eviction or None"),
        ("logits_fn", "x", "must be a Callable or None"),
        ("host_pages", 1.5, "must be a whole number"),
        ("keep_trace", 1, "must be True or False"),
        ("eos_ids", 3, "must be a sequence of token ids"),
        ("eos_ids", ["a"], "must be a sequence of token ids"),
    )
    for name, value, wanted in tries:
        fields: Any = {name: value}
        served: Any = parts
        options: Any = fields
        if name in part_names:
            served = dataclasses.replace(parts, **fields)
            options = {}
        elif name in rule_names:
            options = {"rules": EngineRules(**fields)}
        message = refusal(lambda x=served, more=options: api.Engine(x, **more))
        assert message.startswith(f"{name}={validation.format_value(value)} {wanted}")


def test_a_policy_must_return_a_plan() -> None:
    policy: Any = Planless()
    message = refusal(lambda: jaxkv.schedule(cast(Any, None), policy))
    assert message == "Planless.plan returns None, which must be a Plan"


@pytest.mark.parametrize(
    "fields",
    [
        dict(num_pages=2**30),
        dict(page_size=2**31 - 1),
        dict(max_sequences=2**30),
        dict(max_length=2**31 - 1),
        dict(max_swap_pages=2**30),
        dict(max_logprobs=2**30),
    ],
    ids=str,
)
def test_pools_larger_than_memory_are_refused(fields: dict[str, Any]) -> None:
    message = refusal(lambda: jaxkv.Engine.load(FOLDER, **fields))
    assert " bytes are needed and " in message
    assert " are free for config.num_pages=" in message


def test_free_memory_is_known() -> None:
    state = engines.start(BOUNDS)
    assert loading.num_bytes(state) == sum(x.nbytes for x in jax.tree.leaves(state))
    free = loading.free_bytes()
    assert free is None or free > 2**20
    loading.check_free_memory(state, "the state")


def test_failed_allocation_error_is_one_line() -> None:
    message = refusal(
        lambda: pages_of(num_pages=2**29, page_size=2**16, head_dim=2**10)
    )
    assert message.startswith("no room for num_pages=536870912: ")


# Random values

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    7,
    -1,
    64,
    2**31,
    2**40,
    10**400,
    0.0,
    0.5,
    1.0,
    1.5,
    -0.5,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "a",
    "never",
    "int8",
    (),
    ("a",),
    (1,),
    (1, 2, 3, 4),
    [],
    [1],
    {},
    b"x",
    np.int64(2),
    np.float32(0.25),
    np.array([1, 2]),
    np.bool_(True),
    Broken(),
]


def drawn_fields(rng: random.Random, kind: Any) -> dict[str, Any]:
    """Draws some fields of a configuration with random values."""
    names = [field.name for field in dataclasses.fields(kind)]
    chosen = rng.sample(names, rng.choice([1, 1, 2, 3]))
    return {name: rng.choice(VALUES) for name in chosen}


@pytest.mark.parametrize(
    "kind", [EngineConfig, Sampling, ModelConfig, Experts, RopeScaling]
)
def test_random_configs_are_made_or_refused(kind: Any) -> None:
    rng = random.Random(0)
    num_made = 0
    needed = {"ModelConfig": vars(engines.MODEL)}.get(kind.__name__, {})
    if kind is Experts:
        needed = dict(num_experts=4, top_k=2, size=8)
    for _ in range(2000):
        fields = drawn_fields(rng, kind)
        try:
            value = kind(**needed | fields)
        except ValueError as error:
            message = check_line(str(error))
            together = ("beam search takes", "experts have no biases", "shared experts")
            assert any(name in message for name in [*fields, *together]), message
        else:
            num_made += 1
            assert hash(value) == hash(dataclasses.replace(value))
    assert 50 < num_made < 1900


def drawn_sampling(rng: random.Random) -> Any:
    """Draws a `Sampling` with up to two random fields; sometimes another object."""
    if rng.random() < 0.05:
        return rng.choice([*VALUES, Sampling])
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 9, 200])}
    if rng.random() < 0.5:
        fields["temperature"] = rng.choice([0.0, 0.7, 3.0])
    if rng.random() < 0.4:
        fields |= drawn_fields(rng, Sampling)
    return Sampling(**fields)


def drawn_prompt(rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return rng.choice([*NO_PROMPTS, *VALUES, "\ud800", [1] * 64, [320]])
    if rng.random() < 0.3:
        return rng.choice(["import os", "x" * rng.randrange(1, 90), "naïve ☃"])
    tokens = [rng.randrange(320) for _ in range(rng.randrange(1, 40))]
    return rng.choice([tokens, tuple(tokens), np.array(tokens), jnp.array(tokens)])


def tried(engine: jaxkv.Engine, rng: random.Random) -> set[int]:
    """Passes random arguments; returns the ids of the accepted requests."""
    prompts = [drawn_prompt(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    fields: dict[str, Any] = {}
    if rng.random() < 0.2:
        fields["request_id"] = rng.choice([*VALUES, 10**6, np.int32(10**6 + 1)])
    if rng.random() < 0.2:
        fields["arrival_s"] = rng.choice([*VALUES, engine.now() + 0.01])
    num = len(engine.tracker.records)
    try:
        if len(prompts) > 1:
            asks = [drawn_sampling(rng) for _ in prompts]
            done = engine.generate(prompts, rng.choice([asks, asks[0], asks[1:]]))
            assert len(done) == len(prompts)
            return set()
        name = engine.submit(prompts[0], drawn_sampling(rng), **fields)
    except ValueError as error:
        check_line(str(error))
        assert len(engine.tracker.records) == num
        return set()
    if fields.get("arrival_s") is not None and fields["arrival_s"] > engine.now() + 1:
        engine.cancel(name)
    return {name}


@pytest.mark.parametrize(
    ("seed", "num"),
    [(0, 200), *[pytest.param(i, 700, marks=pytest.mark.slow) for i in (1, 2, 3)]],
)
def test_random_requests_are_served_or_refused(
    engine: jaxkv.Engine, greedy_tokens: list[list[int]], seed: int, num: int
) -> None:
    rng = random.Random(seed)
    taken = set[int]()
    done = dict[int, str]()
    num_taken = 0
    for index in range(num):
        taken |= tried(engine, rng)
        if index % 25 == 24:
            for event in engine.stream():
                if event.completion is not None:
                    done[event.request_id] = event.completion.reason
            assert done.keys() >= taken
            assert set(done.values()) <= {"stop", "length", "cancelled"}
            num_taken += len(taken)
            taken.clear()
            assert_sound(engine, greedy_tokens)
    assert num / 8 < num_taken < num
