"""`jaxkv train CONFIG` and `jaxkv sweep CONFIG`: training runs in a folder."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxkv import files, parallel
from jaxkv.cli import (
    MAX_SECONDS,
    RESUMABLE,
    CommandOutput,
    Terminal,
    describe_default,
    open_step_log,
    parse_subject,
)
from jaxkv.files import WriterLock
from jaxkv.models import ModelConfig, Params, read_config, save_model
from jaxkv.parallel import gather_numbers, is_first
from jaxkv.report import (
    Sheet,
    config_dumps,
    format_named,
    format_number,
    from_plain,
)
from jaxkv.text import ByteTokenizer
from jaxkv.validation import format_unknown_name
from scaling import sweeps, training
from scaling.corpora import CorpusConfig, check_lengths, open_corpus
from scaling.costs import parse_layout
from scaling.sweeps import RecordRow, SweepConfig, format_best_loss, run_logged_sweep
from scaling.training import (
    TrainConfig,
    count_model_parameters,
    score_stream,
    training_flops,
)

SWEEPS = sweeps.SWEEPS
TRAININGS = sweeps.TRAININGS
NUM_EVAL_WINDOWS = 1024
"""Held-out windows that score a trained model."""
MODEL = "model"
"""Subfolder of the trained model in the run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train` in addition to its config."""

    out: Annotated[Path | None, describe_default("runs/train-CONFIG")] = None
    """Folder of the run. An existing run is continued."""
    max_seconds: Annotated[float, describe_default("no limit", MAX_SECONDS)] = math.inf
    parallel: Annotated[str | None, describe_default("as in the config")] = None
    """Parallel layout in the syntax of `jaxkv cost`: tp=2,pp=2,dp=2. A CPU provides as
    many virtual devices as needed. A run can continue under another layout or number of
    processes: parameters are restored bit for bit, and later losses agree to a relative
    2e-3, or 5e-2 at a learning rate near divergence."""
    zero: Annotated[int | None, describe_default("as in the config")] = None
    """ZeRO stage; 1: replicas shard the optimizer's moments."""
    log: Annotated[
        Literal["jsonl", "tensorboard", "wandb"] | None, describe_default("none")
    ] = None
    """Log the numbers of every report: jsonl writes steps.jsonl in the folder."""
    resume: Literal["last", "previous"] = "last"
    """Checkpoint to continue from: `last` rejects a damaged one; `previous` takes the
    newest intact one, and removes damaged ones after it."""
    print_config: bool = False
    """Print the config as JSON, to be edited and passed as CONFIG; train no model. Its
    model may be the path of a Hugging Face config.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of `sweep` in addition to its config."""

    out: Annotated[Path | None, describe_default("runs/sweep-CONFIG")] = None
    """Folder of the runs. Runs that it already contains are not repeated."""
    executor: Annotated[
        Literal["local", "ray"] | None,
        describe_default("as in the config: local"),
    ] = None
    """Run in this process, or on a Ray cluster."""
    mode: Annotated[
        Literal["auto", "loop", "vmap"] | None,
        describe_default("as in the config"),
    ] = None
    """Run trainings of one model one after another or vectorized; auto times both."""
    max_seconds: Annotated[float, describe_default("no limit", MAX_SECONDS)] = math.inf
    log: Annotated[
        Literal["jsonl", "tensorboard", "wandb"] | None, describe_default("none")
    ] = None
    """Log the numbers of every training run: jsonl writes steps.jsonl in the folder."""
    keep_models: bool = False
    """Keep the trained models."""
    check_coordinates: bool = False
    """Train no sweep, but its first model at four widths for a few steps, standard and
    by maximal update (mup): the status is 1 if the changes of mup's activations depend
    on the width."""
    print_config: bool = False
    """Print the config as JSON, to be edited and passed as CONFIG; train no model. A
    model may be the path of a Hugging Face config.json."""


def main(args: list[str]) -> CommandOutput:
    """Runs `train CONFIG [OPTIONS]`."""
    text = f"JSON file, or one of: {', '.join(TRAININGS)}"
    return train_model(*_parse(args, TrainOptions, "jaxkv train CONFIG", text))


def sweep_main(args: list[str]) -> CommandOutput:
    """Runs `sweep CONFIG [OPTIONS]`."""
    text = f"JSON file, or one of: {', '.join(SWEEPS)}"
    return run_model_sweep(*_parse(args, SweepOptions, "jaxkv sweep CONFIG", text))


def _parse[T](
    args: list[str], options: type[T], prog: str, choices: str
) -> tuple[str, T]:
    missing = f"CONFIG is missing: a {choices}"
    return parse_subject(args, options, prog, missing, f"CONFIG is a {choices}.")


def find_config[T](name: str, config_type: type[T], shipped: Mapping[str, T]) -> T:
    """Returns a shipped config by name, or reads a JSON file.

    In a JSON file a string in place of a model is the path of a Hugging Face
    `config.json`, or of a folder with one.

    Args:
      name: name of a shipped config, or path of a JSON file as `--print-config` writes
        it.
      config_type: type of the config.
      shipped: shipped configs by name.

    Raises:
      ValueError: the name is unknown, the file is invalid, or a model's file is.
    """
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        line = format_unknown_name("config", name, shipped)
        raise ValueError(f"{line}, or the path of a JSON file")
    document = files.parse_json(files.read_text(path), name)
    if isinstance(document, dict):
        if "model" in document:
            document["model"] = _read_model(document["model"])
        if isinstance(document.get("models"), list):
            document["models"] = [_read_model(x) for x in document["models"]]
    return from_plain(config_type, document, name)


def _read_model(model: object) -> object:
    """Returns the fields of a model whose path a config has."""
    if not isinstance(model, str):
        return model
    return json.loads(config_dumps(read_config(model)))


def _printed(config: TrainConfig | SweepConfig) -> CommandOutput:
    text = config_dumps(config)
    return CommandOutput(json.loads(text), [], [text])


def train_model(name: str, options: TrainOptions) -> CommandOutput:
    """Trains a model, or continues the run in its folder.

    Args:
      name: name of a shipped config, or path of a JSON file.
      options: options of the command.

    Returns:
      Folder, losses and model. The status is 130 if the run was ended early, 143 after
      SIGTERM, 75 after the time limit, 1 if it diverged. A process that was stopped by
      another one has the status of the first process that was asked to stop.

    Raises:
      ValueError: the config is unknown, or `training.train` rejects it.
    """
    config = find_config(name, TrainConfig, TRAININGS)
    layout = config.how.layout
    if options.parallel is not None:
        layout = parse_layout(options.parallel, zero=layout.zero)
    if options.zero is not None:
        layout = dataclasses.replace(layout, zero=options.zero)
    how = dataclasses.replace(config.how, layout=layout)
    config = dataclasses.replace(config, how=how)
    if options.print_config:
        return _printed(config)
    parallel.set_cpu_devices(config.how.layout.num_devices)
    corpus = open_corpus(config.corpus)
    check_lengths(corpus, config.seq_len)
    out = options.out or Path("runs") / f"train-{Path(name).stem}"

    def last_words() -> str:
        return f"interrupted at once; the last checkpoint is in {out}"

    with (
        open_step_log(options.log, out) as log,
        Terminal(last_words, options.max_seconds, log) as bars,
    ):
        result = training.train(config, out, progress=bars, resume=options.resume)
        bars.show("scoring")
        per_step = training_flops(
            config.model, batch=config.batch_size, sequence=config.seq_len
        )
        no_step = {"tokens": 0, "step": 0, "loss": None, "duration_s": 0.0}
        last: dict[str, Any] = result.curve[-1] if result.curve else no_step
        document = {
            "out": out,
            "status": result.status,
            "num_params": count_model_parameters(config.model).total,
            "num_tokens": last["tokens"],
            "flops": per_step * last["step"],
            "train_loss": last["loss"],
            "checkpoint": result.checkpoint,
            "duration_s": last["duration_s"],
        }
        lines = []
        if result.status == "done" and is_first():
            steps = config.num_steps
            assert last["tokens"] == config.batch_size * config.seq_len * steps
            score = score_stream(
                result.params,
                corpus.held_out,
                model=config.scaled_model,
                seq_len=config.seq_len,
                num_windows=NUM_EVAL_WINDOWS,
            )
            bits = score.loss / math.log(2) / corpus.bytes_per_token
            document |= {"loss": score.loss, "loss_se": score.loss_se}
            document["bits_per_byte"] = bits
            with contextlib.closing(WriterLock(out)):
                document["model"] = _save(config, out / MODEL, result.params)
            if document["model"]:
                lines = [f"jaxkv generate {out / MODEL} --prompt 'def '"]
    stopped = bars.status or RESUMABLE
    if result.status == "stopped":
        statuses = gather_numbers(bars.status)
        stopped = bars.status or next(filter(None, statuses), RESUMABLE)
        why = bars.reason if bars.status else "another process was stopped"
        lines = [f"{why}; run the same command to continue"]
    if result.status == "diverged":
        lines = [f"a loss was not finite: try less than {config.learning_rate=:g}"]
    rows = [format_named(key, value) for key, value in document.items() if key != "out"]
    status = {"done": 0, "stopped": stopped, "diverged": 1}[result.status]
    return CommandOutput(document, [Sheet("run", ("", ""), rows)], lines, status)


def _save(config: TrainConfig, folder: Path, params: Params) -> Path | None:
    """Writes a folder for the engine; returns None for unsupported architectures."""
    model = config.scaled_model
    if not isinstance(model, ModelConfig):
        return None
    tokenizer = None
    if isinstance(config.corpus, CorpusConfig):
        tokenizer = ByteTokenizer(model.vocab_size)
    try:
        save_model(folder, model, params, tokenizer=tokenizer, overwrite=True)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written: {error.strerror or error}; the run is kept: "
            "run the same command to continue"
        ) from None
    return folder


def run_model_sweep(name: str, options: SweepOptions) -> CommandOutput:
    """Runs a sweep, or the missing runs of its folder.

    Args:
      name: name of a shipped config, or path of a JSON file.
      options: options of the command.

    Returns:
      Folder and counts. The status is 130 if the sweep was ended early, 143 after
      SIGTERM, 75 after the time limit.

    Raises:
      ValueError: the config is unknown, or `sweep.run_sweep` rejects it.
    """
    config = find_config(name, SweepConfig, SWEEPS)
    overrides = {x: getattr(options, x) for x in ("executor", "mode", "keep_models")}
    config = dataclasses.replace(config, **{x: y for x, y in overrides.items() if y})
    if options.print_config:
        return _printed(config)
    out = options.out or Path("runs") / f"sweep-{Path(name).stem}"
    if options.check_coordinates:
        # matplotlib takes a second to import.
        from scaling.cli.train.coordinates import check_coordinates

        return check_coordinates(config, out, options.max_seconds)

    def last_words() -> str:
        return f"interrupted at once; the runs that ended are in {out}"

    with (
        open_step_log(options.log, out) as log,
        Terminal(last_words, options.max_seconds, log) as bars,
    ):
        outcome = run_logged_sweep(config, out, bars)
    document = {
        "log": outcome.log,
        "completed": outcome.num("done"),
        "diverged": outcome.num("diverged"),
        "failed": outcome.num("failed"),
        "skipped": outcome.skipped,
        "interrupted": outcome.is_stopped,
        "duration_s": outcome.duration_s,
    }
    lines = [f"log: {out}"]
    if outcome.num("done"):
        lines = [f"log: {out}; next: jaxkv fit {out}"]
    if outcome.is_stopped:
        lines.insert(0, f"{bars.reason}; run the same command to continue")
    status = bars.status if outcome.is_stopped else 0
    return CommandOutput(document, _sheets(document, outcome.records), lines, status)


def _sheets(document: Mapping[str, object], records: list[RecordRow]) -> list[Sheet]:
    """Returns counts, and a row for each cell with its best run.

    Batch, weight decay and schedule have columns if they differ between runs.
    """
    counts = [(name, format_number(value)) for name, value in document.items()]
    axes = [
        name
        for name in ("batch_tokens", "weight_decay", "schedule")
        if len({record.get(name) for record in records}) > 1
    ]
    rows = []
    for cell in dict.fromkeys(record["cell"] for record in records):
        selected = [r for r in records if r["cell"] == cell]
        done = [r for r in selected if r["status"] == "done"]
        best = min(done or selected, key=lambda r: r["loss"] or 0.0)
        rows.append(
            (
                f"{best['hidden_size']}",
                f"{best['num_params']:,}",
                f"{best['num_tokens']:,}",
                f"{best['flops']:.3g}",
                *(str(best.get(name)) for name in axes),
                f"{best['learning_rate']:.3g}",
                format_best_loss(selected),
                f"{len(selected)}",
            )
        )
    rows.sort(key=lambda row: (int(row[0]), float(row[3])))
    heads = (
        *("width", "parameters", "tokens", "FLOP"),
        *(name.replace("_", " ") for name in axes),
        *("best rate", "loss", "runs"),
    )
    return [Sheet("sweep", ("", ""), counts[1:]), Sheet("cells", heads, rows)]
