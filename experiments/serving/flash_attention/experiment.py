"""What does attention in tiles save, and whom does it serve?

Plain attention writes every score to memory and keeps them all for the gradient; in
tiles (FlashAttention) a score lives as long as its tile, and the gradient computes it
again. Both are timed here, forward and with their gradient, and their memory is what
the compiler says that it sets aside.

Then the question of the lectures: does it help decoding? A prompt has as many queries
as keys, so tiles of queries share what they read, and there are many tiles to share
out. A decoding sequence has one query. It reads every key for that one, whatever the
tiling, and offers one piece of work for each head; so it wants its keys split instead,
over all cores of a GPU.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.framework import Claim, judge
from experiments.plotting import style
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from pallas_kernels import devices
from pallas_kernels.flash_attention.tiled import TILE, flash_attention
from pallas_kernels.paged_attention import api

PANELS = (1, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Shapes to attend over."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Tokens of a sequence, all of them queries; ascending."""
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Tokens that a single query sees."""
    num_q_heads: int = 8
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 64
    """Elements of a head."""
    page_size: int = 16
    """Token places in a page, for the single query."""
    repeats: int = 7
    """Timings of each, in turns."""
    seed: int = 0
    """Of queries, keys and values."""

    def __post_init__(self) -> None:
        """Refuses what cannot be measured."""
        for name in ("lengths", "contexts"):
            values = getattr(self, name)
            if len(values) < 2 or min(values) < 1 or sorted(set(values)) != [*values]:
                raise ValueError(f"{name}={values} must be at least two, ascending")
        validation.at_least(
            self, "num_q_heads", "num_kv_heads", "head_dim", "page_size", "repeats"
        )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_q_heads=} must be a multiple of {self.num_kv_heads=}"
            )


CONFIGS = {
    "smoke": Config(lengths=(64, 128, 256), contexts=(64, 256), head_dim=16, repeats=2),
    "real": Config(),
}


class Way(NamedTuple):
    """One implementation, by length: [lengths]."""

    forward_s: np.ndarray
    gradient_s: np.ndarray
    """Forward and gradient together."""
    temporary_bytes: np.ndarray
    """What the program with the gradient sets aside beside arguments and results."""
    error: np.ndarray
    """Largest difference from float64, of the output and of the gradients."""


class Result(NamedTuple):
    """All that was measured."""

    length: np.ndarray
    plain: Way
    flash: Way
    context: np.ndarray
    one_plain_s: np.ndarray
    """One query: [contexts]."""
    one_flash_s: np.ndarray
    one_paged_s: np.ndarray
    num_q_heads: int
    num_kv_heads: int


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Measures every length, then every context; ended early, it has what is done."""
    ways: list[list[tuple[float, ...]]] = [[], []]
    for length in progress.track(config.lengths, "lengths", "lengths"):
        for rows, row in zip(ways, _at_length(length, config), strict=True):
            rows.append(row)
    ones = [
        _one_query(context, config)
        for context in progress.track(config.contexts, "contexts", "contexts")
    ]
    plain, tiled = (Way(*np.array(rows, float).reshape(-1, 4).T) for rows in ways)
    one = np.array(ones, float).reshape(-1, 3).T
    return Result(
        np.array(config.lengths[: len(ways[0])]),
        plain,
        tiled,
        np.array(config.contexts[: len(ones)]),
        *one,
        config.num_q_heads,
        config.num_kv_heads,
    )


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention as the formula reads: all scores at once."""
    batch, queries, q_heads, head_dim = q.shape
    q = q.reshape(batch, queries, k.shape[2], -1, head_dim)
    scale = jnp.asarray(head_dim**-0.5, q.dtype)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * scale
    query = jnp.arange(queries, dtype=jnp.int32)[:, None] + k.shape[1] - queries
    seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] <= query
    scores = jnp.where(seen[None, None, None], scores, jnp.asarray(-jnp.inf, q.dtype))
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
    return out.reshape(batch, queries, q_heads, head_dim)


def tiled_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same in tiles."""
    return flash_attention(q, k, v)[0]


