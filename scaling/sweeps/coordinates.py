"""Coordinate check: activations should change equally at every width.

Source: Yang et al. 2022, arXiv:2203.03466, section D.1 and figure 5.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv.models import ModelConfig
from jaxkv.progress import QUIET, Progress
from scaling.corpora import Corpus, draw_windows
from scaling.sweeps.grid import SweepConfig
from scaling.training import (
    LearningRateSchedule,
    TrainConfig,
    compiled_steps,
    init_train_state,
    layer_activity,
    serving_config,
)

WIDENINGS = (1, 2, 4, 8)
"""Widths of the check over the smallest one."""
MIN_CHECK_WIDTH = 32
"""Least width of the smallest model."""
CHECK_STEPS = 8
"""Steps of training; after fewer, logits of `mup` still depend on the start."""
CHECK_RATE = 0.004
"""Constant learning rate; a few times it, changes are no longer small."""
CHECK_SEEDS = (0, 1)
MAX_SLOPE = 0.15
"""Largest slope of ln(change) against ln(width), in size, that passes.

It is a factor of 1.37 at 8 times the width. Slopes of `mup` are up to 0.08 in size,
since widths are finite; layers of the standard parametrization have 1.9 to 2.1."""


class CoordinateCheck(NamedTuple):
    """Changes of activations after a few steps.

    Attributes:
      parametrization: standard or mup.
      widths: widths of the models, rising.
      places: embedding, layers and logits.
      change: mean absolute change since the start, of a token's activation.
      slopes: slope of ln(change) against ln(width) by place.
    """

    parametrization: str
    widths: tuple[int, ...]
    places: tuple[str, ...]
    change: Float[np.ndarray, "widths places"]
    slopes: Float[np.ndarray, " places"]

    @property
    def passes(self) -> bool:
        """True if no slope is larger than `MAX_SLOPE` in size."""
        return bool((np.abs(self.slopes) <= MAX_SLOPE).all())


def widen_model(model: ModelConfig) -> list[ModelConfig]:
    """Returns a model at the widths of the check: more heads, of the same size.

    The smallest has one KV head, or as many as a width of 32 needs.
    """
    smallest = model.hidden_size // model.num_kv_heads
    smallest *= math.ceil(MIN_CHECK_WIDTH / smallest)
    shapes = []
    for widening in WIDENINGS:
        width = smallest * widening
        num_kv_heads = round(model.num_kv_heads * width / model.hidden_size)
        shapes.append(
            dataclasses.replace(
                model,
                hidden_size=width,
                num_kv_heads=num_kv_heads,
                num_q_heads=num_kv_heads * model.group_size,
                mlp_size=max(1, round(model.mlp_size * width / model.hidden_size)),
            )
        )
    return shapes


def measure_coordinates(
    config: SweepConfig,
    corpus: Corpus,
    parametrization: Literal["standard", "mup"],
    *,
    models: Sequence[ModelConfig],
    progress: Progress = QUIET,
) -> CoordinateCheck:
    """Trains models of several widths for a few steps, and measures the changes.

    Args:
      config: the sweep, for optimizer, batch, window and base width.
      corpus: its corpus, with the stream on the device.
      parametrization: parametrization of the models.
      models: one model at two or more widths, such as `widen_model` returns.
      progress: shows the widths.

    Returns:
      The changes as means over seeds, tokens and features, and their slopes.

    Raises:
      ValueError: the parametrization is not defined for the models or the optimizer.
    """
    batch_size = config.settings[0].batch_size
    stream = jnp.asarray(corpus.stream)
    tokens = draw_windows(
        stream,
        jnp.int32(-1),
        jnp.int32(0),
        batch_size=batch_size,
        seq_len=config.seq_len,
        aligned=False,
    )[:, :-1]
    rows = []
    for model in progress.track(models, f"{parametrization}: widths", "widths"):
        run = TrainConfig(
            model=model,
            corpus=config.corpus,
            optimizer=config.optimizer,
            batch_size=batch_size,
            seq_len=config.seq_len,
            num_steps=CHECK_STEPS,
            warmup_steps=0,
            cooldown_steps=0,
            learning_rate=CHECK_RATE,
            schedule="constant",
            parametrization=parametrization,
            base_width=config.base_width,
        )
        scaled_model = serving_config(run.scaled_model)
        train = compiled_steps(
            scaled_model,
            run.optimizer,
            batch_size,
            config.seq_len,
            hidden_rate=run.hidden_rate,
        )
        activity = jax.jit(functools.partial(layer_activity, config=scaled_model))
        schedule = LearningRateSchedule.of(run)
        changes = []
        for seed in map(jnp.int32, CHECK_SEEDS):
            state = init_train_state(model, run.optimizer, seed, run.hidden_rate)
            before = activity(state.params, tokens)
            state, _ = train(state, stream, schedule, seed, jnp.int32(CHECK_STEPS))
            after = activity(state.params, tokens)
            changes.append(
                [
                    np.abs(np.asarray(y) - np.asarray(x)).mean()
                    for x, y in zip(
                        (*before.residual, before.logits),
                        (*after.residual, after.logits),
                        strict=True,
                    )
                ]
            )
        rows.append(np.mean(np.array(changes), axis=0))
    change = np.array(rows)
    widths = tuple(model.hidden_size for model in models)
    num_layers = models[0].num_layers
    layers = tuple(f"layer {i}" for i in range(1, num_layers + 1))
    slopes = np.polyfit(np.log(widths), np.log(change), 1)[0]
    places = ("embedding", *layers, "logits")
    return CoordinateCheck(parametrization, widths, places, change, slopes)
