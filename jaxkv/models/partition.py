"""Which part of a model a device has: read from the shapes of its weights.

On a mesh a step runs on every device at once, inside `jax.shard_map`, each with a part
of the weights (see `jaxkv.parallel`). A matrix with fewer columns than the model's
makes a term of a sum, and those of all devices are added up. A table with fewer rows
than there are words has the words of this device, in order of the devices; rows of
zeros may follow the last word. Of fewer experts than a router has, those of this
device answer all rows, and the answers are added up. With whole weights nothing here
does anything.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.models import moe

TENSOR = "tensor"
"""The axis of the mesh over which matrices are divided."""
EXPERT = "expert"
"""The axis over which experts are divided."""


def sum_parts(x: Float[Array, "..."], *, part: int, whole: int) -> Float[Array, "..."]:
    """Adds the devices' sums over `part` of `whole` numbers; `x` if that is all."""
    return x if part >= whole else lax.psum(x, TENSOR)


def embed_tokens(
    table: Float[Array, "words hidden"], tokens: Int[Array, "*rows"], num_words: int
) -> Float[Array, "*rows hidden"]:
    """The rows of a table of `num_words`, of which this device may have a part."""
    if table.shape[0] >= num_words:
        return table[tokens]
    return lax.psum(embed_own_tokens(table, tokens), TENSOR)


def embed_own_tokens(
    table: Float[Array, "words hidden"], tokens: Int[Array, "*rows"]
) -> Float[Array, "*rows hidden"]:
    """The rows of this device's words, zeros for those of others."""
    own, is_here = own_words(table.shape[0], tokens)
    found = table[own]
    return jnp.where(is_here[..., None], found, jnp.zeros_like(found))


def own_words(
    part: int, tokens: Int[Array, "*rows"]
) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
    """Places of tokens among the `part` words of this device, and which are there."""
    own = tokens - part * lax.axis_index(TENSOR).astype(tokens.dtype)
    is_here = (own >= 0) & (own < part)
    return jnp.where(is_here, own, 0), is_here


def gather_words(x: Float[Array, "words rows"], num_words: int) -> Float[Array, "..."]:
    """Puts the devices' parts of `num_words` side by side."""
    if x.shape[0] >= num_words:
        return x
    return lax.all_gather(x, TENSOR, tiled=True)[:num_words]


def own_experts(routing: moe.Routing, *, part: int) -> moe.Routing:
    """The routing to the `part` of the experts that this device has.

    Choices of others go to nobody, with a share of zero; the probabilities are none.
    """
    own = routing.expert - lax.axis_index(EXPERT).astype(jnp.int32) * part
    is_own = (own >= 0) & (own < part)
    share = jnp.where(is_own, routing.share, jnp.zeros_like(routing.share))
    return moe.Routing(
        probs=jnp.zeros((len(own), part), share.dtype),
        # Nobody answers for experts that are elsewhere.
        expert=jnp.where(is_own, own, part),
        share=share,
    )