def _draw(queries: int, keys: int, config: Config) -> list[np.ndarray]:
    rng = np.random.default_rng([config.seed, queries, keys])
    heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
    tokens = (queries, keys, keys)
    return [
        rng.normal(size=(1, n, h, config.head_dim)).astype(np.float32)
        for n, h in zip(tokens, heads, strict=True)
    ]


def _gradient(attend: Callable, *arrays: Any) -> Any:
    """Gradients of a sum in which every output has a weight of its own."""

    def loss(*arrays: Any) -> Any:
        out = attend(*arrays)
        place = jnp.arange(out.size, dtype=jnp.int32).astype(out.dtype)
        return jnp.sum(jnp.sin(place) * out.reshape(-1))

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


def _at_length(length: int, config: Config) -> list[tuple[float, ...]]:
    arrays = _draw(length, length, config)
    exact = _exact(arrays)
    calls, rest = [], []
    for attend in (plain_attention, tiled_attention):
        forward = jax.jit(attend)
        gradient = jax.jit(functools.partial(_gradient, attend))
        program: Any = gradient.lower(*arrays).compile()
        found = (forward(*arrays), *gradient(*arrays))
        error = max(
            float(np.abs(np.asarray(a, np.float64) - b).max())
            for a, b in zip(found, exact, strict=True)
        )
        calls += [forward, gradient]
        rest.append((program.memory_analysis().temp_size_in_bytes, error))
    times = _times([functools.partial(call, *arrays) for call in calls], config)
    return [(*times[:2], *rest[0]), (*times[2:], *rest[1])]


def _exact(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Output and gradients of plain attention in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        both = (plain_attention(*wide), *_gradient(plain_attention, *wide))
        return [np.asarray(x) for x in both]


def _one_query(context: int, config: Config) -> list[float]:
    """Seconds of plain, tiled and paged attention for one query."""
    q, k, v = _draw(1, context, config)
    num_pages = -(-context // config.page_size)
    room = num_pages * config.page_size - context

    def paged(x: np.ndarray) -> np.ndarray:
        x = np.pad(x[0], [(0, room), (0, 0), (0, 0)])
        x = x.reshape(num_pages, config.page_size, *x.shape[1:])
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3))

    table = np.random.default_rng(config.seed).permutation(num_pages)
    order = np.argsort(table)
    pages = [paged(x)[order] for x in (k, v)]

    @jax.jit
    def by_pages(q: Any, k_pages: Any, v_pages: Any, ids: Any, last: Any) -> Any:
        return api.paged_attention(q, k_pages, v_pages, ids, last).out

    ids = table.astype(np.int32)[None]
    last = np.array([context - 1], np.int32)
    calls = [
        functools.partial(jax.jit(plain_attention), q, k, v),
        functools.partial(jax.jit(tiled_attention), q, k, v),
        functools.partial(by_pages, q[0], *pages, ids, last),
    ]
    return _times(calls, config)


