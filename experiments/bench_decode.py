"""How many tokens a second does the engine serve, and how many do others?

Every engine gets the same weights, prompts and number of threads, and answers greedily
to the full length. They take turns, round after round, and a row holds medians over the
rounds: a disturbance hits everyone or is voted out. A batch is served twice in a turn,
for one token each (prefill) and for all (what that takes longer is decode). Compiling
stands apart.
"""

import contextlib
import dataclasses
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments import bundled, peers, watching
from experiments.peers import Timing
from experiments.progress import QUIET, Progress
from jaxkv import checkpoints, models, states
from jaxkv.sampling import Sampling

RANDOM = {
    "random-135m": models.ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_size=1536,
        max_positions=8192,
        rope_theta=100_000.0,
    ),
    "random-tiny": models.ModelConfig(
        vocab_size=257,
        hidden_size=32,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_size=64,
        max_positions=1024,
    ),
}
"""Shapes that are served with random weights: the values do not matter for speed."""

PANELS = (1, 2)


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
    """Tokens of every answer, at least 2."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of our weights and pages; peers compute in float32."""
    page_size: int = 16
    """Token places in a page."""
    token_budget: int = 256
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
        for name in ("prompt_tokens", "page_size", "steps_per_call", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.output_tokens < 2:
            raise ValueError(f"{self.output_tokens=} must be at least 2")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"{self.batch=} must be numbers of at least 1")
        if self.token_budget < max(self.batch):
            raise ValueError(
                f"{self.token_budget=} must be at least max({self.batch=})"
            )


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        model="random-tiny", batch=(1, 2), prompt_tokens=8, output_tokens=32, rounds=1
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
                everyone = [Ours(config, model, batch), *others]
                timings = {engine.name: [] for engine in everyone}
            for engine in everyone:
                progress.show(f"batch {batch}, {engine.name}")
                prompts = _prompts(config, model, batch)
                timing = engine.measure(prompts, config.output_tokens)
                timings[engine.name].append(timing)
            if turn == config.rounds:
                rows += _rows(config, batch, everyone, timings, absent)
    return rows


