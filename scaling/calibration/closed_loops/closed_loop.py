"""A closed loop: a constant number of requests, each replaced when it ends.

Of N requests, those whose K and V fit run. A step decodes one token of each; between
two tokens of a request, prompts of others are fed as often as answers end: a request of
m answer tokens is delayed by (N - 1) / m prompts per token if prompts interrupt one by
one, and by half of it if an engine feeds all waiting prompts before it decodes. The
`interference` is this factor, and is fitted.

A first token comes after the request's own prompt, a share of the other prompts
(requests that arrive together when the load starts wait for each other), and the wait
for memory by Little's law. An engine that looks for requests every few steps adds half
of that interval, and the prompts that have come in it. Steps that feed prompts run
without recorded graphs: layers with experts, which have the most kernels, are launched
in `launch_s` for each weight. One process streams the messages of all requests, so that
a life of N requests of m messages takes at least `N m host_token_s`; later requests
wait for the backlog.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv.simulation import Work, make_work
from scaling.calibration.closed_loops.row_costs import RowWork
from scaling.calibration.server_cost import (
    Scalar,
    ServerCoefficients,
    ServerCost,
    smooth_maximum,
)
from scaling.costs import counts_as_floats


class LoopCoefficients(NamedTuple):
    """Coefficients of a server under a closed loop; each leaf may be batched."""

    server: ServerCoefficients
    """Coefficients of a step; of those of a request only `ingest_s` is used."""
    expert_read: Scalar
    """Time of reading routed experts over that of reading other weights."""
    expert_product: Scalar
    """Time of the products of routed experts over that of other products."""
    expert_ranks: Scalar
    """Factor of both if devices divide whole experts, which are not loaded evenly."""
    float8_product: Scalar
    """Time of 8-bit products over that of their data sheet, relative to 16 bits."""
    product_4_bits: Scalar
    """Time of products with 4-bit weights, relative to those of 16 bits."""
    interference: Scalar
    """Prompts of others between the tokens of a request, over one for each."""
    prompt_steps: Scalar
    """Time to the first token over that of the prompt: rest of a step, small chunks."""
    first_wave: Scalar
    """Prompts that a prompt waits for, as a share of the other requests."""
    launch_s: Scalar
    """Host time of a weight of a layer with experts in a step with prompts, in s."""
    host_token_s: Scalar
    """Host time of streaming a message to a client in s."""
    pace: Scalar
    """Factor of the time per token; 1 without effects."""


LOOP_PRIOR = {
    "expert_read": (1.3, 0.4),
    "expert_product": (1.5, 0.5),
    "expert_ranks": (1.1, 0.3),
    "float8_product": (1.1, 0.3),
    "product_4_bits": (1.2, 0.4),
    "interference": (0.9, 0.4),
    "prompt_steps": (1.5, 0.4),
    "first_wave": (0.12, 0.6),
    "launch_s": (100e-6, 0.5),
    "host_token_s": (50e-6, 0.15),
    "pace": (1.0, 1e-3),
}
"""Median and standard deviation of the logarithm of each further coefficient."""


_HOST_OVERLAP = 6.0
"""Exponent of the smooth maximum of a request's life and of its tokens' streaming."""


class LoopLatency(NamedTuple):
    """Mean latencies of a closed loop in s."""

    token_s: Float[Array, ""]
    """Time per token after the first."""
    first_token_s: Float[Array, ""]
    """From a request to its first token."""
    num_running: Float[Array, ""]
    """Requests that run; the others wait for memory."""
    mean_token_s: Float[Array, ""]
    """Mean time per token with the steps that feed prompts, which a median hides."""


def find_loop_latency(work: RowWork, coefficients: LoopCoefficients) -> LoopLatency:
    """Returns the mean latencies of a server under a closed loop.

    Args:
      work: counts of one server, as scalars.
      coefficients: single coefficients.
    """
    cost = make_loop_cost(work, coefficients)
    f = coefficients
    prompt = work.prompt_tokens
    answer = work.answer_tokens
    # Half of an answer is in memory on average.
    context = prompt + answer / 2
    limit = work.kv_capacity / (context + work.state_tokens)
    limit = jnp.where(work.is_median_step > 0, work.concurrency, limit)
    running = jnp.maximum(jnp.minimum(work.concurrency, limit), 1.0)
    decode = make_work()._replace(
        num_decodes=running,
        # A step reads and writes the states.
        decode_context=running * (context + 2 * work.state_tokens),
        num_drawn=running,
    )
    fed = decode._replace(
        num_prompt_rows=prompt,
        prompt_context=prompt,
        prompt_squares=prompt**2 * work.prefill_pairs,
        num_drawn=running + 1,
    )
    zero = jnp.float32(0.0)
    single = fed._replace(
        num_decodes=zero, decode_context=zero, num_drawn=jnp.float32(1.0)
    )
    step_s = cost(decode)
    prompt_s = cost(fed) - step_s
    single_s = cost(single)
    others = jnp.maximum(running - 1, 0.0)
    prompts_s = f.interference * others / answer * prompt_s
    mean_token_s = f.pace * (step_s + prompts_s)
    token_s = jnp.where(work.is_median_step > 0, f.pace * step_s, mean_token_s)
    # Little's law: a slot is free once per lifetime of a running request.
    queue = jnp.maximum(work.concurrency - running, 0.0)
    # First tokens of dense models do not inform the coefficients of a step.
    prompt_s, single_s, answer_s, step_s = jax.tree.map(
        lambda x: jnp.where(work.num_mixture_layers > 0, x, lax.stop_gradient(x)),
        (prompt_s, single_s, answer * token_s, f.pace * step_s),
    )
    single_s += f.launch_s * work.num_launches
    wait_s = queue / running * (answer_s + prompt_s)
    first_s = f.server.ingest_s + f.prompt_steps * single_s + wait_s
    polled = work.poll_steps - 1
    first_s += (f.first_wave + polled / answer) * others * prompt_s
    first_s += polled / 2 * step_s
    streamed_s = jnp.asarray(work.concurrency * answer * f.host_token_s)
    streamed_s /= work.streamed_tokens
    life_s = jnp.asarray(first_s + answer_s)
    life_s = smooth_maximum(life_s, streamed_s, _HOST_OVERLAP)
    first_s = life_s - answer_s
    return LoopLatency(
        token_s, jnp.asarray(first_s), running, jnp.asarray(mean_token_s)
    )


class LoopCost(NamedTuple):
    """Time of a step of a server: dense layers, then routed experts."""

    dense: ServerCost
    """Cost without the products and the weights of routed experts."""
    expert_flops_s: Float[Array, ""]
    """Time of the products of a token's routed experts in s."""
    read_s: Float[Array, ""]
    """Time of reading all routed experts in s."""

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time of a step in s; 0 for a step without tokens."""
        w = counts_as_floats(work)
        rows = w.num_decode_rows + w.num_prompt_rows
        met = 1.0 - (1.0 - self.dense.counts.expert_share) ** rows
        has_experts = self.read_s > 0
        # Kernels of the experts run after those of attention: their bounds are added.
        experts_s = smooth_maximum(
            jnp.where(has_experts, rows * self.expert_flops_s, 1.0),
            jnp.where(has_experts, met * self.read_s, 1.0),
            self.dense.coefficients.overlap,
        )
        return self.dense(work) + jnp.where(has_experts, experts_s, 0.0)


def make_loop_cost(work: RowWork, coefficients: LoopCoefficients) -> LoopCost:
    """Makes the cost of a step of a server from its counts.

    Args:
      work: counts of one server, as scalars.
      coefficients: single coefficients.
    """
    f = coefficients
    low_bits = 1 + work.is_float8 * (f.float8_product - 1)
    low_bits *= 1 + work.is_4_bits * (f.product_4_bits - 1)
    ranks = 1 + work.has_expert_ranks * (f.expert_ranks - 1)
    c = work.counts
    rate = c.flops_per_s * f.server.product_share
    bandwidth = c.bytes_per_s * f.server.weight_share
    expert_flops_s = work.expert_flops * f.expert_product * ranks * low_bits / rate
    dense = ServerCost(
        counts=c._replace(
            flops_per_token=c.flops_per_token * low_bits,
            expert_bytes=jnp.float32(0.0),
        ),
        kv_copies=work.kv_copies,
        token_link_s=work.token_link_s,
        logit_link_s=jnp.float32(0.0),
        num_reduces=work.num_reduces,
        other_devices=work.other_devices,
        num_layers=work.num_layers,
        num_mixture_layers=work.num_mixture_layers,
        coefficients=f.server,
    )
    read_s = c.expert_bytes * f.expert_read * ranks / bandwidth
    return LoopCost(dense, expert_flops_s, read_s)
