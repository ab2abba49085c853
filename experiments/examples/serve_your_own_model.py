"""A custom model of one attention layer, served inside a custom `jit`.

The engine is a pure function, so it runs inside `jit`, `vmap` and `scan`; the policy's
parameter is an argument of the compiled program.
"""

import jax
import jax.numpy as jnp

import jaxkv
from experiments.examples.simulate_a_policy import ConcurrencyLimit
from jaxkv.engine import DrainedSequences
from jaxkv.memory import make_pages

config = jaxkv.EngineConfig(num_pages=32, max_slots=4, max_length=64, token_budget=16)


def one_layer_model(params, pages, rows):
    """Applies one layer; `rows` has the position, slot and page table of each token."""
    x = params["embed"][rows.token]
    q, k, v = (
        (x @ params[name]).reshape(-1, 2, 8) for name in ("query", "key", "value")
    )
    out, pages = jaxkv.attend(pages, 0, q, k, v, rows)
    x = x + out.reshape(x.shape)
    return jaxkv.ForwardResult(x[rows.logit_rows] @ params["embed"].T, pages)


@jax.jit
def serve_inside_jit(params, requests, limit):
    """Runs 24 steps; returns the answers and the trace of all steps."""
    pages = make_pages(
        num_layers=1,
        num_pages=32,
        num_kv_heads=2,
        page_size=16,
        head_dim=8,
        dtype="float32",
    )
    state = jaxkv.init(config, pages)
    state, _ = jaxkv.submit(state, requests, config=config)
    start = jnp.zeros(2, jnp.int32)  # the clock: seconds, microseconds
    state, trace = jaxkv.run_steps(
        params,
        state,
        start,
        config=config,
        forward=one_layer_model,
        policy=ConcurrencyLimit(limit),
        num_steps=24,
    )
    return jaxkv.drain(state)[1], trace


def main() -> tuple[DrainedSequences, jaxkv.StepInfo]:
    """Serves three requests, at most one at a time."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"embed": (50, 16), "query": (16, 16), "key": (16, 16), "value": (16, 16)}
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    asks = [jaxkv.Sampling.greedy(max_tokens=8)] * 3
    requests = jaxkv.make_requests([[1, 2, 3], [4, 5], [6]], asks, config=config)
    done, trace = serve_inside_jit(params, requests, jnp.int32(1))
    print(done.sequences.tokens[:3, :11], trace.num_emitted.sum(axis=1))
    return done, trace


if __name__ == "__main__":
    main()
