"""`jaxkv train CONFIG`: one run in a folder, and a model that can be served."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated

from experiments.cli import parsing
from experiments.cli.console import terminal
from experiments.cli.run import Answer
from experiments.cli.train import configs
from experiments.framework import Sheet, config_json, units
from jaxkv.models import checkpoints, transformer
from jaxkv.models.config import ModelConfig
from jaxkv.text.tokenizer import ByteTokenizer
from scaling import locking
from scaling.corpora import corpora, streams
from scaling.training import TrainConfig, architectures, objectives
from scaling.training import train as training_train

NUM_EVAL_WINDOWS = 1024
"""Held-out windows that the model is scored on."""
MODEL = "model"
"""Where in the run's folder the trained model lies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `train` takes beside its config."""

    out: Annotated[Path | None, parsing.without("runs/train-CONFIG")] = None
    """Folder of the run. A run that is there goes on."""
    max_seconds: Annotated[float, parsing.without("no end", parsing.MAX_SECONDS)] = (
        math.inf
    )
    print_config: bool = False
    """Print the config as JSON, to be changed and passed as CONFIG; run nothing."""


def train(name: str, options: Options) -> Answer:
    """Trains a model, or goes on where its folder stands.

    Args:
      name: a shipped config, or the path of a JSON file.
      options: the rest of the command line.

    Returns:
      The folder, the losses and the model; status 130 if it was ended early, 143 if
      by SIGTERM, 75 if by the clock, 1 if it diverged.

    Raises:
      ValueError: there is no such config, or `training.train` refuses it.
    """
    config = configs.find(name, TrainConfig, configs.TRAININGS)
    if options.print_config:
        text = config_json.config_dumps(config)
        return Answer(json.loads(text), [], [text])
    corpus = corpora.open(config.corpus)
    streams.check_lengths(corpus, config.seq_len)
    out = options.out or Path("runs") / f"train-{Path(name).stem}"

    def last_words() -> str:
        return f"interrupted at once; the last checkpoint is in {out}"

    with terminal.Terminal(last_words, max_seconds=options.max_seconds) as bars:
        result = training_train.train(config, out, progress=bars)
        bars.show("scoring")
        tokens = config.batch_size * config.seq_len * config.num_steps
        per_step = architectures.training_flops(
            config.model, batch=config.batch_size, sequence=config.seq_len
        )
        document = {
            "out": out,
            "status": result.status,
            "num_params": architectures.parameters(config.model).total,
            "num_tokens": result.curve[-1]["tokens"] if result.curve else 0,
            "flops": per_step * (result.curve[-1]["step"] if result.curve else 0),
            "train_loss": result.curve[-1]["loss"] if result.curve else None,
            "checkpoint": result.checkpoint,
            "duration_s": result.curve[-1]["duration_s"] if result.curve else 0.0,
        }
        lines = []
        if result.status == "done":
            assert tokens == document["num_tokens"]
            document |= _score(config, corpus, result.params)
            with contextlib.closing(locking.WriterLock(out)):
                document["model"] = _save(config, out / MODEL, result.params)
            if document["model"]:
                lines = [f"jaxkv generate {out / MODEL} --prompt 'def '"]
    if result.status == "stopped":
        lines = [f"{bars.reason}; the same command goes on"]
    if result.status == "diverged":
        lines = [f"a loss was not finite: try less than {config.learning_rate=:g}"]
    rows = [units.named(key, value) for key, value in document.items() if key != "out"]
    status = {"done": 0, "stopped": bars.status, "diverged": 1}[result.status]
    return Answer(document, [Sheet("run", ("", ""), rows)], lines, status)


def _score(
    config: TrainConfig, corpus: streams.Corpus, params: transformer.Params
) -> dict[str, float]:
    score = objectives.score_stream(
        params,
        corpus.held_out,
        model=config.model,
        seq_len=config.seq_len,
        num_windows=NUM_EVAL_WINDOWS,
    )
    return {
        "loss": score.loss,
        "loss_se": score.loss_se,
        "bits_per_byte": score.loss / math.log(2) / corpus.bytes_per_token,
    }


def _save(config: TrainConfig, folder: Path, params: transformer.Params) -> Path | None:
    """Writes a folder that the engine serves; None for a rival, which it does not."""
    if not isinstance(config.model, ModelConfig):
        return None
    tokenizer = None
    if isinstance(config.corpus, corpora.CorpusConfig):
        tokenizer = ByteTokenizer(config.model.vocab_size)
    try:
        checkpoints.save_model(
            folder, config.model, params, tokenizer=tokenizer, overwrite=True
        )
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written: {error.strerror or error}; the run is kept, "
            "and the same command goes on"
        ) from None
    return folder
