"""Withholds the tokens of a state: other ids, in which equal prefixes stay equal.

The schedule of an engine depends on the lengths of sequences and on common prefixes,
which the prefix cache finds. A masked token depends on all tokens before it and on a
secret that is not kept, so two masked sequences have a common prefix of the same length
as the sequences themselves, and no further relation to them.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.engine import EngineState
from jaxkv.ledger import PROGRESS
from jaxkv.memory import PrefixCache, replace_tokens
from jaxkv.models import NO_EXPERT

_DIGEST_BYTES = 16


class TokenMask:
    """Replaces token ids; one mask for all sequences of an incident."""

    def __init__(self, vocab_size: int, secret: bytes | None = None):
        """Takes the size of the vocabulary; the secret is random by default."""
        self._vocab_size = vocab_size
        self._start = os.urandom(_DIGEST_BYTES) if secret is None else secret

    def replace(
        self, tokens: Sequence[int] | np.ndarray, before: bytes | None = None
    ) -> tuple[list[int], bytes]:
        """Returns masked tokens, and the digest with which they can be continued.

        Args:
          tokens: token ids.
          before: digest of the tokens before; None at the start of a sequence.
        """
        digest = self._start if before is None else before
        masked = []
        for token in tokens:
            digest = hashlib.blake2b(
                digest + int(token).to_bytes(4, "little"), digest_size=_DIGEST_BYTES
            ).digest()
            masked.append(int.from_bytes(digest[:8], "little") % self._vocab_size)
        return masked, digest


def withhold_tokens(state: EngineState, mask: TokenMask) -> EngineState:
    """Returns a state without tokens, K and V, log-probabilities and stop tokens.

    Lengths, page tables, queue, prefix cache and random keys stay, so the same schedule
    follows. The state has no beam searches, swapped pages or drafter.
    """
    s = state.sequences
    used = np.asarray(PROGRESS.read(state.ledger.progress, "num_tokens")) > 0
    tokens = np.zeros(s.tokens.shape, np.int32)
    for row in np.flatnonzero(used):
        tokens[row] = mask.replace(np.asarray(s.tokens[row]))[0]
    zeros: Any = jax.tree.map(jnp.zeros_like, s)
    prefixes = state.prefixes
    return state._replace(
        pages=jax.tree.map(jnp.zeros_like, state.pages),
        sequences=s._replace(
            tokens=jnp.asarray(tokens),
            stop_tokens=jnp.full_like(s.stop_tokens, -1),
            logprobs=zeros.logprobs,
            top_ids=zeros.top_ids,
            top_logprobs=zeros.top_logprobs,
        ),
        prefixes=None if prefixes is None else _mask_prefixes(prefixes, mask),
        routes=None if state.routes is None else jnp.full_like(state.routes, NO_EXPERT),
    )


def _mask_prefixes(cache: PrefixCache, mask: TokenMask) -> PrefixCache:
    """Masks the cached pages, parents before the pages after them."""
    depth = np.asarray(cache.depth)
    parent = np.asarray(cache.parent)
    tokens = np.array(cache.tokens)
    digests: dict[int, bytes] = {}
    for page in np.argsort(depth, kind="stable").tolist():
        if depth[page] >= 0:
            before = digests[int(parent[page])] if depth[page] else None
            tokens[page], digests[page] = mask.replace(tokens[page], before)
    return replace_tokens(cache, jnp.asarray(tokens, jnp.int32))
