"""How many tokens per second does the engine generate, compared with other engines?

All engines get the same weights, prompts and number of threads, and decode greedily.
They run in rotation, round after round. A rate is the median over the rounds, and a
ratio the median of the rounds' ratios, so that a disturbance affects all engines or is
removed by the median.

Decoding is measured while every sequence decodes, after a context that was not
prefilled: the pages of jaxkv and the cache of transformers contain random numbers, and
llama.cpp prefills one sequence and copies it. Prefill is the time until every request
has its first token, measured separately for batches of moderate size. The floor is the
time to read weights, K and V once, at the read bandwidth measured in the same run.
"""

import contextlib
import functools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lab
from experiments.bench.decode import parts, tables
from experiments.bench.decode.jaxkv_engine import JaxkvEngine, TurnTiming
from experiments.bench.decode.tables import DecodeRow, plot, summary
from experiments.bench.tables import split_details
from experiments.harness import (
    MODEL_PEERS,
    PeerProcess,
    format_absent,
    load_benchmark_model,
    make_benchmark_config,
    measure_in_turns,
    median_and_spread,
    start_peers,
)
from jaxkv.engine import EngineConfig
from jaxkv.models import LoadedModel, WeightFormat, quantize_params, save_model
from pallas_kernels import devices
from pallas_kernels.bench import Ceilings, measure_ceilings
from scaling.costs import kv_bytes_per_token
from scaling.shapes import describe_config

DETAILS = ("spread", "same_answers", "dtype", "version", "absent")
READS = 4
"""Tokens per answer that are compared between engines; one for long prompts."""
MAX_PREFILL_TOKENS = 1024
"""Largest number of prompt tokens in a batch for which `READS` tokens are compared, in
a turn before the timed turns; a longer prefill takes seconds and is not repeated."""


class Config(lab.ConfigRecord):
    """Model and workload, and the peers."""

    model: str = "random-135m"
    """A folder, a bundled model, or a shape with random weights: random-135m
    (SmolLM2-135M), random-8b (Llama-3-8B) or random-tiny."""
    batch: lab.Sizes = (1, 8, 32)
    """Batch sizes; each gives separate rows."""
    contexts: lab.Sizes = (128, 768, 2048)
    """Context lengths in tokens at the start of decoding; each gives separate rows."""
    prompt_tokens: lab.NonNegativeInt = 0
    """A single context length that replaces `contexts`; 0 uses `contexts`."""
    prefill_tokens: lab.NonNegativeInt = 4096
    """Largest number of prompt tokens in a batch for which prefill is timed."""
    output_tokens: int = 128
    """Tokens that every sequence decodes in a turn, more than those of one call."""
    turn_s: lab.PositiveFloat = 2.0
    """Time limit of decoding in a turn, in s; at least one call runs."""
    parts: bool = True
    """Also measure the parts of a decode step, without speculation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and pages of jaxkv; peers compute in float32."""
    weights: WeightFormat = "model"
    """Format of the weights of jaxkv's layers; peers have those of the model."""
    page_size: lab.PositiveInt = 16
    """Tokens per page."""
    token_budget: int = 512
    """Largest number of rows in a prefill step."""
    speculate: Literal["ngram", "jacobi", "early-exit"] | None = None
    """Speculative method of jaxkv; the tokens are the same."""
    drafts: lab.PositiveInt = 3
    """Draft tokens per step with speculation."""
    steps_per_call: lab.PositiveInt = 16
    """Steps per call to the device."""
    rounds: lab.PositiveInt = 3
    """Turns of every engine."""
    peer_python: Path | None = None
    """Python interpreter with transformers, or llama_cpp and gguf, or all of them;
    these engines are timed on the same weights."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.output_tokens <= self.steps_per_call:
            raise ValueError(
                f"output_tokens={self.output_tokens!r} must be more than "
                f"steps_per_call={self.steps_per_call!r}: "
                "tokens of the first call are not counted"
            )
        limit = self.steps_per_call * (1 + self.drafts)
        if self.speculate is not None and self.output_tokens <= limit:
            raise ValueError(
                f"output_tokens={self.output_tokens!r} must be more than {limit}: with "
                f"drafts={self.drafts!r} "
                "that many may come in the first call, whose tokens are not counted"
            )
        if self.token_budget < max(self.batch):
            raise ValueError(
                f"token_budget={self.token_budget!r} must be at least "
                f"max(batch={self.batch!r})"
            )

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Batch and context of every measurement."""
        contexts = (self.prompt_tokens,) if self.prompt_tokens else self.contexts
        return [(batch, context) for batch in self.batch for context in contexts]


