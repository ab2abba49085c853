"""Training and scoring of draft heads for a frozen target model.

The labels are the target model's whole distribution at each position, since the target
model accepts or rejects the guesses. Each Medusa head predicts a token further ahead;
an EAGLE drafter is unrolled for as many steps as it will draft, and trained on its own
states.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.1; Li et al. 2025,
arXiv:2503.01840, section 3.2; distributions as labels, Hinton et al. 2015,
arXiv:1503.02531, section 2.
"""

import functools
import math
import time
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxkv import models, validation
from jaxkv.models import Params, run_sequences
from jaxkv.progress import QUIET, Progress
from jaxkv.speculation import EagleConfig, HeadsConfig, head_logits, unroll_drafts
from jaxkv.validation import ConfigRecord, PositiveInt, Range
from scaling.corpora import Corpus, draw_windows
from scaling.training import optimizers
from scaling.training.recipes import LearningRateSchedule, TrainConfig

type HeadsState = tuple[Params, PyTree[Array]]
"""Parameters of heads, and moments of the optimizer."""


class HeadRecipe(ConfigRecord):
    """Training settings of draft heads."""

    run: TrainConfig
    """Corpus, optimizer and schedule; its model is the target model."""
    depth: PositiveInt = 4
    """Number of successive guesses to train; for Medusa, the number of its heads."""
    decay: Annotated[float, Range(0, 1, "(]")] = 0.8
    """Ratio of the loss weights of successive guesses."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.run.parametrization != "standard":
            raise ValueError(
                f"run.parametrization={self.run.parametrization!r} must be 'standard': "
                "heads have no other"
            )


class TargetOutput(NamedTuple):
    """Outputs of the target model for a text."""

    features: Float[Array, "batch seq features"]
    """Inputs of the heads."""
    logits: Float[Array, "batch seq vocab"]
    """Logits of the token after each position."""


class HeadResult(NamedTuple):
    """Result of training heads.

    Attributes:
      params: parameters of the heads, float32.
      curve: one dict per report: `step`, `tokens`, `loss` (nats per guess, weighted
        mean), `duration_s`.
      status: `done`, `stopped` or `diverged`.
    """

    params: Params
    curve: list[dict[str, int | float]]
    status: str


def read_target(
    target: Params, tokens: Int[Array, "batch seq"], heads: HeadsConfig
) -> TargetOutput:
    """Runs the target model over texts, each from its beginning."""
    model = models.merge(heads.target, target)
    states = run_sequences(model, tokens, taps=heads.taps)
    features = jnp.concatenate(states.taps).T.reshape(*tokens.shape, -1)
    logits = model.logits(states.last).reshape(*tokens.shape, -1)
    return TargetOutput(*jax.lax.stop_gradient((features, logits)))


def head_guesses(
    params: Params,
    target: Params,
    tokens: Int[Array, "batch seq"],
    target_output: TargetOutput,
    *,
    heads: HeadsConfig,
    depth: int,
) -> Float[Array, "depth batch seq vocab"]:
    """Returns the heads' logits of guesses 0 to `depth` - 1 after each position.

    Guess d is made before the target model reads the last d + 1 tokens of the position;
    EAGLE knows these tokens and Medusa does not. So it is undefined at the first d + 1
    positions.
    """
    if isinstance(heads, EagleConfig):
        how = {"config": heads, "num_steps": depth}
        return unroll_drafts(params, target, tokens, target_output.features, **how)
    batch, seq = tokens.shape
    rows = target_output.features.reshape(batch * seq, -1)
    guessed = head_logits(params, target, rows, config=heads)
    guessed = guessed.reshape(heads.num_heads, batch, seq, -1)[:depth]
    ahead = range(1, guessed.shape[0] + 1)
    rolled = [jnp.roll(x, k, axis=1) for k, x in zip(ahead, guessed, strict=True)]
    return jnp.stack(rolled)


def head_loss(
    params: Params,
    target: Params,
    tokens: Int[Array, "batch seq"],
    *,
    heads: HeadsConfig,
    depth: int,
    decay: float,
) -> Float[Array, ""]:
    """Returns the weighted cross-entropy of the heads to the target, in nats."""
    target_output = read_target(target, tokens, heads)
    guessed = head_guesses(
        params, target, tokens, target_output, heads=heads, depth=depth
    )
    law = jax.nn.softmax(target_output.logits)
    nats = -jnp.sum(law[None] * jax.nn.log_softmax(guessed), axis=-1)
    # Mask of the defined guesses.
    counts = np.arange(tokens.shape[1])[None] > np.arange(depth)[:, None]
    counts = counts[:, None]
    depth_losses = jnp.sum(jnp.where(counts, nats, 0), (1, 2)) / jnp.sum(
        jnp.broadcast_to(counts, nats.shape), (1, 2), dtype=nats.dtype
    )
    weights = np.float32(decay) ** np.arange(depth, dtype=np.float32)
    return jnp.sum(depth_losses * (weights / weights.sum()))


def train_heads(
    recipe: HeadRecipe,
    heads: HeadsConfig,
    target: Params,
    corpus: Corpus,
    *,
    progress: Progress = QUIET,
) -> HeadResult:
    """Trains heads on windows of a corpus, in memory.

    Args:
      recipe: training settings.
      heads: config of the heads.
      target: parameters of the target model.
      corpus: the recipe's corpus, from `corpora.open_corpus`.
      progress: receives the progress, and may stop the training.

    Returns:
      The heads; if the loss was not finite, those before the last report.
    """
    config = recipe.run
    schedule = LearningRateSchedule.of(recipe.run)
    optimizer = optimizers.make_optimizer(config.optimizer)
    loss = functools.partial(
        head_loss, heads=heads, depth=recipe.depth, decay=recipe.decay
    )

    def steps(
        state: HeadsState, step: Array, num: Array, stream: Array, target: Params
    ) -> tuple[HeadsState, Array]:
        def one(
            index: Array, carry: tuple[HeadsState, Array]
        ) -> tuple[HeadsState, Array]:
            (params, moments), total = carry
            windows = draw_windows(
                stream,
                jnp.int32(config.seed),
                step + index,
                batch_size=config.batch_size,
                seq_len=config.seq_len,
            )
            nats, grads = jax.value_and_grad(loss)(params, target, windows[:, :-1])
            updates, moments = optimizer.update(grads, moments, params)
            rate = schedule.at(step + index)
            params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
            return (params, moments), total + nats

        state, total = jax.lax.fori_loop(0, num, one, (state, jnp.float32(0)))
        return state, total / num.astype(jnp.float32)

    call = jax.jit(steps)
    stream = jnp.asarray(corpus.stream)
    params = heads.init_params(jax.random.key(config.seed))
    state = params, optimizer.init(params)
    curve = []
    started = time.monotonic()
    status = "stopped"
    stretches = range(0, config.num_steps, config.report_every)
    for step in progress.track(stretches, "heads", "reports"):
        if progress.stopped:
            break
        num = min(config.report_every, config.num_steps - step)
        new, nats = call(state, jnp.int32(step), jnp.int32(num), stream, target)
        if not math.isfinite(nats := float(nats)):
            status = "diverged"
            break
        state = new
        line = {
            "step": step + num,
            "tokens": (step + num) * config.batch_size * config.seq_len,
            "loss": nats,
            "duration_s": time.monotonic() - started,
        }
        curve.append(line)
        status = "done" if step + num == config.num_steps else "stopped"
    return HeadResult(state[0], curve, status)


@validation.checks_numbers()
def acceptance_rates(
    params: Params,
    target: Params,
    windows: Int[np.ndarray, "windows window"],
    *,
    heads: HeadsConfig,
    depth: int,
    num_ranks: int,
    start: int = 1,
    batch_size: int = 8,
) -> Float[np.ndarray, "depth num_ranks"]:
    """Returns the acceptance rates of the heads' best guesses, by depth and rank.

    Rates are measured at the positions where a step begins if the best guesses are
    drafted as a chain: after the first wrong guess. Over all positions they would be
    too high, since easy positions are skipped by accepted guesses.

    Args:
      params: parameters of the heads.
      target: parameters of the target model.
      windows: texts, each with an answer of the target model.
      heads: config of the heads.
      depth: number of successive guesses, as in training.
      num_ranks: number of best guesses to measure.
      start: position of each window at which its answer begins, at least 1.
      batch_size: windows per forward pass; need not divide their number.

    Returns:
      Shares in [0, 1], by depth, the first guess first, and by rank of the guess.
    """

    @jax.jit
    def is_right(params: Params, target: Params, tokens: Array) -> Array:
        target_output = read_target(target, tokens, heads)
        guessed = head_guesses(
            params, target, tokens, target_output, heads=heads, depth=depth
        )
        best = jax.lax.top_k(guessed[:, :, :-1], num_ranks)[1].astype(jnp.int32)
        return (best == tokens[None, :, 1:, None]).transpose(1, 2, 0, 3)

    hits = np.zeros((depth, num_ranks))
    num_steps = 0
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        fill = ((0, batch_size - len(batch)), (0, 0))
        is_correct = is_right(params, target, jnp.asarray(np.pad(batch, fill)))
        for right in np.asarray(is_correct)[: len(batch)]:
            place = start
            while place + depth < windows.shape[1]:
                # Guess d of the step at a position is stored d positions later.
                step_hits = right[place + np.arange(depth), np.arange(depth)]
                hits = hits + step_hits
                num_steps = num_steps + 1
                place += 1 + int(np.cumprod(step_hits[:, 0]).sum())
    return hits / max(num_steps, 1)
