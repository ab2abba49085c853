"""Measures time and memory of tiled attention (FlashAttention).

Plain attention writes every score to memory and keeps all scores for the gradient.
Tiled attention keeps the scores of one tile at a time and recomputes them for the
gradient. Both are timed, forward and with the gradient; memory is the temporary memory
that the compiler reports.

A single query, as in decoding, is timed as well. A prompt has as many queries as keys,
so tiles of queries share the keys that they read, and there are many tiles to run in
parallel. A decoding sequence has one query: it reads every key once with any tiling,
and has one unit of work per head. It gains from splitting the keys over the cores of a
GPU instead.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from experiments import lab
from experiments.harness import median_seconds
from pallas_kernels import devices
from pallas_kernels.flash_attention import QUERY_TILE, flash_attention
from pallas_kernels.paged_attention import PagedKV, RowView, paged_attention

Lengths = Annotated[tuple[int, ...], lab.Ascending(1, minimum=2)]


class Config(lab.ConfigRecord):
    """Shapes to attend over."""

    lengths: Lengths = (256, 512, 1024, 2048, 4096)
    """Sequence lengths in tokens, all of them queries; ascending."""
    contexts: Lengths = (512, 1024, 2048, 4096, 8192)
    """Context lengths in tokens of a single query, ascending."""
    num_q_heads: lab.PositiveInt = 8
    """Query heads."""
    num_kv_heads: lab.PositiveInt = 2
    """Key and value heads."""
    head_dim: lab.PositiveInt = 64
    """Elements of a head."""
    page_size: lab.PositiveInt = 16
    """Token places in a page, for the single query."""
    repeats: lab.PositiveInt = 7
    """Timings of each, interleaved."""
    seed: int = 0
    """Seed of queries, keys and values."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads!r} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads!r}"
            )


CONFIGS = {
    "smoke": Config(lengths=(64, 128, 256), contexts=(64, 256), head_dim=16, repeats=2),
    "real": Config(),
}


class AttentionTimes(lab.ResultTable):
    """Times, memory and errors of one implementation by length."""

    forward_s: lab.Floats = lab.column("output")
    gradient_s: lab.Floats = lab.column("output and gradient")
    temporary_bytes: lab.Floats = lab.column(
        "temporary memory of the gradient's program, arguments and results excluded"
    )
    error: lab.Floats = lab.column(
        "largest error from float64, of output and gradients"
    )


class Result(lab.ResultRecord):
    """Measurements by length and by context."""

    length: lab.Ints = lab.column("tokens: [lengths]")
    plain: AttentionTimes = lab.column("plain attention")
    flash: AttentionTimes = lab.column("tiled attention")
    context: lab.Ints = lab.column("tokens that one query attends to: [contexts]")
    one_plain_s: lab.Floats = lab.column("one query, plain: [contexts]")
    one_flash_s: lab.Floats = lab.column("one query, tiled: [contexts]")
    one_paged_s: lab.Floats = lab.column("one query, paged: [contexts]")
    num_q_heads: int = lab.column("query heads")
    num_kv_heads: int = lab.column("key and value heads")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Measures every length, then every context; if stopped, keeps finished ones."""
    ways = [
        _at_length(length, config)
        for length in progress.track(config.lengths, "lengths", "lengths")
    ]
    ones = [
        _one_query(context, config)
        for context in progress.track(config.contexts, "contexts", "contexts")
    ]
    return Result(
        np.array(config.lengths[: len(ways)]),
        AttentionTimes.of(plain for plain, _ in ways),
        AttentionTimes.of(tiled for _, tiled in ways),
        np.array(config.contexts[: len(ones)]),
        *np.array(ones, float).reshape(-1, 3).T,
        config.num_q_heads,
        config.num_kv_heads,
    )


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention that materialises all scores."""
    batch, queries, q_heads, head_dim = q.shape
    q = q.reshape(batch, queries, k.shape[2], -1, head_dim)
    scale = jnp.asarray(head_dim**-0.5, q.dtype)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * scale
    mask = jnp.tri(queries, k.shape[1], k.shape[1] - queries, dtype=bool)
    scores = jnp.where(mask[None, None, None], scores, jnp.asarray(-jnp.inf, q.dtype))
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
    return out.reshape(batch, queries, q_heads, head_dim)


