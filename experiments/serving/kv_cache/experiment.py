"""Measures the cost of a token with and without a KV cache.

FLOPs are counted for two models, and times are measured with the bundled model on this
machine. Without a cache the whole prefix goes through the model for every token; with a
cache, only the last token does. Both must generate the same tokens.

A cache reduces the work of a token from O(t^2) to O(t) for attention and from O(t) to
O(1) for all other layers, so that of a text falls from O(t^3) to O(t^2). Times without
a cache are measured at some lengths; the time of a text is interpolated between them as
a power of the length.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from experiments import lab
from experiments.harness import make_benchmark_config, time_call
from experiments.serving.kv_cache import counting
from experiments.serving.kv_cache.counting import FLOP_COLUMNS, FlopCounts
from jaxkv import decoding
from jaxkv.files import model_folder
from jaxkv.models import LoadedModel, PagedForward, Params, load_model, make_model_pages
from jaxkv.models import logits as model_logits
from scaling import shapes
from scaling.shapes import load_shape

RASCHKA_TOKENS = 200
FEW_TOKENS = 512
"""Below, the overhead of a call exceeds the time of its operations."""
CACHE_METHODS = ("without a cache", "with a cache")
PAGE_SIZE = 16


Lengths = Annotated[tuple[int, ...], lab.Ascending(2, minimum=2)]


class Config(lab.ConfigRecord):
    """The models and the lengths."""

    model: str = "stdlib-bytes"
    """Measured and counted model: a folder or a bundled model."""
    lengths: Lengths = (16, 32, 64, 128, 200, 256, 512, 1024)
    """Lengths in tokens at which the next token is timed; ascending, from 2."""
    counted: str = "llama-2-7b"
    """Another counted model, by its name in `jaxkv cost`."""
    counted_lengths: Annotated[tuple[int, ...], lab.Ascending(1, minimum=2)] = tuple(
        2**k for k in range(4, 21)
    )
    """Lengths in tokens at which FLOPs are counted; ascending, from 1."""
    repeats: lab.PositiveInt = 20
    """Texts generated with the cache, and calls at each length without; the fastest
    counts."""


CONFIGS = {
    "smoke": Config(lengths=(4, 8), counted_lengths=(64, 2**18, 2**20), repeats=2),
    "real": Config(),
}


class TokenTimes(lab.ResultRecord):
    """Seconds of generating one token greedily."""

    length: Int[np.ndarray, " lengths"] = lab.column("tokens of the prefix")
    without_s: Float[np.ndarray, " lengths"] = lab.column("forward pass of the prefix")
    with_s: Float[np.ndarray, " lengths"] = lab.column("forward pass of the last token")
    is_same: Bool[np.ndarray, " lengths"] = lab.column("True if both tokens are equal")
    every_with_s: Float[np.ndarray, " tokens"] = lab.column(
        "with the cache, by prefix length 1, 2, ..."
    )

    def totals_s(self) -> Float[np.ndarray, "2 lengths"]:
        """Returns the seconds of all tokens up to each length, without and with cache.

        Without a cache, the time between two measured lengths is a power of the length.
        Below the first length it is that of the first length, an upper bound.
        """
        if not self.length.size:
            return np.zeros((2, 0))
        n = np.arange(1, int(self.length[-1]) + 1)
        between = np.interp(np.log(n), np.log(self.length), np.log(self.without_s))
        both = np.exp(between), self.every_with_s[: n.size]
        return np.stack([np.cumsum(x)[self.length - 1] for x in both])

    def rows(self) -> list[lab.Row]:
        """Returns a row per length, for JSON."""
        without, cached = self.totals_s()
        return lab.to_rows(
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


class Result(lab.ResultRecord):
    """Counted FLOPs and measured times."""

    timed: TokenTimes = lab.column("times of the bundled model on this machine")
    counted: FlopCounts = lab.column("FLOPs of the measured model")
    other: FlopCounts = lab.column("FLOPs of another model")
    device: str = lab.column("kind of device")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Counts, then measures; if stopped, keeps the finished lengths."""
    folder = model_folder(config.model)
    shape = dataclasses.replace(load_shape(folder), name=config.model)
    counted, other = (
        counting.count_flops(model, config.counted_lengths)
        for model in (shape, shapes.describe(config.counted))
    )
    model = load_model(folder)
    if config.lengths[-1] > model.config.max_positions:
        raise ValueError(
            f"{config.lengths[-1]} tokens are more than {model.config.max_positions=}"
        )
    timed = time_both(model, config.lengths, config.repeats, progress)
    return Result(timed, counted, other, jax.devices()[0].device_kind)


