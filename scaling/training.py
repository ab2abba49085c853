"""Trains a language model: a pure step, checkpoints that survive anything, a curve.

The only door to optax, and with `jaxkv.checkpoints` to Orbax. `init` and `steps` are
pure; `train` is the loop around them that a person watches. A run that was killed is
taken up by calling `train` again with the same folder, and ends bit for bit where the
unbroken run would have.
"""

import dataclasses
import functools
import hashlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Float32, Int, Int32, UInt16

from jaxkv import models
from scaling import corpora, objectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates; the learning rate is apart, in `Schedule`."""

    kind: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon for the layers' matrices, AdamW for everything else."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean square gradient."""
    momentum: float = 0.95
    """Muon's decay of the mean gradient."""
    weight_decay: float = 0.1
    """Decoupled, of matrices; times the learning rate per step."""
    max_grad_norm: float = 1.0
    """Gradients of all parameters together are scaled down to this norm."""

    def __post_init__(self):
        """Refuses what no optimizer takes."""
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.weight_decay < 0:
            raise ValueError(f"{self.weight_decay=} must be at least 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"{self.max_grad_norm=} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: the model, the text, and everything that decides the result."""

    model: models.ModelConfig
    corpus: corpora.CorpusConfig = corpora.CorpusConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: int = 16
    """Windows per step."""
    seq_len: int = 256
    """Predictions per window."""
    num_steps: int = 1000
    """Where the run ends, counted from its beginning, a trunk's steps included."""
    learning_rate: float = 3e-3
    """The peak of the schedule."""
    warmup_steps: int = 100
    """Steps of linear rise from zero to the peak."""
    cooldown_steps: int = 200
    """Last steps, of linear fall to zero."""
    seed: int = 0
    """Of the initial parameters and of the order of the text."""
    report_every: int = 10
    """Steps per compiled call, and per line of the curve."""
    checkpoint_every: int = 100
    """Steps that a killed run may lose."""

    def __post_init__(self):
        """Refuses sizes that cannot be."""
        for name in (
            *("batch_size", "seq_len", "num_steps", "report_every"),
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup_steps", "cooldown_steps"):
            if not 0 <= getattr(self, name) <= self.num_steps:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be in [0, {self.num_steps=}]"
                )
        if not self.learning_rate > 0:
            raise ValueError(f"{self.learning_rate=} must be above 0")
        if self.seq_len > self.model.max_positions:
            raise ValueError(
                f"{self.seq_len=} must be at most {self.model.max_positions=}"
            )
        if self.model.vocab_size < corpora.VOCAB_SIZE:
            raise ValueError(
                f"{self.model.vocab_size=} must be at least {corpora.VOCAB_SIZE}"
            )


class Schedule(NamedTuple):
    """Warm-up, a stable stretch, linear cool-down; arrays, so no value recompiles.

    Attributes:
      peak: learning rate of the stable stretch.
      warmup: steps of linear rise.
      cooldown: steps of linear fall to zero, the last ones.
      end: number of steps in all.

    Source: Hägele et al. 2024, arXiv:2405.18392, section 3.
    """

    peak: Float32[Array, ""]
    warmup: Int32[Array, ""]
    cooldown: Int32[Array, ""]
    end: Int32[Array, ""]

    @classmethod
    def of(cls, config: TrainConfig) -> "Schedule":
        """Reads a schedule off a run's config."""
        counts = (config.warmup_steps, config.cooldown_steps, config.num_steps)
        return cls(jnp.float32(config.learning_rate), *map(jnp.int32, counts))

    def at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The learning rate of a step, counted from 0."""
        done = (step + 1).astype(jnp.float32)
        left = (self.end - step).astype(jnp.float32)
        # Without a warm-up or cool-down the quotient is at least one, or infinite.
        rise = done / self.warmup.astype(jnp.float32)
        fall = left / self.cooldown.astype(jnp.float32)
        return self.peak * jnp.minimum(jnp.float32(1), jnp.minimum(rise, fall))


class TrainState(NamedTuple):
    """All that a run carries from step to step.

    Attributes:
      params: the model's parameters, float32.
      moments: what the optimizer remembers.
      step: how many steps have been taken.
    """

    params: models.Params
    moments: Any
    step: Int32[Array, ""]


class Progress(Protocol):
    """Who is told how far a run is, and may ask it to stop; `experiments` has one."""

    @property
    def stopped(self) -> bool:
        """Whether to save and return after this piece of work."""
        ...

    def bar(self, label: str, total: float | None, unit: str) -> Any:
        """Opens a bar; the function returned takes how much is done, of `total`."""
        ...

    def show(self, content: str) -> None:
        """Replaces the text under the bars."""
        ...


class Result(NamedTuple):
    """What a run left.

    Attributes:
      params: the parameters, float32.
      curve: one dict per report: `step`, `tokens`, `loss` (nats per token, mean over
        the steps since the last report), `learning_rate`, `epoch`, `duration_s`.
      checkpoint: folder of the last checkpoint, which another run can start from.
      done: whether all steps were taken; if not, the run was asked to stop.
      duration_s: time spent in training, earlier pieces of the run included.
    """

    params: models.Params
    curve: list[dict[str, Any]]
    checkpoint: Path
    done: bool
    duration_s: float


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds the optimizer for a learning rate of one; a step scales its updates."""
    shared = {"learning_rate": 1.0, "weight_decay": config.weight_decay}
    if config.kind == "adamw":
        betas = {"b1": config.beta1, "b2": config.beta2}
        main = optax.adamw(**shared, **betas, mask=_are_matrices)
    else:
        main = optax.contrib.muon(
            **shared,
            beta=config.momentum,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_muon_axes,
            # Updates as large as AdamW's, so that one learning rate suits both: Liu et
            # al. 2025, arXiv:2502.16982, section 2.2.
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), main)