CONFIGS = {
    "real": Config(),
    "gpu": Config(
        model="random-8b",
        dtype="bfloat16",
        batch=(1, 32, 128),
        contexts=(1024,),
        prefill_tokens=32 * 1024,
        token_budget=4096,
        turn_s=5.0,
    ),
    "smoke": Config(
        model="random-tiny",
        batch=(1, 2),
        prompt_tokens=8,
        output_tokens=16,
        rounds=1,
        steps_per_call=4,
    ),
}


class PeerEngine(PeerProcess):
    """A running peer engine, as a context; leaving it ends the process."""

    dtype = "float32"
    host_share = None
    compile_s = 0.0

    def measure(
        self, prompts: list[list[int]], num_tokens: int, turn_s: float, reads: int
    ) -> TurnTiming:
        """Runs a turn, see `JaxkvEngine.measure`.

        Raises:
          ValueError: the peer failed, with its last error line.
        """
        question = {"prompts": prompts, "output_tokens": num_tokens}
        return TurnTiming(**self.ask(question | {"turn_s": turn_s, "reads": reads}))


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[DecodeRow]:
    """Measures every case with every engine; a stopped run has complete cases only."""
    model = load_benchmark_model(config.model, config.dtype)
    length = max(_length(config, context) for _, context in config.cases)
    if length > model.config.max_positions:
        raise ValueError(
            f"{max(x for _, x in config.cases)} tokens of context and "
            f"{config.output_tokens=}, with those of a call, must be at most "
            f"{model.config.max_positions=}"
        )
    rows: list[DecodeRow] = []
    fixed: dict[int, parts.StepParts] = {}
    answers: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        progress.show("starting peers")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            if config.peer_python:
                save = save_model
                save(folder, model.config, model.params, dtype="float32")
            peers = {name: (*peer, folder) for name, peer in MODEL_PEERS.items()}
            peer_engines, absent = start_peers(
                stack, PeerEngine, config.peer_python, peers, needed=True
            )
        # Ceilings of reads and products, on arrays larger than the caches.
        on_gpu = devices.current_target().platform == "gpu"
        sizes = (2**29, 8192) if on_gpu else (2**25, 1024)
        size, width = (2**16, 64) if config.model == "random-tiny" else sizes
        ceilings = measure_ceilings(
            num_elements=size, width=width, dtype=config.dtype, num_calls=10
        )

        # Peers have the weights of the model.
        model = model._replace(params=quantize_params(model.params, config.weights))

        def measure(
            case: tuple[int, int],
            engine: JaxkvEngine | PeerEngine,
            turn_s: float = config.turn_s,
            reads: int = 1,
        ) -> TurnTiming:
            rng = np.random.default_rng(0)
            prompts = rng.integers(0, model.config.vocab_size, case).tolist()
            reads *= math.prod(case) <= config.prefill_tokens
            return engine.measure(prompts, config.output_tokens, turn_s, reads)

        def begin(case: tuple[int, int]) -> list[JaxkvEngine | PeerEngine]:
            bounds = _bounds(config, *case)
            label = f"batch {case[0]}, context {case[1]}"
            progress.show(f"{label}: compiling jaxkv")
            jaxkv_row = JaxkvEngine(model, bounds, config.dtype, config.speculate)
            reads = READS * (math.prod(case) <= MAX_PREFILL_TOKENS)
            for one in (jaxkv_row, *peer_engines):
                progress.show(f"{label}: first turn of {one.name}")
                answers[one.name] = measure(case, one, 0.1, reads).tokens
            batch, context = case
            if config.parts and config.speculate is None and batch not in fixed:
                progress.show(f"parts of a step, batch {batch}")
                prompts = [[0] * context] * batch
                num = config.output_tokens
                fixed[batch] = parts.measure_parts(
                    jaxkv_row, model, prompts, num, config.turn_s
                )
            return [jaxkv_row, *peer_engines]

        for case, engines, timings in measure_in_turns(
            config.cases,
            config.rounds,
            begin,
            measure,
            progress=progress,
            bar_label="serving",
            case_name="batch and context",
        ):
            jaxkv_row, *peer_rows = _rows(config, case, engines, timings, answers)
            jaxkv_row["absent"] = format_absent(absent)
            for row in (jaxkv_row, *peer_rows):
                row |= _floor(model, config, case, row, ceilings)
            if (step := fixed.get(case[0])) is not None:
                # Attention is the remainder of the step.
                jaxkv_row |= {
                    "products_s": step.products_s,
                    "sampling_s": step.sampling_s,
                    "attention_s": jaxkv_row["step_s"] - sum(step),
                }
            rows += [jaxkv_row, *peer_rows]
    return rows