def metrics(result: Result) -> dict[str, object]:
    """Returns both ways at every length."""
    counted = {x.name: x.rows() for x in (result.counted, result.other)}
    return {"device": result.device, "measured": result.timed.rows(), **counted}


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of times and of FLOPs."""
    title = f"measured on {result.device}, greedy"
    measured = result.timed.rows()
    parts: list[lab.ReportPart] = [
        *lab.metric_sheets({title: measured} if measured else {})
    ]
    heads = ("tokens", "without", "with", "text without", "text with", "ratio")
    for counted in (result.counted, result.other):
        cells = [
            (
                lab.format_number(row["tokens"]),
                *(lab.format_flops(row[key]) for key in FLOP_COLUMNS),
                lab.format_number(row["text_ratio"]),
            )
            for row in counted.rows()
        ]
        parts.append(lab.Sheet(f"{counted.name}: operations, counted", heads, cells))
    return parts


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares growth and a published speed-up with counts and measurements."""
    other = result.other
    timed = result.timed
    attention = counting.growth_exponents(other.attention_flops, other.length)
    without, cached = counting.growth_exponents(other.total_flops, other.length)
    for power, method, slope in zip((3, 2), CACHE_METHODS, attention, strict=True):
        yield lab.measured(
            "growth",
            slope,
            power=power,
            way=method,
            without=without,
            cached=cached,
            model=other.name,
            before=other.length[-2],
            last=other.length[-1],
        )
    if timed.length.size < 2:
        return
    yield lab.measured("same", timed.is_same.sum(), published=float(timed.length.size))
    both = np.stack([timed.without_s, timed.with_s])
    without, cached = counting.growth_exponents(both, timed.length)
    yield lab.measured(
        "time", without, differs=timed.length[-1] < FEW_TOKENS, cached=cached
    )
    if RASCHKA_TOKENS in timed.length:
        (index,) = np.flatnonzero(timed.length == RASCHKA_TOKENS)
        without, cached = timed.totals_s()[:, index]
        yield lab.measured(
            "raschka", without / cached, tokens=RASCHKA_TOKENS, device=result.device
        )


