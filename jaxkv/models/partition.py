"""Tensor and expert parallelism in a model: the part of each device, by shapes.

On a mesh a step runs on every device inside `jax.shard_map`, each with a part of the
weights (see `jaxkv.parallel`). A matrix with fewer columns than the model's gives a
term of a sum, which is summed over devices. A table with fewer rows than the vocabulary
has the words of this device, in the order of devices; zero rows may follow the last
word. If a device has fewer experts than the router, its experts process all rows, and
the outputs are summed. With whole weights these functions are identities.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import validation
from jaxkv.models import moe

TENSOR = "tensor"
"""Mesh axis over which matrices are divided."""
EXPERT = "expert"
"""Mesh axis over which experts are divided."""


def sum_parts(
    x: Float[Array, "..."], *, part: int, full_size: int
) -> Float[Array, "..."]:
    """Sums over devices, if each has the sum over `part` of `full_size` numbers."""
    return x if part >= full_size else lax.psum(x, TENSOR)


@validation.checks_numbers()
def embed_tokens(
    table: Float[Array, "words hidden"], tokens: Int[Array, "*rows"], num_words: int
) -> Float[Array, "*rows hidden"]:
    """Returns embeddings from a table of `num_words`, divided over devices or not."""
    if table.shape[0] >= num_words:
        return table[tokens]
    return lax.psum(embed_own_tokens(table, tokens), TENSOR)


def embed_own_tokens(
    table: Float[Array, "words hidden"], tokens: Int[Array, "*rows"]
) -> Float[Array, "*rows hidden"]:
    """Returns embeddings of this device's words, and zeros for other words."""
    local_words, is_here = own_words(table.shape[0], tokens)
    embeddings = table[local_words]
    return jnp.where(is_here[..., None], embeddings, jnp.zeros_like(embeddings))


@validation.checks_numbers()
def own_words(
    part: int, tokens: Int[Array, "*rows"]
) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
    """Returns the indices of tokens among this device's `part` words, and a mask."""
    local = tokens - part * lax.axis_index(TENSOR).astype(tokens.dtype)
    is_here = (local >= 0) & (local < part)
    return jnp.where(is_here, local, 0), is_here


def gather_words(x: Float[Array, "words rows"], num_words: int) -> Float[Array, "..."]:
    """Concatenates the devices' parts of a vocabulary of `num_words`."""
    if x.shape[0] >= num_words:
        return x
    return lax.all_gather(x, TENSOR, tiled=True)[:num_words]


@validation.checks_numbers()
def own_experts(routing: moe.Routing, *, part: int) -> moe.Routing:
    """Returns the routing to the `part` of the experts that this device has.

    Other experts are replaced by the invalid number `part` with a share of zero; the
    probabilities are zeros.
    """
    local_expert = routing.expert - lax.axis_index(EXPERT).astype(jnp.int32) * part
    is_own = (local_expert >= 0) & (local_expert < part)
    share = jnp.where(is_own, routing.share, jnp.zeros_like(routing.share))
    return moe.Routing(
        probs=jnp.zeros((len(local_expert), part), share.dtype),
        expert=jnp.where(is_own, local_expert, part),
        share=share,
    )
