"""How well does a small byte-level model learn Python's standard library?

The `shipped` config trained the model in `models/stdlib-bytes`: a trunk at a constant
learning rate on short windows, then a cool-down on windows as long as the contexts that
the model is served with. The same command takes up a run that was stopped.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training.bundled_model import model_card
from jaxkv import validation
from jaxkv.models import checkpoints
from jaxkv.models.config import ModelConfig
from jaxkv.progress import QUIET, Progress
from jaxkv.text import tokenizer
from scaling.corpora import corpora
from scaling.training import TrainConfig, architectures, objectives, train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A trunk, its cool-down, and where the model goes."""

    trunk: TrainConfig
    """The run at a constant rate, `cooldown_steps=0`."""
    cooldown_steps: int
    """Steps after the trunk, of linear fall to zero."""
    cooldown_batch_size: int
    """Windows per step of the cool-down."""
    cooldown_seq_len: int
    """Predictions per window of the cool-down, and of scoring held-out text."""
    folder: str = ""
    """Where checkpoints are kept, for a run to be taken up; empty: not kept."""
    export: str = ""
    """Folder for the trained model in bfloat16; empty: not written."""

    def __post_init__(self):
        """Refuses a cool-down that is none."""
        validation.at_least(self, "cooldown_steps")
        if self.trunk.cooldown_steps:
            raise ValueError(f"{self.trunk.cooldown_steps=} must be 0")
        if not isinstance(self.trunk.corpus, corpora.CorpusConfig):
            raise ValueError(f"{self.trunk.corpus=} must be text")

    @property
    def text(self) -> corpora.CorpusConfig:
        """What is learnt."""
        assert isinstance(self.trunk.corpus, corpora.CorpusConfig)
        return self.trunk.corpus

    @property
    def cooldown(self) -> TrainConfig:
        """The run that starts from the trunk's last checkpoint."""
        return dataclasses.replace(
            self.trunk,
            num_steps=self.trunk.num_steps + self.cooldown_steps,
            warmup_steps=0,
            cooldown_steps=self.cooldown_steps,
            batch_size=self.cooldown_batch_size,
            seq_len=self.cooldown_seq_len,
        )


CONFIGS = {
    "smoke": Config(
        trunk=TrainConfig(
            model=ModelConfig(
                vocab_size=corpora.VOCAB_SIZE,
                hidden_size=16,
                num_layers=1,
                num_q_heads=2,
                num_kv_heads=1,
                head_dim=8,
                mlp_size=32,
                max_positions=64,
            ),
            # So little text is held out that scoring it takes a moment.
            corpus=corpora.CorpusConfig(held_out=0.02),
            batch_size=8,
            seq_len=32,
            num_steps=40,
            warmup_steps=5,
            cooldown_steps=0,
            learning_rate=1e-2,
        ),
        cooldown_steps=10,
        cooldown_batch_size=4,
        cooldown_seq_len=64,
    ),
    "shipped": Config(
        trunk=TrainConfig(
            model=ModelConfig(
                vocab_size=corpora.VOCAB_SIZE,
                hidden_size=160,
                num_layers=4,
                num_q_heads=4,
                num_kv_heads=2,
                head_dim=64,
                mlp_size=432,
                max_positions=1024,
            ),
            batch_size=8,
            seq_len=256,
            num_steps=9000,
            warmup_steps=100,
            cooldown_steps=0,
            learning_rate=1e-2,
            report_every=25,
            checkpoint_every=250,
        ),
        cooldown_steps=1000,
        cooldown_batch_size=8,
        cooldown_seq_len=512,
        folder="runs/stdlib-bytes",
        export="experiments/models/stdlib-bytes",
    ),
}


class Result(NamedTuple):
    """What was learnt.

    Attributes:
      tokens: tokens trained on before each report, both runs together.
      loss: nats per token of training since the report before.
      status: of the run that came last: `done`, `stopped` or `diverged`.
      num_params: parameters of the model.
      bits_per_byte: of the held-out documents, by the weights rounded to bfloat16; NaN
        if training did not end.
      bits_per_byte_float32: the same before rounding.
      num_held_out_bytes: size of the held-out documents.
      duration_s: time spent in training, on the clock.
    """

    tokens: np.ndarray
    loss: np.ndarray
    status: str
    num_params: int
    bits_per_byte: float
    bits_per_byte_float32: float
    num_held_out_bytes: int
    duration_s: float


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains, scores held-out text and exports."""
    if config.folder:
        return _run(config, Path(config.folder), progress)
    with tempfile.TemporaryDirectory() as folder:
        return _run(config, Path(folder), progress)


def plot(ax: Any, result: Result) -> None:
    """Draws the loss over the tokens, and the held-out text's loss at the end."""
    ax.plot(result.tokens / 1e6, result.loss / np.log(2), label="training")
    if np.isfinite(result.bits_per_byte):
        ax.axhline(result.bits_per_byte, color="0.6", linestyle="--")
        ax.annotate(
            f"held-out files: {result.bits_per_byte:.3f}",
            (result.tokens[-1] / 1e6, result.bits_per_byte),
            ha="right",
            va="bottom",
        )
    ax.set_yscale("log")
    ax.set_xlabel("tokens trained on [million]")
    ax.set_ylabel("loss [bits per byte]")


def metrics(result: Result) -> dict[str, Any]:
    """Names the numbers of the report."""
    return {
        "status": result.status,
        "num_params": result.num_params,
        "num_tokens": int(result.tokens[-1]) if len(result.tokens) else 0,
        "held_out_bits_per_byte": result.bits_per_byte,
        "held_out_bits_per_byte_float32": result.bits_per_byte_float32,
        "num_held_out_bytes": result.num_held_out_bytes,
        "train_duration_s": result.duration_s,
    }


def _run(config: Config, folder: Path, progress: Progress) -> Result:
    split = corpora.load(config.text)
    runs = [train.train(config.trunk, folder / "trunk", progress=progress)]
    if runs[0].status == "done":
        start = runs[0].checkpoint
        runs.append(
            train.train(
                config.cooldown, folder / "cooldown", start=start, progress=progress
            )
        )
    params, done = runs[-1].params, len(runs) == 2 and runs[-1].status == "done"
    tokens, loss, before = [], [], 0
    for part in runs:
        tokens += [before + line["tokens"] for line in part.curve]
        loss += [line["loss"] for line in part.curve]
        before = tokens[-1] if tokens else 0
    bits = dict.fromkeys(("bfloat16", "float32"), float("nan"))
    if done:
        for dtype in bits:
            rounded = jax.tree.map(
                lambda x, dtype=dtype: x.astype(dtype).astype(jnp.float32), params
            )
            bits[dtype] = objectives.score(
                rounded,
                split.held_out,
                model=config.trunk.model,
                seq_len=config.cooldown_seq_len,
            ).bits_per_byte
    result = Result(
        tokens=np.asarray(tokens, np.int64),
        loss=np.asarray(loss),
        status=runs[-1].status,
        num_params=sum(x.size for x in jax.tree.leaves(params)),
        bits_per_byte=bits["bfloat16"],
        bits_per_byte_float32=bits["float32"],
        num_held_out_bytes=corpora.num_bytes(split.held_out),
        duration_s=sum(part.curve[-1]["duration_s"] for part in runs if part.curve),
    )
    if done and config.export:
        model = architectures.servable(config.trunk.model)
        checkpoints.save_model(
            config.export,
            model,
            params,
            tokenizer=tokenizer.ByteTokenizer(model.vocab_size),
            model_card=model_card.text(config, split, result),
            dtype="bfloat16",
            overwrite=True,
        )
    return result
