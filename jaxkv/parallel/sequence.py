"""Sequence parallelism in training: Ulysses and ring attention.

For functions inside `jax.shard_map` over the axes `ULYSSES` and `RING`. The ring
divides a sequence first, in zigzag order: of 2p equal chunks a device has chunk i and
chunk 2p - 1 - i, so that all devices have equal work under a causal mask. Ulysses
divides the tokens of one ring device, in order.

Sources: Jacobs et al. 2023, arXiv:2309.14509, section 3 (Ulysses); Liu et al. 2023,
arXiv:2310.01889, section 3 (ring); Brandon et al. 2023, arXiv:2311.09431 (balance).
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, PyTree

from jaxkv import validation
from pallas_kernels.flash_attention import flash_attention

RING = "ring"
ULYSSES = "ulysses"
"""Mesh axes."""

type Queries = Float[Array, "batch seq q_heads head_dim"]
type Keys = Float[Array, "batch seq kv_heads head_dim"]
type Values = Float[Array, "batch seq kv_heads value_dim"]
type Outputs = Float[Array, "batch seq q_heads value_dim"]
type Attend = Callable[[Array, Array, Array], Array]


@validation.checks_numbers()
def zigzag_order(length: int, *, ring: int) -> Int[np.ndarray, " {length}"]:
    """Returns positions in the order of devices, those of the first device first.

    Raises:
      ValueError: `length` is not a multiple of two chunks per device.
    """
    if ring == 1:
        return np.arange(length)
    if length % (2 * ring):
        raise ValueError(f"{length=} must be a multiple of {2 * ring}, {ring=} twice")
    chunks = np.arange(length).reshape(2 * ring, -1)
    pairs = [np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(ring)]
    return np.concatenate(pairs)


@validation.checks_numbers()
def token_positions(length: int, *, ring: int, ulysses: int) -> Int32[Array, " part"]:
    """Returns the positions of this device's tokens, of `length` in all."""
    part = length // (ring * ulysses)
    index = jnp.int32(0)
    if ring > 1:
        index = index + lax.axis_index(RING).astype(jnp.int32) * ulysses
    if ulysses > 1:
        index = index + lax.axis_index(ULYSSES).astype(jnp.int32)
    every = jnp.asarray(zigzag_order(length, ring=ring), jnp.int32)
    return lax.dynamic_slice_in_dim(every, index * part, part)


