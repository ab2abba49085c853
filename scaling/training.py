"""Trains a language model: a pure step, checkpoints that survive anything, a curve.

The only door to optax, and with `jaxkv.snapshots` to Orbax. `init` and `steps` are
pure; `train` is the loop around them that a person watches. A run that was killed is
taken up by calling `train` again with the same folder, and ends bit for bit where the
unbroken run would have.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int, Int32, UInt16

from jaxkv import models
from scaling import architectures, corpora, objectives, runs
from scaling.recipes import OptimizerConfig, Schedule, TrainConfig


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


@runtime_checkable
class Progress(Protocol):
    """Who is told how far a run is, and may ask it to stop; `experiments` has one."""

    @property
    def stopped(self) -> bool:
        """Whether to save and return after this piece of work."""
        ...

    def bar(
        self, label: str, total: float | None, unit: str
    ) -> Callable[[float], None]:
        """Opens a bar; the function returned takes how much is done, of `total`."""
        ...

    def show(self, content: str) -> None:
        """Replaces the text under the bars."""
        ...


class Result(NamedTuple):
    """What a run left.

    Attributes:
      params: the parameters, float32.
      curve: one dict per report: `step`; `tokens` and `epoch`, trained on by this run
        so far; `loss` (nats per token, mean over the steps since the last report);
        `learning_rate`; `duration_s`, spent in training by this run so far.
      checkpoint: folder of the last checkpoint, which another run can start from.
      status: `done`; `stopped`, because it was asked to; or `diverged`, if a loss was
        not finite: the parameters are then those before the last report.
    """

    params: models.Params
    curve: list[dict[str, Any]]
    checkpoint: Path
    status: Literal["done", "stopped", "diverged"]


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds the optimizer for a learning rate of one; a step scales its updates."""
    if config.kind == "adamw":
        main = optax.adamw(
            learning_rate=1.0,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_are_matrices,
        )
    elif config.kind == "sgd":
        main = optax.chain(
            optax.trace(decay=config.momentum),
            optax.add_decayed_weights(config.weight_decay, mask=_are_matrices),
            optax.scale(-1.0),
        )
    else:
        main = optax.contrib.muon(
            learning_rate=1.0,
            beta=config.momentum,
            weight_decay=config.weight_decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_muon_axes,
            # Updates as large as AdamW's, so that one learning rate suits both: Liu et
            # al. 2025, arXiv:2502.16982, section 2.2.
            consistent_rms=0.2,
        )
    whole = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), main)

    def update(updates, state, params=None):
        # optax mixes integers and floats, which a strict caller would forbid.
        with jax.numpy_dtype_promotion("standard"):
            return whole.update(updates, state, params)

    return optax.GradientTransformation(whole.init, update)


def init(
    model: architectures.Architecture, optimizer: OptimizerConfig, seed: Int[Array, ""]
) -> TrainState:
    """Makes the state before the first step."""
    params = architectures.init_params(model, jax.random.key(seed))
    return TrainState(params, make_optimizer(optimizer).init(params), jnp.int32(0))


