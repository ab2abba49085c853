"""How many tokens a second does the engine serve, and how many do others?

Every engine gets the same weights, prompts and number of threads, and answers greedily
to the full length. They take turns, round after round, and a row holds medians over the
rounds: a disturbance hits everyone or is voted out. Prefill is what it takes until
every request has its first token, decode the rate at which tokens come after that;
compiling stands apart. Ours come in calls of several steps, so our prefill is timed in
a serving of its own, for one token each.
"""

import contextlib
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.bench.decode import peers
from experiments.bench.decode.ours import Ours
from experiments.bench.decode.peers import Timing
from experiments.framework import Part, Sheet, units
from experiments.harness import model_shapes
from jaxkv import validation
from jaxkv.engine import state
from jaxkv.models import checkpoints
from jaxkv.progress import QUIET, Progress

PANELS = (1, 2)
DETAILS = ("spread", "same_answers", "dtype", "version", "absent")
COLORS = {"jaxkv": "#0072b2", "transformers": "#e69f00", "llama.cpp": "0.6"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is served, and beside whom."""

    model: str = "random-135m"
    """A folder, a bundled model, or a shape with random weights: random-135m (that of
    SmolLM2-135M) or random-tiny."""
    batch: tuple[int, ...] = (1, 8, 32)
    """Sequences served at once; each number gives rows of its own."""
    prompt_tokens: int = 128
    """Tokens of every prompt."""
    output_tokens: int = 128
    """Tokens of every answer, more than those of one call."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of our weights and pages; peers compute in float32."""
    page_size: int = 16
    """Token places in a page."""
    token_budget: int = 512
    """Rows that a prefill step feeds at most."""
    steps_per_call: int = 16
    """Steps between two looks of the host."""
    rounds: int = 3
    """Turns that everyone has."""
    peer_python: Path | None = None
    """A Python that has transformers, or llama_cpp and gguf, or all of them: they are
    timed on the same weights."""

    def __post_init__(self) -> None:
        """Refuses what cannot be served."""
        validation.at_least(
            self, "prompt_tokens", "page_size", "steps_per_call", "rounds"
        )
        if self.output_tokens <= self.steps_per_call:
            raise ValueError(
                f"{self.output_tokens=} must be more than {self.steps_per_call=}: "
                "the tokens of the first call are not counted"
            )
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"{self.batch=} must be numbers of at least 1")
        if self.token_budget < max(self.batch):
            raise ValueError(
                f"{self.token_budget=} must be at least max({self.batch=})"
            )


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        model="random-tiny",
        batch=(1, 2),
        prompt_tokens=8,
        output_tokens=16,
        rounds=1,
        steps_per_call=4,
    ),
}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Serves every batch size with every engine; ended early, it has whole sizes."""
    model = _load(config)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        progress.show("starting peers")
        others, absent = _start_peers(config, model, stack)
        turns = [
            (batch, turn) for batch in config.batch for turn in range(config.rounds + 1)
        ]
        everyone: list[Ours | peers.Peer] = []
        timings: dict[str, list[Timing]] = {}
        for batch, turn in progress.track(turns, "serving", "turns"):
            if turn == 0:  # warms up
                ours = Ours(model, _bounds(config, batch), config.dtype)
                everyone = [ours, *others]
                timings = {engine.name: [] for engine in everyone}
            for engine in everyone:
                progress.show(f"batch {batch}, {engine.name}")
                prompts = _prompts(config, model, batch)
                timing = engine.measure(prompts, config.output_tokens)
                timings[engine.name].append(timing)
            if turn == config.rounds:
                rows += _rows(config, batch, everyone, timings, absent)
    return rows


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws tokens per second at every batch size: decode, then prefill."""
    names = list(dict.fromkeys(row["implementation"] for row in result))
    sizes = list(dict.fromkeys(row["batch"] for row in result))
    width = 0.8 / max(1, len(names))
    for ax, kind in zip(axes, ("decode", "prefill"), strict=True):
        for i, name in enumerate(names):
            rates = {
                row["batch"]: row[f"{kind}_tokens_per_s"]
                for row in result
                if row["implementation"] == name
            }
            places = [sizes.index(size) + (i + 0.5) * width - 0.4 for size in rates]
            bars = ax.bar(
                *(places, list(rates.values()), 0.92 * width),
                label=name,
                color=COLORS.get(name),
            )
            labels = [units.rate(rate) for rate in rates.values()]
            ax.bar_label(bars, labels, fontsize=5.5, padding=1, color="0.3")
        ax.set_title(f"{kind}, tokens per second", loc="left")
        ax.set_xlim(-0.6, max(1, len(sizes)) - 0.4)
        ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        ax.tick_params(axis="x", length=0)
        ax.set_xlabel("sequences at once")
        # The numbers stand on the bars.
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    if len(names) > 1:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        look = {"handlelength": 0.8, "handleheight": 0.8, "columnspacing": 1.0}
        axes[-1].legend(ncols=len(names), fontsize=6, **place, **look)


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives the speeds, and apart from them what to know of the engines."""
    names = ("implementation", "batch")
    return {
        "rows": [{k: v for k, v in row.items() if k not in DETAILS} for row in result],
        "details": [{name: row[name] for name in names + DETAILS} for row in result],
    }


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells the rates of everyone, side by side, and what our engine took."""
    names = list(dict.fromkeys(row["implementation"] for row in result))
    batches: dict[int, dict[str, dict[str, Any]]] = {}
    for row in result:
        batches.setdefault(row["batch"], {})[row["implementation"]] = row
    if not result:
        return []
    lines = []
    for batch, rows in batches.items():
        cells = (units.named(name, rows[Ours.name][name])[1] for name in _OWN.values())
        lines.append([f"{batch:,}", *cells])
    note = "host share: the time in which the device waits between two calls."
    parts: list[Part] = [Sheet("jaxkv", ["sequences", *_OWN], lines, note)]
    if not names[1:]:
        return parts
    heads = ["sequences", *names, "jaxkv / best peer"]
    for kind, ratio in (("decode", "ratio"), ("prefill", "prefill_ratio")):
        lines = []
        for batch, rows in batches.items():
            rates = [units.rate(rows[x][f"{kind}_tokens_per_s"]) for x in names]
            lines.append([f"{batch:,}", *rates, f"{rows[Ours.name][ratio]:.2f}"])
        parts.append(Sheet(f"{kind}, tokens per second", heads, lines))
    lines = [
        [
            *(name, f"{batch:,}", row["version"]),
            *(units.share(row[key]) for key in ("spread", "same_answers")),
        ]
        for batch, rows in batches.items()
        for name, row in rows.items()
    ]
    heads = ["engine", "sequences", "version", "decode spread", "same answers"]
    absent = result[0]["absent"]
    note = f"Not timed: {absent}." if absent else ""
    parts.append(Sheet("everyone", heads, lines, note))
    return parts