class Ours:
    """Our engine, serving batches of one size. The first `measure` compiles.

    Args:
      config: the benchmark.
      model: what to serve.
      batch: sequences at once; slots and pages are just enough for them.
    """

    name = "jaxkv"

    def __init__(self, config: Config, model: checkpoints.Loaded, batch: int):
        length = config.prompt_tokens + config.output_tokens
        bounds = states.EngineConfig(
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
        self._engine = watching.WatchedEngine(
            model.params,
            models.Forward(model.config, bounds.numerics),
            models.make_pages(model.config, bounds, dtype=config.dtype),
            bounds,
            eos_ids=(),
            vocab_size=model.config.vocab_size,
        )
        self.host_shares: list[float | None] = []

    def measure(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        """Serves prompts of one length as one batch, greedily."""
        watching.reset_peak()
        prefill_s, _ = self._serve(prompts, 1)
        with self._engine.watch() as calls:
            total_s, tokens = self._serve(prompts, output_tokens)
        self.host_shares.append(watching.host_share(calls))
        return Timing(prefill_s, total_s - prefill_s, tokens, watching.peak_bytes())

    def _serve(
        self, prompts: list[list[int]], num_tokens: int
    ) -> tuple[float, list[list[int]]]:
        ask = Sampling.greedy(max_tokens=num_tokens, ignore_eos=True)
        start_s = self._engine.now()
        answers = self._engine.generate(prompts, ask)
        # The host held the last token; what it tidies up afterwards is no one's wait.
        end_s = max(answer.finish_s for answer in answers)
        return end_s - start_s, [answer.tokens for answer in answers]


def plot(axes: Any, result: list[dict[str, Any]]) -> None:
    """Draws tokens per second against the batch size: decode, prefill."""
    kinds = ("decode", "prefill")
    names = list(dict.fromkeys(row["implementation"] for row in result))
    for ax, kind in zip(axes, kinds, strict=True):
        for name in names:
            mine = [row for row in result if row["implementation"] == name]
            sizes = [row["batch"] for row in mine]
            rates = [row[f"{kind}_tokens_per_s"] for row in mine]
            (line,) = ax.plot(sizes, rates, marker="o")
            ax.annotate(
                name,
                (sizes[-1], rates[-1]),
                xytext=(4, 0),
                textcoords="offset points",
                color=line.get_color(),
                va="center",
            )
        ax.set_title(kind)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("sequences at once")
        ax.set_ylabel("tokens per second")
        sizes = sorted({row["batch"] for row in result})
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.margins(x=0.25)


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives the rows as they are."""
    return {"rows": result}


def _load(config: Config) -> checkpoints.Loaded:
    if config.model in RANDOM:
        shape = RANDOM[config.model]
        params = models.init_params(shape, jax.random.key(0), dtype=config.dtype)
        model = checkpoints.Loaded(shape, params, None, ())
    else:
        folder = bundled.folder_of(config.model)
        model = checkpoints.load_model(folder, dtype=config.dtype)
    length = config.prompt_tokens + config.output_tokens
    if length > model.config.max_positions:
        raise ValueError(
            f"{config.prompt_tokens=} and {config.output_tokens=} are more than "
            f"{model.config.max_positions=}"
        )
    return model


def _prompts(config: Config, model: checkpoints.Loaded, batch: int) -> list[list[int]]:
    size = (batch, config.prompt_tokens)
    return np.random.default_rng(0).integers(0, model.config.vocab_size, size).tolist()


def _start_peers(
    config: Config, model: checkpoints.Loaded, stack: contextlib.ExitStack
) -> tuple[list[peers.Peer], list[str]]:
    """Starts those that are installed; says why the others are not there."""
    if config.peer_python is None:
        return [], []
    found, absent = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        checkpoints.save_model(folder, model.config, model.params, dtype="float32")
        for kind in peers.KINDS:
            peer = peers.Peer(kind, config.peer_python, folder, _num_threads())
            try:
                found.append(stack.enter_context(peer))
            except ValueError as error:
                absent.append(str(error))
    if not found:
        raise ValueError(f"{config.peer_python}: no peer: {'; '.join(absent)}")
    return found, absent


def _num_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rows(
    config: Config,
    batch: int,
    everyone: list[Any],
    timings: dict[str, list[Timing]],
    absent: list[str],
) -> list[dict[str, Any]]:
    """One row for each engine, medians over the turns after the first."""
    prompt_tokens = batch * config.prompt_tokens
    decoded = batch * (config.output_tokens - 1)
    ours = timings["jaxkv"][-1].tokens
    rows = []
    for engine in everyone:
        first, *later = timings[engine.name]
        prefill_s = statistics.median(x.prefill_s for x in later)
        decode_s = statistics.median(x.decode_s for x in later)
        slowest_s, fastest_s = (f(x.decode_s for x in later) for f in (max, min))
        row = {
            "implementation": engine.name,
            "batch": batch,
            "prompt_tokens": config.prompt_tokens,
            "output_tokens": config.output_tokens,
            "prefill_tokens_per_s": _rate(prompt_tokens, prefill_s),
            "decode_tokens_per_s": _rate(decoded, decode_s),
            "decode_slowest": _rate(decoded, slowest_s),
            "decode_fastest": _rate(decoded, fastest_s),
            "step_s": decode_s / (config.output_tokens - 1),
            "host_share": None,
            "compile_s": 0.0,
            "peak_bytes": max(x.peak_bytes for x in later),
            "same_answers": _share_equal(ours, later[-1].tokens),
            "dtype": "float32",
            "version": "",
            "note": "",
        }
        if isinstance(engine, Ours):
            row |= {
                "host_share": _median(engine.host_shares[1:]),
                "compile_s": max(0.0, first.prefill_s - prefill_s),
                "dtype": config.dtype,
                "note": "; ".join(absent),
            }
        else:
            row["version"] = engine.version
        rows.append(row)
    for kind, key in (("decode", "ratio"), ("prefill", "prefill_ratio")):
        name = f"{kind}_tokens_per_s"
        best = max((row[name] or 0.0 for row in rows[1:]), default=0.0)
        for row in rows:
            row[key] = row[name] / best if best and row[name] else None
    return rows


def _rate(num_tokens: int, seconds: float) -> float | None:
    """Tokens per second; None where a difference of two times drowned in noise."""
    return num_tokens / seconds if seconds > 0 else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _share_equal(a: list[list[int]], b: list[list[int]]) -> float:
    pairs = list(zip(a, b, strict=True))
    return sum(x == y for x, y in pairs) / len(pairs)
