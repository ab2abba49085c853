"""Pages of a prefix on their way from one engine's cache to another's."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import validation
from jaxkv.engine import EngineConfig
from jaxkv.memory import Pages, Prefix


def of_tokens(tokens: Sequence[int], salt: int, config: EngineConfig) -> Prefix:
    """The full pages of tokens, for the programs.

    Raises:
      ValueError: there is no prefix cache, or there are too many tokens.
    """
    if not config.prefix_cache:
        raise ValueError(f"{config.prefix_cache=} must be True")
    own = validation.tokens("tokens", tokens)
    if len(own) > config.max_length:
        raise ValueError(f"{len(own)=} must be at most {config.max_length=}")
    # The last token is always fed.
    num_pages = max(len(own) - 1, 0) // config.page_size
    padded = np.zeros(config.max_length, np.int32)
    padded[: len(own)] = own
    return Prefix(jnp.asarray(padded), jnp.int32(num_pages), jnp.uint32(salt))


def padded(
    prefix: Prefix, pages: Any, mine: Pages, config: EngineConfig
) -> tuple[Prefix, Any]:
    """Pages that were sent, as many as a sequence may have; the prefix says how many.

    Args:
      prefix: the tokens, of which the first pages are sent.
      pages: K and V arrays, as `Engine.take_prefix` gives them.
      mine: those of the engine that takes them.
      config: its bounds.

    Raises:
      ValueError: the arrays do not fit the engine's.
    """
    num = {leaf.shape[1] for leaf in jax.tree.leaves(pages)}
    fits = len(num) == 1 and jax.tree.structure(pages) == jax.tree.structure(mine)
    most = int(prefix.num_pages)
    if not fits or not 0 <= (count := num.pop()) <= most:
        raise ValueError(f"pages must be those of at most {most} pages")
    width = config.max_pages_per_slot - count

    def fill(own: Any, sent: Any) -> np.ndarray:
        wanted = (own.shape[0], count, *own.shape[2:])
        if sent.shape != wanted or sent.dtype != own.dtype:
            raise ValueError(
                f"pages of {sent.dtype} {sent.shape} must be {own.dtype} {wanted}"
            )
        return np.pad(sent, [(0, 0), (0, width), *[(0, 0)] * (own.ndim - 2)])

    return prefix._replace(num_pages=jnp.int32(count)), jax.tree.map(fill, mine, pages)
