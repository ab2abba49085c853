"""A custom logits_fn, policy and model of about ten lines each, tested exactly."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import memory
from jaxkv.engine import EngineParts, EngineRules
from jaxkv.memory import Pages
from tests.support import engines

# Slow, because `test_readme.py` runs programs that show the same.
pytestmark = pytest.mark.slow

END = 60

# [example: a logits_fn]


def only_digits(answer: jaxkv.TokenHistory, logits: jax.Array) -> jax.Array:
    """Allows five digits, then the end token."""
    token = jnp.arange(logits.shape[1])[None, :]
    digit = (token >= ord("0")) & (token <= ord("9"))
    full = answer.num_tokens - answer.prompt_length >= 5
    allowed = jnp.where(full[:, None], token == END, digit)
    return jnp.where(allowed, logits, -jnp.inf)


# [example: a policy]


class ShortestFirst(NamedTuple):
    """First come, first served, with the shortest prompt first."""

    fcfs: jaxkv.Policy
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        order = jnp.argsort(jnp.where(counts.waiting, counts.waiting_tokens, 2**30))
        head = ("waiting", "waiting_tokens", "waiting_scored_prompt")
        sorted_head = {name: getattr(counts, name)[order] for name in head}
        plan = self.fcfs.plan(counts._replace(**sorted_head))
        back = jnp.argsort(order)
        head = ("admit", "head_places", "head_rows")
        return plan._replace(**{name: getattr(plan, name)[back] for name in head})


# [example: a model]


def forward(params, pages, rows):
    """A transformer without norms: embeddings, paged attention, an MLP."""
    x = params["embed"][rows.token] + params["places"][jnp.maximum(rows.position, 0)]
    for layer, w in enumerate(params["layers"]):
        q, k, v = (jnp.einsum("rd,dhe->rhe", x, w[name]) for name in "qkv")
        attention, pages = jaxkv.attend(pages, layer, q, k, v, rows)
        x = x + jnp.einsum("rhe,hed->rd", attention, w["out"])
        x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
    logits = x[jnp.maximum(rows.logit_rows, 0)] @ params["embed"].T
    return jaxkv.ForwardResult(logits, pages)


# [example: inside your own jit and scan]


@jax.jit
def serve(params, state):
    """Runs 40 steps in one program."""

    def body(state, _):
        return jaxkv.step(
            params,
            state,
            config=CONFIG,
            forward=forward,
            policy=ShortestFirst(jaxkv.fcfs()),
            logits_fn=only_digits,
        )

    return jax.lax.scan(body, state, length=40)


# [end of the examples]

HIDDEN = 16
HEADS = 2
HEAD_DIM = 8
VOCAB = 61
CONFIG = jaxkv.EngineConfig(
    num_pages=24,
    page_size=4,
    max_slots=4,
    max_length=32,
    max_sequences=8,
    token_budget=6,
    max_stop_tokens=1,
    submit_width=8,
    steps_per_call=8,
    debug=True,
)


@functools.cache
def make_params() -> dict:
    rng = np.random.default_rng(0)

    def draw(*shape: int, std: float = 0.25) -> jax.Array:
        return jnp.asarray(rng.normal(0, std, shape), jnp.float32)

    layers = [
        {name: draw(HIDDEN, HEADS, HEAD_DIM) for name in "qkv"}
        | {"out": draw(HEADS, HEAD_DIM, HIDDEN)}
        | {"up": draw(HIDDEN, 32), "down": draw(32, HIDDEN)}
        for _ in range(2)
    ]
    places = draw(CONFIG.max_length, HIDDEN, std=1.0)
    return {"embed": draw(VOCAB, HIDDEN, std=1.0), "places": places, "layers": layers}


def make_pages() -> Pages:
    return memory.make_pages(
        num_layers=2,
        num_pages=CONFIG.num_pages,
        num_kv_heads=HEADS,
        page_size=CONFIG.page_size,
        head_dim=HEAD_DIM,
        dtype="float32",
    )


def logits_of(params: dict, tokens: list[int]) -> np.ndarray:
    """Returns the logits of the last token of the model on a sequence, in NumPy."""
    p = jax.tree.map(np.asarray, params)
    x = p["embed"][tokens] + p["places"][: len(tokens)]
    future = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
    for w in p["layers"]:
        q, k, v = (np.einsum("rd,dhe->rhe", x, w[name]) for name in "qkv")
        scores = np.einsum("qhe,khe->hqk", q, k) * HEAD_DIM**-0.5
        weights = np.exp(np.where(future, -np.inf, scores))
        weights /= weights.sum(axis=2, keepdims=True)
        x = x + np.einsum("hqk,khe,hed->qd", weights, v, w["out"])
        x = x + np.maximum(x @ w["up"], 0) @ w["down"]
    return x[-1] @ p["embed"].T


def five_digits(params: dict, prompt: list[int]) -> list[int]:
    """Returns the expected greedy answer that consists of digits."""
    tokens = list(prompt)
    for _ in range(5):
        logits = logits_of(params, tokens)[ord("0") : ord("9") + 1]
        tokens.append(ord("0") + int(np.argmax(logits)))
    return [*tokens[len(prompt) :], END]


PROMPTS = [
    [7] * 9,
    [1, 2, 3, 4, 5],
    [50, 4],
    [9, 8, 7],
    [1, 2],
    [11] * 12,
    [6],
    [5, 6],
]
GREEDY = jaxkv.Sampling.greedy(max_tokens=20, stop_tokens=(END,))


def test_all_features_inside_a_custom_jit_and_scan() -> None:
    params = make_params()
    state = jaxkv.init(CONFIG, make_pages())
    asks = [engines.Ask(name, prompt, GREEDY) for name, prompt in enumerate(PROMPTS)]
    requests = jax.tree.map(jnp.asarray, engines.requests_of(asks, CONFIG))
    state, taken = jaxkv.submit(state, requests, config=CONFIG)
    assert taken.all()
    state, info = serve(params, state)
    engines.assert_sound(info)
    engines.assert_empty(state)
    outcomes = engines.outcomes_of(state.sequences)
    for name, prompt in enumerate(PROMPTS):
        assert outcomes[name].tokens == five_digits(params, prompt)
        assert outcomes[name].reason == "stop"
    # Six rows: 2 + 3 + 1 of 5; the first arrival has to wait.
    first = np.asarray(info.request_id)[0]
    assert sorted(first[first >= 0].tolist()) == [1, 2, 3]


def test_all_features_through_the_engine_class() -> None:
    params = make_params()
    engine = jaxkv.Engine(
        EngineParts(params, forward, make_pages(), CONFIG, eos_ids=(END,)),
        EngineRules(policy=ShortestFirst(jaxkv.fcfs()), logits_fn=only_digits),
    )
    done = engine.generate(PROMPTS, jaxkv.Sampling.greedy(max_tokens=20))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.tokens == five_digits(params, prompt)
        assert completion.reason == "stop"
