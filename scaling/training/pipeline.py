"""Pipeline parallelism: stages of layers, micro-batches passed from one to the next.

One loop of ticks, in each of which a stage may run one micro-batch forward and one
backward, by a schedule: GPipe runs all forward and then all backward, 1F1B starts
backward as soon as the last stage can. A stage keeps the input of a micro-batch, and
runs its layers again for the gradient; GPipe keeps inputs of all micro-batches, 1F1B of
at most twice the stages. In both a stage is idle for the same share of the time,
`(p - 1) / (m + p - 1)` with m micro-batches over p stages.

All stages have embeddings, head and last norm; the first and the last use them, and
their gradients are summed.

Sources: Huang et al. 2019, arXiv:1811.06965 (GPipe); Narayanan et al. 2021,
arXiv:2104.04473, section 2.2 (1F1B, called PipeDream-Flush).
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import models, validation
from jaxkv.models import TENSOR, ModelConfig, Params, Transformer, index_leaves
from scaling.training import meshes, objectives
from scaling.training.meshes import PIPELINE
from scaling.training.recipes import StepConfig
from scaling.training.recurrent import Architecture
from scaling.training.transformer_rows import RowOrientation


class PipelineSchedule(NamedTuple):
    """The micro-batch that each stage runs in each tick, -1 for none.

    Attributes:
      forward: micro-batches of the forward pass, [ticks, stages].
      backward: micro-batches of the backward pass, which follows the forward pass.
      num_stored: largest number of micro-batches whose inputs a stage keeps.
    """

    forward: Int[np.ndarray, "ticks stages"]
    backward: Int[np.ndarray, "ticks stages"]
    num_stored: int

    @property
    def idle_share(self) -> float:
        """Idle share of the stages' time; a tick takes as long as its busiest stage.

        Forward and backward have equal weights, since the idle share of both is the
        same.
        """
        busy = (self.forward >= 0).astype(int) + (self.backward >= 0)
        phases = [(x >= 0).any(axis=1).sum() for x in (self.forward, self.backward)]
        return 1 - busy.sum() / (sum(phases) * busy.shape[1])


@validation.checks_numbers()
def make_pipeline_schedule(
    num_stages: int, num_micro: int, kind: Literal["gpipe", "1f1b"] = "1f1b"
) -> PipelineSchedule:
    """Returns the schedule for stages and micro-batches, each at least 1.

    Raises:
      ValueError: a number is below 1, or the kind is unknown.
    """
    if kind not in ("gpipe", "1f1b"):
        raise ValueError(f"{kind=} must be 'gpipe' or '1f1b'")
    last = num_stages - 1
    half_ticks = num_micro + num_stages - 1
    ticks = 2 * half_ticks if kind == "gpipe" else num_micro + 2 * last
    tick = np.arange(ticks)[:, None]
    stage = np.arange(num_stages)[None, :]
    forward = tick - stage
    if kind == "gpipe":
        backward = num_micro - 1 - (tick - half_ticks - (last - stage))
        backward = np.where(tick < half_ticks, -1, backward)
    else:
        backward = tick - (2 * last - stage)

    def real(micro: np.ndarray) -> np.ndarray:
        return np.where((micro >= 0) & (micro < num_micro), micro, -1)

    forward = real(forward)
    backward = real(backward)
    num_buffers = num_micro if kind == "gpipe" else min(num_micro, 2 * last + 1)
    return PipelineSchedule(forward, backward, num_buffers)


class _Carry(NamedTuple):
    """State of a stage between two ticks."""

    coming: Array
    """Output of the stage before, the input of this stage's layers."""
    towards: Array
    """Gradient from the stage after, of this stage's output."""
    inputs: Array
    """Inputs of the micro-batches in flight."""
    grads: Params
    nats: Array


def pipeline_gradient(
    model: Architecture, how: StepConfig, params: Params, tokens: Array, targets: Array
) -> tuple[Float[Array, ""], Params]:
    """Returns one device's mean nats and gradient, with layers divided into stages.

    Args:
      model: a `ModelConfig` whose layers are all of one kind.
      how: a `StepConfig` with `accumulation` micro-batches; its `schedule` is the kind
        of `make_pipeline_schedule`.
      params: stacked layers of this stage; other parameters are the same on all stages.
      tokens: `[batch, seq]`.
      targets: next tokens, of the same shape.
    """
    assert isinstance(model, ModelConfig)  # ensured by `meshes.check_trainable`
    table = make_pipeline_schedule(how.layout.pipeline, how.accumulation, how.schedule)
    shared = {name: x for name, x in params.items() if name != "layers"}
    shared = lax.pcast(shared, PIPELINE, to="varying")
    params = shared | {"layers": params["layers"]}
    tokens, targets = (
        lax.pcast(x.reshape(how.accumulation, -1, x.shape[1]), PIPELINE, to="varying")
        for x in (tokens, targets)
    )
    run = _Run(model, how, table, params, tokens, targets)
    final_carry = lax.fori_loop(0, len(table.forward), run.tick, run.start())
    grads = {name: x for name, x in final_carry.grads.items() if name != "layers"}
    grads = lax.psum(grads, PIPELINE) | {"layers": final_carry.grads["layers"]}
    return lax.psum(final_carry.nats, PIPELINE), grads


