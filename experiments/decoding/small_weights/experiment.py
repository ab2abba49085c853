"""Measures bytes, loss and decode rate of weights in 8 and 4 bits.

The bundled models score pieces of held-out files with each format of weights; the loss
is the decrease of the log-likelihood from float32 on the same tokens, and its standard
error is that of the mean over the pieces. Then an engine of each format decodes one
sequence greedily, in rounds of all engines in turn, and the tokens after the first call
are timed. A ratio is the median of the
ratios to float32 of the same round, by wall time and by processor time.

Q8_0 and Q4_0 are formats of llama.cpp: blocks of 32 weights with a scale in float16, 34
and 18 bytes (ggml/src/ggml-common.h). Their rule of rounding is applied to the weights
that jaxkv quantizes, and the model runs in float32, so they have no decode rate. A row
of inputs that is no multiple of 32 counts the part of its last block; llama.cpp does
not quantize such rows.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

import jaxkv
from experiments import lab
from experiments.harness import cut_held_out_prompts, load_text_model
from jaxkv import files
from jaxkv.models import (
    LoadedModel,
    ModelConfig,
    Params,
    QuantizedWeight,
    WeightFormat,
    load_model,
    quantize_params,
)
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine

CLAIMS = lab.claims_file(__file__)
BLOCK_WEIGHTS = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18}
"""Bytes of a block in the formats of llama.cpp."""
QUANTIZED: dict[str, WeightFormat] = {
    "int8": "int8",
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
FORMATS = ("bfloat16", *QUANTIZED, *BLOCK_BYTES)
"""Formats that are compared with float32."""
STEPS_PER_CALL = 16


class Config(lab.ConfigRecord):
    """Models, formats and text."""

    models: Annotated[tuple[str, ...], lab.Entries(1)] = ("stdlib-bytes",)
    """Folders, or names of bundled models, with a tokenizer."""
    formats: Annotated[tuple[str, ...], lab.Choices(FORMATS)] = FORMATS
    """Formats that are compared with float32."""
    num_sequences: Annotated[int, lab.Range(2)] = 16
    """Pieces of held-out text."""
    sequence_tokens: Annotated[int, lab.Range(2)] = 512
    """Tokens of each piece."""
    prompt_tokens: lab.PositiveInt = 16
    """Tokens before the decoded ones."""
    output_tokens: Annotated[int, lab.Range(2 * STEPS_PER_CALL)] = 144
    """Tokens of the answer in a round; those of the first call are not timed."""
    rounds: lab.PositiveInt = 7
    """Rounds of all engines in turn."""
    seed: lab.NonNegativeInt = 0
    """Seed of the pieces."""


CONFIGS = {
    "real": Config(),
    "both": Config(models=("stdlib-bytes", "stdlib-bytes-deepseek")),
    "smoke": Config(
        formats=("int8", "Q4_0"),
        num_sequences=2,
        sequence_tokens=48,
        output_tokens=32,
        rounds=1,
    ),
}


def _format_known(form: str) -> Callable[[float | None], str]:
    """Returns a format of numbers that prints a dash for NaN."""
    return lambda x: "-" if x is None or np.isnan(x) else form.format(x)


class FormatRuns(lab.ResultTable):
    """Bytes, loss and decode rate by model and format."""

    model: lab.Texts = lab.column("model")
    weights: lab.Texts = lab.column("format of the weights")
    bits: lab.Floats = lab.column("bits per quantized weight", form="{:.2f}")
    stored_bytes: lab.Floats = lab.column("all parameters")
    read_bytes: lab.Floats = lab.column("parameters that a step of one token reads")
    loss: lab.Floats = lab.column("log-likelihood lost [nats/token]", form="{:.4f}")
    loss_error: lab.Floats = lab.column("its standard error", form="{:.4f}")
    rate: lab.Floats = lab.column("tokens/s", form=_format_known("{:.0f}"))
    ratio: lab.Floats = lab.column("rate / float32", form=_format_known("{:.2f}"))
    ratio_low: lab.Floats = lab.column("first quartile", form=_format_known("{:.2f}"))
    ratio_high: lab.Floats = lab.column("third quartile", form=_format_known("{:.2f}"))
    cpu_ratio: lab.Floats = lab.column(
        "by processor time", form=_format_known("{:.2f}")
    )


class Result(lab.ResultRecord):
    """Runs of all models and formats."""

    runs: FormatRuns = lab.column("models and formats")
    num_sequences: int = lab.column("pieces of held-out text")
    sequence_tokens: int = lab.column("tokens of each piece")
    rounds: int = lab.column("rounds of the decode rate")


class WeightBytes(NamedTuple):
    """Bytes of the parameters of a model."""

    bits: float
    """Bits per quantized weight, scales included."""
    stored: float
    """Bytes of all parameters."""
    read: float
    """Bytes that a step of one token needs: chosen experts, one row of an embedding
    that is not the head, and no module for multi-token prediction."""


def _is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedWeight)


def count_weight_bytes(
    config: ModelConfig, params: Params, *, bits: float | None = None
) -> WeightBytes:
    """Counts the bytes of quantized parameters.

    Args:
      config: architecture of the model.
      params: parameters with quantized weights.
      bits: bits of each quantized weight in another format; None counts the arrays.
    """
    num_weights = 0
    quantized_bytes = stored = read = 0.0
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_quantized)
    for path, leaf in leaves:
        keys = [key.key for key in path]
        num_bytes = sum(part.nbytes for part in jax.tree.leaves(leaf))
        if _is_quantized(leaf):
            size = math.prod(leaf.shape)
            num_bytes = num_bytes if bits is None else size * bits / 8
            num_weights += size
            quantized_bytes += num_bytes
        stored += num_bytes
        if keys[0] == "ahead":
            continue
        if keys[0] == "embed" and not config.tie_embeddings:
            num_bytes /= config.vocab_size
        elif keys[-3:-1] in (["mixture", "up"], ["mixture", "down"]):
            assert config.experts is not None
            num_bytes *= config.experts.top_k / config.experts.num_experts
        read += num_bytes
    return WeightBytes(8 * quantized_bytes / num_weights, stored, read)


def round_to_blocks(weight: np.ndarray, name: str) -> np.ndarray:
    """Rounds a weight to Q8_0 or Q4_0 along its last axis."""
    num = weight.shape[-1]
    pad = [(0, 0)] * (weight.ndim - 1) + [(0, -num % BLOCK_WEIGHTS)]
    padded = np.pad(np.asarray(weight, np.float32), pad)
    blocks = padded.reshape(-1, BLOCK_WEIGHTS)
    place = np.abs(blocks).argmax(-1)[:, None]
    largest = np.take_along_axis(blocks, place, axis=-1)
    # Q4_0 has the integers -8 to 7, and maps the largest magnitude to -8.
    scale = np.abs(largest) / 127 if name == "Q8_0" else largest / -8
    scaled = blocks / np.where(scale == 0, 1, scale)
    codes = np.rint(scaled)
    if name == "Q4_0":
        codes = np.clip(np.floor(scaled + 8.5), 0, 15) - 8
    rounded = codes * scale.astype(np.float16).astype(np.float32)
    return rounded.reshape(padded.shape)[..., :num]


class WeightsInFormat(NamedTuple):
    """Parameters of a model in a format, and their bytes."""

    params: Params
    bytes: WeightBytes


def convert_weights(folder: str, model: LoadedModel, name: str) -> WeightsInFormat:
    """Returns the parameters of a float32 model in a format."""
    config = model.config
    if name in QUANTIZED:
        params = quantize_params(model.params, QUANTIZED[name])
        return WeightsInFormat(params, count_weight_bytes(config, params))
    small = quantize_params(model.params, "int8")
    if name == "float32":
        return WeightsInFormat(model.params, count_weight_bytes(config, small, bits=32))
    if name == "bfloat16":
        params = load_model(files.model_folder(folder), dtype=name).params
        half = quantize_params(params, "int8")
        return WeightsInFormat(params, count_weight_bytes(config, half, bits=16))

    def round_leaf(place: jax.Array | QuantizedWeight, array: jax.Array) -> jax.Array:
        if not isinstance(place, QuantizedWeight):
            return array
        rows = np.moveaxis(np.asarray(array), place.axis, -1)
        return jnp.asarray(np.moveaxis(round_to_blocks(rows, name), -1, place.axis))

    params = jax.tree.map(round_leaf, small, model.params, is_leaf=_is_quantized)
    bits = 8 * BLOCK_BYTES[name] / BLOCK_WEIGHTS
    return WeightsInFormat(params, count_weight_bytes(config, small, bits=bits))


def load_decoder(
    config: Config, folder: str, model: LoadedModel, params: Params, name: str
) -> Engine:
    """Loads an engine with a place for one sequence."""
    length = config.prompt_tokens + config.output_tokens
    return Engine.load(
        folder,
        loaded=model._replace(params=params),
        dtype=name if name == "bfloat16" else "float32",
        weights=QUANTIZED.get(name, "model"),
        num_pages=-(-length // 16),
        page_size=16,
        max_length=length,
        max_sequences=1,
        queue_capacity=1,
        max_slots=1,
        token_budget=config.prompt_tokens,
        steps_per_call=STEPS_PER_CALL,
    )


class Rates(NamedTuple):
    """Tokens per second of one answer."""

    wall: float
    """By wall time."""
    cpu: float
    """By processor time of the process, all threads together."""


def measure_decoding(config: Config, engine: Engine, prompt: list[int]) -> Rates:
    """Returns the rate after the first call, which also reads the prompt."""
    ask = Sampling.greedy(max_tokens=config.output_tokens, ignore_eos=True)
    engine.submit(prompt, ask)
    times = []
    num_tokens = []
    for event in engine.stream():
        times.append((time.perf_counter(), time.process_time()))
        num_tokens.append(len(event.tokens))
    wall_s, cpu_s = np.subtract(times[-1], times[0])
    num = sum(num_tokens[1:])
    return Rates(num / wall_s, num / cpu_s)


def cut_pieces(config: Config, model: LoadedModel) -> Int32[np.ndarray, "num length"]:
    """Cuts pieces of held-out files; those of files that are too short are left out.

    Raises:
      ValueError: too few files are long enough.
    """
    num_drawn = 4 * config.num_sequences
    texts = cut_held_out_prompts(
        model.tokenizer,
        [config.sequence_tokens] * num_drawn,
        [Sampling()] * num_drawn,
        np.random.default_rng(config.seed),
    )
    pieces = [x.tokens for x in texts if len(x.tokens) == config.sequence_tokens]
    if len(pieces) < config.num_sequences:
        raise ValueError(
            f"sequence_tokens={config.sequence_tokens} exceeds most held-out files"
        )
    return np.array(pieces[: config.num_sequences], np.int32)


def measure_model(
    config: Config, folder: str, progress: lab.Progress
) -> list[tuple[object, ...]]:
    """Returns the rows of a model."""
    length = config.prompt_tokens + config.output_tokens
    model = load_text_model(folder, max_length=max(config.sequence_tokens, length))
    tokens = cut_pieces(config, model)
    engines: dict[str, Engine] = {}
    scores = {}
    sizes = {}
    for name in ("float32", *config.formats):
        progress.show(f"{folder}: {name}")
        params, sizes[name] = convert_weights(folder, model, name)
        logprobs = jaxkv.score(params, tokens, config=model.config)[:, 1:]
        scores[name] = np.asarray(logprobs, np.float64)
        if name not in BLOCK_BYTES:
            engines[name] = load_decoder(config, folder, model, params, name)
    progress.show(f"{folder}: rounds")
    prompt = tokens[0, : config.prompt_tokens].tolist()
    turns = [
        [measure_decoding(config, engine, prompt) for engine in engines.values()]
        for _ in range(1 + config.rounds)
    ]
    rates = np.array(turns)[1:]  # the first round compiles
    ratios = rates / rates[:, :1]
    rows: list[tuple[object, ...]] = []
    for name, score in scores.items():
        losses = (scores["float32"] - score).mean(1)
        speeds = [np.nan] * 5
        if name in engines:
            i = [*engines].index(name)
            quartiles = np.quantile(ratios[:, i, 0], [0.5, 0.25, 0.75])
            speeds = [np.median(rates[:, i, 0]), *quartiles, np.median(ratios[:, i, 1])]
        error = losses.std(ddof=1) / len(losses) ** 0.5
        rows.append((folder, name, *sizes[name], losses.mean(), error, *speeds))
    return rows


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Measures every model in all formats; a stopped run has complete models.

    Raises:
      ValueError: a model cannot be read or has too few positions.
    """
    rows = []
    for folder in progress.track(config.models, "models", "models"):
        rows += measure_model(config, folder, progress)
    sizes = config.num_sequences, config.sequence_tokens, config.rounds
    return Result(FormatRuns.of(rows), *sizes)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares rate, bytes and loss with the bars."""
    for model in result.runs.distinct("model"):
        runs = result.runs.where(model=model)
        row = {name: runs.where(weights=name) for name in FORMATS}
        int8 = row["int8"]
        if len(int8):
            yield lab.measured(
                "speed",
                float(int8.ratio[0]),
                model=model,
                rounds=result.rounds,
                low=int8.ratio_low[0],
                high=int8.ratio_high[0],
                cpu=int8.cpu_ratio[0],
            )
            yield lab.measured(
                "loss",
                float(int8.loss[0]),
                model=model,
                num=result.num_sequences,
                error=int8.loss_error[0],
            )
        for id, ours, other in (
            ("bytes_8", int8, "Q8_0"),
            ("bytes_4", row["mxfp4"], "Q4_0"),
        ):
            if len(ours):
                bits = 8 * BLOCK_BYTES[other] / BLOCK_WEIGHTS
                yield lab.measured(id, float(ours.bits[0] / bits), model=model)


COLORS = {
    "bfloat16": lab.BLACK,
    "int8": lab.BLUE,
    "fp8": lab.GREEN,
    "mxfp4": lab.ORANGE,
    "nvfp4": lab.PURPLE,
    "Q8_0": lab.SKY,
    "Q4_0": lab.RED,
}


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws loss against bytes, and the decode rate of each format."""
    left, right = axes
    models = result.runs.distinct("model")
    small = result.runs.at(np.flatnonzero(result.runs.weights != "float32"))
    for name in small.distinct("weights"):
        for number, model in enumerate(models):
            point = small.where(model=model, weights=name)
            color = lab.colors()[COLORS[name]]
            left.errorbar(
                point.stored_bytes / 1e6,
                point.loss,
                1.96 * point.loss_error,
                label=name if not number else None,
                color=color,
                marker="os^v"[number % 4],
                markerfacecolor="none" if number else color,
                linestyle="",
                capsize=3,
            )
    lab.draw_reference_line(left, 0.0)
    title = ""
    int8 = small.where(weights="int8")
    if len(int8):
        title = f"int8: loss changes by {np.abs(int8.loss).max():.4f} nats/token"
    y = "log-likelihood lost [nats/token]"
    lab.set_labels(left, title, "all parameters [MB]", y)
    if len(small):
        left.legend()
    timed = small.at(np.flatnonzero(np.isfinite(small.ratio)))
    names = timed.distinct("weights")
    for number, model in enumerate(models):
        rows = timed.where(model=model)
        places = np.arange(len(rows)) + (number - (len(models) - 1) / 2) * 0.38
        colors = [lab.colors()[COLORS[name]] for name in rows.weights.tolist()]
        faces = ["none"] * len(colors) if number else colors
        right.bar(places, rows.ratio, 0.36, color=faces, edgecolor=colors, label=model)
    right.set_xticks(range(len(names)), names)
    lab.draw_reference_line(right, 1.0, "float32")
    title = ""
    if len(int8):
        title = f"int8 decodes at {int8.ratio.min():.2f} of float32 or more"
    lab.set_labels(right, title, "weights [format]", "tokens/s / float32 [1]")
    right.legend()


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns the table of models and formats."""
    title = (
        f"{result.num_sequences} pieces of {result.sequence_tokens} tokens; "
        f"{result.rounds} rounds"
    )
    return [result.runs.sheet(title, *FormatRuns.columns())]


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(1, 2, 3.6)
)