def init(
    model: models.ModelConfig, optimizer: OptimizerConfig, seed: Int[Array, ""]
) -> TrainState:
    """Makes the state before the first step."""
    params = models.init_params(model, jax.random.key(seed))
    return TrainState(params, make_optimizer(optimizer).init(params), jnp.int32(0))


def steps(
    state: TrainState,
    stream: UInt16[Array, " tokens"],
    schedule: Schedule,
    seed: Int[Array, ""],
    num_steps: Int[Array, ""],
    *,
    model: models.ModelConfig,
    optimizer: OptimizerConfig,
    batch_size: int,
    seq_len: int,
) -> tuple[TrainState, Float[Array, ""]]:
    """Takes some steps of training.

    Args:
      state: where the run stands.
      stream: the tokens to learn, as `corpora.tokens` makes them.
      schedule: of the learning rate.
      seed: of the order of the text.
      num_steps: how many steps, at least 1.
      model: shape of the model.
      optimizer: as the state was made for.
      batch_size: windows per step.
      seq_len: predictions per window.

    Returns:
      The new state; and the mean loss of the steps, in nats per token. However a run
      is divided into calls, its states are the same.
    """
    update = make_optimizer(optimizer).update

    def mean_loss(params, windows):
        return objectives.token_losses(params, windows, model=model).mean()

    def step(_, carry):
        (params, moments, step), total = carry
        windows = corpora.draw(
            stream, seed, step, batch_size=batch_size, seq_len=seq_len
        )
        loss, grads = jax.value_and_grad(mean_loss)(params, windows)
        updates, moments = update(grads, moments, params)
        rate = schedule.at(step)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
        return TrainState(params, moments, step + 1), total + loss

    state, total = jax.lax.fori_loop(0, num_steps, step, (state, jnp.float32(0)))
    return state, total / num_steps.astype(jnp.float32)