class _Run(NamedTuple):
    """One device's part of a step."""

    config: ModelConfig
    how: StepConfig
    table: PipelineSchedule
    params: Params
    tokens: Int[Array, "micro batch seq"]
    targets: Int[Array, "micro batch seq"]

    def start(self) -> _Carry:
        """Returns the state before the first tick."""
        # Only the shape is needed: a real lookup would send sums of embeddings.
        shape = jax.eval_shape(
            lambda *x: self._begin(*x)[2], self.how.cast(self.params), self.tokens[0]
        )
        axes = tuple(sorted(shape.manual_axis_type.varying))
        blank = lax.pcast(jnp.zeros(shape.shape, shape.dtype), axes, to="varying")
        inputs = jnp.repeat(blank[None], self.table.num_stored, axis=0)
        grads = jax.tree.map(lambda x: x * 0, self.params)
        return _Carry(blank, blank, inputs, grads, meshes.zero_like(self.targets))

    def tick(self, number: Array, carry: _Carry) -> _Carry:
        """Runs the forward and backward passes of a tick, and sends the results."""
        stage = lax.axis_index(PIPELINE)
        forward, backward = (
            jnp.asarray(micro_batches, jnp.int32)[number, stage]
            for micro_batches in self.table[:2]
        )
        place = jnp.maximum(forward, 0) % self.table.num_stored
        inputs = jnp.where(
            forward >= 0,
            lax.dynamic_update_index_in_dim(carry.inputs, carry.coming, place, 0),
            carry.inputs,
        )
        going = lax.cond(
            forward >= 0,
            lambda x: self._stage(self.params, x, jnp.maximum(forward, 0))[0][0],
            lambda x: x * 0,
            carry.coming,
        )
        place = jnp.maximum(backward, 0) % self.table.num_stored
        came = lax.dynamic_index_in_dim(inputs, place, 0, keepdims=False)

        def back(
            came: Array, towards: Array, grads: Params, nats: Array
        ) -> tuple[Array, Params, Array]:
            """Runs the micro-batch again, and its backward pass."""
            stage = functools.partial(self._stage, micro=jnp.maximum(backward, 0))
            (_, loss), pull, more = jax.vjp(stage, self.params, came, has_aux=True)
            stage_grads, towards = pull((towards, jnp.ones_like(loss)))
            return towards, jax.tree.map(jnp.add, grads, stage_grads), nats + more

        towards, grads, nats = lax.cond(
            backward >= 0,
            back,
            lambda came, towards, grads, nats: (towards * 0, grads, nats),
            came,
            carry.towards,
            carry.grads,
            carry.nats,
        )
        num = self.how.layout.pipeline
        on = [(i, i + 1) for i in range(num - 1)]
        return _Carry(
            coming=self._pass(going, on),
            towards=self._pass(towards, [(b, a) for a, b in on]),
            inputs=inputs,
            grads=grads,
            nats=nats,
        )

    def _pass(self, x: Array, on: list[tuple[int, int]]) -> Array:
        """Sends a value that tensor-parallel devices replicate; each sends its part.

        Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
        """
        num = self.how.layout.tensor
        if num == 1 or self.how.layout.sequence or x.size % num:
            return lax.ppermute(x, PIPELINE, on)
        parts = x.reshape(num, -1)
        local_part = lax.dynamic_index_in_dim(
            parts, lax.axis_index(TENSOR), keepdims=False
        )
        moved = lax.ppermute(local_part, PIPELINE, on)
        moved = lax.all_gather(moved, TENSOR, to="invarying")
        return moved.reshape(x.shape)

    def _begin(
        self, params: Params, tokens: Array
    ) -> tuple[Transformer, RowOrientation, Array]:
        """Returns this stage's layers as a model, its orientation, and embeddings."""
        config = self.config
        layout = self.how.layout
        shape = tokens.shape
        (stacked,) = params["layers"].values()
        every = range(config.num_layers // layout.pipeline)
        layers = {index: index_leaves(stacked, index) for index in every}
        stage_config = dataclasses.replace(config, num_layers=len(every))
        model = models.merge(stage_config, params | {"layers": layers})
        rows = RowOrientation(config=config, shape=shape, layout=layout)
        return model, rows, model.embedded(tokens.reshape(-1), rows.positions(), rows)

    def _stage(
        self, params: Params, x: Array, micro: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """Runs this stage's layers: returns output, part of the loss, and nats."""
        config = self.config
        layout = self.how.layout
        params = self.how.cast(params)
        take = functools.partial(lax.dynamic_index_in_dim, axis=0, keepdims=False)
        tokens = take(self.tokens, micro)
        targets = take(self.targets, micro)
        stage = lax.axis_index(PIPELINE)
        model, rows, first = self._begin(params, tokens)
        x = jnp.where(stage == 0, first, x)
        states = model.run(x, rows.positions(), rows.attend, {}, rows)
        x = states.last

        def of_last(x: Array) -> Array:
            logits = model.logits(model.final_norm(x, rows.axis), rows)
            token_nats = objectives.divided_nats(
                logits.reshape(*tokens.shape, -1), targets, num_words=config.vocab_size
            )
            return token_nats.mean() / np.float32(self.how.accumulation)

        is_last = stage == layout.pipeline - 1
        nats = lax.cond(is_last, of_last, lambda _: meshes.zero_like(targets), x)
        more = rows.auxiliary(states.routings, nats.dtype)
        return (x, nats + more / np.float32(self.how.accumulation)), nats