def _length(config: Config, context: int) -> int:
    """Returns the tokens of a sequence: context, first call, and the turn."""
    drafts = 0 if config.speculate is None else config.drafts
    first = 1 + config.steps_per_call * (1 + drafts)
    return context + first + config.output_tokens


def _floor(
    model: LoadedModel,
    config: Config,
    case: tuple[int, int],
    row: DecodeRow,
    ceilings: Ceilings,
) -> DecodeRow:
    """Returns the time to read a step's weights, K and V, and its share of the step."""
    shape, (batch, context) = model.config, case
    leaves = jax.tree.leaves(model.params)
    num_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
    if not shape.tie_embeddings:  # an embedding lookup reads few rows
        num_bytes -= model.params["embed"]["weight"].nbytes
    mean = context + config.output_tokens // 2
    num_bytes += (
        batch
        * mean
        * kv_bytes_per_token(
            describe_config(shape),
            kv_bytes=np.dtype(jnp.dtype(config.dtype)).itemsize,
        )
    )
    rate = max(ceilings.read_bytes_per_s, ceilings.copy_bytes_per_s)
    floor_s = num_bytes / rate
    return {
        "step_bytes": num_bytes,
        "floor_s": floor_s,
        "fraction": floor_s / row["step_s"],
        "read_bytes_per_s": rate,
    }


def _bounds(config: Config, batch: int, context: int) -> EngineConfig:
    """Returns an engine config with the slots and pages of a batch."""
    length = _length(config, context)
    # Padding rows are computed as well: prefill steps have equal sizes.
    num_rows = batch * context
    num_steps = -(-num_rows // config.token_budget)
    budget = max(batch, -(-num_rows // num_steps))
    return make_benchmark_config(
        batch,
        length,
        page_size=config.page_size,
        token_budget=budget,
        steps_per_call=config.steps_per_call,
        max_drafts=0 if config.speculate is None else config.drafts,
    )


def _rows(
    config: Config,
    case: tuple[int, int],
    engines: list[JaxkvEngine | PeerEngine],
    timings: dict[str, list[TurnTiming]],
    answers: dict[str, list[list[int]]],
) -> list[DecodeRow]:
    """Returns one row per engine, medians over the turns; jaxkv is the first."""
    batch, context = case
    if not any(answers[JaxkvEngine.name]):
        answers = {x: timings[x][-1].tokens for x in timings}
    rates = {x: [t.num_decoded / t.decode_s for t in timings[x]] for x in timings}
    reads = {
        x: [batch * context / t.prefill_s for t in timings[x] if t.prefill_s]
        for x in timings
    }
    rows: list[DecodeRow] = []
    for engine in engines:
        name = engine.name
        taken = timings[engine.name]
        rate, spread = median_and_spread(rates[name])
        prefill = statistics.median(reads[name]) if reads[name] else None
        same = zip(answers[JaxkvEngine.name], answers[name], strict=True)
        ratio, ratio_range = _ratio(rates, name)
        prefill_ratio, prefill_range = _ratio(reads, name)
        row: DecodeRow = {
            "implementation": name,
            "batch": batch,
            "prompt_tokens": context,
            "output_tokens": config.output_tokens,
            "prefill_tokens_per_s": prefill,
            "first_token_s": batch * context / prefill if prefill else None,
            "decode_tokens_per_s": rate,
            "step_s": batch / rate,
            "occupancy": min(x.occupancy for x in taken),
            "host_share": engine.host_share,
            "compile_s": engine.compile_s,
            "peak_bytes": max(x.peak_bytes for x in taken),
            "spread": spread,
            "same_answers": float(np.mean([x == y for x, y in same])),
            "dtype": engine.dtype,
            "version": engine.version,
            "absent": "",
            "ratio": ratio,
            "ratio_range": ratio_range,
            "prefill_ratio": prefill_ratio,
            "prefill_ratio_range": prefill_range,
        }
        rows.append(row)
    return rows


def _ratio(
    rates: dict[str, list[float]], name: str
) -> tuple[float | None, list[float] | None]:
    """Returns the median and range of the ratio to the best peer of each round."""
    peers = [
        series
        for other, series in rates.items()
        if other != JaxkvEngine.name and series
    ]
    if not peers or not rates[name]:
        return None, None
    best = [max(turn_rates) for turn_rates in zip(*peers, strict=True)]
    series = [x / y for x, y in zip(rates[name], best, strict=True)]
    return statistics.median(series), [min(series), max(series)]


STUDY = lab.Study(
    CONFIGS,
    list,
    run,
    plot,
    summary=summary,
    metrics=functools.partial(split_details, names=tables.KEY_COLUMNS, details=DETAILS),
    panels=lab.Panels(4, 1, 2.9),
)