def train(
    config: TrainConfig,
    out: Path,
    *,
    start: Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Trains a model in a folder, or takes up the run that the folder holds.

    The folder gets `config.json`, `curve.jsonl` and `checkpoints/STEP`. A checkpoint is
    written aside and renamed, so there is always a whole one. A killed run loses at
    most `checkpoint_every` steps; Ctrl-C, or `progress.stopped`, loses at most
    `report_every`: the run then saves and returns.

    Args:
      config: the run.
      out: its folder, made where it is missing.
      start: a checkpoint of another run of the same model and optimizer, whose state
        and step count are continued under this run's schedule and data.
      progress: who is told.

    Returns:
      What was reached.

    Raises:
      ValueError: the folder holds another run, the text is missing or too short, or
        there is nothing to start from.
    """
    documents = corpora.load(config.corpus).train
    stream = corpora.tokens(documents)
    num_windows = corpora.windows_per_epoch(len(stream), config.seq_len)
    run = _Folder(out, config, _digest(stream))
    seed, schedule = jnp.int32(config.seed), Schedule.of(config)
    state = init(config.model, config.optimizer, seed)
    if (last := run.last()) is not None:
        state = run.restore(last, state)
    elif start is not None:
        state = restore(start, state)
    curve = run.resume_curve(int(state.step))
    started = time.monotonic() - (curve[-1]["duration_s"] if curve else 0.0)
    tokens_per_step = config.batch_size * config.seq_len
    update = show = lambda *_: None
    if progress is not None:
        total = config.num_steps * tokens_per_step
        update, show = progress.bar("training", total, "tokens"), progress.show
    compiled = _compiled(
        config.model, config.optimizer, config.batch_size, config.seq_len
    )
    tokens = jnp.asarray(stream)
    try:
        while (step := int(state.step)) < config.num_steps:
            if progress is not None and progress.stopped:
                break
            every = (config.report_every, config.checkpoint_every)
            end = min(config.num_steps, *((step // n + 1) * n for n in every))
            # Not donated: an interrupt in here leaves the state before it whole.
            new, loss = compiled(state, tokens, schedule, seed, jnp.int32(end - step))
            loss = float(loss)
            state = new
            line = {
                "step": end,
                "tokens": end * tokens_per_step,
                "loss": loss,
                "learning_rate": float(schedule.at(jnp.int32(end - 1))),
                "epoch": end * config.batch_size / num_windows,
                "duration_s": time.monotonic() - started,
            }
            curve.append(line)
            run.append(line)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {loss} after {end} steps; the last whole state is "
                    f"checkpoint {run.last()} of {out}"
                )
            update(line["tokens"])
            show(f"step {end}   loss {loss:.3f} nats per token")
            if end % config.checkpoint_every == 0:
                run.save(state)
    except KeyboardInterrupt:
        pass  # the folder gets what there is, below; `done` tells the caller
    done = int(state.step) >= config.num_steps
    checkpoint = run.save(state)
    duration_s = curve[-1]["duration_s"] if curve else 0.0
    return Result(state.params, curve, checkpoint, done, duration_s)


def restore(checkpoint: Path, like: TrainState) -> TrainState:
    """Reads a checkpoint.

    Args:
      checkpoint: its folder, `.../checkpoints/STEP`.
      like: a state of the same model and optimizer.

    Raises:
      ValueError: it is missing, broken, or of another model or optimizer.
    """
    checkpoint = Path(checkpoint).absolute()
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such checkpoint")
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(checkpoint, abstract)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{checkpoint}: cannot be continued: {reason}") from error


class _Folder:
    """The files of one run."""

    def __init__(self, out: Path, config: TrainConfig, digest: str):
        self.out = Path(out).absolute()
        self.checkpoints = self.out / "checkpoints"
        self.curve = self.out / "curve.jsonl"
        described = dataclasses.asdict(config) | {"corpus_sha256": digest}
        described = json.loads(json.dumps(described))
        file = self.out / "config.json"
        if file.exists():
            before = json.loads(file.read_text("utf-8"))
            keys = described.keys() | before.keys()
            other = sorted(k for k in keys if described.get(k) != before.get(k))
            if other:
                raise ValueError(f"{out}: holds another run; differs in {other}")
        else:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            _write(file, json.dumps(described, indent=2) + "\n")

    def last(self) -> int | None:
        """The step of the latest whole checkpoint."""
        names = [p.name for p in self.checkpoints.iterdir() if p.name.isdigit()]
        return max(map(int, names), default=None)

    def restore(self, step: int, like: TrainState) -> TrainState:
        return restore(self.checkpoints / str(step), like)

    def save(self, state: TrainState) -> Path:
        """Writes a checkpoint if it is new, and drops all but the last two."""
        step = int(state.step)
        folder = self.checkpoints / str(step)
        if not folder.exists():
            with ocp.StandardCheckpointer() as writer:
                writer.save(folder, state)
        ours = sorted(int(p.name) for p in self.checkpoints.iterdir() if p.name.isdigit())
        for old in ours[:-2]:
            shutil.rmtree(self.checkpoints / str(old))
        return folder

    def resume_curve(self, step: int) -> list[dict[str, Any]]:
        """Reads the curve up to a step, and cuts off what a killed run wrote after."""
        if not self.curve.exists():
            return []
        lines = self.curve.read_text("utf-8").splitlines(keepends=True)
        # A killed run may have left half a line.
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        kept = [line for line in whole if line["step"] <= step]
        _write(self.curve, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def append(self, line: dict[str, Any]) -> None:
        with self.curve.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@functools.cache
def _compiled(model, optimizer, batch_size, seq_len):
    return jax.jit(
        functools.partial(
            steps,
            model=model,
            optimizer=optimizer,
            batch_size=batch_size,
            seq_len=seq_len,
        )
    )


def _is_matrix(path, _) -> bool:
    """Whether a parameter is a matrix of a layer: not an embedding, scale or bias."""
    return path[0].key == "layers" and path[-1].key == "weight"


def _are_matrices(params):
    return jax.tree.map_with_path(_is_matrix, params)


def _muon_axes(params):
    """Each matrix maps the last axis to the one before it; the axes before those are
    separate matrices: each head's query, key and value, the gate and the up projection.
    """
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    return jax.tree.map_with_path(
        lambda path, p: axes if _is_matrix(path, p) else None, params
    )


def _digest(stream: UInt16[np.ndarray, " tokens"]) -> str:
    return hashlib.sha256(stream.astype("<u2").tobytes()).hexdigest()


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
