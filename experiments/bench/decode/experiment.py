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
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.bench import peer_process
from experiments.bench.decode.ours import Ours, Timing
from experiments.bench.turns import in_turns, middle, split
from experiments.framework import (
    Floats,
    Ints,
    Part,
    Sheet,
    Table,
    Texts,
    column,
    units,
)
from experiments.harness import model_shapes
from jaxkv import validation
from jaxkv.engine import state
from jaxkv.models import checkpoints
from jaxkv.progress import QUIET, Progress

KINDS = {"transformers": "Transformers", "llama.cpp": "LlamaCpp"}
SCRIPT = Path(__file__).with_name("peer_script.py")
NAMES = ("implementation", "batch")
DETAILS = ("spread", "same_answers", "dtype", "version", "absent")
RATIOS = {"decode": "ratio", "prefill": "prefill_ratio"}
"""Names of rates, held against those of the best peer."""
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
    speculate: Literal["ngram", "jacobi", "early-exit"] | None = None
    """How our engine guesses tokens; it generates the same ones."""
    drafts: int = 4
    """Tokens guessed in a step, where any are."""
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
            *(self, "prompt_tokens", "page_size", "steps_per_call", "rounds", "drafts")
        )
        if self.output_tokens <= self.steps_per_call:
            raise ValueError(
                f"{self.output_tokens=} must be more than {self.steps_per_call=}: "
                "the tokens of the first call are not counted"
            )
        most = self.steps_per_call * (1 + self.drafts)
        if self.speculate is not None and self.output_tokens <= most:
            raise ValueError(
                f"{self.output_tokens=} must be more than {most}: with {self.drafts=} "
                "that many may come in the first call, whose tokens are not counted"
            )
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"{self.batch=} must be numbers of at least 1")
        if self.token_budget < max(self.batch):
            raise ValueError(
                f"{self.token_budget=} must be at least max({self.batch=})"
            )


PANELS = (1, 2)
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