def tiled_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention in tiles."""
    return flash_attention(q, k, v)[0]


def _draw(queries: int, keys: int, config: Config) -> list[np.ndarray]:
    rng = np.random.default_rng([config.seed, queries, keys])
    kv = (keys, config.num_kv_heads)
    return [
        rng.normal(size=(1, *tokens_heads, config.head_dim)).astype(np.float32)
        for tokens_heads in ((queries, config.num_q_heads), kv, kv)
    ]


def _gradient(attend: Callable[..., Array], *arrays: ArrayLike) -> tuple[Array, ...]:
    """Returns gradients of a sum that weights every output differently."""

    def loss(*arrays: ArrayLike) -> Array:
        out = attend(*arrays)
        place = jnp.arange(out.size, dtype=jnp.int32).astype(out.dtype)
        return jnp.sum(jnp.sin(place) * out.reshape(-1))

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


def _at_length(length: int, config: Config) -> list[tuple[float, ...]]:
    arrays = _draw(length, length, config)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        both = (plain_attention(*wide), *_gradient(plain_attention, *wide))
        exact = [np.asarray(x) for x in both]
    calls = []
    program_costs = []
    for attend in (plain_attention, tiled_attention):
        forward = jax.jit(attend)
        gradient = jax.jit(functools.partial(_gradient, attend))
        program: Any = gradient.lower(*arrays).compile()
        outputs = (forward(*arrays), *gradient(*arrays))
        error = max(
            float(np.abs(np.asarray(a, np.float64) - b).max())
            for a, b in zip(outputs, exact, strict=True)
        )
        calls += [forward, gradient]
        program_costs.append((program.memory_analysis().temp_size_in_bytes, error))
    ready = [functools.partial(call, *arrays) for call in calls]
    times = median_seconds(ready, config.repeats)
    return [(*times[:2], *program_costs[0]), (*times[2:], *program_costs[1])]


def _one_query(context: int, config: Config) -> list[float]:
    """Returns the seconds of plain, tiled and paged attention for one query."""
    q, k, v = _draw(1, context, config)
    num_pages = -(-context // config.page_size)
    room = num_pages * config.page_size - context

    def paged(x: np.ndarray) -> np.ndarray:
        x = np.pad(x[0], [(0, room), (0, 0), (0, 0)])
        x = x.reshape(num_pages, config.page_size, *x.shape[1:])
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3))

    ids = np.random.default_rng(config.seed).permutation(num_pages)
    order = np.argsort(ids)
    pages = [paged(x)[order] for x in (k, v)]

    @jax.jit
    def by_pages(
        q: Array, k_pages: Array, v_pages: Array, ids: Array, last: Array
    ) -> Array:
        return paged_attention(q, PagedKV(k_pages, v_pages), RowView(ids, last)).out

    last = np.array([context - 1], np.int32)
    plain, tiled = (
        functools.partial(jax.jit(attend), q, k, v)
        for attend in (plain_attention, tiled_attention)
    )
    tables = ids.astype(np.int32)[None]
    paged_call = functools.partial(by_pages, q[0], *pages, tables, last)
    return median_seconds([plain, tiled, paged_call], config.repeats)


def metrics(result: Result) -> dict[str, object]:
    """Returns ratios at every length, and the units of parallel work."""
    plain = result.plain
    flash = result.flash
    heads = result.num_kv_heads
    pieces = -(-result.context // 64) * heads
    queries = {
        "tokens": result.length,
        "plain / tiles, forward": plain.forward_s / flash.forward_s,
        "plain / tiles, with gradient": plain.gradient_s / flash.gradient_s,
        "plain / tiles, memory": plain.temporary_bytes / flash.temporary_bytes,
        "error, plain": plain.error,
        "error, tiles": flash.error,
        "pieces of work, prompt": -(-result.length // QUERY_TILE) * result.num_q_heads,
    }
    one = {
        "tokens seen": result.context,
        "plain / paged": result.one_plain_s / result.one_paged_s,
        "tiles / paged": result.one_flash_s / result.one_paged_s,
        "pieces of work, keys whole": np.full(len(result.context), heads),
        "pieces of work, keys split": np.minimum(devices.NUM_CORES, pieces),
    }
    return {"all queries": lab.to_rows(queries), "one query": lab.to_rows(one)}


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the published scaling with the measurements."""
    flash = result.flash
    plain = result.plain
    ratio = plain.gradient_s / flash.gradient_s
    one = result.one_flash_s / result.one_paged_s
    worst = np.max(flash.error / plain.error, initial=0)
    yield lab.measured("memory_of_tiles", _slope(result.length, flash.temporary_bytes))
    yield lab.measured("memory_of_plain", _slope(result.length, plain.temporary_bytes))
    yield lab.measured("exact", float(worst))
    yield lab.measured("training", float(ratio[-1]) if len(ratio) else float("nan"))
    yield lab.measured("one_query", float(one[-1]) if len(one) else float("nan"))


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the exponent between the last 2 points."""
    if len(x) < 2:
        return float("nan")
    return float(np.log(y[-1] / y[-2]) / np.log(x[-1] / x[-2]))


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws time and memory by length, and the time of a single query."""
    seconds, memory, one = axes
    for name, timings, one_s in (
        ("plain", result.plain, result.one_plain_s),
        ("in tiles", result.flash, result.one_flash_s),
        ("paged", None, result.one_paged_s),
    ):
        if timings is not None:
            mega = timings.temporary_bytes / 1e6
            lab.draw_curve(seconds, result.length, timings.gradient_s * 1e3, name, name)
            lab.draw_curve(memory, result.length, mega, name, name)
        lab.draw_curve(one, result.context, one_s * 1e3, name, name)
    titles = ["All queries: time with the gradient", "All queries: memory"]
    titles.append("One query, as in decoding")
    if len(result.length) and len(result.context):
        plain = result.plain
        flash = result.flash
        gain = plain.gradient_s[-1] / flash.gradient_s[-1]
        titles[0] = (
            f"{result.length[-1]:,} queries: tiles take 1/{gain:.2g} of the time"
        )
        gain = plain.temporary_bytes[-1] / flash.temporary_bytes[-1]
        titles[1] = (
            f"{result.length[-1]:,} queries: tiles take 1/{gain:.2g} of the memory"
        )
        gain = result.one_plain_s[-1] / result.one_paged_s[-1]
        titles[2] = f"One query: pages take {1 / gain:.2f} times as long as plain"
    for ax, title, x, y in (
        (seconds, titles[0], "length [tokens]", "time [ms]"),
        (memory, titles[1], "length [tokens]", "memory [MB]"),
        (one, titles[2], "context [tokens]", "time [ms]"),
    ):
        lab.use_powers_of_two(ax)
        lab.set_labels(ax, title, x, y, yscale="log")
        lab.label_log_axis(ax.yaxis)
        ax.legend()


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, metrics=metrics, panels=lab.Panels(3, 1, 2.9)
)