SYSTEMS = ("without the cache", "with the cache")
"""Labels of both ways in figures."""


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws times on the left and FLOPs on the right; one token above, a text below."""
    timed = result.timed
    models = ((result.counted, "-"), (result.other, "--"))
    for row, what, label, seconds in (
        (0, "one token", "tokens before it [tokens]", (timed.without_s, timed.with_s)),
        (1, "a whole text", "length of the text [tokens]", timed.totals_s()),
    ):
        left, right = axes[row]
        for values, system in zip(seconds, SYSTEMS, strict=True):
            lab.draw_curve(left, timed.length, values, system, system)
        for counted, dash in models:
            flops = (counted.token_flops, counted.total_flops)[row]
            for values, system in zip(flops, SYSTEMS, strict=True):
                name = system.removesuffix(" the cache")
                look = {"linestyle": dash, "markevery": 0.2}
                words = f"{counted.name}, {name}"
                lab.draw_curve(right, counted.length, values, system, words, **look)
        gain = seconds[0][-1] / seconds[1][-1] if timed.length.size else float("nan")
        title = f"Measured: a cache makes {what} {gain:,.1f} times as fast"
        lab.set_labels(left, title, label, "time [s]", xscale="log", yscale="log")
        for axis in (left.xaxis, left.yaxis):
            lab.label_log_axis(axis)
        flops = (result.other.token_flops, result.other.total_flops)[row]
        gain = flops[0][-1] / flops[1][-1]
        title = f"Counted: a cache saves {what} {gain:,.0f}-fold "
        title += f"at {result.other.length[-1]:,} tokens"
        y = "operations [FLOP]"
        lab.set_labels(right, title, label, y, xscale="log", yscale="log")
    # Grey lines of slope 3 and 2 pass through the last points.
    end = result.other.length[-1]
    length = result.other.length
    x = length[length >= end / 256]
    rows = zip(result.other.total_flops, (3, 2), ("-.", ":"), strict=True)
    for row, power, line in rows:
        y = row[-1] * (x / end) ** float(power)
        look = {"color": "0.6", "linewidth": 1, "linestyle": line, "zorder": 0}
        axes[1, 1].plot(x, y, label=f"as length$^{power}$", **look)
    for ax in axes.flat:
        ax.legend()


def time_both(
    model: LoadedModel,
    lengths: tuple[int, ...],
    repeats: int,
    progress: lab.Progress,
) -> TokenTimes:
    """Generates a text with the cache, then single tokens of it without.

    Args:
      model: the model.
      lengths: prefix lengths to time without the cache; ascending.
      repeats: texts, and calls at each length. The fastest counts, since other load on
        the machine only adds time.
      progress: receives progress. If stopped, the finished lengths are returned.
    """
    start = model.tokenizer.encode("import")[0] if model.tokenizer else 0
    progress.show("with the cache: every token of a text")
    tokens, every_s = _draw(model, start, lengths[-1], repeats)

    @jax.jit
    def find_next_token(params: Params, tokens: jax.Array) -> jax.Array:
        logits = model_logits(params, tokens, config=model.config)
        return jnp.argmax(logits[0, -1]).astype(jnp.int32)

    rows = []
    for length in progress.track(lengths, "without the cache", "lengths"):
        progress.show(f"without the cache: {length:,} tokens")
        prefix = jnp.asarray(tokens[None, :length], jnp.int32)
        call = functools.partial(find_next_token, model.params, prefix)
        token = int(call())  # and compiles
        seconds = min(time_call(call)[0] for _ in range(repeats))
        rows.append((seconds, token == tokens[length]))
    done = np.array(lengths[: len(rows)], np.int64)
    table = np.array(rows, float).reshape(-1, 2)
    return TokenTimes(done, table[:, 0], every_s[done - 1], table[:, 1] > 0, every_s)


def _draw(
    model: LoadedModel, start: int, num: int, repeats: int
) -> tuple[np.ndarray, np.ndarray]:
    """Generates `num` tokens; returns all tokens and the least time of each."""
    length = -(-num // PAGE_SIZE) * PAGE_SIZE
    bounds = make_benchmark_config(1, length, page_size=PAGE_SIZE, token_budget=1)
    forward = PagedForward(model.config)

    @functools.partial(jax.jit, donate_argnames="cache")
    def feed(
        params: Params, cache: decoding.Cache, token: jax.Array
    ) -> tuple[jax.Array, decoding.Cache]:
        logits, cache, _ = decoding.decode_step(params, cache, token, forward=forward)
        return jnp.argmax(logits, axis=1).astype(jnp.int32), cache

    taken = []
    for _ in range(repeats + 1):  # the first one compiles
        cache = decoding.init_cache(
            make_model_pages(model.config, bounds), max_slots=1, max_length=num
        )
        token = jnp.asarray([start], jnp.int32)
        draws = []
        seconds = []
        for _ in range(num):
            start_s = time.perf_counter()
            token, cache = feed(model.params, cache, token)
            token.block_until_ready()
            seconds.append(time.perf_counter() - start_s)
            draws.append(token)
        taken.append(seconds)
    tokens = np.array([start, *(int(x[0]) for x in draws)])
    return tokens, np.min(np.array(taken[1:]), axis=0)


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(2, 2, 3.8)
)
