"""Fine-tunes a model for Jacobi decoding with the consistency loss of CLLM.

The bundled model finds blocks after pieces of its training text. It is trained to
predict, from intermediate guesses, the same tokens as from the final block
(`scaling/training/consistency.py`), and on the text itself, to keep its quality. Before
and after training, the study measures the iterations per block on held-out text, bits
per byte, and the speed of the engine's Jacobi drafter.

Source: Kou et al. 2024, arXiv:2403.00835.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lab
from experiments.decoding.jacobi import blocks, drawing, from_text
from experiments.decoding.speculation import held_out, on_text
from experiments.harness import load_text_model
from jaxkv.models import LoadedModel, Params, save_model
from jaxkv.sampling import Sampling
from scaling.corpora import STANDARD_LIBRARY, Corpus, CorpusConfig, open_corpus
from scaling.training import (
    Consistency,
    TrainConfig,
    Trajectory,
    init_train_state,
    make_records,
    score_stream,
    stream_windows,
    train_in_memory,
)

CLAIMS = lab.claims_file(__file__)
BEFORE = "as it was"
AFTER = "fine-tuned"
TOGETHER = 32
"""Blocks that are found in one batch."""


class Config(held_out.TextConfig):
    """Training data, training of a byte-level model, and its evaluation."""

    corpus: CorpusConfig = STANDARD_LIBRARY
    """Training text of the model."""
    objective: Consistency = dataclasses.field(default_factory=Consistency)
    """Lengths of prompts, blocks and texts."""
    num_texts: lab.PositiveInt = 640
    """Pieces of training text after which blocks are found."""
    guesses: lab.PositiveInt = 8
    """Intermediate guesses of each block that are trained on."""
    num_steps: lab.PositiveInt = 400
    """Training steps."""
    batch_size: lab.PositiveInt = 8
    """Guesses per step, each paired with a piece of text."""
    learning_rate: Annotated[float, lab.Range(0, ends="()")] = 7e-4
    """Peak learning rate; it decays to 0 over the second half."""
    num_held_out: lab.PositiveInt = 64
    """Pieces of held-out text after which blocks are found before and after."""
    scored_windows: lab.PositiveInt = 256
    """Held-out windows of 512 tokens for bits per byte."""
    num_prompts: int = 4
    """Texts that the engine continues, one at a time."""
    num_drafts: lab.AscendingInts = (3, 7, 15)
    """Draft lengths of the engine's drafter."""
    steps_per_call: int = 4
    """Steps per call of the engine."""
    export: str = ""
    """Folder for the trained model in bfloat16; empty: not written."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_answer_length(self.num_drafts[-1])

    def recipe(self, model: LoadedModel) -> TrainConfig:
        """Returns the training config."""
        return TrainConfig(
            model=model.config,
            corpus=self.corpus,
            batch_size=self.batch_size,
            seq_len=self.objective.record_tokens,
            num_steps=self.num_steps,
            learning_rate=self.learning_rate,
            warmup_steps=self.num_steps // 10,
            cooldown_steps=self.num_steps // 2,
            seed=self.seed,
            report_every=max(1, self.num_steps // 40),
        )


CONFIGS = {"cllm": Config(export="runs/stdlib-bytes-cllm")}


class ModelTable(lab.ResultTable):
    """Quality and iterations of the model before and after training."""

    model: lab.Texts = lab.column("before or after")
    bits_per_byte: lab.Floats = lab.column("on held-out text", form="{:.4f}")
    num_blocks: lab.Ints = lab.column("blocks of held-out text", heading="blocks")
    length: lab.Ints = lab.column("tokens of a block", heading="tokens")
    steps: lab.Floats = lab.column("mean iterations per block", form="{:.2f}")

    @property
    @lab.computed_column(heading="tokens a step", form="{:.2f}")
    def tokens_per_step(self) -> np.ndarray:
        """Mean block tokens per iteration."""
        return self.length / np.maximum(self.steps, 1e-9)


class Result(lab.ResultRecord):
    """Training curve, and both models' measurements."""

    models: ModelTable = lab.column(
        "before and after",
        heading="before and after",
        note="Blocks of held-out text; initial guesses repeat the token before. Bits "
        "per byte on held-out text show the quality of the fine-tuned model: a model "
        "that repeats one token finds every block in one step.",
    )
    runs: on_text.DecodingRuns = lab.column(
        "runs of the engine's drafter",
        heading=from_text.DRAFTER,
        columns=("way", *from_text.DRAFTER_COLUMNS),
        note="The same prompts, greedily, each model alternating with its own plain "
        "decoding. The two models generate different texts.",
    )
    trained: lab.Ints = lab.column("training step of each report", is_reported=False)
    loss: lab.Floats = lab.column(
        "consistency loss in nats per block token, mean since the last report",
        is_reported=False,
    )
    num_records: int = lab.column("trained guesses", heading="guesses", is_shown=False)
    train_s: float = lab.column("wall-clock time of training", is_shown=False)
    device: str = lab.column("kind of device", is_shown=False)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Finds blocks, trains, and evaluates both models, unless stopped before.

    Raises:
      ValueError: the model cannot be served, or its context is too short.
    """
    model = load_text_model(config.model, max_length=config.max_length)
    corpus = open_corpus(config.corpus)
    records = _records(config, model, corpus, progress)
    learnt = corpus._replace(stream=records)
    params = jax.tree.map(jnp.asarray, model.params)
    recipe = config.recipe(model)
    start = init_train_state(recipe.model, recipe.optimizer, jnp.int32(0))
    output = train_in_memory(
        recipe,
        learnt,
        start=start._replace(params=params),
        objective=config.objective,
        progress=progress,
    )
    both = {BEFORE: model, AFTER: model._replace(params=output.params)}
    if output.status != "done":
        both = {}
    elif config.export:
        _export(config, both[AFTER])
    models = [
        (name, *_measure_blocks(config, stage_model, corpus))
        for name, stage_model in both.items()
    ]
    ways = [(from_text.WAY, num) for num in config.num_drafts]
    runs = [
        (name, *row[1:])
        for name, stage_model in both.items()
        for row in held_out.decode_in_turns(
            config, stage_model, [(1, 0.0)], lambda _: ways, progress
        )
    ]
    return Result(
        ModelTable.of(models),
        on_text.DecodingRuns.of(runs),
        np.array([line["step"] for line in output.curve], np.int64),
        np.array([line["loss"] for line in output.curve]),
        len(records) // config.objective.record_tokens,
        output.curve[-1]["duration_s"] if output.curve else 0.0,
        jax.devices()[0].device_kind,
    )


def _find_blocks(
    model: LoadedModel, prompts: np.ndarray, num: int
) -> list[blocks.JacobiBlock]:
    """Finds the block after each prompt greedily.

    Initial guesses repeat the last token of the prompt, as in the engine.
    """
    asks = [Sampling.greedy(max_tokens=num)] * len(prompts)
    return blocks.find_jacobi_blocks(
        model, prompts.tolist(), asks, num, first=prompts[:, -1]
    )


def _records(
    config: Config, model: LoadedModel, corpus: Corpus, progress: lab.Progress
) -> np.ndarray:
    """Returns training records from trajectories after pieces of the training text."""
    sizes = config.objective
    trajectories = []
    prompts = stream_windows(
        corpus.stream, seq_len=sizes.prompt_tokens - 1, num_windows=config.num_texts
    )
    starts = range(0, len(prompts), TOGETHER)
    for first in progress.track(starts, "trajectories", "batches"):
        batch = prompts[first : first + TOGETHER]
        output = _find_blocks(model, batch, sizes.block_tokens)
        pairs = zip(batch.tolist(), output, strict=True)
        trajectories += [Trajectory(text, block.guesses) for text, block in pairs]
    return make_records(
        trajectories,
        corpus.stream,
        num_guesses=config.guesses,
        text_tokens=sizes.text_tokens,
        seed=config.seed,
    )


def _measure_blocks(
    config: Config, model: LoadedModel, corpus: Corpus
) -> tuple[float, int, int, float]:
    """Returns a row of `ModelTable` without the name."""
    sizes = config.objective
    prompts = stream_windows(
        corpus.held_out,
        seq_len=sizes.prompt_tokens - 1,
        num_windows=config.num_held_out,
    )
    starts = range(0, len(prompts), TOGETHER)
    jacobi_blocks = [
        block
        for first in starts
        for block in _find_blocks(
            model, prompts[first : first + TOGETHER], sizes.block_tokens
        )
    ]
    scored = score_stream(
        model.params,
        corpus.held_out,
        model=model.config,
        seq_len=min(512, model.config.max_positions),
        num_windows=config.scored_windows,
        batch_size=16,
    )
    bits = scored.loss / np.log(2) / corpus.bytes_per_token
    steps = float(np.mean([block.steps for block in jacobi_blocks]))
    return bits, len(jacobi_blocks), sizes.block_tokens, steps


def _export(config: Config, model: LoadedModel) -> None:
    """Saves the model for serving."""
    params: Params = model.params
    card = (
        f"# A model of `{config.model}`'s shape, trained for Jacobi decoding\n\n"
        "    jaxkv run jacobi cllm\n\n"
        "Consistency fine-tuning (Kou et al. 2024, arXiv:2403.00835); data, licence "
        "and shape are those of the model that it comes from.\n"
    )
    save_model(
        config.export,
        model.config,
        params,
        tokenizer=model.tokenizer,
        eos_ids=model.eos_ids,
        model_card=card,
        dtype="bfloat16",
        overwrite=True,
    )


def metrics(result: Result) -> dict[str, Any]:
    """Returns models, runs, and the training loss and time."""
    return {
        "device": result.device,
        "models": result.models.rows(),
        # The key "way" of other studies is "model" here.
        "runs": [{"model": x.pop("way")} | x for x in result.runs.rows()],
        "num_records": result.num_records,
        "train_s": result.train_s,
        "loss": result.loss[-1:].tolist(),
    }


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares tokens with plain decoding, and the speed-up with CLLM's."""
    runs = result.runs
    if len(runs):
        num = int(runs.num_tokens.sum())
        yield lab.measured("lossless", runs.num_other.sum(), num=num)
        best = [np.nanmax(runs.where(way=method).speed) for method in (AFTER, BEFORE)]
        yield lab.measured(
            "tuned", best[0], before=f"{best[1]:.2f}", device=result.device
        )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the loss, and tokens per step of blocks and of the engine."""
    loss, blocks, engine, unused = axes.flat
    unused.remove()
    lab.draw_curve(loss, result.trained, result.loss, 5, marker="")
    title = "Loss of training"
    x = "training [steps]"
    y = "loss [nats/token]"
    if len(result.loss):
        title = f"The consistency loss falls to {result.loss[-1]:.2f} nats/token"
    lab.set_labels(loss, title, x, y, ylim=(0, None))
    models = result.models
    color = lab.colors()[5]
    bars = blocks.bar(models.model, models.tokens_per_step, 0.6, color=color)
    labels = [f"{bits:.3f}\nbits/byte" for bits in models.bits_per_byte]
    blocks.bar_label(bars, labels, padding=2)
    blocks.margins(y=0.25)
    length = models.length[0] if len(models) else 0
    title = f"Blocks of {length}: tokens found a step, and the model's loss"
    lab.set_labels(blocks, title, "", "found [tokens/step]")
    runs_by_name = {name: result.runs.where(way=name) for name in (AFTER, BEFORE)}
    drawing.draw_speeds(engine, runs_by_name)


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, lab.sheets, metrics, panels=lab.Panels(2, 2)
)