_OWN = {
    "decode tokens/s": "decode_tokens_per_s",
    "prefill tokens/s": "prefill_tokens_per_s",
    "step": "step_s",
    "host share": "host_share",
    "compiling": "compile_s",
    "peak memory": "peak_bytes",
}
"""Heads of the table of our own numbers, and where each stands in a row."""


def _load(config: Config) -> checkpoints.Loaded:
    model = model_shapes.load(config.model, config.dtype)
    length = config.prompt_tokens + config.output_tokens
    if length > model.config.max_positions:
        raise ValueError(
            f"{config.prompt_tokens=} and {config.output_tokens=} are more than "
            f"{model.config.max_positions=}"
        )
    return model


def _bounds(config: Config, batch: int) -> state.EngineConfig:
    """Just enough slots and pages for a batch."""
    length = config.prompt_tokens + config.output_tokens
    return state.EngineConfig(
        num_pages=batch * -(-length // config.page_size),
        page_size=config.page_size,
        max_slots=batch,
        max_length=length,
        max_sequences=batch,
        queue_capacity=batch,
        # Padding rows are computed, too.
        token_budget=min(config.token_budget, batch * config.prompt_tokens),
        submit_width=batch,
        steps_per_call=config.steps_per_call,
    )


def _prompts(config: Config, model: checkpoints.Loaded, batch: int) -> list[list[int]]:
    size = (batch, config.prompt_tokens)
    return np.random.default_rng(0).integers(0, model.config.vocab_size, size).tolist()


def _start_peers(
    config: Config, model: checkpoints.Loaded, stack: contextlib.ExitStack
) -> tuple[list[peers.Peer], list[str]]:
    """Starts those that are installed; says why the others are not there."""
    if config.peer_python is None:
        return [], []
    python, threads = config.peer_python, peers.num_threads()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        checkpoints.save_model(folder, model.config, model.params, dtype="float32")
        everyone = (peers.Peer(x, python, folder, threads) for x in peers.KINDS)
        return peers.start(stack, python, everyone)


def _rows(
    config: Config,
    batch: int,
    everyone: list[Any],
    timings: dict[str, list[Timing]],
    absent: list[str],
) -> list[dict[str, Any]]:
    """One row for each engine, medians over the turns after the first."""
    ours = timings[Ours.name][-1].tokens
    rows: list[dict[str, Any]] = []
    for engine in everyone:
        first, *later = timings[engine.name]
        prefill_s = statistics.median(x.prefill_s for x in later)
        rates = sorted(x.num_decoded / x.decode_s for x in later)
        rate = statistics.median(rates)
        row = {
            "implementation": engine.name,
            "batch": batch,
            "prompt_tokens": config.prompt_tokens,
            "output_tokens": config.output_tokens,
            "prefill_tokens_per_s": batch * config.prompt_tokens / prefill_s,
            "decode_tokens_per_s": rate,
            "step_s": batch / rate,
            "host_share": None,
            "compile_s": 0.0,
            "peak_bytes": max(x.peak_bytes for x in later),
            "ratio": None,
            "prefill_ratio": None,
            "spread": (rates[-1] - rates[0]) / rate,
            "same_answers": _share_equal(ours, later[-1].tokens),
            "dtype": "float32",
            "version": engine.version,
            "absent": "",
        }
        if isinstance(engine, Ours):
            row |= {
                "host_share": _median(engine.host_shares[1:]),
                "compile_s": max(0.0, first.prefill_s - prefill_s),
                "dtype": config.dtype,
                "absent": "; ".join(absent),
            }
        rows.append(row)
    for kind, key in (("decode", "ratio"), ("prefill", "prefill_ratio")):
        name = f"{kind}_tokens_per_s"
        others: list[float] = [row[name] for row in rows[1:]]
        for row in rows if others else []:
            row[key] = row[name] / max(others)
    return rows


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _share_equal(a: list[list[int]], b: list[list[int]]) -> float:
    pairs = list(zip(a, b, strict=True))
    return sum(x == y for x, y in pairs) / len(pairs)