@validation.checks_numbers()
def ulysses_attention(
    q: Queries, k: Keys, v: Values, attend: Attend, *, degree: int
) -> Outputs:
    """Computes Ulysses attention: all-to-all to heads, attention, all-to-all back.

    KV heads are first copied if there are fewer than devices.

    Args:
      q: queries of this device's tokens, all heads.
      k: keys of these tokens, all heads.
      v: values of these tokens, all heads.
      attend: attention over whole sequences of a part of the heads.
      degree: number of devices.

    Raises:
      ValueError: the heads cannot be divided over the devices.
    """
    if degree == 1:
        return attend(q, k, v)
    num_q = q.shape[2]
    num_kv = k.shape[2]
    if num_q % degree or (num_kv % degree and degree % num_kv):
        raise ValueError(
            f"{num_q} query and {num_kv} KV heads must be divided by ulysses={degree}"
        )
    if num_kv < degree:
        k, v = (jnp.repeat(x, degree // num_kv, axis=2) for x in (k, v))
    change = functools.partial(lax.all_to_all, axis_name=ULYSSES, tiled=True)
    q, k, v = (change(x, split_axis=2, concat_axis=1) for x in (q, k, v))
    return change(attend(q, k, v), split_axis=1, concat_axis=2)


@validation.checks_numbers()
def ring_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    degree: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
) -> Outputs:
    """Computes causal ring attention in zigzag order.

    Keys and values are sent around the ring of devices. The gradient sends them around
    once more together with their gradients, which take one more hop to return to their
    devices. A `scale` of None means head_dim ** -0.5; `softcap` and `sinks` are those
    of `flash_attention`.

    Raises:
      ValueError: `window`, `softcap` or `sinks` is set with more than one device.
    """
    if degree == 1:
        return flash_attention(
            q, k, v, window=window, scale=scale, softcap=softcap, sinks=sinks
        )[0]
    if window is not None or softcap is not None or sinks is not None:
        raise ValueError(
            f"{window=}, {softcap=} and sinks must be None in a ring of {degree=}"
        )
    return _ring(q, k, v, degree, scale)


type _Residuals = tuple[Array, Array, Array, Array, Array]
"""Queries, keys, values, output and log-sum-exp."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ring(q: Array, k: Array, v: Array, degree: int, scale: float | None) -> Array:
    return _ring_forward(q, k, v, degree, scale)[0]


def _ring_forward(
    q: Array, k: Array, v: Array, degree: int, scale: float | None
) -> tuple[Array, _Residuals]:
    def hop(
        number: Array, carry: tuple[tuple[Array, Array], tuple[Array, Array]]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (k, v), state = carry
        k, v = _pass_on((k, v), degree)
        # Combines attention over two sets of keys by their log-sum-exps.
        both = state, _from(number, q, k, v, scale)
        lse = jnp.logaddexp(state[1], both[1][1])
        old, new = (
            out * jnp.exp(partial_lse - lse)[..., None].astype(out.dtype)
            for out, partial_lse in both
        )
        return (k, v), (old + new, lse)

    first_state = flash_attention(q, k, v, scale=scale)
    _, (out, lse) = lax.fori_loop(1, degree, hop, ((k, v), first_state))
    return out, (q, k, v, out, lse)


def _ring_backward(
    degree: int, scale: float | None, residuals: _Residuals, grad: Array
) -> tuple[Array, Array, Array]:
    # Sent again: otherwise XLA recognises the exchange of the forward pass and keeps
    # its result in memory.
    q, k, v, out, lse = lax.optimization_barrier(residuals)

    def of_block(
        number: Array | None, k: Array, v: Array
    ) -> tuple[Array, Array, Array]:
        (part, part_lse), back = jax.vjp(
            lambda q, k, v: _from(number, q, k, v, scale), q, k, v
        )
        share = jnp.exp(part_lse - lse)[..., None]
        grad_lse = jnp.sum(grad * (part - out) * share, axis=-1).astype(part_lse.dtype)
        return back(((grad * share).astype(part.dtype), grad_lse))

    def hop(
        number: Array, carry: tuple[tuple[Array, ...], Array]
    ) -> tuple[tuple[Array, ...], Array]:
        sent, grad_q = carry
        k, v, grad_k, grad_v = _pass_on(sent, degree)
        more = of_block(number, k, v)
        sent = k, v, grad_k + more[1], grad_v + more[2]
        return sent, grad_q + more[0]

    grad_q, *grads = of_block(None, k, v)
    carry = lax.fori_loop(1, degree, hop, ((k, v, *grads), grad_q))
    (_, _, *grads), grad_q = carry
    return grad_q, *_pass_on(grads, degree)


_ring.defvjp(_ring_forward, _ring_backward)


def _pass_on(arrays: Sequence[Array], degree: int) -> PyTree[Array]:
    """Sends arrays to the next device of the ring."""
    pairs = [(i, (i + 1) % degree) for i in range(degree)]
    return jax.tree.map(lambda x: lax.ppermute(x, RING, pairs), tuple(arrays))


def _from(
    number: Array | None, q: Array, k: Array, v: Array, scale: float | None
) -> tuple[Array, Array]:
    """Attends to keys and values received after `number` hops; None means the own ones.

    A device before this one in the ring has an early chunk that all queries see, and a
    late chunk that none sees; the late half of the queries sees both chunks of a device
    after this one.
    """
    attend = functools.partial(flash_attention, scale=scale)
    if number is None:
        return attend(q, k, v)
    half = q.shape[1] // 2

    def before(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return attend(q, k[:, :half], v[:, :half], causal=False)

    def after(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = attend(q[:, half:], k, v, causal=False)
        none = lse * 0 - jnp.asarray(jnp.inf, lse.dtype)
        lse = jnp.concatenate([none, lse], axis=1)
        return jnp.concatenate([out * 0, out], axis=1), lse

    came_before = number <= lax.axis_index(RING)
    return lax.cond(came_before, before, after, q, k, v)