def _times(calls: list[Callable], config: Config) -> list[float]:
    """Median seconds of each, timed in turns after a first call."""
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(config.repeats):
        for times, call in zip(taken, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
    return [float(np.median(times)) for times in taken]


def plot(axes: Any, result: Result) -> None:
    """Draws time and memory against length, and the single query."""
    colors = style.colors()
    looks = {"plain": colors[6], "in tiles": colors[5], "paged": colors[3]}
    both = {"plain": result.plain, "in tiles": result.flash}
    seconds, memory, one = axes
    for name, way in both.items():
        look = {"color": looks[name], "marker": "o", "label": name}
        seconds.plot(result.length, way.gradient_s * 1e3, **look)
        memory.plot(result.length, way.temporary_bytes / 1e6, **look)
    rows = (result.one_plain_s, result.one_flash_s, result.one_paged_s)
    for (name, color), times in zip(looks.items(), rows, strict=True):
        one.plot(result.context, times * 1e3, color=color, marker="o", label=name)
    seconds.set_title("all queries: time with the gradient", loc="left")
    memory.set_title("and its memory", loc="left")
    one.set_title("one query, as in decoding", loc="left")
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.legend()
    seconds.set_xlabel("tokens")
    memory.set_xlabel("tokens")
    one.set_xlabel("tokens seen")
    for ax, label in zip(axes, ("ms", "MB", "ms"), strict=True):
        ax.set_ylabel(label)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Exponent between the last two points: what long sequences cost."""
    if len(x) < 2:
        return float("nan")
    return float(np.log(y[-1] / y[-2]) / np.log(x[-1] / x[-2]))


def metrics(result: Result) -> dict[str, Any]:
    """Ratios at every length, and how much work there is to share out."""
    length, heads = result.length, result.num_q_heads
    tiles = -(-length // TILE)
    rows = [
        {
            "tokens": int(length[i]),
            "plain / tiles, forward": result.plain.forward_s[i]
            / result.flash.forward_s[i],
            "plain / tiles, with gradient": result.plain.gradient_s[i]
            / result.flash.gradient_s[i],
            "plain / tiles, memory": result.plain.temporary_bytes[i]
            / result.flash.temporary_bytes[i],
            "error, plain": result.plain.error[i],
            "error, tiles": result.flash.error[i],
            "pieces of work, prompt": int(heads * tiles[i]),
        }
        for i in range(len(length))
    ]
    ones = [
        {
            "tokens seen": int(result.context[i]),
            "plain / paged": result.one_plain_s[i] / result.one_paged_s[i],
            "tiles / paged": result.one_flash_s[i] / result.one_paged_s[i],
            "pieces of work, keys whole": result.num_kv_heads,
            "pieces of work, keys split": min(
                devices.NUM_CORES,
                result.num_kv_heads * (-(-int(result.context[i]) // 64)),
            ),
        }
        for i in range(len(result.context))
    ]
    return {"all queries": rows, "one query": ones}


def claims(result: Result) -> list[Claim]:
    """Holds the published scaling against ours."""
    source = "Dao et al. 2022, arXiv:2205.14135"
    worst = np.max(result.flash.error / result.plain.error, initial=0)
    ratio = result.plain.gradient_s / result.flash.gradient_s
    one = result.one_flash_s / result.one_paged_s
    return [
        judge(
            "memory of attention in tiles grows linearly: exponent",
            source=f"{source}, theorem 1",
            published=1,
            ours=_slope(result.length, result.flash.temporary_bytes),
            unit="1",
            tolerance=0.15,
        ),
        judge(
            "memory of plain attention grows with the square: exponent",
            source=f"{source}, section 2.2",
            published=2,
            ours=_slope(result.length, result.plain.temporary_bytes),
            unit="1",
            tolerance=0.15,
        ),
        judge(
            "it is exact: largest error from float64, over that of plain attention",
            source=f"{source}, theorem 1",
            published=2,
            ours=float(worst),
            unit="1",
            relation="at_most",
        ),
        judge(
            "training is faster with it: the longest sequence, with its gradient",
            source=f"{source}, section 4.3: up to 3 times on a GPU",
            published=3,
            ours=float(ratio[-1]) if len(ratio) else float("nan"),
            unit="1",
            differs="Theirs is a GPU with fast memory on the chip, ours a CPU whose "
            "caches take its place.",
        ),
        judge(
            "one query gains nothing from tiles: its time, over paged attention's",
            source="the lectures' question; Dao et al. 2023, Flash-Decoding",
            published=1,
            ours=float(one[-1]) if len(one) else float("nan"),
            unit="1",
            relation="at_least",
            tolerance=0.2,
        ),
    ]
