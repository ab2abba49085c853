"""Time of a token with and without kept keys and values, on the machine at hand."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.framework import Progress, Record, column, table
from jaxkv import decoding
from jaxkv.engine import state
from jaxkv.models import checkpoints, paged, transformer
from jaxkv.models.config import ModelConfig

PAGE_SIZE = 16


class Timed(Record):
    """Seconds of drawing one token, greedily, waited for."""

    length: Int[np.ndarray, " lengths"] = column("tokens behind which it is drawn")
    without_s: Float[np.ndarray, " lengths"] = column("the whole prefix is fed")
    with_s: Float[np.ndarray, " lengths"] = column("the last token is")
    is_same: Bool[np.ndarray, " lengths"] = column("whether both draw the same token")
    every_with_s: Float[np.ndarray, " tokens"] = column(
        "with the cache, behind 1, 2, ... tokens"
    )

    def totals_s(self) -> Float[np.ndarray, "2 lengths"]:
        """Seconds of all tokens up to each length, without the cache and with it.

        Without, the time between two lengths is a power of the length, and below the
        first of them that of the first: an upper bound for so few tokens.
        """
        if not self.length.size:
            return np.zeros((2, 0))
        n = np.arange(1, int(self.length[-1]) + 1)
        between = np.interp(np.log(n), np.log(self.length), np.log(self.without_s))
        both = np.exp(between), self.every_with_s[: n.size]
        return np.stack([np.cumsum(x)[self.length - 1] for x in both])

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of every length, for JSON."""
        without, cached = self.totals_s()
        return table.by_row(
            {
                "tokens": self.length,
                "without_s": self.without_s,
                "with_s": self.with_s,
                "ratio": self.without_s / self.with_s,
                "same": self.is_same,
                "text_without_s": without,
                "text_with_s": cached,
                "text_ratio": without / cached,
            }
        )


def time_both(
    model: checkpoints.Loaded,
    lengths: tuple[int, ...],
    repeats: int,
    progress: Progress,
) -> Timed:
    """Draws a text with the cache, then single tokens of it without.

    Args:
      model: the model.
      lengths: tokens behind which tokens are drawn without the cache; ascending.
      repeats: texts, and calls at each length, of which the fastest count: whoever
        else is at work on the machine only adds to them.
      progress: hears of it. When the person stops, the lengths that are done come back.
    """
    start = model.tokenizer.encode("import")[0] if model.tokenizer else 0
    progress.show("with the cache: every token of a text")
    tokens, every_s = _draw(model, start, lengths[-1], repeats)
    rows = []
    for length in progress.track(lengths, "without the cache", "lengths"):
        progress.show(f"without the cache: {length:,} tokens")
        prefix = jnp.asarray(tokens[None, :length], jnp.int32)
        call = functools.partial(_whole, model.params, prefix, config=model.config)
        drawn = int(call())  # and compiles
        seconds = min(_seconds(call) for _ in range(repeats))
        rows.append((seconds, drawn == tokens[length]))
    done = np.array(lengths[: len(rows)], np.int64)
    found = np.array(rows, float).reshape(-1, 2)
    return Timed(done, found[:, 0], every_s[done - 1], found[:, 1] > 0, every_s)


def _draw(
    model: checkpoints.Loaded, start: int, num: int, repeats: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `num` tokens behind the first: all tokens, and the least time of each."""
    pages = -(-num // PAGE_SIZE)
    bounds = state.EngineConfig(
        num_pages=pages,
        page_size=PAGE_SIZE,
        max_slots=1,
        max_length=pages * PAGE_SIZE,
        max_sequences=1,
        queue_capacity=1,
        token_budget=1,
    )
    forward = paged.PagedForward(model.config)
    taken = []
    for _ in range(repeats + 1):  # the first one compiles
        cache: Any = decoding.init_cache(
            paged.make_pages(model.config, bounds), max_slots=1, max_length=num
        )
        token, drawn, seconds = jnp.asarray([start], jnp.int32), [], []
        for _ in range(num):
            start_s = time.perf_counter()
            token, cache = _next(model.params, cache, token, forward=forward)
            token.block_until_ready()
            seconds.append(time.perf_counter() - start_s)
            drawn.append(token)
        taken.append(seconds)
    tokens = np.array([start, *(int(x[0]) for x in drawn)])
    return tokens, np.min(np.array(taken[1:]), axis=0)


@functools.partial(jax.jit, static_argnames="forward", donate_argnames="cache")
def _next(
    params: Any,
    cache: decoding.Cache,
    token: jax.Array,
    *,
    forward: paged.PagedForward,
) -> tuple[jax.Array, decoding.Cache]:
    logits, cache, _ = decoding.decode_step(params, cache, token, forward=forward)
    return jnp.argmax(logits, axis=1).astype(jnp.int32), cache


@functools.partial(jax.jit, static_argnames="config")
def _whole(params: Any, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    logits = transformer.logits(params, tokens, config=config)
    return jnp.argmax(logits[0, -1]).astype(jnp.int32)


def _seconds(call: Any) -> float:
    start_s = time.perf_counter()
    call().block_until_ready()
    return time.perf_counter() - start_s