class Peer(peer_process.PeerProcess):
    """A running engine, as a context; leaving it ends the process."""

    dtype, host_share, first_s = "float32", None, 0.0

    def measure(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        """Serves prompts of one length as one batch, greedily.

        Raises:
          ValueError: the peer broke down; the line says what it said last.
        """
        return Timing(**self.ask({"prompts": prompts, "output_tokens": output_tokens}))


class Rates(Table):
    """What is told of a result, of which every column is a key of the rows."""

    implementation: Texts = column("who", heading="engine")
    batch: Ints = column("at once", heading="sequences", form="{:,}")
    decode_tokens_per_s: Floats = column("median", heading="decode tokens/s")
    prefill_tokens_per_s: Floats = column("median", heading="prefill tokens/s")
    step_s: Floats = column("a token of every sequence")
    host_share: np.ndarray = column("of the time; None where it is not known")
    compile_s: Floats = column("of the first serving", heading="compiling")
    peak_bytes: Ints = column("of the process or its device", heading="peak memory")
    ratio: np.ndarray = column("to the best peer's decode", form="{:.2f}")
    prefill_ratio: np.ndarray = column("to the best peer's prefill", form="{:.2f}")
    version: Texts = column("of its libraries")
    spread: Floats = column("of rates", heading="decode spread", form=units.share)
    same_answers: Floats = column("share that is ours", form=units.share)


OWN = ("batch", "decode_tokens_per_s", "prefill_tokens_per_s", "step_s")
OWN += ("host_share", "compile_s", "peak_bytes")


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Serves every batch size with every engine; ended early, it has whole sizes."""
    model = _load(config)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        progress.show("starting peers")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            if config.peer_python:
                save = checkpoints.save_model
                save(folder, model.config, model.params, dtype="float32")
            peers = {name: (SCRIPT, kind, folder) for name, kind in KINDS.items()}
            others, absent = peer_process.start(
                stack, Peer, config.peer_python, peers, needed=True
            )

        def measure(batch: int, engine: Ours | Peer) -> Timing:
            size = (batch, config.prompt_tokens)
            rng = np.random.default_rng(0)
            prompts = rng.integers(0, model.config.vocab_size, size).tolist()
            return engine.measure(prompts, config.output_tokens)

        def begin(batch: int) -> list[Ours | Peer]:
            bounds = _bounds(config, batch)
            ours = Ours(model, bounds, config.dtype, config.speculate)
            ours.first_s, *_ = (measure(batch, x).prefill_s for x in (ours, *others))
            return [ours, *others]

        for batch, everyone, timings in in_turns(
            config.batch,
            config.rounds,
            begin,
            measure,
            progress=progress,
            doing="serving",
            what="batch",
        ):
            ours, *theirs = _rows(config, batch, everyone, timings)
            ours["absent"] = peer_process.in_a_line(absent)
            rows += [ours, *theirs]
    return rows


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws tokens per second at every batch size: decode, then prefill."""
    found = Rates.of(result)
    names, sizes = found.distinct("implementation"), found.distinct("batch")
    width = 0.8 / max(1, len(names))
    for ax, kind in zip(axes, RATIOS, strict=True):
        for i, name in enumerate(names):
            mine = found.where(implementation=name)
            places = [sizes.index(x) + (i + 0.5) * width - 0.4 for x in mine.batch]
            rates = getattr(mine, f"{kind}_tokens_per_s")
            look = {"label": name, "color": COLORS.get(name)}
            bars = ax.bar(places, rates, 0.92 * width, **look)
            labels = [*map(units.rate, rates)]
            ax.bar_label(bars, labels, fontsize=5.5, padding=1, color="0.3")
        ax.set(title=f"{kind}, tokens per second", xlabel="sequences at once")
        ax.set_yticks([])  # the numbers stand on the bars
        ax.set_xlim(-0.6, max(1, len(sizes)) - 0.4)
        ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        ax.tick_params(axis="x", length=0)
        ax.spines["left"].set_visible(False)
    if len(names) > 1:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        look = {"handlelength": 0.8, "handleheight": 0.8, "columnspacing": 1.0}
        axes[-1].legend(ncols=len(names), fontsize=6, **place, **look)


metrics = functools.partial(split, names=NAMES, details=DETAILS)


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells the rates of everyone, side by side, and what our engine took."""
    if not result:
        return []
    found = Rates.of(result)
    note = "host share: the time in which the device waits between two calls."
    parts: list[Part] = [
        found.where(implementation=Ours.name).sheet(Ours.name, *OWN, note=note)
    ]
    names = found.distinct("implementation")
    if not names[1:]:
        return parts
    heads = ["sequences", *names, "jaxkv / best peer"]
    for kind, ratio in RATIOS.items():
        lines = []
        for batch in found.distinct("batch"):
            mine = found.where(batch=batch)
            rates = map(units.rate, getattr(mine, f"{kind}_tokens_per_s"))
            lines.append([f"{batch:,}", *rates, f"{getattr(mine, ratio)[0]:.2f}"])
        parts.append(Sheet(f"{kind}, tokens per second", heads, lines))
    absent = result[0]["absent"]
    told = ("implementation", "batch", "version", "spread", "same_answers")
    note = f"Not timed: {absent}." if absent else ""
    return [*parts, found.sheet("everyone", *told, note=note)]


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
        max_drafts=0 if config.speculate is None else config.drafts,
    )


def _rows(
    config: Config,
    batch: int,
    everyone: list[Any],
    timings: dict[str, list[Timing]],
) -> list[dict[str, Any]]:
    """One row for each engine, medians over the turns; ours is the first."""
    answers = timings[Ours.name][-1].tokens
    rows: list[dict[str, Any]] = []
    for engine in everyone:
        taken = timings[engine.name]
        same = zip(answers, taken[-1].tokens, strict=True)
        prefill_s = statistics.median(x.prefill_s for x in taken)
        rate, spread = middle([x.num_decoded / x.decode_s for x in taken])
        row = {
            "implementation": engine.name,
            "batch": batch,
            "prompt_tokens": config.prompt_tokens,
            "output_tokens": config.output_tokens,
            "prefill_tokens_per_s": batch * config.prompt_tokens / prefill_s,
            "decode_tokens_per_s": rate,
            "step_s": batch / rate,
            "host_share": engine.host_share,
            "compile_s": max(0.0, engine.first_s - prefill_s),
            "peak_bytes": max(x.peak_bytes for x in taken),
            "ratio": None,
            "prefill_ratio": None,
            "spread": spread,
            "same_answers": float(np.mean([x == y for x, y in same])),
            "dtype": engine.dtype,
            "version": engine.version,
            "absent": "",
        }
        rows.append(row)
    for kind, ratio in RATIOS.items():
        rates = [row[f"{kind}_tokens_per_s"] for row in rows]
        best = max(rates[1:], default=None)
        for row, rate in zip(rows, rates, strict=True):
            row[ratio] = rate / best if best else None
    return rows
