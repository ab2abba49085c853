"""What does a token cost with and without keys and values that are kept?

Counted for two models, and measured with the bundled one on this machine. Without a
cache the whole prefix goes through the model for every token; with one, the last token
alone. The tokens are the same, and that is checked.

A cache turns the quadratic work of a token into linear work: t^2 into t for attention,
t into a constant for everything else. Over a text that is t^3 against t^2. Measured
without a cache are some lengths; a text's time is interpolated between these, as a
power of the length.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.harness import bundled
from experiments.serving.kv_cache import counting, drawing
from experiments.serving.kv_cache.counting import Counted
from experiments.serving.kv_cache.timing import Timed, time_both
from jaxkv import validation
from jaxkv.models import checkpoints
from jaxkv.progress import QUIET, Progress
from scaling.shapes import huggingface, published

PANELS = (2, 2)
RASCHKA_TOKENS = 200
FEW_TOKENS = 512
"""Below, a call takes longer than its operations do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The models, and the lengths."""

    model: str = "stdlib-bytes"
    """Measured and counted: a folder, or a bundled model."""
    lengths: tuple[int, ...] = (16, 32, 64, 128, 200, 256, 512, 1024)
    """Tokens behind which a token is drawn; ascending, from 2."""
    counted: str = "llama-2-7b"
    """Another model that is counted, by its name in `jaxkv cost`."""
    counted_lengths: tuple[int, ...] = tuple(2**k for k in range(4, 21))
    """Tokens; ascending, from 1."""
    repeats: int = 20
    """Texts drawn with the cache, and calls at each length without; the fastest counts.
    """

    def __post_init__(self) -> None:
        """Refuses lengths that nothing is drawn behind."""
        for name, least in (("lengths", 2), ("counted_lengths", 1)):
            values = getattr(self, name)
            is_sorted = sorted(set(values)) == [*values]
            if len(values) < 2 or values[0] < least or not is_sorted:
                raise ValueError(
                    f"{name}={values} must be two or more, ascending, from {least}"
                )
        validation.at_least(self, "repeats")


CONFIGS = {
    "smoke": Config(lengths=(4, 8), counted_lengths=(64, 2**18, 2**20), repeats=2),
    "real": Config(),
}


class Result(NamedTuple):
    """What was counted, and what was measured."""

    timed: Timed
    counted: Counted
    """The model that was measured."""
    other: Counted
    device: str


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Counts, then measures; ended early, it has the lengths that are done."""
    folder = bundled.folder_of(config.model)
    shape = dataclasses.replace(huggingface.load(folder), name=config.model)
    other = published.describe(config.counted)
    counted, far = (
        counting.count(model, config.counted_lengths) for model in (shape, other)
    )
    model = checkpoints.load_model(folder)
    if config.lengths[-1] > model.config.max_positions:
        raise ValueError(
            f"{config.lengths[-1]} tokens are more than {model.config.max_positions=}"
        )
    timed = time_both(model, config.lengths, config.repeats, progress)
    return Result(timed, counted, far, jax.devices()[0].device_kind)


def plot(axes: Any, result: Result) -> None:
    """Draws times and operations, of a token and of a text."""
    drawing.draw(axes, result)


def metrics(result: Result) -> dict[str, Any]:
    """Gives both ways at every length."""
    timed, rows = result.timed, []
    totals = timed.totals_s() if timed.length.size else np.empty((2, 0))
    for i, length in enumerate(timed.length.tolist()):
        without, cached = float(timed.without_s[i]), float(timed.with_s[i])
        row = {"tokens": length, "without_s": without, "with_s": cached}
        row |= {"ratio": without / cached, "same": bool(timed.is_same[i])}
        row |= {"text_without_s": float(totals[0, i]), "text_with_s": totals[1, i]}
        rows.append(row | {"text_ratio": float(totals[0, i] / totals[1, i])})
    return {
        "device": result.device,
        "measured": rows,
        **{
            counted.name: _counts(counted) for counted in (result.counted, result.other)
        },
    }


def summary(result: Result) -> list[Part]:
    """Tables: of times, and of operations."""
    found = metrics(result)
    parts: list[Part] = []
    if rows := found["measured"]:
        cells = [[units.named(*x) for x in row.items()] for row in rows]
        heads = [label for label, _ in cells[0]]
        title = f"measured on {result.device}, greedy"
        parts.append(Sheet(title, heads, [[x for _, x in row] for row in cells]))
    heads = ("tokens", "without", "with", "text without", "text with", "ratio")
    for counted in (result.counted, result.other):
        lines = [
            (
                units.cell(row["tokens"]),
                *(units.flops(row[key]) for key in _FLOPS),
                units.cell(row["text_ratio"]),
            )
            for row in found[counted.name]
        ]
        parts.append(Sheet(f"{counted.name}: operations, counted", heads, lines))
    return parts


_FLOPS = ("without_flops", "with_flops", "text_without_flops", "text_with_flops")


def _counts(counted: Counted) -> list[dict[str, Any]]:
    columns = (*counted.token_flops, *counted.total_flops)
    return [
        {"tokens": int(n), **dict(zip(_FLOPS, map(float, row), strict=True))}
        | {"text_ratio": float(row[2] / row[3])}
        for n, *row in zip(counted.length, *columns, strict=True)
    ]


def claims(result: Result) -> list[Claim]:
    """Holds what lectures say of the growth, and a published speed, against ours."""
    other, timed = result.other, result.timed
    attention = counting.exponents(other.attention_flops, other.length)
    text = counting.exponents(other.total_flops, other.length)
    source = "lecture on serving LLMs: generation with and without a KV cache"
    spread = (
        f"Between {other.length[-2]:,} and {other.length[-1]:,} tokens of "
        f"{other.name}; all operations together grow with powers "
        f"{text[0]:.3f} and {text[1]:.3f}."
    )
    found = [
        judge(
            f"attention of a text of t tokens takes O(t^{power}) operations {name}",
            source=source,
            published=power,
            ours=float(ours),
            unit="1",
            tolerance=0.01,
            note=spread,
        )
        for power, name, ours in zip((3, 2), drawing.WAYS, attention, strict=True)
    ]
    if timed.length.size < 2:
        return found
    pair = np.stack([timed.without_s, timed.with_s])
    growth = counting.exponents(pair, timed.length)
    found += [
        judge(
            "a cache changes no token",
            source=source,
            published=timed.length.size,
            ours=int(timed.is_same.sum()),
            unit="tokens",
        ),
        judge(
            "without a cache the time of a token grows at least with the tokens",
            source=source,
            published=1.0,
            ours=float(growth[0]),
            unit="1",
            tolerance=0.1,
            relation="at_least",
            differs=""
            if timed.length[-1] >= FEW_TOKENS
            else "So few tokens that calls take all the time.",
            note=f"Power of the length between the last two lengths measured; with a "
            f"cache {growth[1]:.2f}.",
        ),
    ]
    if RASCHKA_TOKENS in timed.length:
        totals = timed.totals_s()[:, list(timed.length).index(RASCHKA_TOKENS)]
        found.append(
            judge(
                f"a text of {RASCHKA_TOKENS} tokens takes 5 times as long without",
                source="Raschka 2025, Understanding and Coding the KV Cache in LLMs "
                "from Scratch: 124 M parameters",
                published=5.0,
                ours=float(totals[0] / totals[1]),
                unit="times",
                tolerance=1.0,
                differs=f"Another model and device ({result.device}).",
            )
        )
    return found