def steps(
    state: TrainState,
    stream: UInt16[Array, " tokens"],
    schedule: Schedule,
    seed: Int[Array, ""],
    num_steps: Int[Array, ""],
    *,
    model: architectures.Architecture,
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

    gradient = jax.value_and_grad(
        functools.partial(objectives.mean_loss, model=model), has_aux=True
    )

    def step(_, carry):
        (params, moments, step), total = carry
        windows = corpora.draw(
            stream, seed, step, batch_size=batch_size, seq_len=seq_len
        )
        (_, loss), grads = gradient(params, windows)
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

    A checkpoint is written aside and renamed, so there is always a whole one. A killed
    run loses at most `checkpoint_every` steps; Ctrl-C, or `progress.stopped`, loses at
    most `report_every`: the run then saves and returns.

    Args:
      config: the run.
      out: its folder, as `runs` describes it, made where it is missing.
      start: a checkpoint of another run of the same model and optimizer, whose state
        and step count are continued under this run's schedule and text.
      progress: who is told.

    Returns:
      What was reached.

    Raises:
      ValueError: the folder holds another run, the text is missing or too short, or
        there is nothing to start from.
    """
    stream = corpora.tokens(corpora.load(config.corpus).train)
    per_epoch = corpora.windows_per_epoch(len(stream), config.seq_len)
    seed, schedule = jnp.int32(config.seed), Schedule.of(config)
    state = init(config.model, config.optimizer, seed)
    if start is not None:
        state = restore(start, state)
    described = dataclasses.asdict(config) | {"corpus_sha256": runs.digest(stream)}
    folder = runs.RunFolder(out, described, int(state.step))
    if (last := folder.last_step()) is not None:
        state = restore(folder.checkpoint(last), state)
    curve = folder.read_curve(int(state.step))
    before_s = curve[-1]["duration_s"] if curve else 0.0
    tokens_per_step = config.batch_size * config.seq_len
    update, show = _told(progress, (config.num_steps - folder.first_step), config)
    call = _compiled(config.model, config.optimizer, config.batch_size, config.seq_len)
    tokens, status = jnp.asarray(stream), "done"
    started = time.monotonic()
    try:
        while (step := int(state.step)) < config.num_steps:
            if progress is not None and progress.stopped:
                status = "stopped"
                break
            end = _next_stop(step, config)
            # Not donated: an interrupt in here leaves the state before it whole.
            new, loss = call(state, tokens, schedule, seed, jnp.int32(end - step))
            if not math.isfinite(loss := float(loss)):
                status = "diverged"
                break
            state = new
            num_steps = end - folder.first_step
            line = {
                "step": end,
                "tokens": num_steps * tokens_per_step,
                "epoch": num_steps * config.batch_size / per_epoch,
                "loss": loss,
                "learning_rate": float(schedule.at(jnp.int32(end - 1))),
                "duration_s": before_s + time.monotonic() - started,
            }
            curve.append(line)
            folder.report(line)
            update(line["tokens"])
            show(f"step {end}: {loss:.3f} nats per token")
            if end % config.checkpoint_every == 0:
                _save(folder, state)
    except KeyboardInterrupt:
        status = "stopped"
    return Result(state.params, curve, _save(folder, state), status)


def restore(checkpoint: Path, like: TrainState) -> TrainState:
    """Reads a checkpoint.

    Args:
      checkpoint: its folder.
      like: a state of the same model and optimizer.

    Raises:
      ValueError: it is missing, broken, or of another model or optimizer.
    """
    checkpoint = Path(checkpoint).absolute()
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such checkpoint")
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(checkpoint, shapes)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{checkpoint}: cannot be continued: {reason}") from error


def _save(folder: runs.RunFolder, state: TrainState) -> Path:
    """Writes a checkpoint unless it is there, whole or not at all."""
    path = folder.checkpoint(int(state.step))
    if not path.exists():
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, state)
    folder.prune()
    return path


def _next_stop(step: int, config: TrainConfig) -> int:
    """The step of the next report or checkpoint, or the end."""
    every = (config.report_every, config.checkpoint_every)
    return min(config.num_steps, *((step // n + 1) * n for n in every))


def _told(progress: Progress | None, num_steps: int, config: TrainConfig):
    """What to call with the tokens done, and with a line to show."""
    if progress is None:
        return (lambda done: None), (lambda content: None)
    total = num_steps * config.batch_size * config.seq_len
    return progress.bar("training", total, "tokens"), progress.show


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
    """Says which axes are a matrix: the last is mapped to the one before it.

    Axes before those count separate matrices: each head's query, key and value, the
    gate and the up projection.
    """
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    return jax.tree.map_with_path(
        lambda path, p: axes if _is_matrix(path, p) else None, params
    )
